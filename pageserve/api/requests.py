"""GET /v1/requests and POST /v1/requests/{id}/cancel: look at what runs, and end it."""

import asyncio
import time
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from pageserve.api.context import ServingContext
from pageserve.api.errors import APIError, engine_dead, request_cancelled, unavailable
from pageserve.api.generation import QUESTION_TIMEOUT, Generation
from pageserve.api.keys import ApiKey, require_admin
from pageserve.engine.client import EngineDeadError
from pageserve.messages import RequestProgress


async def list_requests(context: ServingContext, http: Request) -> Response:
    """List all requests in the engine; raises :class:`APIError` (403 without an admin key)."""
    require_admin(http)
    generations = sorted(context.generations, key=lambda g: g.arrival)
    progress = {p.request_id: p for p in await _ask(context)}
    data = [_card(generation, progress) for generation in generations]
    return _json({"object": "list", "data": data})


async def cancel_request(context: ServingContext, http: Request) -> Response:
    """End the requests of this id (of a reply, or an X-Request-Id) that the key may end.

    Raises :class:`APIError` (404) if there is none.
    """
    name: str = http.path_params["request_id"]
    key: ApiKey = http.scope["api_key"]
    found = [
        generation
        for generation in context.generations
        if name in (generation.id, generation.label)
        and (key.admin or generation.key is key)
        and not generation.is_ending
    ]
    if not found:
        raise APIError(404, "request_not_found", "no running request has this id")
    for generation in found:
        generation.abort(request_cancelled())
    return _json({"id": name, "cancelled": True})


async def _ask(context: ServingContext) -> list[RequestProgress]:
    try:
        async with asyncio.timeout(QUESTION_TIMEOUT):
            return await context.client.get_progress()
    except TimeoutError:
        raise unavailable("server_is_overloaded", "the engine does not answer") from None
    except EngineDeadError:
        raise engine_dead() from None


def _card(generation: Generation, progress: dict[str, RequestProgress]) -> dict[str, Any]:
    known = [progress[i] for i in generation.request_ids if i in progress]
    if generation.num_output_tokens:
        state = "decode"
    else:
        state = "waiting" if all(p.queue_position for p in known) else "prefill"
    return {
        "id": generation.id,
        "request_id": generation.label,
        "state": state,
        "age_s": round(time.monotonic() - generation.arrival, 3),
        "prompt_tokens": generation.num_prompt_tokens,
        "generated_tokens": generation.num_output_tokens,
        "cached_tokens": generation.num_cached_tokens,
        "key": generation.key.name,
    }


def _json(value: Any) -> Response:
    return Response(orjson.dumps(value), media_type="application/json")
