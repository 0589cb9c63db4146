"""Random ids in OpenAI's alphabet."""

import os

BASE62 = b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_OF_BYTE = bytes(BASE62[byte % len(BASE62)] for byte in range(256))


def random_id(prefix: str, length: int = 29) -> str:
    """Return ``prefix`` and ``length`` random base62 characters."""
    return prefix + os.urandom(length).translate(_OF_BYTE).decode()


def tool_call_id() -> str:
    """Return a new id of a tool call."""
    return random_id("call_", 24)
