"""The asyncio side of the engine: requests in, token ids out, one stream per request.

:class:`EngineClient` is what the API needs; :class:`ProcessClient` (process.py) talks to the
engine process and tests bring a scripted one.
"""

from collections.abc import AsyncIterator, Callable
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

    def submit(self, request: AddRequest) -> AsyncIterator[RequestOutput]:
        """Enqueue now and stream outputs, merged when the consumer lags, up to the one with a
        ``finish_reason``. Closing the iterator aborts. Raises :class:`EngineDeadError`."""
        ...

    def abort(self, request_ids: list[str]) -> None:
        """Forget requests; each open stream ends with ``finish_reason`` ``abort`` at once, even
        if the engine hangs."""
        ...

    async def get_progress(self, request_ids: list[str] | None = None) -> list[RequestProgress]:
        """Ask where these requests are, or all live ones; the answer comes between two steps.

        Raises :class:`EngineDeadError`."""
        ...

    async def reset_prefix_cache(self) -> int:
        """Forget all cached prefixes; returns the number of blocks forgotten.

        Raises :class:`EngineDeadError`."""
        ...
