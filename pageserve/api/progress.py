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

    ``queue_position`` is 0 once all sequences run; tokens are those of all prompts, each counted
    once however many sequences share it.
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
        where = {p.request_id: p for p in found}
        prompts = [where[i] for i in generation.prompt_ids if i in where]
        total = generation.num_prompt_tokens
        left = sum(max(0, p.num_prompt_tokens - p.num_computed_tokens) for p in prompts)
        progress = {
            "queue_position": max(p.queue_position for p in found),
            "total": total,
            "cached": sum(p.num_cached_tokens for p in prompts),
            "processed": total - left,
        }
        if progress != told:
            told = progress
            elapsed = round((time.monotonic() - generation.arrival) * 1000)
            await send({**progress, "time_ms": elapsed})
