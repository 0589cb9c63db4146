"""The sequences of one HTTP request: admitted, run, counted and aborted together."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby

import msgspec

from pageserve.api.chat_output import ChatParser
from pageserve.api.context import QUESTION_TIMEOUT, ServingContext
from pageserve.api.errors import (
    APIError,
    bad_request,
    deadline_exceeded,
    engine_dead,
    internal_error,
    request_cancelled,
)
from pageserve.api.keys import ApiKey
from pageserve.api.metrics import SequenceTimes
from pageserve.engine.client import EngineDeadError, merge
from pageserve.engine.output_processor import OutputProcessor, TextOutput
from pageserve.messages import (
    ENGINE_DEAD,
    INVALID_LOGITS,
    PROMPT_TOO_LONG,
    AddRequest,
    RequestOutput,
)

logger = logging.getLogger("pageserve.api")

# Takes an output of a sequence; returns whether more may follow before resume().
Taker = Callable[[int, TextOutput], bool]


class _Sequence:
    __slots__ = (
        "num_cached",
        "num_output",
        "num_preemptions",
        "num_prompt",
        "parser",
        "processor",
        "request",
        "times",
    )

    processor: OutputProcessor  # from the start on

    def __init__(self, request: AddRequest, parser: ChatParser | None) -> None:
        self.request = request
        self.parser = parser
        # A prompt that several sequences share counts with the first of them.
        self.num_prompt = len(request.prompt_token_ids) if request.parent_id is None else 0
        self.num_output = 0
        self.num_cached = 0
        self.num_preemptions = 0
        self.times = SequenceTimes(request.arrival_time)


class Generation:
    """Runs requests as one, sequence ``i`` being ``requests[i]``. ``label`` is the log's name for
    it, ``n`` how many choices to each prompt were asked for.

    Creating it takes its place in the queue; raises :class:`APIError` if there is none.
    :meth:`close` gives the place back and must be called whatever happened.
    """

    def __init__(
        self,
        context: ServingContext,
        requests: list[AddRequest],
        label: str,
        deadline: float | None = None,
        key: ApiKey | None = None,
        parsers: Sequence[ChatParser] | None = None,
        n: int = 1,
    ) -> None:
        self._context = context
        self.key = key or context.keys.anonymous
        self._metrics = context.metrics
        self._sequences = [
            _Sequence(request, None if parsers is None else parsers[i])
            for i, request in enumerate(requests)
        ]
        self._live = set(range(len(requests)))
        self._take: Taker
        self._on_end: Callable[[], None]
        self._held = True  # whether outputs wait: for start(), then for resume()
        self._waiting: dict[int, RequestOutput] = {}  # by sequence, in the order of their turns
        self._unscored: set[str] = set()  # whose scores were asked for and have not come
        self._ended_by: Exception | TextOutput | None = None
        self.ended = False
        self._deadline = deadline
        self._failure: APIError | None = None
        self._timers: list[asyncio.TimerHandle] = []
        self._queue_check: asyncio.Task[None] | None = None
        self.arrival = requests[0].arrival_time
        self.label = label
        self.num_pending = len(requests)
        if deadline is not None and time.monotonic() >= deadline:
            self._metrics.deadlines.inc()
            raise deadline_exceeded()
        self.key.check_tokens(self.num_prompt_tokens)
        context.admit(self)
        self.key.charge(self.num_prompt_tokens)
        context.load.live += len(requests)
        context.load.pending += len(requests)
        context.load.pending_tokens += self.num_prompt_tokens
        for request in requests:
            if request.parent_id is None:
                limit = request.sampling_params.max_tokens
                self._metrics.enqueued(n, context.max_model_len if limit is None else limit)

    @property
    def id(self) -> str:
        """The id of the reply."""
        return self._sequences[0].request.request_id.rpartition("-")[0]

    @property
    def is_ending(self) -> bool:
        """Whether all sequences have finished or are about to."""
        return self._failure is not None or not self._live

    @property
    def is_forked(self) -> bool:
        """Whether some prompt has more than one sequence."""
        return any(s.request.parent_id is not None for s in self._sequences)

    @property
    def request_ids(self) -> list[str]:
        """What the engine calls the sequences."""
        return [s.request.request_id for s in self._sequences]

    @property
    def prompt_ids(self) -> list[str]:
        """What the engine calls the first sequence of each prompt, which computes it."""
        requests = [s.request for s in self._sequences]
        return [r.request_id for r in requests if r.parent_id is None]

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all prompts, each counted once."""
        return sum(s.num_prompt for s in self._sequences)

    @property
    def num_output_tokens(self) -> int:
        """Tokens sampled so far for all sequences."""
        return sum(s.num_output for s in self._sequences)

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens of all sequences that the prefix cache held."""
        return sum(s.num_cached for s in self._sequences)

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens of all sequences that were spent on reasoning."""
        return sum(s.parser.num_reasoning_tokens for s in self._sequences if s.parser is not None)

    def abort(self, failure: APIError) -> None:
        """End all sequences, unless they have; :meth:`result` then raises ``failure``."""
        if self._failure is None and self._live:
            self._failure = failure
            if failure.code == "deadline_exceeded":
                self._metrics.deadlines.inc()
            self._context.client.abort([self._sequences[i].request.request_id for i in self._live])

    def submit(self) -> None:
        """Hand the sequences to the engine, whose outputs wait for :meth:`start`. Raises
        :class:`APIError` if the engine is gone already."""
        loop, now = asyncio.get_running_loop(), time.monotonic()
        if self._deadline is not None:
            delay = self._deadline - now
            self._timers.append(loop.call_later(delay, self.abort, deadline_exceeded()))
        patience = self._context.config.queue_timeout
        if patience is not None:
            delay = self.arrival + patience - now
            self._timers.append(loop.call_later(delay, self._patience_ended))
        tokenizer, client = self._context.loaded_tokenizer, self._context.client
        for index, sequence in enumerate(self._sequences):
            request = sequence.request
            if request.sampling_params.prompt_logprobs is not None:
                self._unscored.add(request.request_id)
            sequence.processor = OutputProcessor(
                tokenizer, request.sampling_params, request.prompt_token_ids
            )
            try:
                client.submit(request, partial(self._put, index))
            except EngineDeadError:
                raise engine_dead() from None

    def start(self, take: Taker, on_end: Callable[[], None]) -> None:
        """Let ``take(sequence, output)`` get what is released, as it comes, until each sequence has
        finished; after a False what comes is kept, merged by sequence so that memory stays bounded,
        until :meth:`resume`. Then, or at the first failure, ``on_end()`` is called once.

        Where prompts are scored, the first output to a prompt is that of its first sequence, which
        has the scores.
        """
        self._take, self._on_end = take, on_end
        self.resume()

    def resume(self) -> None:
        """Go on after an output was taken with a False."""
        if not self.ended:
            self._held = False
            self._hand_over()

    def result(self) -> None:
        """Raise what ended the run before its time: an :class:`APIError`, or a bug's exception."""
        if isinstance(self._ended_by, Exception):
            raise self._ended_by
        if self._ended_by is not None:
            raise self._failure or _failure(self._ended_by)

    def close(self) -> None:
        """Give the place in the queue back; sequences still running count as aborted."""
        for timer in self._timers:
            timer.cancel()
        if self._queue_check is not None:
            self._queue_check.cancel()
        self._abort_live()
        for _, group in groupby(
            self._sequences, lambda s: s.request.parent_id or s.request.request_id
        ):
            self._metrics.longest_output(max(s.num_output for s in group))
        self._take = lambda index, output: False  # it may hold what holds this
        self._context.generations.discard(self)
        self.key.charge(self.num_output_tokens)
        computed = sum(s.num_prompt for s in self._sequences if s.times.first_token)
        self._metrics.count_key_tokens(self.key.name, computed, self.num_output_tokens)

    def timings(self) -> dict[str, float | int | None]:
        """Return how long queue, prompt and output took, in milliseconds; None for what has not
        happened. Of several sequences the earliest begin and the latest end count."""
        all_times = [s.times for s in self._sequences]

        def first(name: str) -> float:
            return min((t for t in (getattr(x, name) for x in all_times) if t), default=0.0)

        def span(start: float, end: float) -> float | None:
            return round(max(0.0, end - start) * 1000, 3) if start and end else None

        scheduled, first_token = first("scheduled"), first("first_token")
        last_token = max(x.last_token for x in all_times)
        decode_ms = span(first_token, last_token)
        num_decoded = sum(max(0, s.num_output - 1) for s in self._sequences)
        rate = round(num_decoded / decode_ms * 1000, 2) if num_decoded and decode_ms else None
        return {
            "queue_ms": span(self.arrival, scheduled),
            "prefill_ms": span(scheduled, first_token),
            "ttft_ms": span(self.arrival, first_token),
            "decode_ms": decode_ms,
            "tokens_per_second": rate,
            "cached_tokens": self.num_cached_tokens,
        }

    def _patience_ended(self) -> None:
        if self.num_pending == len(self._sequences):
            self._queue_check = asyncio.create_task(self._leave_queue())

    async def _leave_queue(self) -> None:
        """End a request of which nothing has begun to run yet, as only the engine knows. One in a
        long step does not answer at once, and is asked again; one that hangs runs nothing."""
        while self.num_pending == len(self._sequences) and not self.is_ending:
            try:
                async with asyncio.timeout(QUESTION_TIMEOUT):
                    found = await self._context.client.get_progress(self.request_ids)
            except EngineDeadError:
                return  # which ends the request anyway
            except TimeoutError:
                is_queued = self._context.stalled
            else:
                if any(p.queue_position == 0 for p in found):
                    return
                is_queued = bool(found)
                if not found:  # it has not come to the engine yet, or has just ended there
                    await asyncio.sleep(QUESTION_TIMEOUT)
            if is_queued and self.num_pending == len(self._sequences):
                seconds = self._context.config.queue_timeout
                self.abort(deadline_exceeded(f"the request waited {seconds:g} s without being run"))

    # --- outputs ---

    def _put(self, index: int, step: RequestOutput) -> None:
        """The sink of a sequence."""
        if self._held or self._unscored:
            earlier = self._waiting.setdefault(index, step)
            if earlier is not step:
                merge(earlier, step)
            self._hand_over()
        else:
            self._process(index, step)

    def _hand_over(self) -> None:
        """Process what waits, but for sequences whose prompt's scores have not come."""
        while not self._held:
            parents = ((i, self._sequences[i].request.parent_id) for i in self._waiting)
            index = next((i for i, parent in parents if parent not in self._unscored), None)
            if index is None:
                return
            self._process(index, self._waiting.pop(index))

    def _process(self, index: int, step: RequestOutput) -> None:
        sequence = self._sequences[index]
        try:
            output = sequence.processor.process(step)
            if output is None:
                return
            self._observe(sequence, output)
            if sequence.parser is not None:
                output = sequence.parser.parse(output)
            if self._unscored:
                self._unscored.discard(sequence.request.request_id)
            if output.finish_reason is None:
                self._held = not self._take(index, output)
            else:
                self._take_last(index, output)
        except Exception as error:  # a bug, too, must reach the reader, who would wait for ever
            self._end(error)

    def _take_last(self, index: int, output: TextOutput) -> None:
        reason = output.finish_reason
        assert reason is not None
        self._finish(index, "stop" if reason == "tool_calls" else reason)
        if reason not in ("error", "abort"):
            self._held = not self._take(index, output)
            if not self._live:
                self._end(None)
            return
        if output.error == INVALID_LOGITS:
            self._metrics.corrupted.inc()
        if output.token_ids:  # what came before the failure is good
            self._take(index, msgspec.structs.replace(output, finish_reason=None))
        self._end(output)

    def _end(self, by: Exception | TextOutput | None) -> None:
        self.ended = self._held = True
        self._ended_by = by
        self._abort_live()
        self._on_end()

    # --- books ---

    def _observe(self, sequence: _Sequence, output: TextOutput) -> None:
        now = time.monotonic()
        times = sequence.times
        metrics = self._metrics
        metrics.generation_tokens += output.num_output_tokens - sequence.num_output
        sequence.num_output = output.num_output_tokens
        if output.num_preemptions > sequence.num_preemptions:
            sequence.num_preemptions = output.num_preemptions
        if times.first_token:
            metrics.gaps.observe(now - times.last_token)
        elif output.num_output_tokens or output.finish_reason == "length":
            times.first_token = now
            times.scheduled = output.scheduled_time
            if sequence.request.parent_id is None:
                sequence.num_cached = output.num_cached_tokens
            metrics.first_token(times, sequence.num_prompt, sequence.num_cached)
            self._no_longer_pending(sequence)
        times.last_token = now

    def _no_longer_pending(self, sequence: _Sequence) -> None:
        self.num_pending -= 1
        self._context.load.pending -= 1
        self._context.load.pending_tokens -= sequence.num_prompt

    def _abort_live(self) -> None:
        for index in sorted(self._live):
            self._finish(index, "abort")

    def _finish(self, index: int, reason: str) -> None:
        self._live.discard(index)
        self._context.load.live -= 1
        sequence = self._sequences[index]
        # It may have ended before the engine knows, behind a stop string say.
        self._context.client.forget(sequence.request.request_id)
        times = sequence.times
        if not times.first_token:
            self._no_longer_pending(sequence)
        num_prompt = len(sequence.request.prompt_token_ids)
        self._metrics.finished(
            reason, times, num_prompt, sequence.num_output, sequence.num_preemptions
        )


def _failure(output: TextOutput) -> APIError:
    """Turn an engine's failure into the answer it deserves."""
    if output.finish_reason == "abort":
        return request_cancelled()
    error = output.error or ""
    if error == ENGINE_DEAD:
        return engine_dead()
    if error.startswith(PROMPT_TOO_LONG):
        return bad_request("context_length_exceeded", error.removeprefix(PROMPT_TOO_LONG).strip())
    logger.error("the engine failed on a request: %s", error)
    return internal_error()
