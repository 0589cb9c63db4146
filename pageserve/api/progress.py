"""What a stream tells of its prompt before the first token, if its client asked for it."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

from pageserve.api.generation import Generation
from pageserve.engine.client import EngineClient, EngineDeadError

INTERVAL = 0.25  # seconds between two reports at least


async def report_progress(
    client: EngineClient, generation: Generation, send: Callable[[dict[str, Any]], Awaitable[None]]
) -> None:
    """Send how far queue and prompt are whenever it has changed, until cancelled.

    ``queue_position`` is 0 once all sequences run; tokens are those of all prompts.
    """
    told = None
    while True:
        await asyncio.sleep(INTERVAL)
        try:
            found = await client.get_progress(generation.request_ids)
        except EngineDeadError:
            return  # which ends the stream anyway
        if not found:
            continue
        total = generation.num_prompt_tokens
        processed = sum(min(p.num_computed_tokens, p.num_prompt_tokens) for p in found)
        progress = {
            "queue_position": max(p.queue_position for p in found),
            "total": total,
            "cached": min(total, sum(p.num_cached_tokens for p in found)),
            "processed": min(total, processed),
        }
        if progress != told:
            told = progress
            elapsed = round((time.monotonic() - generation.arrival) * 1000)
            await send({**progress, "time_ms": elapsed})
