"""The HTTP application: which function answers which route."""

from collections.abc import Awaitable, Callable
from functools import cache

from fastapi import FastAPI
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

import pageserve
from pageserve.api import control, probes
from pageserve.api.chat_completions import create_chat_completion
from pageserve.api.completions import create_completion
from pageserve.api.context import ServingContext
from pageserve.api.docs import build_openapi, describe, docs, playground
from pageserve.api.errors import APIError, method_not_allowed, unknown_url
from pageserve.api.middleware import Gate, RequestFrame
from pageserve.api.models import list_models, retrieve_model
from pageserve.api.protocol import (
    ApplyTemplateRequest,
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from pageserve.api.requests import cancel_request, list_requests
from pageserve.api.response_schemas import (
    ChatCompletion,
    Completion,
    Load,
    Model,
    ModelList,
    PromptText,
    Status,
    Text,
    Tokens,
    Version,
)
from pageserve.api.tokenize import detokenize, tokenize

Handler = Callable[[ServingContext, Request], Awaitable[Response]]
EXPOSED_HEADERS = [
    "x-request-id", "x-pageserve-ignored", "x-pageserve-warning", "openai-processing-ms",
    "retry-after",
    *(f"x-ratelimit-{a}-{b}" for a in ("limit", "remaining", "reset")
      for b in ("requests", "tokens")),
]  # fmt: skip


class _Route(APIRoute):
    """Calls its endpoint with the request and sends what it returns."""

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request whose path matches."""
        if scope["method"] not in (self.methods or ()):
            await super().handle(scope, receive, send)  # which refuses the method
            return
        response = await self.endpoint(Request(scope, receive, send))
        await response(scope, receive, send)


class _App(FastAPI):
    """FastAPI for its document alone. It has nothing to inject, to serialise or to clean up here,
    and the layers that look for that take longer than many answers."""

    def build_middleware_stack(self) -> ASGIApp:
        """Return the middleware around the routes, of which the outermost takes every error."""
        app: ASGIApp = ExceptionMiddleware(self.router, handlers=self.exception_handlers)
        for cls, args, kwargs in reversed(self.user_middleware):
            app = cls(app, *args, **kwargs)
        return app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        await Starlette.__call__(self, scope, receive, send)


def build_app(context: ServingContext) -> FastAPI:
    """Return the application; it may serve while ``context`` is still being filled."""
    app = _App(
        title="pageserve",
        version=pageserve.__version__,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.context = context
    _add_routes(app, context)
    app.add_exception_handler(APIError, _on_api_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_middleware(Gate, context=context, routes=app.router.routes)
    if context.config.allow_origin:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=context.config.allow_origin,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=EXPOSED_HEADERS,
        )
    app.add_middleware(RequestFrame, context=context)
    return app


def _add_routes(app: FastAPI, context: ServingContext) -> None:
    models: set[type[BaseModel]] = set()

    def add(
        method: str,
        paths: list[str],
        handler: Handler,
        body: type[BaseModel] | None = None,
        answer: type[BaseModel] | str = "application/json",
    ) -> None:
        models.update(m for m in (body, answer) if isinstance(m, type))

        async def route(request: Request) -> Response:
            return await handler(context, request)

        for path in paths:
            app.router.add_api_route(
                path,
                route,
                methods=[method],
                name=handler.__name__,
                response_model=None,
                description=(handler.__doc__ or "").partition("\n")[0],
                openapi_extra=describe(path, body, answer),
                route_class_override=_Route,
            )

    add(
        "POST",
        ["/v1/chat/completions"],
        create_chat_completion,
        ChatCompletionRequest,
        ChatCompletion,
    )
    add("POST", ["/v1/completions"], create_completion, CompletionRequest, Completion)
    add("GET", ["/v1/models"], list_models, answer=ModelList)
    add("GET", ["/v1/models/{model:path}"], retrieve_model, answer=Model)
    add("POST", ["/tokenize", "/v1/tokenize"], tokenize, TokenizeRequest, Tokens)
    add("POST", ["/detokenize", "/v1/detokenize"], detokenize, DetokenizeRequest, Text)
    add("GET", ["/tokenizer_info"], control.tokenizer_info)
    add("POST", ["/apply-template"], control.apply_template, ApplyTemplateRequest, PromptText)
    add("GET", ["/v1/requests"], list_requests)
    add("POST", ["/v1/requests/{request_id:path}/cancel"], cancel_request)
    add("POST", ["/reset_prefix_cache"], control.reset_prefix_cache)
    add("GET", ["/server_info"], control.server_info)
    add("GET", ["/load"], control.load, answer=Load)
    add("GET", ["/health", "/v1/health"], probes.health, answer=Status)
    add("GET", ["/live"], probes.live, answer=Status)
    add("GET", ["/ready"], probes.ready, answer=Status)
    add("GET", ["/version"], probes.version, answer=Version)
    add("GET", ["/metrics"], probes.metrics, answer="text/plain")
    add("GET", ["/docs"], docs, answer="text/html")
    if context.config.ui:
        add("GET", ["/"], playground, answer="text/html")
    app.openapi = cache(lambda: build_openapi(app, models))  # type: ignore[method-assign]


async def _on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, APIError)
    return error.response()


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "").split(", ")
        if "GET" in allowed:
            allowed.append("HEAD")
        return method_not_allowed(request.method, allowed).response()
    if error.status_code == 404:
        return unknown_url(request.method, request.url.path).response()
    return APIError(error.status_code, None, str(error.detail)).response()
