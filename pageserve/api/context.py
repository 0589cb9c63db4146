"""What the routes share: the engine, the tokenizer, the names served, and who is being served."""

import asyncio
import contextvars
import math
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from pageserve.api.errors import (
    APIError,
    bad_request,
    engine_dead,
    model_not_found,
    server_draining,
    unavailable,
)
from pageserve.api.grammars import GrammarCompiler
from pageserve.api.keys import load_keys
from pageserve.api.metrics import Metrics
from pageserve.config import EngineConfig, ServerArgs
from pageserve.engine.client import EngineClient, EngineDeadError
from pageserve.messages import EngineReady
from pageserve.sampling_params import GenerationDefaults
from pageserve.tokenizer import Tokenizer

if TYPE_CHECKING:
    from pageserve.api.generation import Generation

QUESTION_TIMEOUT = 2.0  # seconds for the engine to answer between two steps
ABORT_GRACE = 5.0  # seconds for aborted requests to say so after the drain time is over
MAX_RETRY_AFTER = 60

T = TypeVar("T")


@dataclass
class Load:
    """Sequences in the engine, as seen from here."""

    live: int = 0
    pending: int = 0  # of the live ones, those without any output yet
    pending_tokens: int = 0  # prompt tokens of the pending ones


@dataclass(eq=False)
class ServingContext:
    """State of one server. ``tokenizer`` and ``defaults`` are filled in while the engine loads;
    requests are refused with 503 until both they and the engine are there."""

    client: EngineClient
    config: ServerArgs
    model_names: tuple[str, ...]
    engine_config: EngineConfig = field(default_factory=EngineConfig)
    tokenizer: Tokenizer | None = None
    defaults: GenerationDefaults = GenerationDefaults()
    created: int = field(default_factory=lambda: int(time.time()))
    draining: bool = False
    in_flight: int = 0  # requests past the gate whose answer is not complete
    load: Load = field(default_factory=Load)
    generations: "set[Generation]" = field(default_factory=set)
    warned_names: set[str] = field(default_factory=set)  # unknown fields the log has seen

    def __post_init__(self) -> None:
        self.keys = load_keys(self.config.api_key, self.config.api_keys_file)
        if not self.priorities:
            self.keys.refuse_priorities()
        names = [key.name for key in self.keys.keys]
        self.metrics = Metrics(self.model_names[0], self.client, self.engine_config, names)
        self.grammars = GrammarCompiler()
        # More threads would only take turns: rendering holds the interpreter's lock.
        self._pool = ThreadPoolExecutor(2, thread_name_prefix="tokenize")
        # For what may take seconds: a request's own template, rendered in a process, of which there
        # are no more than these; a text that no context bounds.
        self._apart = ThreadPoolExecutor(2, thread_name_prefix="apart")
        self._idle = asyncio.Event()
        self._drained = False

    # --- readiness ---

    def unavailable(self) -> APIError | None:
        """Return why no request can be served now, None if one can."""
        if self.client.dead is not None:
            return engine_dead()
        if self.draining:
            return server_draining()
        if self.client.ready is None or self.tokenizer is None:
            return unavailable("model_loading", "the model is still loading")
        return None

    @property
    def ready(self) -> EngineReady:
        """Facts of the loaded engine; only for requests past the gate."""
        assert self.client.ready is not None
        return self.client.ready

    @property
    def loaded_tokenizer(self) -> Tokenizer:
        """The tokenizer; only for requests past the gate."""
        assert self.tokenizer is not None
        return self.tokenizer

    @property
    def max_model_len(self) -> int:
        """Longest prompt + output in tokens: the model's context, or what the KV pool can hold."""
        # The last token needs no room in the pool: nothing is computed from it.
        pool = self.ready.num_kv_blocks * self.ready.block_size + 1
        return min(self.ready.max_model_len, pool)

    @property
    def max_body_bytes(self) -> int:
        """Largest request body."""
        return int(self.config.max_body_mib * 2**20)

    @property
    def priorities(self) -> bool:
        """Whether the scheduler orders requests by their priority."""
        return self.engine_config.scheduler.scheduling_policy == "priority"

    def resolve_model(self, name: str) -> str:
        """Return the served name a request means; raises :class:`APIError` for any other."""
        if not name:
            return self.model_names[0]
        if name not in self.model_names:
            if self.config.any_model:
                return self.model_names[0]
            raise model_not_found(name)
        return name

    async def in_thread(self, function: Callable[[], T], *, apart: bool = False) -> T:
        """Run ``function`` off the event loop, and ``apart`` from others if it may take long."""
        here = contextvars.copy_context()  # log lines name the request there too
        pool = self._apart if apart else self._pool
        return await asyncio.get_running_loop().run_in_executor(pool, here.run, function)

    async def ask(self, question: Awaitable[T]) -> T:
        """Return what the engine answers; raises :class:`APIError` (503) if it does not."""
        try:
            async with asyncio.timeout(QUESTION_TIMEOUT):
                return await question
        except TimeoutError:
            raise unavailable("server_is_overloaded", "the engine does not answer") from None
        except EngineDeadError:
            raise engine_dead() from None

    @property
    def stalled(self) -> bool:
        """Whether the engine has work and shows no sign of life."""
        since = self.client.busy_since
        return since is not None and time.monotonic() - since > self.config.stall_timeout

    # --- load ---

    def admit(self, generation: "Generation") -> None:
        """Let a request in; raises the :class:`APIError` of a full queue, of a request that could
        never get in, or of an ended drain."""
        if self._drained:
            raise server_draining()
        new = generation.num_pending
        most = self.ready.max_num_seqs + self.config.max_queue
        if new > most:  # no 503: it would be sent again for ever
            param = "n" if generation.is_forked else "prompt"
            message = f"the request asks for {new} sequences, but the server takes at most {most}"
            raise bad_request("invalid_value", message, param)
        free_seats = max(0, self.ready.max_num_seqs - (self.load.live - self.load.pending))
        # Our own count sees a burst at once; the engine's sees requests that lack KV blocks.
        told = self.client.stats.num_waiting
        waiting = max(self.load.pending + new - free_seats, told + new if told else 0)
        if waiting > self.config.max_queue:
            raise self._overloaded(f"--max-queue is {self.config.max_queue}")
        most_tokens = self.config.max_queued_tokens
        queued_tokens = self.load.pending_tokens + generation.num_prompt_tokens
        if most_tokens is not None and waiting and queued_tokens > most_tokens:
            raise self._overloaded(f"--max-queued-tokens is {most_tokens}")
        self.generations.add(generation)

    def _overloaded(self, limit: str) -> APIError:
        self.metrics.count_rejection("queue_full")
        message = f"the queue is full: {limit}"
        return unavailable("server_is_overloaded", message, self._retry_after())

    def _retry_after(self) -> int:
        rate = self.metrics.prefill_rate
        seconds = math.ceil(self.load.pending_tokens / rate) if rate else 1
        return max(1, min(MAX_RETRY_AFTER, seconds))

    # --- drain ---

    def begin_drain(self) -> None:
        """Refuse new requests from now on."""
        self.draining = True

    async def wait_idle(self, timeout: float) -> bool:
        """Wait until no request is running; after ``timeout`` seconds abort the rest.

        Aborted streams end with a ``server_draining`` error frame. Returns whether all requests
        finished by themselves.
        """
        if await self._wait_until_idle(timeout):
            return True
        self._drained = True
        for generation in list(self.generations):
            generation.abort(server_draining())
        await self._wait_until_idle(ABORT_GRACE)
        return False

    async def _wait_until_idle(self, timeout: float) -> bool:
        try:
            async with asyncio.timeout(timeout):
                while self.in_flight:
                    self._idle.clear()
                    await self._idle.wait()
        except TimeoutError:
            return False
        return True

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Mark the body of the ``with`` as a request that a drain waits for."""
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1
            if not self.in_flight:
                self._idle.set()
