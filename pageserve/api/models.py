"""GET /v1/models and /v1/models/{id}."""

from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from pageserve.api.context import ServingContext


async def list_models(context: ServingContext, http: Request) -> Response:
    """List the served names."""
    return _json({"object": "list", "data": [_card(context, n) for n in context.model_names]})


async def retrieve_model(context: ServingContext, http: Request) -> Response:
    """Describe one model; its name may hold slashes. Raises :class:`APIError` if unknown."""
    return _json(_card(context, context.resolve_model(http.path_params["model"])))


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


def _json(value: Any) -> Response:
    return Response(orjson.dumps(value), media_type="application/json")
