"""Reading a JSON request body without trusting its size, type, shape or sender."""

from typing import Any

import orjson
from starlette.requests import Request

from pageserve.api.errors import APIError, bad_request

MAX_DEPTH = 128
# Nothing else runs while the parser does, so a body may take a fraction of a second, not many.
MAX_FIELDS = 1000
MAX_CONTAINERS = 2**17  # arrays and objects
MAX_VALUES = 2**20
CHARSETS = ("utf-8", "utf8", "us-ascii")


async def read_json(request: Request, max_bytes: int) -> dict[str, Any]:
    """Return the JSON object in the body, for which the connection waits a bounded time; raises
    :class:`APIError` (400, 413, 415)."""
    length = request.headers.get("content-length", "0")
    if length.isdecimal() and int(length) > max_bytes:
        raise _too_large(max_bytes)
    _check_content_type(request.headers.get("content-type", ""))
    return parse_object(await _read(request, max_bytes))


def parse_object(body: bytes) -> dict[str, Any]:
    """Parse strict JSON: no NaN, no lone surrogates, at most 128 levels, an object on top, and a
    bounded number of values.

    Raises :class:`APIError`.
    """
    if _has_too_many(body):
        raise _too_many("values")
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise bad_request("invalid_json", f"the request body is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise bad_request("invalid_json", "the request body must be a JSON object")
    if len(value) > MAX_FIELDS:
        raise _too_many("fields")
    if body.count(b"[") + body.count(b"{") > MAX_DEPTH and depth_exceeds(value, MAX_DEPTH):
        raise bad_request("invalid_json", f"the request body nests deeper than {MAX_DEPTH} levels")
    return value


def _has_too_many(body: bytes) -> bool:
    """Whether a body has more values than may be parsed, by what stands between them."""

    def exceeds(text: bytes) -> bool:
        containers = text.count(b"[") + text.count(b"{")
        return containers > MAX_CONTAINERS or text.count(b",") > MAX_VALUES

    if not exceeds(body):
        return False
    text = body.replace(rb"\\", b"").replace(rb"\"", b"")
    if text.count(b'"') > 4 * MAX_VALUES:
        return True
    return exceeds(b"".join(text.split(b'"')[::2]))  # without strings, which may have anything


def depth_exceeds(value: Any, limit: int) -> bool:
    """Whether arrays and objects of ``value`` are more than ``limit`` deep inside each other."""
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(limit):
        level = [
            child
            for item in level
            for child in (item.values() if isinstance(item, dict) else item)
            if isinstance(child, dict | list)
        ]
        if not level:
            return False
    return True


def _check_content_type(content_type: str) -> None:
    kind, *parameters = (part.strip().lower() for part in content_type.split(";"))
    charset = next((p[8:].strip('"') for p in parameters if p.startswith("charset=")), "utf-8")
    if kind != "application/json" or charset not in CHARSETS:
        raise APIError(
            415, "unsupported_media_type", "the content type must be application/json in UTF-8"
        )


async def _read(request: Request, max_bytes: int) -> bytes:
    chunks = []
    size = 0
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise APIError(499, "client_disconnect", "the client left", type="api_error")
        chunk = message.get("body", b"")
        size += len(chunk)
        if size > max_bytes:
            raise _too_large(max_bytes)
        chunks.append(chunk)
        if not message.get("more_body", False):
            return b"".join(chunks)


def _too_large(max_bytes: int) -> APIError:
    return APIError(413, "request_too_large", f"the request body has more than {max_bytes} bytes")


def _too_many(what: str) -> APIError:
    return APIError(413, "request_too_large", f"the request body has too many {what}")
