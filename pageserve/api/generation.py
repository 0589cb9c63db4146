"""The sequences of one HTTP request: admitted, run, counted and aborted together."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from itertools import groupby

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
from pageserve.engine.client import EngineDeadError
from pageserve.engine.output_processor import OutputProcessor, TextOutput
from pageserve.messages import INVALID_LOGITS, PROMPT_TOO_LONG, AddRequest

logger = logging.getLogger("pageserve.api")

MERGE_AHEAD = 64  # outputs of several sequences that may wait for their reader


class _Sequence:
    __slots__ = (
        "num_cached",
        "num_output",
        "num_preemptions",
        "num_prompt",
        "parser",
        "request",
        "times",
    )

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
        """End all sequences, unless they have; :meth:`outputs` then raises ``failure``."""
        if self._failure is None and self._live:
            self._failure = failure
            if failure.code == "deadline_exceeded":
                self._metrics.deadlines.inc()
            self._context.client.abort([self._sequences[i].request.request_id for i in self._live])

    def outputs(self) -> AsyncGenerator[tuple[int, TextOutput]]:
        """Yield (sequence, output) as it comes, until each sequence has finished. Where prompts are
        scored, the first output to a prompt is that of its first sequence, which has the scores.

        Raises :class:`APIError` if one of them fails; closing the generator aborts them all.
        """
        loop, now = asyncio.get_running_loop(), time.monotonic()
        if self._deadline is not None:
            delay = self._deadline - now
            self._timers.append(loop.call_later(delay, self.abort, deadline_exceeded()))
        patience = self._context.config.queue_timeout
        if patience is not None:
            delay = self.arrival + patience - now
            self._timers.append(loop.call_later(delay, self._patience_ended))
        return self._run(0) if len(self._sequences) == 1 else self._merge()

    def close(self) -> None:
        """Give the place in the queue back; sequences still running count as aborted."""
        for timer in self._timers:
            timer.cancel()
        if self._queue_check is not None:
            self._queue_check.cancel()
        for index in sorted(self._live):
            self._finish(index, "abort")
        for _, group in groupby(
            self._sequences, lambda s: s.request.parent_id or s.request.request_id
        ):
            self._metrics.longest_output(max(s.num_output for s in group))
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

    async def _run(self, index: int) -> AsyncGenerator[tuple[int, TextOutput]]:
        """Run one sequence and count what it does."""
        if self._failure is not None:
            raise self._failure
        context = self._context
        sequence = self._sequences[index]
        request = sequence.request
        processor = OutputProcessor(
            context.loaded_tokenizer, request.sampling_params, request.prompt_token_ids
        )
        try:
            # Closing the stream aborts what still runs in the engine, behind a stop string say.
            async with aclosing(context.client.submit(request)) as stream:  # type: ignore[type-var]
                async for step in stream:
                    output = processor.process(step)
                    if output is None:
                        continue
                    self._observe(sequence, output)
                    if sequence.parser is not None:
                        output = sequence.parser.parse(output)
                    if output.finish_reason is not None:
                        self._ended(index, output)
                    yield index, output
                    if output.finish_reason is not None:  # perhaps before the engine knows
                        return
        except EngineDeadError:
            raise engine_dead() from None

    def _ended(self, index: int, output: TextOutput) -> None:
        """Count a sequence's end; raises :class:`APIError` if it is a failure."""
        reason = output.finish_reason
        assert reason is not None
        self._finish(index, "stop" if reason == "tool_calls" else reason)
        if reason in ("error", "abort"):
            if self._failure is None:
                self._failure = _failure(output)
                if output.error == INVALID_LOGITS:
                    self._metrics.corrupted.inc()
            raise self._failure

    async def _merge(self) -> AsyncGenerator[tuple[int, TextOutput]]:
        queue: asyncio.Queue[tuple[int, TextOutput] | Exception] = asyncio.Queue(MERGE_AHEAD)
        scored = {  # set once the first output of such a sequence is in the queue
            s.request.request_id: asyncio.Event()
            for s in self._sequences
            if s.request.sampling_params.prompt_logprobs is not None
        }

        async def feed(index: int) -> None:
            request = self._sequences[index].request
            try:
                async with aclosing(self._run(index)) as stream:
                    async for item in stream:
                        if request.parent_id in scored:
                            await scored[request.parent_id].wait()
                        await queue.put(item)
                        if request.request_id in scored:
                            scored[request.request_id].set()
            except Exception as error:  # a bug, too, must reach the reader, who would wait for ever
                await queue.put(error)

        tasks = [asyncio.create_task(feed(i)) for i in range(len(self._sequences))]
        try:
            unfinished = len(tasks)
            while unfinished:
                item = await queue.get()
                if isinstance(item, Exception):
                    raise item
                yield item
                unfinished -= item[1].finish_reason is not None
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    # --- books ---

    def _observe(self, sequence: _Sequence, output: TextOutput) -> None:
        now = time.monotonic()
        times = sequence.times
        metrics = self._metrics
        metrics.generation_tokens += output.num_output_tokens - sequence.num_output
        sequence.num_output = output.num_output_tokens
        # The abort that the client makes itself knows nothing of them.
        sequence.num_preemptions = max(sequence.num_preemptions, output.num_preemptions)
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

    def _finish(self, index: int, reason: str) -> None:
        self._live.discard(index)
        self._context.load.live -= 1
        sequence = self._sequences[index]
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
    if error.startswith(PROMPT_TOO_LONG):
        return bad_request("context_length_exceeded", error.removeprefix(PROMPT_TOO_LONG).strip())
    logger.error("the engine failed on a request: %s", error)
    return internal_error()
