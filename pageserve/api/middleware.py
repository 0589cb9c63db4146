"""Pure ASGI middleware: the frame around every request, and the gate in front of the routes."""

import hashlib
import hmac
import logging
import os
from collections.abc import Iterable, Iterator, Sequence

from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pageserve.api.context import ServingContext
from pageserve.api.errors import APIError, internal_error

logger = logging.getLogger("pageserve.api")

OPEN_PATHS = frozenset({"/health", "/v1/health", "/live", "/ready", "/version", "/metrics"})
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
MAX_REQUEST_ID = 128


class RequestFrame:
    """Gives each request an id, answers HEAD where GET works, counts the answer, and turns a bug
    into a 500."""

    def __init__(self, app: ASGIApp, context: ServingContext) -> None:
        self.app = app
        self.context = context

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        method = scope["method"]
        request_id = _request_id(header_values(scope, b"x-request-id"))
        inner = {**scope, "method": "GET"} if method == "HEAD" else dict(scope)
        inner["request_id"] = request_id
        inner["server_send"] = send
        if self.context.config.root_path:
            inner["root_path"] = self.context.config.root_path
        status = 0

        async def framed(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message.setdefault("headers", []).append((b"x-request-id", request_id.encode()))
            elif method == "HEAD":
                message = {"type": "http.response.body", "body": b""}
            await send(message)

        try:
            await self.app(inner, receive, framed)
        except Exception:
            logger.exception("request %s failed", request_id)
            if status:
                raise  # too late for an answer: the server cuts the connection
            await internal_error("the server failed on this request").response()(
                inner, receive, framed
            )
        finally:
            # Route patterns only: what the client wrote never becomes a label.
            route = inner.get("route")
            self.context.metrics.http_requests.labels(
                getattr(route, "path", "none"),
                method if method in METHODS else "OTHER",
                f"{status // 100}xx",
            ).inc()


class Gate:
    """Lets nothing but the probes pass while no model is ready or without a valid key."""

    def __init__(self, app: ASGIApp, context: ServingContext, routes: Sequence[BaseRoute]) -> None:
        self.app = app
        self.context = context
        self.routes = routes
        self.digests = [_digest(key.encode()) for key in context.config.api_key]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] == "OPTIONS" or _is_open(scope):
            await self.app(scope, receive, send)
            return
        error = self.context.unavailable()
        if error is not None and not self._routed(scope):
            error = None  # a wrong path or method is wrong at any time
        error = error or self._unauthorized(scope)
        if error is not None:
            await error.response()(scope, receive, send)
            return
        with self.context.serving():
            await self.app(scope, receive, send)

    def _routed(self, scope: Scope) -> bool:
        return any(route.matches(scope)[0] == Match.FULL for route in self.routes)

    def _unauthorized(self, scope: Scope) -> APIError | None:
        if not self.digests:
            return None
        given = list(_credentials(scope))
        if not given:
            return _unauthorized("missing_api_key", "no API key was sent")
        if any(self._is_key(credential) for credential in given):
            return None
        return _unauthorized("invalid_api_key", "the API key is not valid")

    def _is_key(self, credential: bytes) -> bool:
        # All keys are compared, on digests of one length: time tells nothing about them.
        digest = _digest(credential)
        return sum(hmac.compare_digest(digest, known) for known in self.digests) > 0


def _unauthorized(code: str, message: str) -> APIError:
    return APIError(401, code, message, headers={"www-authenticate": "Bearer"})


def _credentials(scope: Scope) -> Iterator[bytes]:
    authorization = header_values(scope, b"authorization")
    for value in authorization[:1] if len(authorization) == 1 else ():
        scheme, _, credential = value.partition(b" ")
        if scheme.lower() == b"bearer":
            yield credential.strip()
    yield from header_values(scope, b"x-api-key")


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def _is_open(scope: Scope) -> bool:
    path, root = scope["path"], scope.get("root_path", "")
    return path in OPEN_PATHS or (root != "" and path.removeprefix(root) in OPEN_PATHS)


def _request_id(values: Iterable[bytes]) -> str:
    """Return the client's id if it is fit for a header and a log, else a new one."""
    for value in values:
        if 1 <= len(value) <= MAX_REQUEST_ID and all(0x21 <= byte <= 0x7E for byte in value):
            return value.decode("ascii")
    return os.urandom(16).hex()


def header_values(scope: Scope, name: bytes) -> list[bytes]:
    """Return all values of a header; ASGI names are lower case."""
    return [value for key, value in scope["headers"] if key == name]
