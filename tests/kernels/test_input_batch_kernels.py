"""Step inputs from the request table, and the sampled ids' way back into it."""

import pytest
import torch

from pageserve.kernels.input_batch import (
    InputBuffers,
    prepare_decode,
    prepare_inputs,
    store_sampled,
)

NUM_SLOTS, MAX_LEN = 6, 40


def table(block_size: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(block_size)
    token_ids = torch.randint(1000, (NUM_SLOTS, MAX_LEN), generator=generator, dtype=torch.int32)
    blocks = torch.randperm(NUM_SLOTS * MAX_LEN, generator=generator, dtype=torch.int32)
    return token_ids.to(device), blocks.view(NUM_SLOTS, MAX_LEN).to(device)


def kv_slot(blocks: torch.Tensor, slot: int, position: int, block_size: int) -> int:
    return int(blocks[slot, position // block_size]) * block_size + position % block_size


@pytest.mark.parametrize("block_size", [1, 3, 16])
@pytest.mark.parametrize("padding", [0, 3, 130])
def test_prepare_decode(block_size, padding, device):
    token_ids, blocks = table(block_size, device)
    live = [(4, 0), (0, 39), (2, 17)]
    rows = torch.tensor(live + [(-1, 0)] * padding, dtype=torch.int32, device=device)
    buffers = InputBuffers.allocate(len(rows), device)
    prepare_decode(rows, token_ids, blocks, block_size, buffers)
    zeros = [0] * padding
    assert buffers.input_ids.tolist() == [int(token_ids[s, p]) for s, p in live] + zeros
    assert buffers.positions.tolist() == [p for _, p in live] + zeros
    expected = [kv_slot(blocks, s, p, block_size) for s, p in live]
    assert buffers.slot_mapping.tolist() == expected + [-1] * padding
    assert buffers.seq_lens.tolist() == [p + 1 for _, p in live] + zeros
    assert buffers.query_start_loc.tolist() == list(range(len(rows) + 1))
    assert buffers.row_slots.tolist() == [s for s, _ in live] + zeros


@pytest.mark.parametrize("block_size", [1, 7, 16])
@pytest.mark.parametrize("padding", [0, 300])
def test_prepare_inputs(block_size, padding, device):
    token_ids, blocks = table(block_size, device)
    rows, lengths = [(3, 0), (1, 12), (-1, 0), (5, 39)], [20, 5, 2, 1]
    starts = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32).to(device)
    input_ids, positions, slot_mapping, seq_lens = prepare_inputs(
        torch.tensor(rows, dtype=torch.int32, device=device), starts, token_ids, blocks,
        block_size, sum(lengths) + padding, max(lengths),
    )  # fmt: skip
    tokens = [(s, p + i) for (s, p), n in zip(rows, lengths, strict=True) for i in range(n)]
    live = [s >= 0 for s, _ in tokens]
    flags = list(zip(tokens, live, strict=True))
    rest = [0] * padding
    assert input_ids.tolist() == [int(token_ids[s, p]) if ok else 0 for (s, p), ok in flags] + rest
    assert positions.tolist() == [p if ok else 0 for (_, p), ok in flags] + rest
    expected = [kv_slot(blocks, s, p, block_size) if ok else -1 for (s, p), ok in flags]
    assert slot_mapping.tolist() == expected + [-1] * padding
    assert seq_lens.tolist() == [20, 17, 0, 40]


def test_store_sampled(device):
    token_ids, _ = table(1, device)
    before = token_ids.clone()
    rows = [(2, 5), (-1, 3), (0, MAX_LEN - 1), (4, 0)]
    sampled = torch.tensor([7001, 7002, 7003, -1], dtype=torch.int64, device=device)
    store_sampled(torch.tensor(rows, dtype=torch.int32, device=device), sampled, token_ids)
    before[2, 6], before[4, 1] = 7001, 0
    assert torch.equal(token_ids, before)
