"""The one engine loop: receive → schedule → launch → absorb.

    depth 1   schedule N   | run N | absorb N | schedule N+1 | run N+1 | …
    depth 2   schedule N+1 | absorb N | schedule N+2 | absorb N+1 | …
              run N  ──────┴─ run N+1 ───────┴─ run N+2 …               (on the device)

Depth 1 is the synchronous engine and depth 2 the overlapped one; the code is the same.
"""

import gc
import time
from collections import deque
from collections.abc import Callable
from typing import IO

from llguidance import LLMatcher

from pageserve.config import EngineConfig
from pageserve.core.scheduler import Scheduler
from pageserve.core.structured_output import StructuredOutputManager
from pageserve.engine.timeline import Timeline, open_trace
from pageserve.grammar import compile_grammar, llguidance_tokenizer
from pageserve.kernels.compiler_process import CompilerProcess
from pageserve.messages import (
    AddRequest,
    EngineReady,
    RequestOutput,
    RequestProgress,
    SchedulerOutput,
    SchedulerStats,
    StepStats,
)
from pageserve.tokenizer import Tokenizer
from pageserve.worker.model_runner import StepHandle
from pageserve.worker.worker import Worker

MASK_TIMEOUT = 0.0005  # seconds that a step waits for masks at most while the device is busy
WORTH_WAITING = 0.0002  # seconds: in less than that hardly any mask is ready
MASK_MARGIN = 0.00005  # seconds that a wait for the device has to last to be one
MASK_SHARE = 0.02  # of a step's time, which may be waited for masks whatever the device does,
MASK_SHARE_LIMIT = 0.005  # seconds, at most
SLACK_STEPS = 6  # the last ones, which tell how long the next step may wait
IDLE_TIMEOUT = 0.002  # the same if nothing else can run; the caller may have new requests then


class EngineCore:
    """A scheduler and a worker, and the steps in flight between them."""

    def __init__(
        self,
        config: EngineConfig,
        progress: Callable[[str, int, int], None] | None = None,
        compiler: CompilerProcess | None = None,
    ) -> None:
        """Load the model and allocate the pool; for ``compiler`` see :class:`Worker`.

        Raises ``ModelError`` and ``ConfigError`` for what the user can mend.
        """
        trace = None if config.scheduler.trace is None else open_trace(config.scheduler.trace)
        self.worker = Worker(config, progress, compiler)
        self.config = config = self.worker.config
        model_config = self.worker.model_config
        scheduler = config.scheduler
        assert config.model.max_model_len is not None
        assert scheduler.max_num_seqs is not None
        assert scheduler.max_num_batched_tokens is not None
        assert scheduler.max_steps_in_flight is not None
        self.scheduler = Scheduler(
            num_blocks=self.worker.num_kv_blocks,
            block_size=config.cache.block_size,
            max_num_seqs=scheduler.max_num_seqs,
            max_num_batched_tokens=scheduler.max_num_batched_tokens,
            max_model_len=config.model.max_model_len,
            policy=scheduler.scheduling_policy,
            enable_prefix_caching=config.cache.enable_prefix_caching,
            eos_token_ids=model_config.eos_token_ids,
            seed=config.model.seed,
            structured_output=StructuredOutputManager(
                _compiler(self.worker.tokenizer, tuple(model_config.eos_token_ids)),
                self.worker.runner.vocab_limit,
                model_config.eos_token_ids,
            ),
        )
        self.ready = EngineReady(
            max_model_len=config.model.max_model_len,
            vocab_size=model_config.vocab_size,
            eos_token_ids=list(model_config.eos_token_ids),
            block_size=config.cache.block_size,
            num_kv_blocks=self.worker.num_kv_blocks,
            max_num_seqs=scheduler.max_num_seqs,
            max_num_batched_tokens=scheduler.max_num_batched_tokens,
            dtype=config.model.dtype,
            device=config.model.device,
            attention_backend=config.model.attention_backend,
            fingerprint=self.worker.fingerprint,
            memory_bytes=self.worker.memory_bytes,
            config=config,
        )
        self._timeline = None if trace is None else self._make_timeline(trace)
        gc.collect()
        gc.freeze()  # a full collection must not walk the model and the libraries in mid-step
        self._depth = scheduler.max_steps_in_flight
        self._in_flight: deque[tuple[SchedulerOutput, StepHandle, StepStats]] = deque()
        # Seconds of the last steps that the loop did nothing but wait, and of the last one all.
        self._slacks = deque([0.0], maxlen=SLACK_STEPS)
        self._step_seconds = 0.0
        self._ready = 0.0  # when its results were there
        self.last_step: StepStats | None = None  # that :meth:`step` absorbed, if it did

    def add(self, request: AddRequest) -> list[RequestOutput]:
        """Queue a request; returns its final output if it can never run, else nothing."""
        if self._timeline is not None:
            self._timeline.queued(request)
        refused = self.scheduler.add(request)
        return self._released([] if refused is None else [refused])

    def abort(self, request_ids: list[str]) -> list[RequestOutput]:
        """Forget requests wherever they are and return their final outputs."""
        return self._released(self.scheduler.abort(request_ids))

    def recover(self) -> None:
        """Forget all requests after an exception out of :meth:`step`, the step that it cut short,
        and the prefix cache, which may count on what that step never wrote."""
        self.abort(list(self.scheduler.requests))
        self.scheduler.drop_steps(keep={plan.step_id for plan, _, _ in self._in_flight})
        self.reset_prefix_cache()

    def has_work(self) -> bool:
        """Whether :meth:`step` has anything to schedule or to absorb."""
        return bool(self._in_flight) or self.scheduler.has_work()

    def step(self) -> list[RequestOutput]:
        """Keep the pipeline full, then wait for its oldest step and absorb it.

        Where nothing can run before a grammar's mask is known, waits a little for that instead."""
        begun = time.monotonic()
        released = self._released(self.scheduler.absorb_grammars(self._mask_timeout()))
        masked = time.monotonic()
        while len(self._in_flight) < self._depth:
            start = time.monotonic()
            plan = self.scheduler.schedule()
            if plan is None:
                break
            planned = time.monotonic()
            handle = self.worker.execute(plan)
            launched = time.monotonic()
            if self._timeline is not None:
                times = (start, planned, launched)
                self._timeline.launched(plan, handle, self.scheduler.running, self.stats(), times)
            stats = StepStats(
                self.scheduler.num_scheduled_tokens,
                self.worker.replayed_tokens,
                planned - start,
                launched - planned,
            )
            self._in_flight.append((plan, handle, stats))
        if not self._in_flight:
            self.last_step = None
            return released + self._released(
                self.scheduler.absorb_grammars(IDLE_TIMEOUT, idle=True)
            )
        plan, handle, self.last_step = self._in_flight.popleft()
        self.scheduler.begin_masks()
        start = time.monotonic()
        result = handle.result()
        ready = time.monotonic()
        outputs = self.scheduler.update(plan, result)
        done = time.monotonic()
        # A result that was there already may have been for long: then masks had too much time.
        waited = ready - start
        slack = masked - begun + waited if waited > MASK_MARGIN else (masked - begun) / 2
        self._slacks.append(slack)
        self._step_seconds, self._ready = ready - self._ready, ready
        self.last_step.wait_seconds = ready - start
        self.last_step.update_seconds = done - ready
        if self._timeline is not None:
            self._timeline.absorbed(plan, outputs, self.stats(), (start, ready, done))
        return released + outputs

    def _mask_timeout(self) -> float:
        """Return how long masks may hold up the next step: no longer than the device is busy with
        the one before anyway, as far as the last steps tell, so that they cost other rows next to
        nothing; a row whose mask is late runs in a later step. Steps with masks take longer to
        launch than those between them, so the scarcest of several counts.

        Where no step runs meanwhile, even a short wait begins with the masks: later they could
        only begin when the step has run, and if the device is the host, they miss the next, too."""
        share = min(MASK_SHARE * self._step_seconds, MASK_SHARE_LIMIT)
        spare = max(min(min(self._slacks) - MASK_MARGIN, MASK_TIMEOUT), share)
        return 0.0 if self._in_flight and spare <= WORTH_WAITING else spare

    def prepare_idle(self) -> bool:
        """Use a moment without work to prepare for later steps; False: nothing is left to do."""
        return self.worker.prepare_idle()

    def progress(self, request_ids: list[str] | None) -> list[RequestProgress]:
        """Where these requests are, or all live ones."""
        return self.scheduler.progress(request_ids)

    def reset_prefix_cache(self) -> int:
        """Forget all cached prefixes; returns the number of blocks forgotten."""
        return self.scheduler.reset_prefix_cache()

    def stats(self) -> SchedulerStats:
        """Gauges and counters of the scheduler."""
        return self.scheduler.stats()

    def close(self) -> None:
        """Complete the timeline, if one is written."""
        if self._timeline is not None:
            self._timeline.close()

    def _make_timeline(self, file: IO[bytes]) -> Timeline:
        return Timeline(
            file,
            synchronous=self.config.model.device == "cpu",
            num_kv_blocks=self.worker.num_kv_blocks,
        )

    def _released(self, outputs: list[RequestOutput]) -> list[RequestOutput]:
        if self._timeline is not None:
            self._timeline.released(outputs)
        return outputs


def _compiler(tokenizer: Tokenizer, eos_token_ids: tuple[int, ...]) -> Callable[[str], LLMatcher]:
    """Return what compiles grammars; the first one waits for llguidance's view of the tokenizer."""
    return lambda grammar: compile_grammar(grammar, llguidance_tokenizer(tokenizer, eos_token_ids))
