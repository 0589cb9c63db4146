"""Decode and prefill kernels against attention over each row's own keys and values."""

import pytest
import torch
from reference import PagedBatch, attention, close, paged_batch

from pageserve.kernels import paged_decode as paged_decode_module
from pageserve.kernels.paged_decode import (
    Cascade,
    cascade_config,
    cascade_rows,
    paged_decode,
    plan_cascade,
    plan_decode,
    rope_and_paged_decode,
)
from pageserve.kernels.paged_prefill import paged_prefill
from pageserve.kernels.rope_cache import rope_and_cache

MHA, GQA, GQA7, MQA = (4, 4), (8, 2), (14, 2), (6, 1)
SCALE = 0.11


def decode(
    batch: PagedBatch, num_programs: int | None = None, cascade: Cascade | None = None, **options
) -> torch.Tensor:
    _, heads, head_dim = batch.query.shape
    kv_heads = batch.kv_cache.shape[2]
    plan = plan_decode(
        batch.seq_lens, heads, kv_heads, head_dim, batch.query.dtype, num_programs=num_programs,
        cascade=cascade,
    )  # fmt: skip
    out = torch.full_like(batch.query, float("nan"))
    for _ in range(2):  # twice: the counters must be ready for the next layer
        paged_decode(
            batch.query, batch.kv_cache, batch.block_table, batch.seq_lens, SCALE, plan, out=out,
            **options,
        )  # fmt: skip
    return out


@pytest.mark.parametrize("heads", [MHA, GQA7, MQA])
@pytest.mark.parametrize("block_size", [1, 3, 7, 16, 32])
@pytest.mark.parametrize("head_dim,dtype", [(64, torch.float32), (128, torch.bfloat16)])
def test_decode(heads, block_size, head_dim, dtype, device):
    seq_lens = [1, 70, 0, 33, 161]
    batch = paged_batch([1] * 5, seq_lens, *heads, head_dim, block_size, dtype, device)
    close(decode(batch), attention(batch, SCALE))


@pytest.mark.parametrize("num_programs", [1, 2, 3, 5, 64])
def test_decode_is_the_same_however_the_work_is_cut(num_programs, device):
    seq_lens = [300, 1, 1, 65, 0, 128]
    batch = paged_batch([1] * 6, seq_lens, *GQA, 64, 16, torch.float32, device)
    close(decode(batch, num_programs), attention(batch, SCALE))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_decode_dtypes_and_odd_head_dim(dtype, device):
    batch = paged_batch([1, 1], [97, 40], *GQA, 80, 16, dtype, device)
    close(decode(batch), attention(batch, SCALE))


def test_decode_reads_the_table_of_slots(device):
    batch = paged_batch([1] * 3, [50, 20, 90], *GQA, 64, 16, torch.float32, device)
    slots = torch.tensor([4, 0, 2], dtype=torch.int32, device=device)
    table = torch.full((6, batch.block_table.shape[1]), -7, dtype=torch.int32, device=device)
    table[slots.long()] = batch.block_table
    expected = attention(batch, SCALE)
    batch.block_table = table
    close(decode(batch, row_slots=slots), expected)


@pytest.mark.parametrize("heads", [MHA, GQA7, MQA])
@pytest.mark.parametrize("block_size", [1, 7, 16])
@pytest.mark.parametrize("head_dim,dtype", [(64, torch.float32), (128, torch.bfloat16)])
@pytest.mark.parametrize("norm", [False, True])
def test_decode_with_rope_equals_its_two_parts(heads, block_size, head_dim, dtype, norm, device):
    num_heads, kv_heads = heads
    seq_lens = [1, 70, 0, 33, 160]
    batch = paged_batch([1] * 5, seq_lens, *heads, head_dim, block_size, dtype, device)
    generator = torch.Generator().manual_seed(1)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    qkv = randn(5, (num_heads + 2 * kv_heads) * head_dim).to(dtype)
    cos_sin = randn(200, head_dim)
    norms = [randn(head_dim).to(dtype) for _ in range(2)] if norm else [None, None]
    positions = (batch.seq_lens - 1).clamp(min=0).long()
    blocks = batch.block_table[torch.arange(5, device=device), positions // block_size].long()
    slots = torch.where(batch.seq_lens > 0, blocks * block_size + positions % block_size, -1)
    parts_cache, kv_cache = batch.kv_cache.clone(), batch.kv_cache.clone()
    plan = plan_decode(batch.seq_lens, *heads, head_dim, dtype)
    query = rope_and_cache(qkv, positions, cos_sin, parts_cache, slots, num_heads, kv_heads, *norms)
    expected = paged_decode(query, parts_cache, batch.block_table, batch.seq_lens, SCALE, plan)
    out = rope_and_paged_decode(
        qkv, kv_cache, batch.block_table, batch.seq_lens, cos_sin, SCALE, plan, num_heads,
        None, *norms,
    )  # fmt: skip
    close(out, expected)
    assert torch.equal(kv_cache.isnan(), parts_cache.isnan())
    close(kv_cache.nan_to_num(), parts_cache.nan_to_num())


def share(batch: PagedBatch, owner: int, rows: list[int], num_blocks: int) -> None:
    """Make the first ``num_blocks`` blocks of ``rows`` those of row ``owner``."""
    block_size = batch.kv_cache.shape[3]
    tokens = num_blocks * block_size
    for row in rows:
        batch.block_table[row, :num_blocks] = batch.block_table[owner, :num_blocks]
        for kept in (batch.keys, batch.values):
            kept[row] = torch.cat([kept[owner][:tokens], kept[row][tokens:]])


def plan_common(batch: PagedBatch, num_programs: int | None = None, row_slots=None):
    _, heads, head_dim = batch.query.shape
    _, _, kv_heads, block_size, _ = batch.kv_cache.shape
    return plan_cascade(
        batch.seq_lens, batch.block_table, block_size, heads, kv_heads, head_dim,
        batch.query.dtype, row_slots, num_programs,
    )  # fmt: skip


def cascaded_batch(heads, block_size, head_dim, dtype, device) -> tuple[PagedBatch, list[int]]:
    """Return four groups of rows and what each has in common: 300 tokens or so; all but the newest
    token of its shortest row; nothing, as one row differs; and a row alone, then padding."""
    size = cascade_rows(*heads, head_dim, dtype, device)
    lens = [310 + 37 * i for i in range(size)] + [161 + 100 * i for i in range(size)]
    lens += [280] * size + [290] + [0] * (size - 1)
    batch = paged_batch([1] * len(lens), lens, *heads, head_dim, block_size, dtype, device)
    share(batch, 0, list(range(1, size)), 300 // block_size)
    share(batch, size, list(range(size + 1, 2 * size)), 161 // block_size)
    share(batch, 2 * size, list(range(2 * size + 1, 3 * size - 1)), 270 // block_size)
    return batch, [300 // block_size * block_size, 160 // block_size * block_size, 0, 0]


@pytest.mark.parametrize("block_size", [1, 7, 16])
@pytest.mark.parametrize(
    ("heads", "head_dim", "dtype"),
    [((16, 1), 64, torch.float32), ((14, 2), 128, torch.bfloat16), ((64, 2), 64, torch.bfloat16)],
)
def test_a_cascade_reads_common_blocks_once(heads, block_size, head_dim, dtype, device):
    batch, common = cascaded_batch(heads, block_size, head_dim, dtype, device)
    cascade = plan_common(batch)
    tile = cascade.cut.block_n
    assert cascade.common_lens.tolist() == [tokens // tile * tile for tokens in common]
    expected = attention(batch, SCALE)
    close(decode(batch, cascade=cascade), expected)


@pytest.mark.parametrize("num_programs", [1, 2, 5, 64])
def test_a_cascade_is_the_same_however_the_work_is_cut(num_programs, device):
    batch, _ = cascaded_batch((8, 1), 16, 64, torch.float32, device)
    expected = attention(batch, SCALE)
    close(decode(batch, num_programs, cascade=plan_common(batch, num_programs)), expected)
    close(decode(batch, 7, cascade=plan_common(batch, num_programs)), expected)


def test_a_cascade_reads_the_table_of_slots(device):
    batch, _ = cascaded_batch((16, 2), 16, 64, torch.float32, device)
    expected = attention(batch, SCALE)
    rows = batch.block_table.shape[0]
    slots = torch.randperm(rows, generator=torch.Generator().manual_seed(0)).int().to(device)
    table = torch.full_like(batch.block_table, -7)
    table[slots.long()] = batch.block_table
    batch.block_table = table
    cascade = plan_common(batch, row_slots=slots)
    assert cascade.common_lens[0] > 0
    close(decode(batch, row_slots=slots, cascade=cascade), expected)


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("head_dim,dtype", [(64, torch.float32), (128, torch.bfloat16)])
def test_a_cascade_with_rope_equals_its_two_parts(head_dim, dtype, norm, device):
    heads = num_heads, kv_heads = (14, 2)
    batch, _ = cascaded_batch(heads, 16, head_dim, dtype, device)
    rows = batch.seq_lens.shape[0]
    generator = torch.Generator().manual_seed(1)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    qkv = randn(rows, (num_heads + 2 * kv_heads) * head_dim).to(dtype)
    cos_sin = randn(1024, head_dim)
    norms = [randn(head_dim).to(dtype) for _ in range(2)] if norm else [None, None]
    positions = (batch.seq_lens - 1).clamp(min=0).long()
    blocks = batch.block_table[torch.arange(rows, device=device), positions // 16].long()
    slots = torch.where(batch.seq_lens > 0, blocks * 16 + positions % 16, -1)
    cascade = plan_common(batch)
    assert cascade.common_lens[:2].min() > 0
    whole = plan_decode(batch.seq_lens, *heads, head_dim, dtype)
    plan = plan_decode(batch.seq_lens, *heads, head_dim, dtype, cascade=cascade)
    parts_cache, kv_cache = batch.kv_cache.clone(), batch.kv_cache.clone()
    query = rope_and_cache(qkv, positions, cos_sin, parts_cache, slots, num_heads, kv_heads, *norms)
    expected = paged_decode(query, parts_cache, batch.block_table, batch.seq_lens, SCALE, whole)
    for _ in range(2):
        out = rope_and_paged_decode(
            qkv, kv_cache, batch.block_table, batch.seq_lens, cos_sin, SCALE, plan, num_heads,
            None, *norms,
        )  # fmt: skip
        close(out, expected)
    close(kv_cache.nan_to_num(), parts_cache.nan_to_num())


@pytest.mark.parametrize(
    ("head_dim", "dtype", "room", "block_n"),
    [
        (128, torch.bfloat16, 232448, 128),
        (128, torch.bfloat16, 101376, 64),
        (256, torch.bfloat16, 101376, 16),
        (128, torch.float32, 232448, 32),
        (256, torch.float32, 101376, None),
    ],
)
def test_a_cascades_tile_fits_the_device(head_dim, dtype, room, block_n, device, monkeypatch):
    monkeypatch.setattr(paged_decode_module, "shared_memory", lambda device: room)
    config = cascade_config(head_dim, dtype, device)
    assert (config and config.block_n) == block_n
    assert (cascade_rows(16, 2, head_dim, dtype, device) > 0) == (block_n is not None)


def test_no_cascade_where_a_tile_holds_one_row(device):
    batch = paged_batch([1, 1], [40, 40], 64, 1, 16, 16, torch.float32, device)
    assert plan_common(batch) is None


def prefill(batch: PagedBatch, query_lens: list[int], **options) -> torch.Tensor:
    out = torch.full_like(batch.query, float("nan"))
    return paged_prefill(
        batch.query, batch.kv_cache, batch.block_table, batch.query_start_loc, batch.seq_lens,
        max(query_lens), SCALE, out=out, **options,
    )  # fmt: skip


@pytest.mark.parametrize("heads", [MHA, GQA7, MQA])
@pytest.mark.parametrize("block_size", [1, 3, 7, 16, 32])
@pytest.mark.parametrize("head_dim,dtype", [(64, torch.bfloat16), (128, torch.float32)])
def test_prefill(heads, block_size, head_dim, dtype, device):
    query_lens, seq_lens = [5, 40, 1], [5, 75, 50]
    batch = paged_batch(query_lens, seq_lens, *heads, head_dim, block_size, dtype, device)
    close(prefill(batch, query_lens), attention(batch, SCALE))


@pytest.mark.parametrize("chunk", [1, 2, 31, 64, 100])
def test_prefill_of_chunks_equals_the_whole(chunk, device):
    whole = paged_batch([100], [100], *GQA, 64, 16, torch.float32, device)
    expected = attention(whole, SCALE)
    out = torch.full_like(whole.query, float("nan"))
    for begin in range(0, 100, chunk):
        end = min(begin + chunk, 100)
        bounds = torch.tensor([0, end - begin], dtype=torch.int32, device=device)
        length = torch.tensor([end], dtype=torch.int32, device=device)
        out[begin:end] = paged_prefill(
            whole.query[begin:end], whole.kv_cache, whole.block_table, bounds, length,
            end - begin, SCALE,
        )  # fmt: skip
    close(out, expected)


def test_mixed_step_splits_rows_between_the_kernels(device):
    query_lens, seq_lens = [1, 30, 1, 7, 1], [80, 30, 1, 64, 33]
    batch = paged_batch(query_lens, seq_lens, *GQA, 64, 7, torch.float32, device)
    out = prefill(batch, query_lens, skip_decodes=True)
    plan = plan_decode(
        batch.seq_lens, *GQA, 64, torch.float32, query_start_loc=batch.query_start_loc
    )
    paged_decode(
        batch.query, batch.kv_cache, batch.block_table, batch.seq_lens, SCALE, plan,
        query_start_loc=batch.query_start_loc, out=out,
    )  # fmt: skip
    close(out, attention(batch, SCALE))


@pytest.mark.parametrize("rows", [1, 65, 300])
def test_a_program_without_work_begins_at_the_last_row(rows, device):
    """It reads where that row's tiles begin before it finds that there is nothing to do."""
    seq_lens = torch.full((rows,), 40, dtype=torch.int32, device=device)
    plan = plan_decode(seq_lens, 4, 2, 64, torch.float32, num_programs=600)
    assert plan.cut.first_row.max().item() <= rows


def test_heads_that_do_not_divide_are_refused(device):
    batch = paged_batch([1], [3], 4, 2, 64, 16, torch.float32, device)
    plan = plan_decode(batch.seq_lens, 4, 2, 64, torch.float32)
    with pytest.raises(ValueError, match="3 heads over 2 KV heads"):
        paged_decode(
            batch.query[:, :3], batch.kv_cache, batch.block_table, batch.seq_lens, SCALE, plan
        )
