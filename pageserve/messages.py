"""Everything that crosses a process or the line between core and worker, and nothing else.

Client ⇄ engine: :class:`LoadModel`, :class:`AddRequest`, :class:`AbortRequests`,
:class:`GetProgress`, :class:`ResetPrefixCache`, :class:`Shutdown` one way; :class:`LoadProgress`,
:class:`EngineLog`, :class:`EngineReady`, :class:`StepOutputs`, :class:`Progress`,
:class:`PrefixCacheReset`, :class:`EngineDead` back.
Core → worker: :class:`SchedulerOutput`; worker → core: :class:`ModelRunnerOutput`.
Only ids and numbers travel, never text or tensors. Times are ``time.monotonic()`` seconds, which
all processes of one host share.
"""

from typing import Literal

import msgspec

from pageserve.config import EngineConfig
from pageserve.sampling_params import SamplingParams

FinishReason = Literal["stop", "length", "abort", "error"]

PROMPT_TOO_LONG = "prompt_too_long:"  # how the error of a prompt that can never run begins
INVALID_LOGITS = "internal_error: the model produced invalid logits"
ENGINE_DEAD = "engine_dead: the engine process is gone"


# --- client → engine ------------------------------------------------------------------------------


class AddRequest(msgspec.Struct, tag="add", array_like=True, gc=False):
    """A tokenised request. ``request_id`` is the server's own and unique; lower ``priority`` runs
    first; ``cache_salt`` keeps its prefix-cache blocks apart from other salts'.

    ``parent_id`` names a request with the same prompt, sent just before, whose prompt blocks this
    one shares (n > 1). ``grammar`` is what the output must match, in a form that llguidance reads
    and the client has checked (:mod:`pageserve.grammar`); when nothing may follow any more the
    request ends. With ``grammar_trigger_ids`` everything is free until one of these tokens is
    sampled (one in the prompt does not count). The token itself is no part of the grammar, whose
    text begins right behind it; after its end everything is free again until the next trigger.
    Tenants share the engine by their ``weight``."""

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    arrival_time: float
    priority: int = 0
    cache_salt: str | None = None
    parent_id: str | None = None
    grammar: str | None = None
    grammar_trigger_ids: list[int] = []
    tenant: str = ""
    weight: int = 1


class AbortRequests(msgspec.Struct, tag="abort", array_like=True, gc=False):
    """Forget these requests wherever they are; unknown and finished ids are ignored."""

    request_ids: list[str]


class Shutdown(msgspec.Struct, tag="shutdown", array_like=True, gc=False):
    """Finish the current step, free everything and exit 0."""


class LoadModel(msgspec.Struct, tag="load", array_like=True, gc=False):
    """The first message: load the checkpoint at this path and serve it."""

    path: str


class GetProgress(msgspec.Struct, tag="get_progress", array_like=True, gc=False):
    """Say where requests are (all live ones if no ids are given): answered by Progress."""

    request_ids: list[str] | None = None


class ResetPrefixCache(msgspec.Struct, tag="reset_prefix_cache", array_like=True, gc=False):
    """Forget all cached prefixes: answered by PrefixCacheReset."""


EngineRequest = LoadModel | AddRequest | AbortRequests | GetProgress | ResetPrefixCache | Shutdown


# --- engine → client ------------------------------------------------------------------------------


class TokenLogprobs(msgspec.Struct, array_like=True, gc=False):
    """Log probabilities of one token: its own and the k best, best first, ties by id. ``rank`` is
    the token's place among all, 1 for the most likely; it is counted for prompt tokens only."""

    token_id: int
    logprob: float
    top_token_ids: list[int] = []
    top_logprobs: list[float] = []
    rank: int = 0


class RequestOutput(msgspec.Struct, array_like=True, gc=False):
    """What one step released for one request. Exactly one output per request has a
    ``finish_reason``. ``stop_reason`` is the id of ``stop_token_ids`` that ended it, if one did;
    ``error`` says what went wrong when ``finish_reason`` is ``error``. ``scheduled_time`` is when
    the request first ran. ``prompt_logprobs`` has one entry for each prompt token but the first,
    as far as this step computed them. ``grammar_ended`` says that nothing may follow
    under the grammar: the last token is text, where any other that stops a request is not. (The
    output that says so may come after the one that brought the token.)"""

    request_id: str
    new_token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    new_logprobs: list[TokenLogprobs] | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    scheduled_time: float = 0.0
    error: str | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    grammar_ended: bool = False


class SchedulerStats(msgspec.Struct, array_like=True, gc=False):
    """Gauges (now) and counters (since start, names ending in ``_total``) of the scheduler."""

    num_running: int = 0
    num_waiting: int = 0
    num_deferred: int = 0  # of the waiting: those whose turn has come, but not their grammar
    num_free_blocks: int = 0  # includes blocks that only the prefix cache holds
    num_cached_blocks: int = 0  # free blocks that still answer prefix look-ups
    num_shared_blocks: int = 0  # blocks with more than one reference
    num_used_blocks: int = 0  # blocks held by live requests
    peak_used_blocks: int = 0
    used_slots: int = 0  # token slots that hold a token, of num_used_blocks * block_size
    num_scheduled_tokens: int = 0  # of the last step
    prefix_cache_queries_total: int = 0  # tokens
    prefix_cache_hits_total: int = 0  # tokens
    preemptions_total: int = 0
    steps_total: int = 0
    grammars_compiled_total: int = 0
    grammar_compile_seconds_total: float = 0.0
    grammar_cache_hits_total: int = 0


class StepStats(msgspec.Struct, array_like=True, gc=False):
    """What one step was and where its time went, in seconds."""

    num_scheduled_tokens: int = 0
    replayed_tokens: int = 0  # size of its CUDA graph, 0 if it used none
    schedule_seconds: float = 0.0
    launch_seconds: float = 0.0
    wait_seconds: float = 0.0  # for the device
    update_seconds: float = 0.0


class StepOutputs(msgspec.Struct, tag="step", array_like=True, gc=False):
    """One message a step for all requests; ``step`` is None if nothing ran."""

    outputs: list[RequestOutput]
    stats: SchedulerStats
    step: StepStats | None = None


class RequestProgress(msgspec.Struct, array_like=True, gc=False):
    """Where a live request is: its place in the queue from 1 on, or 0 when it runs."""

    request_id: str
    queue_position: int
    num_prompt_tokens: int
    num_cached_tokens: int  # of the prompt, found in the prefix cache
    num_computed_tokens: int  # of prompt and output
    num_output_tokens: int


class Progress(msgspec.Struct, tag="progress", array_like=True, gc=False):
    """The answer to GetProgress; finished and unknown requests are left out."""

    requests: list[RequestProgress]


class PrefixCacheReset(msgspec.Struct, tag="prefix_cache_reset", array_like=True, gc=False):
    """The answer to ResetPrefixCache."""

    num_blocks: int  # cached blocks that were forgotten


class LoadProgress(msgspec.Struct, tag="loading", array_like=True, gc=False):
    """How far start-up is: a phase name and ``done`` of ``total`` (bytes or 0 of 0)."""

    phase: str
    done: int = 0
    total: int = 0


class EngineReady(msgspec.Struct, tag="ready", array_like=True, gc=False):
    """Facts of the loaded engine that the API needs."""

    max_model_len: int
    vocab_size: int  # rows of the model's head; ids from the tokenizer's size up are padding
    eos_token_ids: list[int]
    block_size: int
    num_kv_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    dtype: str
    device: str
    attention_backend: str
    fingerprint: str
    memory_bytes: dict[str, int] = {}  # what the device's memory is used for
    config: EngineConfig | None = None  # with all that depends on model and device filled in


class EngineDead(msgspec.Struct, tag="dead", array_like=True, gc=False):
    """The engine process is going down; ``message`` is one line without paths or stack."""

    message: str


class EngineLog(msgspec.Struct, tag="log", array_like=True, gc=False):
    """A line for the log, which the front-end writes; ``level`` as in :mod:`logging`."""

    level: int
    message: str


EngineMessage = (
    StepOutputs | Progress | PrefixCacheReset | LoadProgress | EngineReady | EngineLog | EngineDead
)


# --- core → worker → core -------------------------------------------------------------------------


class NewRequestData(msgspec.Struct, array_like=True, gc=False):
    """A request enters a slot of the worker's request table (first time or after preemption).

    ``token_ids`` are all known tokens, prompt first; ``block_ids`` covers the whole block table.
    """

    slot: int
    token_ids: list[int]
    num_prompt_tokens: int
    block_ids: list[int]
    sampling_params: SamplingParams
    seed: int  # 0 … 2**64-1, drawn for the request when it gave none


class ScheduledRow(msgspec.Struct, array_like=True, gc=False):
    """One row of the flat batch: tokens ``[num_computed_tokens, + num_scheduled_tokens)`` of the
    request in ``slot``. ``samples`` says that the row reaches the request's end, so its last
    position yields a token. ``new_block_ids`` are appended to the slot's block table (empty for
    a row whose request entered in this very step)."""

    slot: int
    num_computed_tokens: int
    num_scheduled_tokens: int
    samples: bool
    new_block_ids: list[int] = []


class BlockUpdate(msgspec.Struct, array_like=True, gc=False):
    """Copy-on-write: entry ``index`` of the slot's block table becomes ``dst_block_id`` after the
    contents of ``src_block_id`` were copied there (before the step writes)."""

    slot: int
    index: int
    src_block_id: int
    dst_block_id: int


class SchedulerOutput(msgspec.Struct, array_like=True, gc=False):
    """A step. Order of effect: ``new_requests``, ``block_updates``, then ``rows``.

    ``bitmasks`` has the tokens that a row's grammar allows, by slot: bit ``i % 32`` of the
    little-endian 32-bit word ``i // 32`` is token ``i``. Rows that are not in it are free.
    ``rows`` is in batch order; the core keeps the matching request list to itself, the worker
    never learns a request id."""

    step_id: int
    new_requests: list[NewRequestData]
    block_updates: list[BlockUpdate]
    rows: list[ScheduledRow]
    bitmasks: dict[int, bytes] = {}

    @property
    def num_scheduled_tokens(self) -> int:
        """Tokens of the whole step."""
        return sum(row.num_scheduled_tokens for row in self.rows)


class ModelRunnerOutput(msgspec.Struct, array_like=True, gc=False):
    """Results of a step, aligned with the rows whose ``samples`` is true, in row order.

    ``sampled_token_ids`` holds one id per such row, -1 where the logits held NaN or every token
    was masked (that request ends as an internal error). ``logprobs`` has an entry for rows that
    asked for them, None for the others; the whole list is None if none asked.

    ``prompt_logprobs`` has a list for each row, in row order, whose request asked for them and
    that has a position before the prompt's last one: an entry for each prompt token that follows
    a position of the row."""

    step_id: int
    sampled_token_ids: list[int]
    logprobs: list[TokenLogprobs | None] | None = None
    prompt_logprobs: list[list[TokenLogprobs]] | None = None
