"""Paged attention on the CPU against a plain gather + SDPA: latency, GB/s, ratio.

    python benchmarks/attention_cpu.py [--dtype bfloat16] [--tile-tokens N] [--quick]

Every case runs over several layers' pools in turn, so that KV comes from memory as it does in a
model; times are of one layer. The last line is JSON.
"""

import argparse
import json
import math
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from pageserve.attention import AttentionMetadata
from pageserve.attention.torch_blockwise import TorchBlockwiseBackend

BLOCK_SIZE = 16
MAX_POOL_BYTES = 768 << 20


def measure(*steps: Callable[[int], object], repeats: int, seconds: float) -> list[float]:
    """Return the seconds that a call of each step takes when little else runs.

    The steps take turns, each with 0 … ``repeats`` - 1; the lower quartile over all calls keeps
    what other processes do out of the result.
    """
    times: list[list[float]] = [[] for _ in steps]
    deadline = time.perf_counter() + seconds * len(steps)
    rounds = 0
    while rounds < 3 or time.perf_counter() < deadline:
        rounds += 1
        for step, record in zip(steps, times, strict=True):
            for i in range(repeats):
                start = time.perf_counter()
                step(i)
                record.append(time.perf_counter() - start)
    return [sorted(record)[len(record) // 4] for record in times]


def copy_bandwidth(seconds: float) -> float:
    """Return GB/s (read + written) of copying 256 MiB."""
    source = torch.ones(64 << 20)
    target = torch.empty_like(source)
    (copy,) = measure(lambda _: target.copy_(source), repeats=1, seconds=seconds)
    return 2 * source.nbytes / copy / 1e9


def naive_attention(
    query: torch.Tensor, kv_cache: torch.Tensor, metadata: AttentionMetadata, scale: float
) -> torch.Tensor:
    """Per row: gather the whole sequence's keys and values, repeat the heads, call SDPA."""
    starts, lens = metadata.query_start_loc.tolist(), metadata.seq_lens.tolist()
    outputs = []
    for row, seq_len in enumerate(lens):
        q = query[starts[row] : starts[row + 1]].transpose(0, 1)[None]
        blocks = metadata.block_table[row, : math.ceil(seq_len / BLOCK_SIZE)].long()
        kv = kv_cache[:, blocks].transpose(2, 1).flatten(2, 3)[:, :, :seq_len]
        k, v = kv.repeat_interleave(q.shape[1] // kv.shape[1], dim=1)[:, None]
        out = F.scaled_dot_product_attention(q, k, v, is_causal=q.shape[2] > 1, scale=scale)
        outputs.append(out[0].transpose(0, 1))
    return torch.cat(outputs)


def run_case(
    batch: int, query_len: int, seq_len: int, args: argparse.Namespace
) -> dict[str, float | int | str]:
    """Measure one batch shape in both implementations and check that they agree."""
    dtype = getattr(torch, args.dtype)
    blocks_per_row = math.ceil(seq_len / BLOCK_SIZE)
    num_blocks = batch * blocks_per_row
    shape = (2, num_blocks, args.num_kv_heads, BLOCK_SIZE, args.head_dim)
    layer_bytes = math.prod(shape) * dtype.itemsize
    num_layers = max(1, min(30, MAX_POOL_BYTES // layer_bytes))
    pool = torch.randn(num_layers, *shape).to(dtype)
    query = torch.randn(batch * query_len, args.num_heads, args.head_dim).to(dtype)
    backend = TorchBlockwiseBackend(
        args.num_heads,
        args.num_kv_heads,
        args.head_dim,
        BLOCK_SIZE,
        dtype,
        tile_tokens=args.tile_tokens,
    )
    inputs = (
        torch.arange(batch + 1, dtype=torch.int32) * query_len,
        torch.full((batch,), seq_len, dtype=torch.int32),
        torch.randperm(num_blocks, dtype=torch.int32).view(batch, blocks_per_row),
        torch.empty(0, dtype=torch.int64),
        query_len,
        seq_len,
    )
    metadata = backend.build_metadata(*inputs)
    scale = args.head_dim**-0.5

    def paged(layer: int) -> torch.Tensor:
        return backend.forward(query, pool[layer], metadata, scale)

    def naive(layer: int) -> torch.Tensor:
        return naive_attention(query, pool[layer], metadata, scale)

    torch.testing.assert_close(
        paged(0),
        naive(0),
        atol=1e-5 if dtype is torch.float32 else 2e-2,
        rtol=1e-5 if dtype is torch.float32 else 2e-2,
    )
    paged_s, naive_s = measure(paged, naive, repeats=num_layers, seconds=args.seconds)
    (plan_s,) = measure(lambda _: backend.build_metadata(*inputs), repeats=20, seconds=0)
    return {
        "case": "decode" if query_len == 1 else "prompt",
        "batch": batch,
        "seq_len": seq_len,
        "us_per_layer": round(paged_s * 1e6, 1),
        "gb_per_s": round(layer_bytes / paged_s / 1e9, 2),
        "naive_us_per_layer": round(naive_s * 1e6, 1),
        "speedup": round(naive_s / paged_s, 2),
        "plan_us": round(plan_s * 1e6, 1),
    }


def main() -> None:
    """Print a table, then the same as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--num-heads", type=int, default=9)
    parser.add_argument("--num-kv-heads", type=int, default=3)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--tile-tokens", type=int, default=None)
    parser.add_argument("--seconds", type=float, default=1.0, help="time per measurement")
    parser.add_argument("--quick", action="store_true", help="small cases only")
    args = parser.parse_args()
    torch.manual_seed(0)
    ceiling = copy_bandwidth(args.seconds)
    print(f"copy bandwidth (read + write): {ceiling:.1f} GB/s, {torch.get_num_threads()} threads")
    cases = [(b, 1, s) for s in (64, 512, 4096) for b in (1, 8, 24)]
    cases += [(1, 512, 512), (1, 2048, 2048)]
    if args.quick:
        cases = [(b, 1, 64) for b in (1, 8)] + [(1, 512, 512)]
    results = []
    with torch.inference_mode():
        for case in cases:
            results.append(run_case(*case, args))
            print("  ".join(f"{k} {v}" for k, v in results[-1].items()))
    settings = {k: v for k, v in vars(args).items() if k != "quick"}
    print(json.dumps({"copy_gb_per_s": round(ceiling, 2), **settings, "results": results}))


if __name__ == "__main__":
    main()
