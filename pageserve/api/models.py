"""GET /v1/models and /v1/models/{id}."""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from pageserve.api.context import ServingContext
from pageserve.api.responses import JSONResponse


async def list_models(context: ServingContext, http: Request) -> Response:
    """List the served names."""
    data = [_card(context, name) for name in context.model_names]
    return JSONResponse({"object": "list", "data": data})


async def retrieve_model(context: ServingContext, http: Request) -> Response:
    """Describe one model; its name may hold slashes. Raises :class:`APIError` if unknown."""
    return JSONResponse(_card(context, context.resolve_model(http.path_params["model"])))


def _card(context: ServingContext, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": context.created,
        "owned_by": "pageserve",
        "root": name,
        "parent": None,
        "max_model_len": context.max_model_len,
        "permission": [],
    }
