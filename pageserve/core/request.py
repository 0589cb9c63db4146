"""A request as the scheduler sees it: its tokens, its counters, its blocks, and when it stops.

There are no phases. ``num_computed_tokens`` tries to reach ``num_tokens`` (all known tokens) plus
``num_output_placeholders`` (tokens that steps in flight will bring). Knows nothing of queues,
pools or devices.
"""

import enum
import struct
import sys
from collections import OrderedDict
from hashlib import sha256

from pageserve.core.structured_output import Grammar
from pageserve.messages import AddRequest, FinishReason, RequestOutput, TokenLogprobs

CORRUPTED_TOKEN = -1  # the worker's sign that the logits held NaN or nothing was left to choose
TOKEN_BYTES = 4  # of a token id, when it is hashed
NEVER = sys.maxsize  # a token count that no request reaches


class RequestStatus(enum.IntEnum):
    """Where a request is; everything after PREEMPTED is finished."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    PREEMPTED = enum.auto()
    FINISHED_STOPPED = enum.auto()
    FINISHED_LENGTH = enum.auto()
    FINISHED_ABORTED = enum.auto()
    FINISHED_ERROR = enum.auto()


FINISH_REASONS: dict[RequestStatus, FinishReason] = {
    RequestStatus.FINISHED_STOPPED: "stop",
    RequestStatus.FINISHED_LENGTH: "length",
    RequestStatus.FINISHED_ABORTED: "abort",
    RequestStatus.FINISHED_ERROR: "error",
}


class Request:
    """A live request. Counters are plain attributes because the scheduler's loop reads them for
    every row of every step."""

    __slots__ = (
        "arrival",
        "arrival_clock",
        "arrival_time",
        "block_hashes",
        "block_ids",
        "cache_salt",
        "eos_token_ids",
        "grammar",
        "max_num_tokens",
        "next_hash_at",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_hashed_blocks",
        "num_output_placeholders",
        "num_overtaken",
        "num_preemptions",
        "num_prompt_logprobs",
        "num_prompt_tokens",
        "num_required_blocks",
        "num_tokens",
        "parent_id",
        "priority",
        "prompt_token_ids",
        "request_id",
        "retry_step",
        "running_key",
        "sampling_params",
        "scheduled_time",
        "seed",
        "slot",
        "status",
        "stop_ids",
        "tenant",
        "token_ids",
        "weight",
        "writable_end",
    )

    def __init__(
        self,
        message: AddRequest,
        *,
        arrival: int,
        seed: int,
        max_num_tokens: int,
        eos_token_ids: frozenset[int],
        arrival_clock: int = 0,
    ) -> None:
        """``arrival`` numbers requests in order of arrival, ``arrival_clock`` is how many tokens
        the scheduler had planned by then, ``max_num_tokens`` is where prompt + output must end."""
        params = message.sampling_params
        self.request_id = message.request_id
        self.prompt_token_ids = message.prompt_token_ids
        self.sampling_params = params
        self.arrival_time = message.arrival_time
        self.arrival = arrival
        self.arrival_clock = arrival_clock
        self.priority = message.priority
        self.cache_salt = message.cache_salt
        self.tenant = message.tenant
        self.weight = message.weight
        self.seed = seed
        self.status = RequestStatus.WAITING
        self.running_key: tuple[int, ...] = (arrival,)  # order among the running, set by the policy

        self.token_ids = list(message.prompt_token_ids)  # prompt, then confirmed output
        self.num_prompt_tokens = self.num_tokens = len(self.token_ids)
        self.num_computed_tokens = 0  # advances when a step is planned, not when it has run
        self.num_output_placeholders = 0
        self.max_num_tokens = max_num_tokens

        self.eos_token_ids = frozenset[int]() if params.ignore_eos else eos_token_ids
        # One look-up per token decides whether anything but the length can end the request.
        self.stop_ids = self.eos_token_ids.union(params.stop_token_ids, (CORRUPTED_TOKEN,))

        self.grammar: Grammar | None = None  # what the output must match, set by the scheduler
        self.slot = -1  # row of the worker's request table, -1 while not running
        self.block_ids: list[int] = []
        self.writable_end = 0  # positions below need no word with the KV cache manager to write
        self.block_hashes: list[bytes] = []  # of the full blocks of token_ids, as far as computed
        self.num_hashed_blocks = 0  # leading blocks of block_ids that were offered to the cache
        self.next_hash_at = NEVER  # number of tokens that completes the next block to offer

        self.num_cached_tokens = 0  # prompt tokens found in the prefix cache at first scheduling
        self.num_preemptions = 0
        self.scheduled_time = 0.0
        self.num_overtaken = 0  # requests admitted past this one while it was blocked
        self.num_required_blocks = 0  # free blocks an admission needed when it was last tried
        self.retry_step = 0  # step at which to look again even if those are not free
        self.parent_id: str | None = None  # the request whose prompt this one waits to share
        self.num_prompt_logprobs = 0  # entries of prompt tokens that were put out

    @property
    def misses_prompt_logprobs(self) -> bool:
        """Whether tokens of the prompt are still to be scored."""
        wanted = self.sampling_params.prompt_logprobs is not None
        return wanted and self.num_prompt_logprobs < self.num_prompt_tokens - 1

    def extend_block_hashes(self, block_size: int, memo: "HashMemo | None" = None) -> None:
        """Bring ``block_hashes`` up to the full blocks of ``token_ids``; only new ones cost, and
        of a whole prompt those that ``memo`` does not know."""
        start, end = len(self.block_hashes), self.num_tokens // block_size
        if start >= end:
            return
        token_ids = self.token_ids[start * block_size : end * block_size]
        tokens = struct.pack(f"<{len(token_ids)}I", *token_ids)
        size = block_size * TOKEN_BYTES
        parent = self.block_hashes[-1] if start else root_hash(self.cache_salt)
        if memo is not None and not start:
            self.block_hashes = memo.chain(parent, tokens, size)
        else:
            extend_chain(self.block_hashes, parent, tokens, size)

    def check_stop(self) -> tuple[RequestStatus, int | None] | None:
        """Return (status, stop_reason) if the newest token ends the request, else None."""
        token_id = self.token_ids[-1]
        if self.num_tokens - self.num_prompt_tokens >= self.sampling_params.min_tokens:
            if token_id in self.eos_token_ids:
                return RequestStatus.FINISHED_STOPPED, None
            if token_id in self.stop_ids:
                return RequestStatus.FINISHED_STOPPED, token_id
        if self.num_tokens >= self.max_num_tokens:
            return RequestStatus.FINISHED_LENGTH, None
        return None

    def output(
        self,
        new_token_ids: list[int],
        *,
        stop_reason: int | None = None,
        new_logprobs: list[TokenLogprobs] | None = None,
        error: str | None = None,
        grammar_ended: bool = False,
    ) -> RequestOutput:
        """Build the message for one step's tokens; it is the final one once the status says so."""
        return RequestOutput(
            self.request_id,
            new_token_ids,
            FINISH_REASONS.get(self.status),
            stop_reason,
            new_logprobs,
            self.num_cached_tokens,
            self.num_preemptions,
            self.scheduled_time,
            error,
            grammar_ended=grammar_ended,
        )


class HashMemo:
    """The block hashes of prompts that came lately. What a new prompt has in common with the last
    one that begins with the same block, a system prompt or the turns before, is compared instead of
    hashed."""

    def __init__(self, max_blocks: int = 1 << 17) -> None:
        self._max_blocks = max_blocks
        self._num_blocks = 0
        # By the hash of the first block: tokens and hashes of a prompt, least recently used first.
        self._prompts: OrderedDict[bytes, tuple[bytes, list[bytes]]] = OrderedDict()

    def chain(self, root: bytes, tokens: bytes, size: int) -> list[bytes]:
        """Return the hashes of the blocks of a prompt, one at least, each ``size`` bytes."""
        first = sha256(root + tokens[:size]).digest()
        hashes = [first]
        if (known := self._prompts.pop(first, None)) is not None:
            self._num_blocks -= len(known[1])
            hashes = known[1][: _common_blocks(tokens, known[0], size)]
        extend_chain(hashes, hashes[-1], tokens[len(hashes) * size :], size)
        self._prompts[first] = tokens, hashes.copy()  # the request goes on with its own
        self._num_blocks += len(hashes)
        while self._num_blocks > self._max_blocks:
            _, (_, forgotten) = self._prompts.popitem(last=False)
            self._num_blocks -= len(forgotten)
        return hashes


def extend_chain(hashes: list[bytes], parent: bytes, tokens: bytes, size: int) -> None:
    """Append the hash of each block of ``size`` bytes: of its tokens and all before them."""
    for offset in range(0, len(tokens), size):
        parent = sha256(parent + tokens[offset : offset + size]).digest()
        hashes.append(parent)


def _common_blocks(a: bytes, b: bytes, size: int) -> int:
    low, high = 0, min(len(a), len(b)) // size
    while low < high:
        middle = (low + high + 1) // 2
        if a[low * size : middle * size] == b[low * size : middle * size]:
            low = middle
        else:
            high = middle - 1
    return low


def root_hash(cache_salt: str | None) -> bytes:
    """Return the parent of a first block: salted requests share blocks with equal salts only."""
    return b"" if cache_salt is None else sha256(cache_salt.encode()).digest()
