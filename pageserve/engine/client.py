"""The asyncio side of the engine: requests in, token ids out.

:class:`EngineClient` is what the API needs; :class:`ProcessClient` (process.py) talks to the
engine process and tests bring a scripted one.
"""

from collections.abc import Callable
from typing import Protocol

from pageserve.messages import (
    AddRequest,
    EngineReady,
    LoadProgress,
    RequestOutput,
    RequestProgress,
    SchedulerStats,
    StepStats,
)


class EngineDeadError(RuntimeError):
    """The engine process is gone; no request can be served any more."""


# Takes the outputs of one request, from the event loop and as they come: a task switch for each
# would cost more than what is done with them. It raises nothing.
OutputSink = Callable[[RequestOutput], None]


def merge(into: RequestOutput, later: RequestOutput) -> None:
    """Add a later output of the same request to one that nobody has taken yet."""
    into.new_token_ids = into.new_token_ids + later.new_token_ids
    if later.new_logprobs is not None:
        into.new_logprobs = (into.new_logprobs or []) + later.new_logprobs
    if later.prompt_logprobs is not None:
        into.prompt_logprobs = (into.prompt_logprobs or []) + later.prompt_logprobs
    into.finish_reason = later.finish_reason
    into.stop_reason = later.stop_reason
    into.error = later.error
    into.grammar_ended = later.grammar_ended
    into.num_preemptions = max(into.num_preemptions, later.num_preemptions)
    into.scheduled_time = into.scheduled_time or later.scheduled_time


class EngineClient(Protocol):
    """An engine as the API sees it. All members may be read at any time."""

    ready: EngineReady | None  # None while loading
    progress: LoadProgress
    startup_seconds: dict[str, float]  # by phase, as far as they have ended
    stats: SchedulerStats
    on_step: Callable[[StepStats], None]  # called after each step, with stats up to date
    dead: str | None  # why the engine is gone, None while it lives

    @property
    def busy_since(self) -> float | None:
        """``time.monotonic()`` of the engine's last sign of life while work is pending."""
        ...

    async def start(self) -> None:
        """Start the engine; return at once, loading goes on in the background."""
        ...

    async def stop(self) -> None:
        """Stop the engine and wait until it is gone."""
        ...

    def submit(self, request: AddRequest, sink: OutputSink) -> None:
        """Enqueue now; ``sink`` gets the outputs, up to the one with a ``finish_reason`` (if the
        engine dies, ``error`` with the error ENGINE_DEAD). Raises :class:`EngineDeadError`."""
        ...

    def abort(self, request_ids: list[str]) -> None:
        """Forget requests; the output of each ends with ``finish_reason`` ``abort`` at once, even
        if the engine hangs."""
        ...

    def forget(self, request_id: str) -> None:
        """Tell nobody of a request any more, and abort it if it still runs."""
        ...

    async def get_progress(self, request_ids: list[str] | None = None) -> list[RequestProgress]:
        """Ask where these requests are, or all live ones; the answer comes between two steps.

        Raises :class:`EngineDeadError`."""
        ...

    async def reset_prefix_cache(self) -> int:
        """Forget all cached prefixes; returns the number of blocks forgotten.

        Raises :class:`EngineDeadError`."""
        ...
