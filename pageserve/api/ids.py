"""Random ids in OpenAI's alphabet."""

import os

BASE62 = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


def random_id(prefix: str, length: int = 29) -> str:
    """Return ``prefix`` and ``length`` random base62 characters."""
    number = int.from_bytes(os.urandom(length))
    digits = []
    for _ in range(length):
        number, digit = divmod(number, 62)
        digits.append(BASE62[digit])
    return prefix + "".join(digits)


def tool_call_id() -> str:
    """Return a new id of a tool call."""
    return random_id("call_", 24)
