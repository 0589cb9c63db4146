"""The scheduler: which tokens of which request run in the next step.

``schedule()`` plans a step, ``update()`` absorbs its result. Plans may be made before older results
are in (depth 2); nothing here knows how deep the caller goes, it only counts what is in flight.
Plain Python on plain data: no device, no sockets, no text, constructible from ints.
"""

import bisect
import heapq
import operator
import random
import time
from collections.abc import Iterable

from pageserve.core.fairness import FairQueue
from pageserve.core.kv_cache_manager import KVCacheManager
from pageserve.core.policy import POLICIES
from pageserve.core.request import CORRUPTED_TOKEN, Request, RequestStatus
from pageserve.core.structured_output import Grammar, StructuredOutputManager
from pageserve.messages import (
    INVALID_LOGITS,
    PROMPT_TOO_LONG,
    AddRequest,
    ModelRunnerOutput,
    NewRequestData,
    RequestOutput,
    RequestProgress,
    ScheduledRow,
    SchedulerOutput,
    SchedulerStats,
    TokenLogprobs,
)
from pageserve.utils import COMMON_TOKENS

LOOK_AHEAD = 4  # waiting requests tried behind one that does not fit
MAX_OVERTAKEN = 8  # admissions past a blocked request, after which all wait for it
SLIVER = 0.25  # a prompt that fits one step is not cut for less than this share of it: the rest
# would run as a chunk on a context, which costs more than the sliver saves
RETRY_STEPS = 8  # steps between attempts of a blocked request while its blocks are not free

_LAST_LIVE = RequestStatus.PREEMPTED
_RUNNING_KEY = operator.attrgetter("running_key")


class _Step:
    """A plan in the making. Rows that decode and rows that carry a prompt chunk are kept apart."""

    __slots__ = (
        "bitmasks",
        "budget",
        "chunk_requests",
        "chunk_rows",
        "decode_requests",
        "decode_rows",
        "new_requests",
        "preempted",
        "prompt_budget",
        "scored",
    )

    def __init__(self, budget: int) -> None:
        self.budget = budget  # tokens left
        self.prompt_budget = budget  # tokens that prompts may have in all
        self.new_requests: list[NewRequestData] = []
        self.decode_rows: list[ScheduledRow] = []  # one token, which samples
        self.decode_requests: list[Request] = []
        self.chunk_rows: list[ScheduledRow] = []
        self.chunk_requests: list[Request] = []  # of the chunk rows that sample
        self.scored: list[tuple[Request, int]] = []  # chunk rows that score: their first position
        self.bitmasks: dict[int, bytes] = {}  # slot → tokens its grammar allows
        self.preempted = False

    def constrain(self, slot: int, grammar: Grammar) -> None:
        """Let the row in ``slot`` sample only what its grammar allows, where that is in force."""
        if grammar.active:
            assert grammar.bitmask is not None, "a row without its mask"
            self.bitmasks[slot] = grammar.bitmask


class Scheduler:
    """Continuous batching over one KV pool.

    Promises: each request that enters gets exactly one output with a ``finish_reason``. A running
    decode gets a token in every step it has a block for. Nobody is preempted for a request behind
    it, so the first one always advances. (A row under a grammar runs when its mask is known, and
    holds nobody up until then.) Tenants take turns by the tokens they were served. A waiting
    request whose turn it is and that does not fit is overtaken by at most MAX_OVERTAKEN others
    (LOOK_AHEAD deep), a preempted one by none; one that waits for a mask is set aside meanwhile
    and then back in its place.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        policy: str = "fcfs",
        enable_prefix_caching: bool = True,
        eos_token_ids: Iterable[int] = (),
        watermark: float = 0.01,
        seed: int | None = None,
        structured_output: StructuredOutputManager | None = None,
    ) -> None:
        """``watermark`` is the least share of the pool an admission leaves free for decodes (it
        leaves one block for each running request in any case); ``seed`` makes the seeds of
        requests that bring none reproducible; without ``structured_output`` requests that bring a
        grammar end as errors. Raises ValueError for values that cannot work."""
        for name, value in (
            ("max_num_seqs", max_num_seqs),
            ("max_num_batched_tokens", max_num_batched_tokens),
            ("max_model_len", max_model_len),
        ):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if policy not in POLICIES:
            raise ValueError(f"policy must be one of {', '.join(POLICIES)}, got {policy!r}")
        if not 0 <= watermark < 1:
            raise ValueError(f"watermark must lie in [0, 1), got {watermark}")
        self.kv_cache_manager = KVCacheManager(num_blocks, block_size, enable_prefix_caching)
        self.policy = POLICIES[policy]
        self.max_num_batched_tokens = max_num_batched_tokens
        # A running request costs at least a token a step, so more could not all advance.
        self.max_num_seqs = min(max_num_seqs, max_num_batched_tokens)
        self.max_model_len = max_model_len
        self.max_pool_tokens = num_blocks * block_size

        self.requests: dict[str, Request] = {}  # all that have not had their final output
        self.waiting = FairQueue(self.policy)
        self.running: list[Request] = []  # sorted by running_key; preempted from the back
        self._free_slots = list(range(self.max_num_seqs))  # heap: lowest first, a dense table
        self.structured_output = structured_output
        # Set aside from the waiting until it is known what their first token may be.
        self.awaiting_mask: dict[str, Request] = {}
        self._in_flight: dict[int, list[Request]] = {}  # step id → requests of its sampling rows
        self._scored: dict[int, list[tuple[Request, int]]] = {}  # step id → rows that score
        self._children: dict[str, list[Request]] = {}  # waiting for the prompt of a live request
        self._places: dict[str, int] | None = None  # in the queue from 1 on; None: to be counted

        self._eos_token_ids = frozenset(eos_token_ids)
        self._watermark_blocks = int(watermark * num_blocks)
        self._random = random.Random(seed)
        self._num_arrivals = 0
        self._num_computed_tokens = 0  # over all requests with blocks
        self._step_id = 0
        self.num_scheduled_tokens = 0  # of the last step
        self._total_scheduled_tokens = 0
        self._prefix_cache_queries = 0
        self._prefix_cache_hits = 0
        self._shares_blocks = False  # whether any request ever began with blocks of another
        self._ungrouped: list[Request] = []  # the decodes of a step as they came
        self._group_order: list[int] = []
        self._num_preemptions = 0

    # --- requests come and go ---------------------------------------------------------------------

    def add(self, message: AddRequest) -> RequestOutput | None:
        """Queue a request. One that can never run gets its final output, an error, at once.

        A request whose ``parent_id`` names one with the same first tokens is held back until those
        are computed and then shares their blocks, the last one by copy-on-write. It is queued like
        any other where that cannot be, or can no longer be.
        Raises ValueError for an id that is live: outputs of two requests would be mixed up.
        """
        if message.request_id in self.requests:
            raise ValueError(f"request id {message.request_id} is in use")
        self._places = None
        error = self._why_never(message)
        if error is not None:
            return RequestOutput(message.request_id, [], "error", error=error)
        parent = None if message.parent_id is None else self.requests.get(message.parent_id)
        request = self._register(message)
        if parent is None or not _may_share(parent, request):
            self.waiting.push(request)
        elif _has_computed(parent, request):
            self._fork(parent, request)
        else:
            request.parent_id = parent.request_id
            self._children.setdefault(parent.request_id, []).append(request)
        return None

    def _fork_children(self) -> None:
        """Let requests that were held back share the prompts that are planned by now."""
        for parent_id, children in list(self._children.items()):
            parent = self.requests[parent_id]
            ready = [child for child in children if _has_computed(parent, child)]
            for child in ready:
                self._forget_parent(child)
                self._fork(parent, child)

    def _fork(self, parent: Request, child: Request) -> None:
        """Start ``child`` on its parent's blocks if there is room and nobody is before it."""
        free_blocks = self.kv_cache_manager.block_pool.num_free_blocks
        if (
            len(self.running) < self.max_num_seqs
            and self._headroom() < free_blocks  # its first step takes a block
            and self.waiting.is_next(child)
        ):
            self.kv_cache_manager.fork(parent, child)
            child.slot = self._free_slots[0]
            self._enter_running(child)
        else:
            self.waiting.push(child)

    def _queue_children(self, parent: Request) -> None:
        """Queue the requests that wait for the prompt of one that gives its blocks away."""
        for child in self._children.pop(parent.request_id, ()):
            child.parent_id = None
            self.waiting.push(child)

    def _forget_parent(self, child: Request) -> None:
        assert child.parent_id is not None
        siblings = self._children[child.parent_id]
        siblings.remove(child)
        if not siblings:
            del self._children[child.parent_id]
        child.parent_id = None

    def abort(self, request_ids: Iterable[str]) -> list[RequestOutput]:
        """End requests wherever they are; unknown and finished ids are ignored. Returns the final
        output of each that was alive."""
        self._places = None
        outputs = []
        for request_id in request_ids:
            request = self.requests.get(request_id)
            if request is not None:
                self._finish(request, RequestStatus.FINISHED_ABORTED)
                outputs.append(request.output([]))
        if outputs:
            self._drop_finished()
        return outputs

    def has_work(self) -> bool:
        """Whether anything is left to schedule or to absorb."""
        return bool(self.requests or self._in_flight)

    # --- plan a step ------------------------------------------------------------------------------

    def schedule(self) -> SchedulerOutput | None:
        """Plan the next step, or return None if nothing can run before older steps are absorbed.

        There is no prefill or decode phase. Each request has ``num_computed_tokens`` that tries to
        catch up with its known tokens plus those in flight, and is given ``min(missing, budget)``.
        Those that miss one token come first and are never short of budget; prompt chunks share the
        rest in running order; then the waiting are admitted. Only the first kind can need a block,
        only it preempts, and only requests behind it that this step has not planned yet.
        """
        self._places = None
        self.kv_cache_manager.begin_step()
        step = _Step(self.max_num_batched_tokens)
        unfinished = self._schedule_decodes(step)
        if step.decode_rows:
            pool = self.kv_cache_manager.block_pool
            free_share = pool.num_free_blocks / pool.num_blocks
            step.budget = self.policy.prompt_budget(step.budget, free_share)
        step.prompt_budget = step.budget
        for request in unfinished:
            if step.budget == 0:
                break
            self._add_row(step, request)
        if not step.preempted:
            self._admit_waiting(step)
        plan = self._seal(step)
        if self._children:
            self._fork_children()
        return plan

    def _schedule_decodes(self, step: _Step) -> list[Request]:
        """Plan every running request that misses one token; return those that miss more."""
        unfinished = []
        rows, requests = step.decode_rows, step.decode_requests
        no_blocks: list[int] = []  # one for all rows: hundreds of empty lists a step wake the GC
        for request in self.running:  # preemption pops from the end, never before this request
            grammar = request.grammar
            if grammar is not None and grammar.holds_back(request.num_output_placeholders):
                continue
            num_tokens = request.num_tokens + request.num_output_placeholders
            computed = request.num_computed_tokens
            if num_tokens - computed != 1:
                unfinished.append(request)
                continue
            if num_tokens >= request.max_num_tokens:
                continue  # its last token is in flight
            if computed < request.writable_end:
                rows.append(ScheduledRow(request.slot, computed, 1, True, no_blocks))
            else:
                new_block_ids = self._allocate_or_preempt(step, request)
                if new_block_ids is None:
                    break
                if request.scheduled_time == 0.0:  # a fork's first step
                    self._announce(step, request, is_fork=True)
                    new_block_ids = []
                rows.append(ScheduledRow(request.slot, computed, 1, True, new_block_ids))
            request.num_computed_tokens = num_tokens
            request.num_output_placeholders += 1
            requests.append(request)
            if grammar is not None:
                step.constrain(request.slot, grammar)
        step.budget -= len(rows)
        return unfinished

    def _allocate_or_preempt(self, step: _Step, request: Request) -> list[int] | None:
        """Make one more position writable at the cost of requests behind; None if it was the last
        one itself and had to go. (Alone it always fits: ``max_num_tokens`` ends it in time.)"""
        while True:
            new_block_ids = self.kv_cache_manager.allocate_slots(request, 1)
            if new_block_ids is not None:
                return new_block_ids
            victim = self.running.pop()
            step.preempted = True
            self._preempt(victim)
            if victim is request:
                assert self.running, "a lone request must fit the pool"
                return None

    def _preempt(self, request: Request) -> None:
        """Take blocks and slot away; the request starts over from the front of the queue. A token
        in flight is still absorbed, and it is not resumed before."""
        self._release(request)
        request.num_computed_tokens = 0
        request.status = RequestStatus.PREEMPTED
        request.num_preemptions += 1
        self._num_preemptions += 1
        self.waiting.push(request)
        self._queue_children(request)

    def _admit_waiting(self, step: _Step) -> None:
        """Admit from the front while there is room, looking a little past those that do not fit."""
        blocked: list[Request] = []
        while (
            self.waiting
            and step.budget > 0
            and len(self.running) < self.max_num_seqs
            and len(blocked) <= LOOK_AHEAD
            and all(map(_may_be_overtaken, blocked))
        ):
            request = self.waiting.pop()
            if request.grammar is not None and request.grammar.waits:
                self.awaiting_mask[request.request_id] = request
            elif self._admit(step, request):
                for overtaken in blocked:
                    overtaken.num_overtaken += 1
            else:
                blocked.append(request)
        for request in blocked:
            self.waiting.push(request)

    def _admit(self, step: _Step, request: Request) -> bool:
        """Start or resume a request if the pool has its blocks and headroom for the running, and
        the step room for more than a sliver of it."""
        if request.num_output_placeholders:
            return False
        manager = self.kv_cache_manager
        headroom = 0
        if self.running:
            headroom = self._headroom()
            short = request.num_required_blocks + headroom > manager.block_pool.num_free_blocks
            if short and self._step_id < request.retry_step:
                return False
        computed = manager.get_computed_blocks(request)
        missing = request.num_tokens - len(computed) * manager.block_size
        if step.budget < missing * SLIVER and missing <= step.prompt_budget:
            step.budget = 0  # nor may anyone overtake it with what is left
            return False
        request.slot = self._free_slots[0]
        if not manager.allocate_prompt(request, computed, headroom):
            request.slot = -1
            request.retry_step = self._step_id + RETRY_STEPS
            return False
        self._enter_running(request)
        self._announce(step, request)
        self._add_row(step, request)
        return True

    def _headroom(self) -> int:
        """Blocks to leave free when one more request starts to run beside others: one for each
        carries all of them through the next block_size steps."""
        return max(len(self.running) + 1, self._watermark_blocks)

    def _enter_running(self, request: Request) -> None:
        """Count a request that has just got blocks and the lowest free slot among the running."""
        heapq.heappop(self._free_slots)
        self._num_computed_tokens += request.num_computed_tokens
        request.status = RequestStatus.RUNNING
        if self.running and self.running[-1].running_key > request.running_key:
            bisect.insort(self.running, request, key=_RUNNING_KEY)
        else:
            self.running.append(request)

    def _announce(self, step: _Step, request: Request, is_fork: bool = False) -> None:
        """Introduce the request in its slot to the worker. A fork asks nothing of the cache."""
        if request.scheduled_time == 0.0:
            request.scheduled_time = time.monotonic()
            request.num_cached_tokens = request.num_computed_tokens
            self.waiting.admitted(request, request.num_tokens - request.num_computed_tokens)
            if self.kv_cache_manager.enable_prefix_caching and not is_fork:
                self._prefix_cache_queries += request.num_tokens
                self._prefix_cache_hits += request.num_computed_tokens
        self._shares_blocks |= is_fork or request.num_computed_tokens > 0
        step.new_requests.append(
            NewRequestData(
                request.slot,
                request.token_ids.copy(),
                request.num_prompt_tokens,
                request.block_ids.copy(),
                request.sampling_params,
                request.seed,
            )
        )

    def _add_row(self, step: _Step, request: Request) -> None:
        """Plan as many of a request's known tokens as the budget allows; their blocks are there."""
        computed = request.num_computed_tokens
        missing = request.num_tokens - computed
        num_scheduled = min(missing, step.budget)
        samples = num_scheduled == missing
        row = ScheduledRow(request.slot, computed, num_scheduled, samples)
        is_decode = samples and num_scheduled == 1
        if is_decode:
            step.decode_rows.append(row)
            step.decode_requests.append(request)
        else:
            step.chunk_rows.append(row)
            if samples:
                step.chunk_requests.append(request)
            scores = request.sampling_params.prompt_logprobs is not None
            if scores and computed < request.num_prompt_tokens - 1:
                step.scored.append((request, computed))
        if samples and request.grammar is not None:
            step.constrain(request.slot, request.grammar)
        request.num_computed_tokens = computed + num_scheduled
        request.num_output_placeholders += samples
        step.budget -= num_scheduled
        if not is_decode:  # a step of decodes writes while it reads: offered when it has run
            self.kv_cache_manager.cache_blocks(request)

    def _seal(self, step: _Step) -> SchedulerOutput | None:
        """Number the step and remember whose tokens it will bring."""
        block_updates = self.kv_cache_manager.take_block_updates()
        if not (step.decode_rows or step.chunk_rows):
            assert not block_updates and not step.new_requests, "changes without a row"
            return None
        num_scheduled = len(step.decode_rows)
        for row in step.chunk_rows:
            num_scheduled += row.num_scheduled_tokens
        self.num_scheduled_tokens = num_scheduled
        self._total_scheduled_tokens += num_scheduled
        self._num_computed_tokens += num_scheduled
        if self._shares_blocks and not step.chunk_rows:
            self._group_decodes(step)
        self._step_id += 1
        self._in_flight[self._step_id] = step.decode_requests + step.chunk_requests
        if step.scored:
            self._scored[self._step_id] = step.scored
        rows = step.decode_rows + step.chunk_rows
        return SchedulerOutput(self._step_id, step.new_requests, block_updates, rows, step.bitmasks)

    def _group_decodes(self, step: _Step) -> None:
        """Bring rows that begin with the same blocks together: what neighbours have in common,
        their attention may read once."""
        if step.decode_requests != self._ungrouped:  # else in the order of the step before
            self._ungrouped = step.decode_requests
            count = max(1, COMMON_TOKENS // self.kv_cache_manager.block_size)
            blocks = [request.block_ids[:count][-1] for request in self._ungrouped]
            self._group_order = sorted(range(len(blocks)), key=blocks.__getitem__)
        step.decode_rows = [step.decode_rows[i] for i in self._group_order]
        step.decode_requests = [step.decode_requests[i] for i in self._group_order]

    # --- absorb a step ----------------------------------------------------------------------------

    def update(self, step: SchedulerOutput, result: ModelRunnerOutput) -> list[RequestOutput]:
        """Append the step's tokens to their requests and return what each one releases.

        Tokens of requests that finished meanwhile are dropped. Raises KeyError for a step that was
        never planned or is already absorbed, ValueError for a result that does not match it.
        """
        if result.step_id != step.step_id:
            raise ValueError(f"result of step {result.step_id} given for step {step.step_id}")
        requests = self._in_flight.pop(step.step_id)
        self._places = None
        outputs: list[RequestOutput] = []
        num_live = len(self.requests)
        logprobs = result.logprobs or [None] * len(requests)
        for request, token_id, logprob in zip(
            requests, result.sampled_token_ids, logprobs, strict=True
        ):
            request.num_output_placeholders -= 1
            if request.status > _LAST_LIVE:
                continue
            grammar = request.grammar
            if grammar is not None and grammar.num_stale:
                grammar.num_stale -= 1
                continue
            num_tokens = request.num_tokens + 1
            if token_id in request.stop_ids or num_tokens >= request.max_num_tokens:
                outputs.append(self._absorb_last(request, token_id, logprob))
                continue
            request.token_ids.append(token_id)
            request.num_tokens = num_tokens
            if grammar is not None:
                self._advance_grammar(request, grammar, token_id)
            if num_tokens >= request.next_hash_at:
                self.kv_cache_manager.cache_blocks(request)
            outputs.append(
                RequestOutput(
                    request.request_id,
                    [token_id],
                    None,
                    None,
                    None if logprob is None else [logprob],
                    request.num_cached_tokens,
                    request.num_preemptions,
                    request.scheduled_time,
                )
            )
        scored = self._scored.pop(step.step_id, ())
        for (request, start), entries in zip(scored, result.prompt_logprobs or (), strict=True):
            self._absorb_prompt_logprobs(outputs, request, start, entries)
        if len(self.requests) != num_live:
            self._drop_finished()
        if self.structured_output is not None:
            self.structured_output.flush()
        return outputs

    def drop_steps(self, keep: set[int]) -> None:
        """Forget steps whose results will never come: all but ``keep``. Their requests must have
        ended."""
        for step_id in self._in_flight.keys() - keep:
            assert all(r.status > _LAST_LIVE for r in self._in_flight.pop(step_id))
            self._scored.pop(step_id, None)
        if self.structured_output is not None:
            self.structured_output.forget_masks()

    def _absorb_prompt_logprobs(
        self,
        outputs: list[RequestOutput],
        request: Request,
        start: int,
        entries: list[TokenLogprobs],
    ) -> None:
        """Put out the scores of the prompt tokens from ``start + 1`` that were not before: after a
        preemption some come twice."""
        assert start <= request.num_prompt_logprobs, "prompt tokens were skipped"
        new = entries[request.num_prompt_logprobs - start :]
        output = next((o for o in outputs if o.request_id == request.request_id), None)
        if not new or (output is None and request.status > _LAST_LIVE):
            return
        if output is None:
            output = request.output([])
            outputs.append(output)
        output.prompt_logprobs = new
        request.num_prompt_logprobs += len(new)

    def _absorb_last(
        self, request: Request, token_id: int, logprob: TokenLogprobs | None
    ) -> RequestOutput:
        """Absorb a token that may end its request (``min_tokens`` may still say no)."""
        if token_id == CORRUPTED_TOKEN:
            self.kv_cache_manager.forget(request)
            self._finish(request, RequestStatus.FINISHED_ERROR)
            return request.output([], error=INVALID_LOGITS)
        if request.sampling_params.max_tokens == 0:  # only the prompt counts
            self._finish(request, RequestStatus.FINISHED_LENGTH)
            return request.output([])
        request.token_ids.append(token_id)
        request.num_tokens += 1
        stop = request.check_stop()
        grammar_ended = False
        if request.grammar is not None:
            if stop is None:
                self._advance_grammar(request, request.grammar, token_id)
            elif stop[0] is RequestStatus.FINISHED_LENGTH:
                assert self.structured_output is not None
                grammar_ended = self.structured_output.ends_with(request.grammar, token_id)
                stop = (RequestStatus.FINISHED_STOPPED, None) if grammar_ended else stop
        self.kv_cache_manager.cache_blocks(request)
        if stop is not None:
            self._finish(request, stop[0])
        return request.output(
            [token_id],
            stop_reason=None if stop is None else stop[1],
            new_logprobs=None if logprob is None else [logprob],
            grammar_ended=grammar_ended,
        )

    # --- grammars ---------------------------------------------------------------------------------

    def absorb_grammars(self, timeout: float = 0.0, idle: bool = False) -> list[RequestOutput]:
        """Take in masks and compiled grammars that are ready; return the final outputs of requests
        whose grammar has ended, or has turned out to be unusable.

        Waits up to ``timeout`` seconds for masks under way, or for a compilation if there are none
        and nothing else can run (``idle``)."""
        if self.structured_output is None:
            return []
        self._places = None
        outputs: list[RequestOutput] = []
        num_live = len(self.requests)
        for grammar in self.structured_output.take(timeout, idle):
            request = self.requests.get(grammar.request_id)
            if request is None or request.grammar is not grammar:
                continue  # finished meanwhile
            if grammar.error is not None:
                self._finish(request, RequestStatus.FINISHED_ERROR)
                outputs.append(request.output([], error=f"grammar_error: {grammar.error}"))
            elif grammar.ended:
                self._finish(request, RequestStatus.FINISHED_STOPPED)
                outputs.append(request.output([], grammar_ended=True))
            elif self.awaiting_mask.pop(request.request_id, None) is not None:
                self.waiting.push(request)
        if len(self.requests) != num_live:
            self._drop_finished()
        return outputs

    def begin_masks(self) -> None:
        """Have the masks computed that are not there yet, while the caller waits."""
        if self.structured_output is not None:
            self.structured_output.begin()

    def _advance_grammar(self, request: Request, grammar: Grammar, token_id: int) -> None:
        """Give the newest token to the grammar. If it puts the grammar in force, tokens in flight
        are stale: their positions are planned again, like those of rejected draft tokens."""
        assert self.structured_output is not None
        num_in_flight = request.num_output_placeholders
        self.structured_output.accept(grammar, token_id, num_in_flight)
        if grammar.num_stale and request.status is RequestStatus.RUNNING:
            request.num_computed_tokens -= num_in_flight
            self._num_computed_tokens -= num_in_flight

    # --- books ------------------------------------------------------------------------------------

    def stats(self) -> SchedulerStats:
        """Return gauges and counters, at the same cost whatever is queued or running."""
        pool = self.kv_cache_manager.block_pool
        grammars = self.structured_output
        return SchedulerStats(
            num_running=len(self.running),
            num_waiting=len(self.requests) - len(self.running),
            num_deferred=len(self.awaiting_mask),
            num_free_blocks=pool.num_free_blocks,
            num_cached_blocks=pool.num_cached_blocks,
            num_shared_blocks=pool.num_shared_blocks,
            num_used_blocks=pool.num_blocks - pool.num_free_blocks,
            peak_used_blocks=pool.peak_used_blocks,
            used_slots=self.kv_cache_manager.used_slots(self._num_computed_tokens),
            num_scheduled_tokens=self.num_scheduled_tokens,
            prefix_cache_queries_total=self._prefix_cache_queries,
            prefix_cache_hits_total=self._prefix_cache_hits,
            preemptions_total=self._num_preemptions,
            steps_total=self._step_id,
            grammars_compiled_total=grammars.num_compiled if grammars else 0,
            grammar_compile_seconds_total=grammars.compile_seconds if grammars else 0.0,
            grammar_cache_hits_total=grammars.num_cache_hits if grammars else 0,
        )

    def progress(self, request_ids: Iterable[str] | None = None) -> list[RequestProgress]:
        """Return where these requests are, or all live ones; costs a walk over the queue, once
        between two changes of it, however often it is asked."""
        if self._places is None:
            queue = [*self.awaiting_mask.values(), *self.waiting.requests()]  # their turn had come
            self._places = {r.request_id: i + 1 for i, r in enumerate(queue)}
        places = self._places
        ids = self.requests if request_ids is None else request_ids
        return [
            RequestProgress(
                r.request_id,
                places.get(r.parent_id or r.request_id, 0),
                r.num_prompt_tokens,
                r.num_cached_tokens,
                r.num_computed_tokens,
                r.num_tokens - r.num_prompt_tokens,
            )
            for r in (self.requests[i] for i in ids if i in self.requests)
        ]

    def reset_prefix_cache(self) -> int:
        """Forget all cached prefixes and return the number of blocks that only the cache held;
        running requests keep theirs."""
        pool = self.kv_cache_manager.block_pool
        num_blocks = pool.num_cached_blocks
        pool.reset()
        return num_blocks

    def check_integrity(self) -> None:
        """Assert that all books agree; callable between any two calls."""
        set_aside = list(self.awaiting_mask.values())
        running, waiting = self.running, self.waiting.requests()
        assert len(self.waiting) == len(waiting)
        assert all(r.grammar is not None and r.grammar.waits for r in set_aside)
        waiting += set_aside
        for parent_id, children in self._children.items():
            assert children and all(child.parent_id == parent_id for child in children)
            assert self.requests[parent_id].status is not RequestStatus.PREEMPTED
            assert not any(_has_computed(self.requests[parent_id], c) for c in children)
            waiting += children
        assert len(running) + len(waiting) == len(self.requests) == len({*running, *waiting})
        assert {*running, *waiting} == set(self.requests.values())
        self.waiting.check_integrity(list(self.requests.values()))
        assert running == sorted(running, key=_RUNNING_KEY)
        assert all(r.status is RequestStatus.RUNNING for r in running)
        slots = [r.slot for r in running]
        assert sorted(slots + self._free_slots) == list(range(self.max_num_seqs))
        for request in waiting:
            assert request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)
            assert not request.block_ids and not request.num_computed_tokens
            assert request.slot == -1
        in_flight = [r for requests in self._in_flight.values() for r in requests]
        for request in self.requests.values():
            assert request.num_tokens == len(request.token_ids) < request.max_num_tokens
            assert request.num_output_placeholders == in_flight.count(request)
            grammar = request.grammar
            if grammar is not None:
                assert grammar.num_stale <= request.num_output_placeholders
                assert grammar.active or not grammar.num_stale
                assert not grammar.ended and grammar.error is None, "should have finished"
        for request in running:
            missing = request.num_tokens + request.num_output_placeholders
            assert request.num_computed_tokens < missing, "nothing left to compute"
        assert self._num_computed_tokens == sum(r.num_computed_tokens for r in running)
        self.kv_cache_manager.check_integrity(running)

    # --- shared parts -----------------------------------------------------------------------------

    def _why_never(self, message: AddRequest) -> str | None:
        """Return why a request can never run, None if it can."""
        num_prompt_tokens = len(message.prompt_token_ids)
        num_wanted = int(message.sampling_params.max_tokens != 0)
        if num_prompt_tokens == 0:
            return "The prompt is empty."
        if num_prompt_tokens + num_wanted > self.max_model_len:
            return (
                f"{PROMPT_TOO_LONG} This model's maximum context length is {self.max_model_len} "
                f"tokens. However, the prompt is too long: it has {num_prompt_tokens}, and the "
                f"output needs at least {num_wanted}."
            )
        if num_prompt_tokens > self.max_pool_tokens:
            return (
                f"{PROMPT_TOO_LONG} The prompt is too long: it has {num_prompt_tokens} tokens, "
                f"but the KV cache of this server holds {self.max_pool_tokens}."
            )
        if message.grammar is not None and self.structured_output is None:
            return "This engine takes no grammars."
        return None

    def _register(self, message: AddRequest) -> Request:
        params = message.sampling_params
        # The last token needs no room in the pool: nothing is computed from it.
        max_num_tokens = min(self.max_model_len, self.max_pool_tokens + 1)
        if params.max_tokens == 0:  # the end of the prompt shows by a token, which is thrown away
            max_num_tokens = len(message.prompt_token_ids) + 1
        elif params.max_tokens is not None:
            num_wanted = len(message.prompt_token_ids) + params.max_tokens
            max_num_tokens = min(max_num_tokens, num_wanted)
        seed = self._random.getrandbits(64) if params.seed is None else params.seed % 2**64
        request = Request(
            message,
            arrival=self._num_arrivals,
            arrival_clock=self._total_scheduled_tokens,
            seed=seed,
            max_num_tokens=max_num_tokens,
            eos_token_ids=self._eos_token_ids,
        )
        if message.grammar is not None:
            assert self.structured_output is not None, "refused by _why_never"
            request.grammar = self.structured_output.add(
                message.request_id, message.grammar, message.grammar_trigger_ids, params.ignore_eos
            )
        request.running_key = self.policy.running_key(request)
        self._num_arrivals += 1
        self.waiting.join(request)
        self.requests[request.request_id] = request
        return request

    def _finish(self, request: Request, status: RequestStatus) -> None:
        """Release what the request holds. Steps in flight may still write to its blocks, which is
        harmless as their next owner's steps run later. The caller tidies ``running``."""
        if request.status is RequestStatus.RUNNING:
            self._release(request)
            request.status = status
        elif request.parent_id is not None:
            self._forget_parent(request)
            request.status = status
        else:
            request.status = status
            if self.awaiting_mask.pop(request.request_id, None) is None:
                self.waiting.discard(request)
        self.waiting.leave(request)
        del self.requests[request.request_id]
        self._queue_children(request)

    def _release(self, request: Request) -> None:
        self._num_computed_tokens -= request.num_computed_tokens
        self.kv_cache_manager.free(request)
        heapq.heappush(self._free_slots, request.slot)
        request.slot = -1

    def _drop_finished(self) -> None:
        self.running = [r for r in self.running if r.status is RequestStatus.RUNNING]


def _may_share(parent: Request, child: Request) -> bool:
    """Whether ``child`` begins with tokens of ``parent`` and needs only their keys and values."""
    return (
        parent.status is not RequestStatus.PREEMPTED
        and child.cache_salt == parent.cache_salt
        and child.sampling_params.prompt_logprobs is None
        and child.token_ids == parent.token_ids[: child.num_tokens]
    )


def _has_computed(parent: Request, child: Request) -> bool:
    """Whether all but the last of the child's tokens are planned in the parent's blocks."""
    planned = parent.num_computed_tokens + 1
    return parent.status is RequestStatus.RUNNING and child.num_tokens <= planned


def _may_be_overtaken(request: Request) -> bool:
    return request.num_overtaken < MAX_OVERTAKEN and request.num_preemptions == 0
