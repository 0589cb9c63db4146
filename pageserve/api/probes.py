"""Routes for operators: health, liveness, readiness, version and metrics. They need no key."""

import orjson
from starlette.requests import Request
from starlette.responses import Response

import pageserve
from pageserve.api.context import ServingContext
from pageserve.api.errors import APIError, unavailable
from pageserve.api.responses import JSONResponse


async def health(context: ServingContext, http: Request) -> Response:
    """Return 200 if requests are served, else the error they would get."""
    error = context.unavailable() or _stalled(context)
    return JSONResponse({"status": "ok"}) if error is None else error.response()


async def live(context: ServingContext, http: Request) -> Response:
    """Return 200 unless only a restart can help: loading and draining are signs of life."""
    error = context.unavailable() if context.client.dead is not None else _stalled(context)
    return JSONResponse({"status": "ok"}) if error is None else error.response()


async def ready(context: ServingContext, http: Request) -> Response:
    """Return 200 if requests are served, else how far the server is."""
    error = context.unavailable()
    if error is None:
        return JSONResponse({"status": "ready"})
    progress = context.client.progress
    status = {"model_loading": "loading", "server_draining": "draining"}.get(error.code or "")
    body = orjson.loads(error.body()) | {
        "status": status or "dead",
        "progress": {
            "phase": progress.phase, "done": progress.done, "total": progress.total
        },
    }  # fmt: skip
    return JSONResponse(body, error.status, error.headers)


async def version(context: ServingContext, http: Request) -> Response:
    """Return the server's version."""
    return JSONResponse({"version": pageserve.__version__})


async def metrics(context: ServingContext, http: Request) -> Response:
    """Return all metrics for Prometheus."""
    body, content_type = context.metrics.render(http.headers.get("accept", ""))
    return Response(body, headers={"content-type": content_type})


def _stalled(context: ServingContext) -> APIError | None:
    if not context.stalled:
        return None
    seconds = context.config.stall_timeout
    return unavailable("engine_dead", f"the engine has not finished a step for {seconds:g} s")
