"""The Triton backend on whole steps, as a model calls it."""

import dataclasses

import pytest
import torch
from reference import attention, close, paged_batch

from pageserve.attention import AttentionBackend, AttentionMetadata
from pageserve.attention.triton import TritonBackend

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
