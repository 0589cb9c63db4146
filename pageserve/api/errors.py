"""The one error object of the API, and how every failure becomes one.

Each non-2xx answer on each route has the body ``{"error": {message, type, param, code}}``.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final, NoReturn

import orjson
from pydantic import ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError
from starlette.responses import Response

MAX_MESSAGE = 1000
MAX_ECHO = 80

INVALID_REQUEST: Final = "invalid_request_error"
UNAVAILABLE: Final = "service_unavailable_error"


class APIError(Exception):
    """A request ends with an error; ``status`` is its HTTP status, ``type``, ``code`` and
    ``param`` are OpenAI's words, ``extra`` holds further keys of the error object."""

    def __init__(
        self,
        status: int,
        code: str | None,
        message: str,
        *,
        param: str | None = None,
        type: str = INVALID_REQUEST,
        headers: Mapping[str, str] | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message[:MAX_MESSAGE]
        self.param = param
        self.type = type
        self.headers = dict(headers or {})
        self.extra = dict(extra or {})

    def body(self) -> bytes:
        """Return the JSON of ``{"error": ...}``."""
        error = {
            "message": self.message,
            "type": self.type,
            "param": self.param,
            "code": self.code,
            **self.extra,
        }
        return orjson.dumps({"error": error})

    def response(self) -> Response:
        """Return the answer that carries this error."""
        return Response(self.body(), self.status, self.headers, media_type="application/json")


def bad_request(
    code: str, message: str, param: str | None = None, extra: Mapping[str, Any] | None = None
) -> APIError:
    """Return a 400 that names ``param``."""
    return APIError(400, code, message, param=param, extra=extra)


def unavailable(code: str, message: str, retry_after: int = 1) -> APIError:
    """Return a 503 that asks the client to come back in ``retry_after`` seconds."""
    return APIError(503, code, message, type=UNAVAILABLE, headers={"retry-after": str(retry_after)})


def internal_error(message: str = "the engine failed on this request") -> APIError:
    """Return a 500 that the SDK must not retry, since the request itself caused it."""
    return APIError(
        500,
        "internal_error",
        message,
        type="server_error",
        headers={"x-should-retry": "false"},
    )


def engine_dead() -> APIError:
    """Return the 503 of a server whose engine is gone."""
    return unavailable("engine_dead", "the inference engine is not running")


def server_draining() -> APIError:
    """Return the 503 of a server that is shutting down."""
    return unavailable("server_draining", "the server is shutting down")


def request_cancelled() -> APIError:
    """Return the 499 of a request that was ended by POST /v1/requests/{id}/cancel."""
    return APIError(499, "request_cancelled", "the request was cancelled", type="api_error")


def deadline_exceeded(message: str = "the deadline of this request passed") -> APIError:
    """Return the 504 of a request that was not done in time."""
    return APIError(
        504,
        "deadline_exceeded",
        message,
        type="timeout_error",
        headers={"x-should-retry": "false"},
    )


def model_not_found(name: str) -> APIError:
    """Return the 404 of a model name that is not served."""
    message = f"the model {quote(name)} does not exist or is not served here"
    return APIError(404, "model_not_found", message, param="model")


def method_not_allowed(method: str, allowed: Sequence[str]) -> APIError:
    """Return the 405 that lists the ``allowed`` methods."""
    return APIError(
        405,
        "method_not_allowed",
        f"{quote(method)} is not allowed here; allowed: {', '.join(allowed)}",
        headers={"allow": ", ".join(allowed)},
    )


def unknown_url(method: str, path: str) -> APIError:
    """Return the 404 of a path that no route has."""
    return APIError(404, "unknown_url", f"unknown request URL: {method[:16]} {quote(path)}")


def quote(value: object) -> str:
    """Describe a value from a request in a few characters fit for an error message."""
    match value:
        case str():
            text = value if len(value) <= MAX_ECHO else value[:MAX_ECHO] + "…"
            return "'" + "".join(c if c.isprintable() else "\ufffd" for c in text) + "'"
        case None | bool():
            return {None: "null", True: "true", False: "false"}[value]
        case list():
            return "an array"
        case dict():
            return "an object"
    return str(value)[:MAX_ECHO]


# --- pydantic → API -------------------------------------------------------------------------------

_RANGE_CODES = {
    "greater_than_equal": "below_min_value",
    "greater_than": "below_min_value",
    "less_than_equal": "above_max_value",
    "less_than": "above_max_value",
}
_CODES = {
    "missing": "missing_required_parameter",
    "literal_error": "invalid_value",
    "finite_number": "decimal_above_max_value",
    "string_too_long": "string_above_max_length",
    "string_too_short": "string_below_min_length",
    "too_long": "array_above_max_length",
    "too_short": "empty_array",
}


def invalid(code: str, message: str, path: str = "") -> NoReturn:
    """Fail a validator with the API's own ``code``; ``path`` is appended to the field's name."""
    context = {"api_message": message, "api_param": path}
    raise PydanticCustomError(code, "{api_message}", context)


def from_validation_error(error: ValidationError) -> APIError:
    """Return the 400 of the first thing pydantic found wrong."""
    first = error.errors(include_url=False)[0]
    param = dotted(first["loc"])
    context = first.get("ctx", {})
    if "api_message" in context:  # raised by invalid()
        path = context.get("api_param", "")
        return bad_request(first["type"], context["api_message"], param + path)
    if first["type"] == "missing":
        return bad_request("missing_required_parameter", f"missing required field {param}", param)
    message = f"{param}: {first['msg'][0].lower()}{first['msg'][1:]}, got {quote(first['input'])}"
    return bad_request(_code(first), message, param)


def _code(first: ErrorDetails) -> str:
    kind = first["type"]
    if kind in _RANGE_CODES:
        # Limits of integer fields are declared as ints, those of number fields become floats.
        limit = next(v for k, v in first["ctx"].items() if k in ("ge", "gt", "le", "lt"))
        return ("decimal_" if isinstance(limit, float) else "integer_") + _RANGE_CODES[kind]
    return _CODES.get(kind, "invalid_type")


def dotted(loc: Sequence[int | str]) -> str:
    """Return ``messages[2].content`` for ``("messages", 2, "content")``."""
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc)
    return path.removeprefix(".")
