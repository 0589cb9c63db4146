"""GET /v1/requests and POST /v1/requests/{id}/cancel: look at what runs, and end it."""

import time
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from pageserve.api.context import ServingContext
from pageserve.api.errors import APIError, request_cancelled
from pageserve.api.generation import Generation
from pageserve.api.keys import ApiKey, require_admin
from pageserve.api.responses import JSONResponse
from pageserve.messages import RequestProgress


async def list_requests(context: ServingContext, http: Request) -> Response:
    """List all requests that :func:`cancel_request` could end; raises :class:`APIError` (403
    without an admin key)."""
    require_admin(http)
    progress = {p.request_id: p for p in await context.ask(context.client.get_progress())}
    running = [generation for generation in context.generations if not generation.is_ending]
    data = [_card(generation, progress) for generation in sorted(running, key=lambda g: g.arrival)]
    return JSONResponse({"object": "list", "data": data})


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
    return JSONResponse({"id": name, "cancelled": True})


def _card(generation: Generation, progress: dict[str, RequestProgress]) -> dict[str, Any]:
    ids = generation.request_ids
    known = [progress[i] for i in ids if i in progress]
    if generation.num_output_tokens:
        state = "decode"
    elif generation.num_pending == len(ids) and all(p.queue_position for p in known):
        state = "waiting"  # also what is still on its way to the engine
    else:
        state = "prefill"
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
