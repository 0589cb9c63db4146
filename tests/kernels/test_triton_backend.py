"""The Triton backend on whole steps, as a model calls it."""

import dataclasses

import pytest
import torch
from reference import attention, close, paged_batch

from pageserve.attention import AttentionBackend, AttentionMetadata, triton
from pageserve.attention.triton import LongRow, TritonBackend
from pageserve.messages import ScheduledRow

STEPS = {
    "decodes": ([1, 1, 1], [90, 1, 33]),
    "prompts": ([20, 20], [20, 45]),
    "mixed": ([1, 30, 1, 2], [70, 50, 1, 2]),
    "padded": ([1, 1, 1, 1], [40, 0, 7, 0]),
}


def metadata_of(batch, query_lens, seq_lens, backend: AttentionBackend) -> AttentionMetadata:
    slot_mapping = torch.zeros(sum(query_lens), dtype=torch.int64, device=batch.query.device)
    return backend.build_metadata(
        batch.query_start_loc, batch.seq_lens, batch.block_table, slot_mapping,
        max(query_lens), max(seq_lens),
    )  # fmt: skip


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [(8, 2), (4, 4)])
def test_layers_of_a_step(step, dtype, heads, device):
    query_lens, seq_lens = STEPS[step]
    backend = TritonBackend()
    batch = paged_batch(query_lens, seq_lens, *heads, 64, 16, dtype, device)
    metadata = metadata_of(batch, query_lens, seq_lens, backend)
    for _ in range(2):  # layers share the plan
        out = backend.forward(batch.query, batch.kv_cache, metadata, 0.125)
        close(out, attention(batch, 0.125))


@pytest.mark.parametrize("step", STEPS)
def test_last_tokens_alone(step, device):
    """What the last layer of a step computes: the step narrowed to each row's last token."""
    query_lens, seq_lens = STEPS[step]
    backend = TritonBackend()
    batch = paged_batch(query_lens, seq_lens, 8, 2, 64, 16, torch.float32, device)
    metadata = metadata_of(batch, query_lens, seq_lens, backend)
    last = metadata.last_tokens
    out = backend.forward(batch.query[last], batch.kv_cache, backend.narrow(metadata), 0.125)
    close(out, attention(batch, 0.125)[last.long().cpu()])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [(8, 2), (4, 4)])
def test_rows_for_the_library(dtype, heads, device, monkeypatch):
    """A fresh prompt and a later chunk go to the library, in a batch with paged rows."""
    monkeypatch.setattr(triton, "LONG_QUERY", 10)
    monkeypatch.setattr(triton, "SQUARE", 16)
    query_lens, seq_lens = [1, 20, 5, 33, 12], [9, 20, 40, 50, 100]
    slots = [3, 0, 4, 1, 2]
    backend = TritonBackend()
    assert backend.long_rows(scheduled(query_lens, seq_lens, slots)) == []
    backend.library_costs = {16: 0.3}
    long_rows = backend.long_rows(scheduled(query_lens, seq_lens, slots))
    # Row 2 is short; of row 4 so few queries are new that the library would take longer.
    assert long_rows == [LongRow(1, 1, 20, 20, 0), LongRow(3, 26, 33, 50, 1)]
    batch = paged_batch(query_lens, seq_lens, *heads, 64, 16, dtype, device)
    table = torch.empty_like(batch.block_table)
    table[slots] = batch.block_table
    metadata = backend.build_metadata(
        batch.query_start_loc, batch.seq_lens, table, torch.zeros(71, dtype=torch.int64),
        33, 100, torch.tensor(slots, dtype=torch.int32, device=device), long_rows,
    )  # fmt: skip
    for _ in range(2):  # layers share the plan
        close(
            backend.forward(batch.query, batch.kv_cache, metadata, 0.125), attention(batch, 0.125)
        )


def scheduled(query_lens, seq_lens, slots):
    rows = zip(query_lens, seq_lens, slots, strict=True)
    return [ScheduledRow(slot, total - new, new, True) for new, total, slot in rows]


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "head_dim"), [((14, 2), 64), ((16, 2), 128)])
def test_measured_prefill(heads, head_dim, device):
    """Every timed tile and the library compute the same long prompt."""
    backend = TritonBackend()
    query_lens, seq_lens = [1500, 1, 700], [2000, 90, 1300]
    batch = paged_batch(query_lens, seq_lens, *heads, head_dim, 16, torch.bfloat16, device)
    kv_cache = torch.zeros(1, 2, 1024, heads[1], 16, head_dim, dtype=torch.bfloat16, device=device)
    backend.measure(kv_cache, heads[0], 16384)
    assert backend.prefill_config in triton.PREFILL_CONFIGS
    costs = backend.library_costs
    assert not costs or (list(costs) == [2048, 8192, 16384] and 0 < min(costs.values()) < 1)
    slots = torch.arange(3, dtype=torch.int32, device=device)
    expected = attention(batch, 0.125)
    long_row = LongRow(0, 0, 1500, 2000, 0)
    ways = [(config, ()) for config in triton.PREFILL_CONFIGS]
    for config, long_rows in [*ways, (None, [long_row])]:
        backend.prefill_config = config
        metadata = backend.build_metadata(
            batch.query_start_loc, batch.seq_lens, batch.block_table,
            torch.zeros(2201, dtype=torch.int64), 1500, 2000, slots, long_rows,
        )  # fmt: skip
        close(backend.forward(batch.query, batch.kv_cache, metadata, 0.125), expected)


@pytest.mark.gpu
def test_decode_graph_follows_the_lengths(device):
    """A captured step is replayed on other lengths, which only the device knows."""
    backend = TritonBackend()
    batch = paged_batch([1] * 4, [900, 300, 40, 1], 14, 2, 64, 16, torch.bfloat16, device)
    static_lens = torch.tensor([1, 1, 1, 1], dtype=torch.int32, device=device)

    def run() -> torch.Tensor:
        batch.seq_lens = static_lens
        metadata = metadata_of(batch, [1] * 4, [900], backend)
        return backend.forward(batch.query, batch.kv_cache, metadata, 0.125)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for lens in ([900, 300, 40, 1], [17, 300, 0, 1], [1, 0, 40, 1]):
        static_lens.copy_(torch.tensor(lens, dtype=torch.int32))
        graph.replay()
        keys = [k[:n] for k, n in zip(batch.keys, lens, strict=True)]
        values = [v[:n] for v, n in zip(batch.values, lens, strict=True)]
        shorter = dataclasses.replace(batch, keys=keys, values=values)
        close(out, attention(shorter, 0.125))
