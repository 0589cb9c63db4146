"""Small helpers that several packages share."""

COMMON_TOKENS = 128  # fewer in common are not worth reading once for several rows


def cdiv(a: int, b: int) -> int:
    """Return ``a / b`` rounded up, for non-negative ``a`` and positive ``b``."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """Return the smallest power of two that is at least ``n`` (1 for ``n`` below 2)."""
    return 1 << (n - 1).bit_length() if n > 1 else 1
