"""From a step description to the flat batch the model reads.

    rows     |  r0: 1 token  |  r1: 1 token  |  r2: a chunk of 5 tokens  |
    tokens   |      t0       |      t1       |  t2   t3   t4   t5   t6   |
    query_start_loc  0               1               2                  7

The host computes what follows from counts alone; what depends on the request table (ids, blocks)
is looked up on the device, so nothing here waits for a sampled token.
"""

from dataclasses import dataclass

import numpy as np
import torch

from pageserve.messages import ScheduledRow
from pageserve.utils import cdiv
from pageserve.worker.request_states import RequestStates, to_device


@dataclass(frozen=True)
class InputBatch:
    """One step's tensors on the device."""

    input_ids: torch.Tensor  # [num_tokens] int64
    positions: torch.Tensor  # [num_tokens] int64
    query_start_loc: torch.Tensor  # [num_rows + 1] int32
    seq_lens: torch.Tensor  # [num_rows] int32
    block_table: torch.Tensor  # [num_rows, max_blocks] int32
    slot_mapping: torch.Tensor  # [num_tokens] int64
    max_query_len: int
    max_seq_len: int
    sampling_rows: torch.Tensor  # [num_samples] int64

    @classmethod
    def build(cls, rows: list[ScheduledRow], states: RequestStates) -> "InputBatch":
        """Build the batch of ``rows`` (none of them empty) from the request table."""
        counts = np.array(
            [(r.slot, r.num_computed_tokens, r.num_scheduled_tokens) for r in rows], dtype=np.int64
        )
        slots, computed, scheduled = counts.T
        ends = np.cumsum(scheduled)
        starts = ends - scheduled
        seq_lens = computed + scheduled
        positions = np.arange(ends[-1]) + np.repeat(computed - starts, scheduled)
        samples = np.array([r.samples for r in rows], dtype=bool)

        device = states.device
        token_part = to_device(
            torch.from_numpy(np.stack([np.repeat(slots, scheduled), positions])), device
        )
        row_part = to_device(torch.from_numpy(np.stack([slots, ends, seq_lens])), device)
        token_slots, token_positions = token_part
        block_size = states.block_size
        max_seq_len = int(seq_lens.max())
        blocks = states.block_table[token_slots, token_positions // block_size].to(torch.int64)
        query_start_loc = torch.zeros(len(rows) + 1, dtype=torch.int32, device=device)
        query_start_loc[1:] = row_part[1]
        return cls(
            input_ids=states.token_ids[token_slots, token_positions].to(torch.int64),
            positions=token_positions,
            query_start_loc=query_start_loc,
            seq_lens=row_part[2].to(torch.int32),
            block_table=states.block_table[row_part[0], : cdiv(max_seq_len, block_size)],
            slot_mapping=blocks * block_size + token_positions % block_size,
            max_query_len=int(scheduled.max()),
            max_seq_len=max_seq_len,
            sampling_rows=to_device(torch.from_numpy(samples.nonzero()[0]), device),
        )
