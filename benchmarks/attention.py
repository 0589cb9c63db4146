"""Attention over blocks in place against gathering the sequence first: memory, latency, GB/s.

    python benchmarks/attention.py [--dtype bfloat16] [--quick] [--json FILE]

First the peak of temporary memory of one layer, and its time, for one decode row of 128 to 8,192
tokens: a gather copies the whole sequence's keys and values into one tensor, repeats the heads as
transformers does and calls SDPA; the backends read blocks where they lie. On the CPU
``torch_blockwise`` copies a tile at a time into a workspace that lives as long as the backend, and
is counted in full: 3 MiB by default, which all layers and rows share, or one block. The rest (with
the output) is what the allocator gives out during the call: on the CPU as the profiler sees it, on
a GPU, where the ``triton`` backend runs, as PyTorch counts it. There the scratch that the layers of
a step share is counted in full, too, and a call's time includes its launch.

Then, on the CPU, latency and bandwidth over batch sizes and prompt chunks. Every case runs over
several layers' pools in turn, so that KV comes from memory as it does in a model; times are of one
layer.

What this does not show: whole steps, peaks inside libraries that bypass PyTorch's allocator, and a
dense cache that needs no gather, whose cost is reserved memory instead (see capacity.py).
"""

import os

os.environ.setdefault("KINETO_LOG_LEVEL", "5")  # before torch: else each profile prints lines

import argparse
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from common import machine, memory_bandwidth, report, synchronise
from plots import figures, line_style

from pageserve.attention import AttentionBackend, AttentionMetadata
from pageserve.attention.torch_blockwise import TorchBlockwiseBackend

BLOCK_SIZE = 16
MAX_POOL_BYTES = 768 << 20
SEQ_LENS = (128, 256, 512, 1024, 2048, 4096, 8192)


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


def peak_bytes(step: Callable[[], object], device: str) -> int:
    """Return the most bytes that were allocated at once by a call, over what was there before."""
    step()  # libraries keep what they allocate on first use
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    cpu = torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[cpu], profile_memory=True) as profile:
        kept = step()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    del kept
    return peak


def kept_bytes(backend: AttentionBackend, metadata: AttentionMetadata) -> int:
    """Return the bytes of scratch that outlive a call: a backend's workspace, or what the layers of
    a step share."""
    workspace = getattr(backend, "_workspace", None)
    shared = getattr(metadata.plan, "decode", None)
    kept = [workspace] if shared is None else list(vars(shared.cut).values())
    return sum(x.nbytes for x in kept if isinstance(x, torch.Tensor))


def make_backends(args: argparse.Namespace) -> dict[str, tuple[str, AttentionBackend]]:
    """Return the backends whose memory is measured, by name, with a title each."""
    if args.device == "cuda":
        from pageserve.attention.triton import TritonBackend

        return {"triton": ("in place, triton", TritonBackend())}
    sizes = {
        "tile": ("in place, tiles of 3 MiB", None),
        "block": ("in place, by block", BLOCK_SIZE),
    }
    shape = args.num_heads, args.num_kv_heads, args.head_dim, BLOCK_SIZE
    dtype = getattr(torch, args.dtype)
    return {
        name: (title, TorchBlockwiseBackend(*shape, dtype, tile_tokens=tile_tokens))
        for name, (title, tile_tokens) in sizes.items()
    }


def run_memory(seq_len: int, args: argparse.Namespace) -> dict[str, Any]:
    """Measure one decode row of ``seq_len`` tokens: peak bytes and µs of a gather and in place."""
    dtype, device = getattr(torch, args.dtype), args.device
    blocks = math.ceil(seq_len / BLOCK_SIZE)
    pool = torch.randn(2, blocks, args.num_kv_heads, BLOCK_SIZE, args.head_dim).to(device, dtype)
    query = torch.randn(1, args.num_heads, args.head_dim).to(device, dtype)
    inputs = (
        torch.tensor([0, 1], dtype=torch.int32, device=device),
        torch.tensor([seq_len], dtype=torch.int32, device=device),
        torch.randperm(blocks, dtype=torch.int32).view(1, blocks).to(device),
        torch.empty(0, dtype=torch.int64, device=device),
        1,
        seq_len,
    )
    scale = args.head_dim**-0.5
    copied = pool[:, 0, :, 0].nbytes * seq_len  # the least that any gather must allocate
    row: dict[str, Any] = {"seq_len": seq_len, "copied_kv_bytes": copied, "paged": {}}
    for name, (_, backend) in make_backends(args).items():
        metadata = backend.build_metadata(*inputs)

        def gather(metadata: AttentionMetadata = metadata) -> torch.Tensor:
            return naive_attention(query, pool, metadata, scale)

        def paged(
            backend: AttentionBackend = backend, metadata: AttentionMetadata = metadata
        ) -> torch.Tensor:
            return backend.forward(query, pool, metadata, scale)

        tolerance = 1e-5 if dtype is torch.float32 else 2e-2
        torch.testing.assert_close(paged(), gather(), atol=tolerance, rtol=tolerance)
        kept = kept_bytes(backend, metadata)
        timed = [synchronised(step, device) for step in (paged, gather)]
        paged_s, gather_s = measure(*timed, repeats=1, seconds=args.seconds / 4)
        row["paged"][name] = {"bytes": peak_bytes(paged, device) + kept, "us": paged_s * 1e6}
        row |= {"gather_bytes": peak_bytes(gather, device), "gather_us": gather_s * 1e6}
    return row


def synchronised(step: Callable[[], object], device: str) -> Callable[[int], object]:
    """Make a call last until the device has done its work."""

    def run(_: int) -> None:
        step()
        synchronise(device)

    return run


def memory_study(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure every length and print a table."""
    rows = []
    for seq_len in SEQ_LENS[:2] if args.quick else SEQ_LENS:
        row = run_memory(seq_len, args)
        rows.append(row)
        cells = [
            f"{name} {r['bytes'] / 1024:,.1f} KiB ({row['gather_bytes'] / r['bytes']:,.1f}x less), "
            f"{r['us']:,.0f} µs"
            for name, r in row["paged"].items()
        ]
        print(
            f"{seq_len:>5} tokens: gather {row['gather_bytes'] / 1024:,.0f} KiB, "
            f"{row['gather_us']:,.0f} µs; {'; '.join(cells)}"
        )
    return rows


def draw(rows: list[dict[str, Any]], tiles: dict[str, str], path: Path) -> None:
    """Temporary memory and time over the sequence length."""
    lengths = [row["seq_len"] for row in rows]
    titles = ["Temporary memory (KiB)", "Time of a layer (µs)"]
    with figures(path, titles, xlabel="tokens of the sequence") as panels:
        for axes, key, unit in zip(panels, ("bytes", "us"), (1024, 1), strict=True):
            gather = [row[f"gather_{key}"] / unit for row in rows]
            axes.plot(lengths, gather, label="gather", **line_style(0))
            for index, (name, title) in enumerate(tiles.items(), start=1):
                values = [row["paged"][name][key] / unit for row in rows]
                axes.plot(lengths, values, label=title, **line_style(index))
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            axes.set_xticks(lengths, [str(n) for n in lengths])


def main() -> None:
    """Print the tables, then the same as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], help="(default: the GPU if any)")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--num-heads", type=int, default=9)
    parser.add_argument("--num-kv-heads", type=int, default=3)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--tile-tokens", type=int, default=None)
    parser.add_argument("--seconds", type=float, default=1.0, help="time per measurement")
    parser.add_argument("--quick", action="store_true", help="small cases only")
    parser.add_argument("--json", help="write the result here, a picture beside it")
    args = parser.parse_args()
    args.device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    if args.device == "cuda":
        ceiling = memory_bandwidth("cuda") / 1e9
    else:
        ceiling = copy_bandwidth(args.seconds)
    print(f"copy bandwidth (read + write): {ceiling:.1f} GB/s")
    cases = [(b, 1, s) for s in (64, 512, 4096) for b in (1, 8, 24)]
    cases += [(1, 512, 512), (1, 2048, 2048)]
    if args.quick:
        cases = [(b, 1, 64) for b in (1, 8)] + [(1, 512, 512)]
    results = []
    with torch.inference_mode():
        memory = memory_study(args)
        for case in cases if args.device == "cpu" else []:
            results.append(run_case(*case, args))
            print("  ".join(f"{k} {v}" for k, v in results[-1].items()))
    tiles = {name: title for name, (title, _) in make_backends(args).items()}
    if args.json:
        draw(memory, tiles, Path(args.json).with_suffix(""))
    settings = {k: v for k, v in vars(args).items() if k not in ("quick", "json")}
    report(
        {
            "benchmark": "attention",
            "not_shown": "whole steps; allocations outside PyTorch; a dense cache without a gather",
            "machine": machine(),
            "copy_gb_per_s": round(ceiling, 2),
            **settings,
            "tiles": tiles,
            "memory": memory,
            "results": results,
        },
        args.json,
    )


if __name__ == "__main__":
    main()
