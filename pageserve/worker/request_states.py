"""The request table: one row (slot) per running request, resident on the device.

A step description says only what changed; the table holds the rest. Because the sampled token is
written back into the table on the device, the next step can be launched before the host has seen
it, and prompt chunks and decodes read their input ids by the same rule: ``token_ids[slot, pos]``.
"""

from collections.abc import Sequence

import numpy as np
import torch

from pageserve.messages import NewRequestData, SchedulerOutput
from pageserve.sampling_params import SamplingParams
from pageserve.utils import COMMON_TOKENS, cdiv
from pageserve.worker.sampling_metadata import RowSampling, token_bits

COMPARED_BLOCKS = 512  # at the beginning of a table, when rows are searched for a common prefix


class RequestStates:
    """Token ids, block tables and sampling parameters of up to ``max_num_seqs`` requests."""

    def __init__(
        self,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        vocab_limit: int,
        device: torch.device,
    ) -> None:
        self.device = device
        self.vocab_limit = vocab_limit
        self.block_size = block_size
        self.max_model_len = max_model_len
        self.max_blocks = cdiv(max_model_len, block_size)
        # One column more than the context: the token after the last position has a place too.
        self.token_ids = torch.zeros(
            max_num_seqs, max_model_len + 1, dtype=torch.int32, device=device
        )
        self.block_table = torch.zeros(
            max_num_seqs, self.max_blocks, dtype=torch.int32, device=device
        )
        self.num_blocks = np.zeros(max_num_seqs, dtype=np.int64)
        # What requests entered with, where only those can have blocks in common; -1 behind it.
        self.first_blocks = np.full(
            (max_num_seqs, min(self.max_blocks, COMPARED_BLOCKS)), -1, dtype=np.int32
        )
        self.num_prompt_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self.sampling: list[NewRequestData | None] = [None] * max_num_seqs
        self.allowed: dict[int, np.ndarray] = {}  # slots with an allow-list → its bitmask
        self.scoring_slots: set[int] = set()  # whose requests want log probabilities of the prompt

    def apply(self, step: SchedulerOutput, kv_cache: torch.Tensor) -> None:
        """Bring the table up to date: new requests, copy-on-write, appended blocks."""
        for new in step.new_requests:
            self._fill(self.token_ids, new.slot, new.token_ids)
            self._fill(self.block_table, new.slot, new.block_ids)
            first = new.block_ids[: self.first_blocks.shape[1]]
            self.first_blocks[new.slot, : len(first)] = first
            self.first_blocks[new.slot, len(first) :] = -1
            self.num_blocks[new.slot] = len(new.block_ids)
            self.num_prompt_tokens[new.slot] = new.num_prompt_tokens
            self.sampling[new.slot] = new
            self.allowed.pop(new.slot, None)
            if new.sampling_params.allowed_token_ids is not None:
                allowed = token_bits(new.sampling_params.allowed_token_ids, self.vocab_limit)
                self.allowed[new.slot] = allowed
            if new.sampling_params.prompt_logprobs is not None:
                self.scoring_slots.add(new.slot)
            else:
                self.scoring_slots.discard(new.slot)
        blocks = _Scatter(self.block_table)
        for update in step.block_updates:
            blocks.put(update.slot, update.index, [update.dst_block_id])
            if update.index < self.first_blocks.shape[1]:
                self.first_blocks[update.slot, update.index] = update.dst_block_id
        for row in step.rows:
            if row.new_block_ids:
                blocks.put(row.slot, int(self.num_blocks[row.slot]), row.new_block_ids)
                self.num_blocks[row.slot] += len(row.new_block_ids)
        blocks.flush()
        if step.block_updates:
            pairs = [(u.src_block_id, u.dst_block_id) for u in step.block_updates]
            src, dst = to_device(torch.tensor(pairs).t().contiguous(), self.device)
            kv_cache[:, :, dst] = kv_cache[:, :, src]

    def _fill(self, table: torch.Tensor, slot: int, values: list[int]) -> None:
        row = torch.from_numpy(np.array(values, dtype=np.int32))
        if self.device.type == "cuda":
            row = row.pin_memory()
        table[slot, : len(values)].copy_(row, non_blocking=True)

    def num_repeated_blocks(self, slots: list[int], group_rows: int) -> int:
        """Return how many blocks are read again, when each row reads its own, in groups of
        ``group_rows`` consecutive ``slots``: those that a whole group begins with, COMMON_TOKENS
        and more, times its rows but one."""
        column = max(0, COMMON_TOKENS // self.block_size - 1)
        if column >= self.first_blocks.shape[1]:
            return 0
        last = np.full(cdiv(len(slots), group_rows) * group_rows, slots[-1])
        last[: len(slots)] = slots
        ids = self.first_blocks[last, column].reshape(-1, group_rows)
        repeated = 0
        for group in np.flatnonzero((ids == ids[:, :1]).all(1) & (ids[:, 0] >= 0)):
            start = int(group) * group_rows
            tables = self.first_blocks[slots[start : start + group_rows]]
            differs = (tables != tables[0]).any(0) | (tables[0] < 0)
            common = int(differs.argmax()) if differs.any() else len(differs)
            repeated += common * (len(tables) - 1)
        return repeated

    def sampling_params(self, slot: int) -> SamplingParams:
        """The parameters of the request in ``slot``."""
        new = self.sampling[slot]
        assert new is not None, f"slot {slot} is empty"
        return new.sampling_params

    def row_sampling(self, slot: int, num_tokens: int, bitmask: bytes | None = None) -> RowSampling:
        """Sampling inputs of the request in ``slot`` once it has ``num_tokens`` tokens, of which
        the next is restricted by a grammar's ``bitmask``."""
        new = self.sampling[slot]
        assert new is not None, f"slot {slot} is empty"
        if (allowed := self.allowed.get(slot)) is not None:
            if bitmask is not None:
                allowed = allowed & np.frombuffer(bitmask, dtype="<i4")
            bitmask = allowed.tobytes()
        return RowSampling(
            new.sampling_params,
            new.seed,
            slot,
            int(self.num_prompt_tokens[slot]),
            num_tokens,
            bitmask,
        )

    def record(self, rows: Sequence[RowSampling], token_ids: torch.Tensor) -> torch.Tensor:
        """Append the sampled ``token_ids`` [n], on the device, to the tokens of ``rows``; return
        the rows' slots [n] int64.

        A -1 (corrupted row) is stored as 0: its request ends as soon as the host sees the -1, but
        a step that is already planned may still read the place.
        """
        places = np.array([(row.slot, row.num_tokens) for row in rows], dtype=np.int64).T
        slots, positions = to_device(torch.from_numpy(places.copy()), self.device)
        self.token_ids[slots, positions] = token_ids.clamp_min(0).to(torch.int32)
        return slots


class _Scatter:
    """Collects writes into rows of a 2-D table and sends them in one transfer."""

    def __init__(self, table: torch.Tensor) -> None:
        self.table = table
        self.index: list[np.ndarray] = []
        self.values: list[np.ndarray] = []

    def put(self, row: int, column: int, values: list[int]) -> None:
        start = row * self.table.shape[1] + column
        self.index.append(np.arange(start, start + len(values)))
        self.values.append(np.asarray(values, dtype=np.int64))

    def flush(self) -> None:
        if not self.index:
            return
        both = torch.from_numpy(np.stack([np.concatenate(self.index), np.concatenate(self.values)]))
        index, values = to_device(both, self.table.device)
        self.table.view(-1)[index] = values.to(self.table.dtype)


def to_device(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy without making the host wait; a no-op on the CPU."""
    if device.type == "cuda":
        return host.pin_memory().to(device, non_blocking=True)
    return host.to(device)
