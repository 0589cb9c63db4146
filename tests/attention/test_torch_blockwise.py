"""torch_blockwise against a dense float64 reference, over pools full of poison."""

import math
import weakref
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from pageserve.attention import AttentionMetadata, torch_blockwise
from pageserve.attention.torch_blockwise import TorchBlockwiseBackend

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}


@dataclass
class Batch:
    """Rows of (query_len, seq_len) with their KV scattered over a pool of NaN."""

    rows: list[tuple[int, int]]
    num_kv_heads: int = 3
    group_size: int = 3
    head_dim: int = 64
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    seed: int = 0
    kv: list[torch.Tensor] = field(init=False)  # per row [2, seq_len, num_kv_heads, head_dim]

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)

        def randn(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).to(self.dtype)

        needed = [math.ceil(seq_len / self.block_size) for _, seq_len in self.rows]
        num_blocks = sum(needed) + 3
        shuffled = iter(torch.randperm(num_blocks, generator=generator).tolist())
        shape = (2, num_blocks, self.num_kv_heads, self.block_size, self.head_dim)
        self.kv_cache = torch.full(shape, torch.nan, dtype=self.dtype)
        self.block_table = torch.full((len(needed), max(needed) + 2), 10**6, dtype=torch.int32)
        self.kv = []
        for row, (_, seq_len) in enumerate(self.rows):
            blocks = torch.tensor([next(shuffled) for _ in range(needed[row])])
            self.block_table[row, : len(blocks)] = blocks
            self.kv.append(randn(2, seq_len, self.num_kv_heads, self.head_dim))
            position = torch.arange(seq_len)
            block, offset = blocks[position // self.block_size], position % self.block_size
            self.kv_cache[:, block, :, offset] = self.kv[-1].transpose(0, 1)
        self.starts = torch.tensor([0] + [q for q, _ in self.rows]).cumsum(0)
        self.query = randn(int(self.starts[-1]), self.num_kv_heads * self.group_size, self.head_dim)
        self.scale = self.head_dim**-0.5

    def backend(self, tile_tokens: int | None = None) -> TorchBlockwiseBackend:
        return TorchBlockwiseBackend(
            self.num_kv_heads * self.group_size,
            self.num_kv_heads,
            self.head_dim,
            self.block_size,
            self.dtype,
            tile_tokens=tile_tokens,
        )

    def metadata(self, backend: TorchBlockwiseBackend) -> AttentionMetadata:
        query_lens, seq_lens = zip(*self.rows, strict=True)
        return backend.build_metadata(
            self.starts.int(),
            torch.tensor(seq_lens, dtype=torch.int32),
            self.block_table,
            torch.empty(0, dtype=torch.int64),
            max(query_lens),
            max(seq_lens),
        )

    def attend(self, tile_tokens: int | None = None) -> torch.Tensor:
        backend = self.backend(tile_tokens)
        return backend.forward(self.query, self.kv_cache, self.metadata(backend), self.scale)

    def reference(self) -> torch.Tensor:
        outputs = []
        for row, (query_len, seq_len) in enumerate(self.rows):
            q = self.query[self.starts[row] : self.starts[row + 1]].double()
            k, v = self.kv[row].double().repeat_interleave(self.group_size, dim=2)
            scores = torch.einsum("qhd,khd->hqk", q, k) * self.scale
            first = seq_len - query_len
            future = torch.arange(seq_len) > torch.arange(first, seq_len)[:, None]
            weights = scores.masked_fill(future, -torch.inf).softmax(-1)
            outputs.append(torch.einsum("hqk,khd->qhd", weights, v))
        return torch.cat(outputs)

    def check(self, output: torch.Tensor) -> None:
        assert output.dtype == self.dtype
        tolerance = TOLERANCE[self.dtype]
        torch.testing.assert_close(output.double(), self.reference(), atol=tolerance, rtol=0)


MIXED = [(1, 1), (1, 17), (33, 33), (1, 200), (5, 70), (1, 17), (90, 150), (1, 64), (2, 2)]


@pytest.fixture(params=["fused", "plain"])
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run on the CPU's fused kernel and on the operations that other devices use."""
    if request.param == "plain":
        monkeypatch.setattr(torch_blockwise, "_attend_fused", torch_blockwise._attend_plain)


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("block_size", [1, 3, 7, 16, 32])
@pytest.mark.parametrize("tile_tokens", [32, 100, None])
def test_mixed_batch_of_prompts_chunks_and_decodes(block_size, tile_tokens):
    batch = Batch(MIXED, block_size=block_size)
    batch.check(batch.attend(tile_tokens))


@pytest.mark.usefixtures("implementation")
def test_short_chunks_share_a_tile():
    """Rows of 2 to 32 query tokens, equal or not, with context or without, beside decodes."""
    batch = Batch([(2, 5), (7, 30), (3, 3), (32, 64), (1, 9), (12, 100), (12, 100), (1, 70)])
    batch.check(batch.attend())
    plan = batch.metadata(batch.backend()).plan
    assert any(group.padding is not None for group in plan.groups)


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("head_dim", [16, 17, 64, 80, 128])
@pytest.mark.parametrize("heads", [(4, 1), (1, 4), (2, 7)], ids=["mha", "mqa", "gqa"])
def test_head_layouts(head_dim, heads):
    batch = Batch(MIXED, num_kv_heads=heads[0], group_size=heads[1], head_dim=head_dim)
    batch.check(batch.attend(tile_tokens=48))


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    batch = Batch(MIXED, dtype=dtype)
    batch.check(batch.attend(tile_tokens=64))


@settings(max_examples=25, deadline=None)
@given(
    lens=st.lists(
        st.integers(1, 80).flatmap(lambda s: st.tuples(st.integers(1, s), st.just(s))),
        min_size=1,
        max_size=8,
    ),
    block_size=st.sampled_from([1, 3, 7, 16]),
    tile_tokens=st.sampled_from([1, 8, 33]),
    seed=st.integers(0, 2**31),
)
def test_any_batch_equals_the_reference(lens, block_size, tile_tokens, seed):
    batch = Batch(lens, 2, 2, 16, block_size, seed=seed)
    batch.check(batch.attend(tile_tokens))


def test_extreme_scores_do_not_overflow():
    batch = Batch([(1, 300), (40, 90)])
    batch.query *= 1000
    output = batch.attend(tile_tokens=32)
    assert output.isfinite().all()
    torch.testing.assert_close(output.double(), batch.reference(), atol=1e-3, rtol=0)


def test_query_may_be_a_view_of_the_fused_projection():
    batch = Batch(MIXED)
    expected = batch.attend()
    wide = torch.full((len(batch.query), 15, batch.head_dim), torch.nan)
    wide[:, 3:12] = batch.query
    batch.query = wide[:, 3:12]
    assert not batch.query.is_contiguous()
    assert torch.equal(batch.attend(), expected)


@pytest.mark.parametrize("rows", [[(1, 40), (1, 7)], [(3, 9), (1, 7)]])
def test_padding_tokens_come_back_as_zeros(rows):
    batch = Batch(rows)
    expected = batch.attend()
    batch.query = torch.cat([batch.query, torch.full_like(batch.query[:2], torch.nan)])
    output = batch.attend()
    assert torch.equal(output[:-2], expected)
    assert torch.equal(output[-2:], torch.zeros_like(output[-2:]))


def test_a_row_with_more_queries_than_tokens_is_refused():
    batch = Batch([(2, 2)])
    backend = batch.backend()
    empty = torch.empty(0, dtype=torch.int64)
    for starts, lens in (([0, 0], [2]), ([0, 3], [2])):
        with pytest.raises(AssertionError, match="seq_len query tokens"):
            backend.build_metadata(
                torch.tensor(starts), torch.tensor(lens), batch.block_table, empty, 2, 2
            )


# --- what a row's result may depend on -----------------------------------------------------------


@pytest.mark.parametrize("position", [0, 1, 4])
@pytest.mark.parametrize("seq_len", [3, 40, 150])
def test_row_does_not_depend_on_its_neighbours(position, seq_len):
    """A short sequence beside long ones, wherever it stands."""
    alone = Batch([(1, seq_len)], seed=1)
    others = [(1, 500), (1, 41), (60, 300), (1, 1)]
    full = Batch([*others[:position], (1, seq_len), *others[position:]], seed=2)
    start = int(full.starts[position])
    full.query[start] = alone.query[0]
    used = torch.arange(seq_len)
    blocks = full.block_table[position, used // 16]
    full.kv_cache[:, blocks, :, used % 16] = alone.kv[0].transpose(0, 1)
    output = full.attend(tile_tokens=64)
    expected = alone.attend(tile_tokens=64)
    torch.testing.assert_close(output[start], expected[0], atol=1e-6, rtol=0)


@pytest.mark.parametrize("chunk_size", [1, 7, 16, 17, 96, 97])
def test_chunks_equal_the_whole_prompt(chunk_size):
    whole = Batch([(97, 97)])
    expected = whole.attend()
    backend = whole.backend(tile_tokens=32)
    for first in range(0, 97, chunk_size):
        last = min(first + chunk_size, 97)
        metadata = backend.build_metadata(
            torch.tensor([0, last - first]),
            torch.tensor([last]),
            whole.block_table,
            torch.empty(0, dtype=torch.int64),
            last - first,
            last,
        )
        chunk = backend.forward(whole.query[first:last], whole.kv_cache, metadata, whole.scale)
        torch.testing.assert_close(chunk, expected[first:last], atol=2e-6, rtol=0)


def test_stale_workspace_never_reaches_a_result():
    backend = Batch([(1, 1)]).backend()
    long, short = Batch(MIXED, seed=1), Batch([(1, 5), (1, 2), (3, 4)], seed=2)
    for batch in (long, short, long):
        backend._workspace.fill_(torch.nan)
        batch.check(
            backend.forward(batch.query, batch.kv_cache, batch.metadata(backend), batch.scale)
        )


# --- memory --------------------------------------------------------------------------------------


class MemoryMeter(TorchDispatchMode):
    """Bytes of new storages: the largest, and the most alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, int] = {}
        self.largest = self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given = [a for a in (*args, *(kwargs or {}).values()) if isinstance(a, torch.Tensor)]
        known = {a.untyped_storage()._cdata for a in given}
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            storage = tensor.untyped_storage()
            if storage._cdata in known | self.live.keys():
                continue
            self.live[storage._cdata] = storage.nbytes()
            weakref.finalize(storage, self.live.pop, storage._cdata, None)
            self.largest = max(self.largest, storage.nbytes())
            self.peak = max(self.peak, sum(self.live.values()))
        return result


def forward_memory(rows: list[tuple[int, int]]) -> tuple[MemoryMeter, Batch, int]:
    """Run one layer; return what was allocated, the batch, and the bytes kept by the backend."""
    batch = Batch(rows, num_kv_heads=2, group_size=2, head_dim=16)
    backend = batch.backend(tile_tokens=128)
    metadata = batch.metadata(backend)
    with MemoryMeter() as meter:
        backend.forward(batch.query, batch.kv_cache, metadata, batch.scale)
    return meter, batch, backend._workspace.nbytes


def test_the_meter_sees_a_gather():
    with MemoryMeter() as meter:
        kept = torch.zeros(1000)[torch.arange(10)].repeat(1000)
    assert meter.largest == kept.nbytes == 40_000
    assert meter.peak >= 40_000


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("query_len", [1, 100])
def test_work_memory_does_not_grow_with_the_sequence(query_len):
    rows = [(query_len, 0), (1, 0), (1, 0)]
    used = {}
    for seq_len in (2000, 4000, 16000):
        meter, batch, workspace = forward_memory([(q, seq_len) for q, _ in rows])
        used[seq_len] = (meter.largest, meter.peak)
        one_sequence = batch.kv[0].nbytes
        assert max(meter.largest, workspace) < one_sequence / 2
    assert used[2000] == used[4000] == used[16000]


def test_work_memory_of_decodes_does_not_grow_with_their_number():
    """Only queries and outputs do."""
    for num_rows in (8, 64):
        meter, batch, _ = forward_memory([(1, 100)] * num_rows)
        assert meter.peak <= 3 * batch.query.nbytes + 4096
