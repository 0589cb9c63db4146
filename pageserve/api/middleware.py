"""Pure ASGI middleware: the frame around every request, and the gate in front of the routes."""

import base64
import binascii
import contextlib
import logging
import os
import time
from collections.abc import Iterable, Iterator, Sequence

from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pageserve.api import logs
from pageserve.api.context import ServingContext
from pageserve.api.errors import APIError, internal_error, quote
from pageserve.api.keys import LIMITED_PATHS, ApiKey

logger = logging.getLogger("pageserve.api")
access = logging.getLogger("pageserve.access")

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
        logs.request_id.set(request_id)
        if self.context.config.root_path:
            inner["root_path"] = self.context.config.root_path
        status = size = 0
        started = time.monotonic()

        async def framed(message: Message) -> None:
            nonlocal status, size
            if message["type"] == "http.response.start":
                status = message["status"]
                size = _length(message.get("headers", ()))
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
            self._log_access(inner, method, status, time.monotonic() - started)
            self.context.metrics.http.count(
                getattr(route, "path", "none"),
                method if method in METHODS else "OTHER",
                status,
                time.monotonic() - started,
                _length(scope["headers"]),
                size,
            )
            if "api_key" in inner:
                self.context.metrics.count_key_request(inner["api_key"].name, status)

    def _log_access(self, scope: Scope, method: str, status: int, seconds: float) -> None:
        level = logging.INFO if self.context.config.log_format == "json" else logging.DEBUG
        if not access.isEnabledFor(level):
            return
        fields = {
            "method": method,
            "path": scope["path"],
            "status": status,
            "milliseconds": round(seconds * 1000, 1),
            "key": scope["api_key"].name if "api_key" in scope else None,
        }
        path = quote(scope["path"])
        access.log(level, "%s %s %d", method[:16], path, status, extra={"fields": fields})


class Gate:
    """Lets nothing but the probes pass while no model is ready, without a valid key, or beyond the
    limits of the key."""

    def __init__(self, app: ASGIApp, context: ServingContext, routes: Sequence[BaseRoute]) -> None:
        self.app = app
        self.context = context
        self.routes = routes
        self.open_paths = OPEN_PATHS - ({"/metrics"} if context.config.protect_metrics else set())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] == "OPTIONS":
            await self.app(scope, receive, send)
            return
        path = _route_path(scope)
        if path in self.open_paths:
            await self.app(scope, receive, send)
            return
        try:
            # What must be watched while the model loads is no work of the model.
            error = None if path in OPEN_PATHS else self.context.unavailable()
            if error is not None and self._routed(scope):  # a wrong path is wrong at any time
                raise error
            self._refuse_other_sites(scope)
            key = scope["api_key"] = self._authenticate(scope)
            if path in LIMITED_PATHS:
                await self._limited(key, scope, receive, send)
            else:
                with self.context.serving():
                    await self.app(scope, receive, send)
        except APIError as error:  # of this gate: those of the routes are answered further in
            await error.response()(scope, receive, send)

    def _routed(self, scope: Scope) -> bool:
        return any(route.matches(scope)[0] == Match.FULL for route in self.routes)

    def _refuse_other_sites(self, scope: Scope) -> None:
        """Some POSTs need no body, so a page of any site could send them from a visitor's browser,
        with the visitor's rights."""
        if scope["method"] != "POST" or b"cross-site" not in header_values(
            scope, b"sec-fetch-site"
        ):
            return
        allowed = self.context.config.allow_origin
        origins = [value.decode("latin-1") for value in header_values(scope, b"origin")]
        if "*" not in allowed and not set(origins) & set(allowed):
            raise APIError(
                403,
                "insufficient_permissions",
                "pages of other sites may not call this server: see --allow-origin",
                type="permission_error",
            )

    def _authenticate(self, scope: Scope) -> ApiKey:
        keys = self.context.keys
        if keys.is_open:
            return keys.anonymous
        given = list(_credentials(scope))
        if not given:
            raise _unauthorized("missing_api_key", "no API key was sent", scope)
        key = keys.find(given)
        if key is None:
            raise _unauthorized("invalid_api_key", "the API key is not valid", scope)
        return key

    async def _limited(self, key: ApiKey, scope: Scope, receive: Receive, send: Send) -> None:
        async def with_limits(message: Message) -> None:
            if message["type"] == "http.response.start":
                message.setdefault("headers", []).extend(key.headers())
            await send(message)

        outer = with_limits if key.is_limited else send
        try:
            key.take_request()
        except APIError as error:
            await error.response()(scope, receive, outer)
            return
        try:
            with self.context.serving():
                await self.app(scope, receive, outer)
        finally:
            key.done()


def _unauthorized(code: str, message: str, scope: Scope) -> APIError:
    # A browser that opens a page asks its user for the key; a script only gets the answer.
    page = any(b"text/html" in value for value in header_values(scope, b"accept"))
    scheme = 'Basic realm="pageserve, the password is an API key"' if page else "Bearer"
    return APIError(401, code, message, headers={"www-authenticate": scheme})


def _credentials(scope: Scope) -> Iterator[bytes]:
    authorization = header_values(scope, b"authorization")
    for value in authorization[:1] if len(authorization) == 1 else ():
        scheme, _, credential = value.partition(b" ")
        if scheme.lower() == b"bearer":
            yield credential.strip()
        elif scheme.lower() == b"basic":
            yield from _password(credential)
    yield from header_values(scope, b"x-api-key")


def _password(credential: bytes) -> Iterator[bytes]:
    with contextlib.suppress(binascii.Error):
        _, colon, password = base64.b64decode(credential, validate=True).partition(b":")
        if colon:
            yield password


def _route_path(scope: Scope) -> str:
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


def _length(headers: Iterable[tuple[bytes, bytes]]) -> int:
    """Return the content length that headers declare; a stream declares none and counts as 0."""
    for name, value in headers:
        if name == b"content-length":
            return int(value) if value.isdigit() and len(value) < 19 else 0
    return 0


def _request_id(values: Iterable[bytes]) -> str:
    """Return the client's id if it is fit for a header and a log, else a new one."""
    for value in values:
        if 1 <= len(value) <= MAX_REQUEST_ID and all(0x21 <= byte <= 0x7E for byte in value):
            return value.decode("ascii")
    return os.urandom(16).hex()


def header_values(scope: Scope, name: bytes) -> list[bytes]:
    """Return all values of a header; ASGI names are lower case."""
    return [value for key, value in scope["headers"] if key == name]
