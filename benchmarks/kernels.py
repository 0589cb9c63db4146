"""Time the Triton kernels on a GPU beside the ceilings of the same run.

    python benchmarks/kernels.py [--sections decode linear layers ...] [--sweep] [--json FILE]

Every figure is the median of CUDA-graph replays over inputs that rotate through more memory than
the cache holds. ``share`` is the part of the measured copy bandwidth (decode, linear, sampling) or
of the measured matrix product (prefill). Shapes are those of Qwen2.5. ``--sweep`` times every
tiling as well; its kernels are compiled by several processes first. The last line is JSON.
"""

import argparse
import functools
import json
import multiprocessing
import os
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from common import machine

from pageserve.kernels import launch
from pageserve.kernels.input_batch import InputBuffers, prepare_decode, store_sampled
from pageserve.kernels.linear import (
    Fusion,
    GemvConfig,
    SkinnyConfig,
    gemv,
    library_linear,
    skinny_linear,
)
from pageserve.kernels.paged_decode import (
    num_decode_programs,
    plan_cascade,
    plan_decode,
    rope_and_paged_decode,
)
from pageserve.kernels.paged_prefill import paged_prefill
from pageserve.kernels.sampling import greedy_sample, logsumexp, sample

DTYPE = torch.bfloat16
BLOCK_SIZE = 16
VOCAB = 151936
COLD_BYTES = 256 << 20  # inputs rotate through at least this much


class Model(NamedTuple):
    """Shapes of one Qwen2.5 model."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int


MODELS = {
    "0.5B": Model(24, 896, 14, 2, 64, 4864),
    "1.5B": Model(28, 1536, 12, 2, 128, 8960),
    "3B": Model(36, 2048, 16, 2, 128, 11008),
    "7B": Model(28, 3584, 28, 4, 128, 18944),
}


@dataclass
class Work:
    """Something to time: ``run`` does ``calls`` calls, each of that many bytes and operations."""

    run: Callable[[], Any]
    calls: int = 1
    num_bytes: float = 0
    flops: float = 0


@dataclass(frozen=True)
class Case:
    """A line of the table. ``build`` makes the inputs; a small build is for compiling only."""

    section: str
    name: str
    variant: str
    build: Callable[..., Work]


def randn(*shape: int) -> torch.Tensor:
    """Random bfloat16 on the GPU, scaled like a weight."""
    return torch.randn(*shape, device="cuda", dtype=DTYPE) * shape[-1] ** -0.5


def copies(num_bytes: int, small: bool) -> int:
    """How many inputs of a size to rotate through."""
    return 1 if small else max(2, min(64, -(-COLD_BYTES // num_bytes)))


def timed(work: Work, repeats: int = 30) -> float:
    """Return the median time of one call in µs."""
    for _ in range(2):
        work.run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(torch.cuda.Stream()):
        graph.capture_begin()
        work.run()
        graph.capture_end()
    torch.cuda.synchronize()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / work.calls)
    return statistics.median(times)


# --- ceilings -------------------------------------------------------------------------------------


def copy_case(small: bool = False) -> Work:
    """A device-to-device copy of 4 GiB."""
    source = torch.randn(1 << (10 if small else 30), device="cuda")
    target = torch.empty_like(source)
    # By a kernel: in a graph, copy_ becomes a slower node of its own kind.
    return Work(lambda: torch.neg(source, out=target), num_bytes=2 * source.numel() * 4)


def matmul_case(small: bool = False) -> Work:
    """A square bfloat16 product."""
    n = 256 if small else 8192
    a, b = randn(n, n), randn(n, n)
    return Work(lambda: a @ b, flops=2 * n**3)


# --- attention ------------------------------------------------------------------------------------

DECODES = {  # name: sequence lengths
    "1 x 512": [512],
    "1 x 4k": [4096],
    "1 x 64k": [65536],
    "64 x 512": [512] * 64,
    "256 x 512": [512] * 256,
    "256 x 4k": [4096] * 256,
    "1 x 256k + 127 x 4k": [262144] + [4096] * 127,
    "1 x 64k + 31 x 2k": [65536] + [2048] * 31,
}


def pool(model: Model, tokens: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a layer's KV pool and a block table that scatters the rows over it."""
    blocks = [-(-n // BLOCK_SIZE) for n in tokens]
    shape = (2, sum(blocks), model.kv_heads, BLOCK_SIZE, model.head_dim)
    kv_cache = torch.randn(shape, device="cuda", dtype=DTYPE)
    order = torch.randperm(sum(blocks), device="cuda", dtype=torch.int32)
    table = torch.zeros(len(tokens), max(blocks), dtype=torch.int32, device="cuda")
    for row, part in enumerate(order.split(blocks)):
        table[row, : len(part)] = part
    return kv_cache, table


def decode_case(
    name: str,
    lens: str,
    block_n: int | None = None,
    warps: int | None = None,
    stages: int | None = None,
    per_sm: int | None = None,
    small: bool = False,
) -> Work:
    """One layer's decode attention, as it runs in a step: rotation and KV write included."""
    model = MODELS[name]
    tokens = [64] * 4 if small else DECODES[lens]
    num_bytes = sum(tokens) * model.kv_heads * model.head_dim * 4
    pools = [pool(model, tokens) for _ in range(copies(num_bytes, small))]
    seq_lens = torch.tensor(tokens, dtype=torch.int32, device="cuda")
    qkv = randn(len(tokens), (model.heads + 2 * model.kv_heads) * model.head_dim)
    cos_sin = torch.randn(max(tokens), model.head_dim, device="cuda")
    slots = torch.arange(len(tokens), dtype=torch.int32, device="cuda")
    programs = per_sm and num_decode_programs(qkv.device, model.kv_heads, per_sm)
    plan = plan_decode(
        seq_lens, model.heads, model.kv_heads, model.head_dim, DTYPE,
        num_programs=programs, block_n=block_n,
    )  # fmt: skip

    def run() -> None:
        for kv_cache, table in pools:
            rope_and_paged_decode(
                qkv, kv_cache, table, seq_lens, cos_sin, 0.1, plan, model.heads, slots,
                num_warps=warps, num_stages=stages,
            )  # fmt: skip

    return Work(run, len(pools), num_bytes)


def plan_case(rows: int, small: bool = False) -> Work:
    """The cut of the decode work, once a step."""
    seq_lens = torch.full((rows,), 700, dtype=torch.int32, device="cuda")
    return Work(lambda: [plan_decode(seq_lens, 14, 2, 64, DTYPE) for _ in range(8)], 8)


PREFILLS = {"16 x 1k": (16, 1024), "4 x 4k": (4, 4096), "1 x 16k": (1, 16384)}


def prefill_case(
    name: str,
    lens: str,
    config: tuple[int, int, int, int] | None = None,
    library: bool = False,
    small: bool = False,
) -> Work:
    """Fresh prompts through the paged kernel, or through the library on contiguous KV."""
    model = MODELS[name]
    rows, length = (2, 128) if small else PREFILLS[lens]
    flops = 2 * rows * length**2 * model.heads * model.head_dim  # causal: half of 4 n² d
    if library:
        shape = (rows, model.heads, length, model.head_dim)
        query = torch.randn(shape, device="cuda", dtype=DTYPE)
        kv_shape = (rows, model.kv_heads, length, model.head_dim)
        key, value = torch.randn(2, *kv_shape, device="cuda", dtype=DTYPE)
        attention = torch.nn.functional.scaled_dot_product_attention
        run = functools.partial(attention, query, key, value, is_causal=True, enable_gqa=True)
        return Work(run, flops=flops)
    kv_cache, table = pool(model, [length] * rows)
    query = torch.randn(rows * length, model.heads, model.head_dim, device="cuda", dtype=DTYPE)
    starts = torch.arange(rows + 1, device="cuda", dtype=torch.int32) * length
    seq_lens = torch.full((rows,), length, device="cuda", dtype=torch.int32)
    return Work(
        lambda: paged_prefill(
            query, kv_cache, table, starts, seq_lens, length, model.head_dim**-0.5, config=config
        ),
        flops=flops,
    )


# --- linear layers --------------------------------------------------------------------------------


class Linear(NamedTuple):
    """A linear layer of a model with what can be fused into it."""

    n: int
    k: int
    norm: bool = False
    bias: bool = False
    residual: bool = False
    silu: bool = False


LINEARS = {"gemv": gemv, "skinny": skinny_linear, "library": library_linear}


def linears(model: Model) -> dict[str, Linear]:
    """The four linear layers of a decoder layer, and the head."""
    heads = model.heads * model.head_dim
    return {
        "qkv": Linear(heads + 2 * model.kv_heads * model.head_dim, model.hidden, True, True),
        "o": Linear(model.hidden, heads, residual=True),
        "gate_up": Linear(2 * model.intermediate, model.hidden, norm=True, silu=True),
        "down": Linear(model.hidden, model.intermediate, residual=True),
        "head": Linear(VOCAB, model.hidden, norm=True),
    }


def linear_case(
    name: str, layer: str, m: int, how: str, config: Any = None, small: bool = False
) -> Work:
    """A linear layer for m rows with its norm, bias, residual and activation."""
    shape = linears(MODELS[name])[layer]
    n, k = shape.n, shape.k
    weights = [randn(n, k) for _ in range(copies(n * k * 2, small))]
    x = randn(m, k)
    fusion = Fusion(
        bias=randn(n) if shape.bias else None,
        residual=randn(m, n) if shape.residual else None,
        norm_weight=randn(k) if shape.norm else None,
        silu=shape.silu,
    )
    linear = LINEARS[how] if config is None else functools.partial(LINEARS[how], config=config)

    def run() -> None:
        for weight in weights:
            linear(x, weight, fusion)

    return Work(run, len(weights), n * k * 2)


# --- a whole step ---------------------------------------------------------------------------------


def step_case(
    name: str,
    batch: int,
    context: int,
    how: str,
    common: int = 0,
    cascades: bool = False,
    small: bool = False,
) -> Work:
    """A greedy decode step of a model of random weights, input building and feedback included. Of
    each row's ``context`` the first ``common`` tokens are the same blocks."""
    model = MODELS[name]
    num_layers = 1 if small else model.layers
    shapes = linears(model)
    weights = [
        {key: randn(s.n, s.k) for key, s in shapes.items() if key != "head"}
        for _ in range(num_layers)
    ]
    norm = torch.ones(model.hidden, device="cuda", dtype=DTYPE)
    bias = randn(shapes["qkv"].n)
    head = randn(VOCAB, model.hidden)
    tokens = [context] * batch
    _, table = pool(model._replace(kv_heads=1, head_dim=1), tokens)
    table[:, : common // BLOCK_SIZE] = table[0, : common // BLOCK_SIZE]
    shape = (num_layers, 2, table.numel(), model.kv_heads, BLOCK_SIZE, model.head_dim)
    kv_cache = torch.randn(shape, device="cuda", dtype=DTYPE)
    cos_sin = torch.randn(context + 1, model.head_dim, device="cuda")
    rows = torch.tensor([[i, context - 1] for i in range(batch)], dtype=torch.int32, device="cuda")
    token_ids = torch.zeros(batch, context + 1, dtype=torch.int32, device="cuda")
    buffers = InputBuffers.allocate(batch, torch.device("cuda"))
    scale = model.head_dim**-0.5

    def attention(layer: int, qkv: torch.Tensor, plan: Any) -> torch.Tensor:
        out = rope_and_paged_decode(
            qkv, kv_cache[layer], table, buffers.seq_lens, cos_sin, scale, plan, model.heads,
            row_slots=buffers.row_slots,
        )  # fmt: skip
        return out.view(batch, -1)

    linear, head_linear = LINEARS[how], gemv if how == "gemv" else library_linear

    def forward(hidden: torch.Tensor, plan: Any) -> torch.Tensor:
        for layer, w in enumerate(weights):
            qkv = linear(hidden, w["qkv"], Fusion(bias, norm_weight=norm))
            hidden = linear(attention(layer, qkv, plan), w["o"], Fusion(residual=hidden))
            gated = linear(hidden, w["gate_up"], Fusion(norm_weight=norm, silu=True))
            hidden = linear(gated, w["down"], Fusion(residual=hidden))
        return head_linear(hidden, head, Fusion(norm_weight=norm))

    def run() -> None:
        prepare_decode(rows, token_ids, table, BLOCK_SIZE, buffers)
        shape = (model.heads, model.kv_heads, model.head_dim, DTYPE)
        lens, cascade = buffers.seq_lens, None
        if cascades:
            cascade = plan_cascade(lens, table, BLOCK_SIZE, *shape, buffers.row_slots)
        plan = plan_decode(lens, *shape, cascade=cascade)
        hidden = torch.nn.functional.embedding(buffers.input_ids, head)
        store_sampled(rows, greedy_sample(forward(hidden, plan)), token_ids)

    num_bytes = 2 * sum(s.n * s.k for key, s in shapes.items() if key != "head") * num_layers
    num_bytes += head.numel() * 2
    distinct = common + batch * (context - common)
    num_bytes += distinct * model.kv_heads * model.head_dim * 4 * num_layers
    return Work(run, 1, num_bytes)


# --- sampling -------------------------------------------------------------------------------------

SAMPLERS = {  # temperature, top-k, top-p, min-p
    "temperature": (1.0, 0, 1.0, 0.0),
    "top-p 0.9": (1.0, 0, 0.9, 0.0),
    "top-k 50, top-p 0.9": (1.0, 50, 0.9, 0.0),
    "min-p 0.05": (1.0, 0, 1.0, 0.05),
}


def sampling_case(
    batch: int, kind: str, dtype: torch.dtype, spread: float, how: str, small: bool = False
) -> Work:
    """Sampling from logits of a normal distribution with that spread."""
    logits = (spread * torch.randn(batch, VOCAB, device="cuda")).to(dtype)
    num_bytes = logits.numel() * logits.element_size()

    def work(call: Callable[[torch.Tensor], Any]) -> Work:
        return Work(lambda: [call(logits) for _ in range(8)], 8, num_bytes)

    if kind == "greedy":
        return work(greedy_sample if how == "triton" else functools.partial(torch.argmax, dim=-1))
    if kind == "logprobs":
        return work(logsumexp)
    temperature, top_k, top_p, min_p = SAMPLERS[kind]

    def full(value: float, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((batch,), value, dtype=dtype, device="cuda")

    if how == "torch":
        return work(lambda x: _torch_sample(x, temperature, top_k, top_p))
    arguments = (
        full(temperature, torch.float32),
        full(top_k, torch.int32),
        full(top_p, torch.float32),
        full(min_p, torch.float32),
        torch.arange(batch, device="cuda"),
        full(3, torch.int32),
    )
    return work(lambda x: sample(x, *arguments))


def _torch_sample(
    logits: torch.Tensor, temperature: float, top_k: int, top_p: float
) -> torch.Tensor:
    """The usual sort, mask and exponential race."""
    values, ids = (logits.float() / temperature).sort(dim=-1, descending=True)
    if top_k:
        values[:, top_k:] = -torch.inf
    probs = values.softmax(-1)
    probs = probs.masked_fill(probs.cumsum(-1) - probs >= top_p, 0.0)
    choice = (probs / torch.empty_like(probs).exponential_()).argmax(-1, keepdim=True)
    return ids.gather(1, choice)


# --- the table ------------------------------------------------------------------------------------


def cases(sections: list[str], sweep: bool) -> Iterator[Case]:
    """All lines of the named sections."""
    part = functools.partial
    yield Case("ceiling", "copy", "torch", copy_case)
    yield Case("ceiling", "matmul", "torch", matmul_case)
    if "decode" in sections:
        for name in MODELS:
            for lens in DECODES:
                yield Case("decode", f"{name} {lens}", "triton", part(decode_case, name, lens))
        for rows in (1, 256):
            yield Case("decode", f"plan {rows} rows", "triton", part(plan_case, rows))
    if "decode" in sections and sweep:
        for block_n, warps, stages, per_sm in DECODE_SWEEP:
            variant = f"n{block_n} w{warps} s{stages} p{per_sm}"
            for name in ("0.5B", "3B"):
                for lens in ("1 x 512", "256 x 512", "256 x 4k", "1 x 256k + 127 x 4k"):
                    build = part(decode_case, name, lens, block_n, warps, stages, per_sm)
                    yield Case("decode", f"{name} {lens}", variant, build)
    if "prefill" in sections:
        for name in ("0.5B", "3B"):
            for lens in PREFILLS:
                for config in [None, *(PREFILL_SWEEP if sweep else ())]:
                    variant = "triton" if config is None else "/".join(map(str, config))
                    build = part(prefill_case, name, lens, config)
                    yield Case("prefill", f"{name} {lens}", variant, build)
                build = part(prefill_case, name, lens, None, True)
                yield Case("prefill", f"{name} {lens}", "library", build)
    if "linear" in sections:
        yield from linear_cases(sweep)
    if "step" in sections:
        for name in MODELS:
            ways = [(1, "gemv"), (1, "library")]
            ways += [(batch, how) for batch in (4, 16, 64) for how in ("skinny", "library")]
            for batch, how in [*ways, (256, "library")]:
                build = part(step_case, name, batch, 512, how)
                yield Case("step", f"{name} batch {batch}", how, build)
    if "cascade" in sections:
        for name in ("0.5B", "3B", "7B"):
            for batch in (16, 32, 64, 256):
                how = "skinny" if batch <= 64 else "library"
                for variant in ("each row", "cascade"):
                    cascades = variant == "cascade"
                    build = part(step_case, name, batch, 2112, how, 2048, cascades)
                    yield Case("cascade", f"{name} batch {batch}", variant, build)
    if "sampling" in sections:
        for batch in (1, 16, 256):
            for how in ("triton", "torch"):
                for dtype in (torch.float32, DTYPE):
                    build = part(sampling_case, batch, "greedy", dtype, 3.0, how)
                    label = f"greedy {batch} {str(dtype)[6:]}"
                    yield Case("sampling", label, how, build)
            build = part(sampling_case, batch, "logprobs", torch.float32, 3.0, "triton")
            yield Case("sampling", f"logprobs {batch}", "triton", build)
            for kind in SAMPLERS:
                build = part(sampling_case, batch, kind, torch.float32, 3.0, "triton")
                yield Case("sampling", f"{kind} {batch}", "triton", build)
            build = part(sampling_case, batch, "top-p 0.9", torch.float32, 0.1, "triton")
            yield Case("sampling", f"top-p 0.9, flat {batch}", "triton", build)
            kind = "top-k 50, top-p 0.9"
            build = part(sampling_case, batch, kind, torch.float32, 3.0, "torch")
            yield Case("sampling", f"{kind} {batch}", "torch", build)


def linear_cases(sweep: bool) -> Iterator[Case]:
    """Linear layers through every path that takes their number of rows."""
    for name, model in MODELS.items():
        for layer in linears(model):
            for m in (1, 2, 4, 16, 64):
                ways: list[tuple[str, Any]] = [("library", None)]
                swept = sweep and name != "1.5B" and layer != "head"
                if m == 1:
                    ways += [("gemv", c) for c in (None, *(GEMV_SWEEP if swept else ()))]
                elif layer != "head":
                    ways += [("skinny", c) for c in (None, *(SKINNY_SWEEP if swept else ()))]
                for how, config in ways:
                    variant = how if config is None else how + " " + "/".join(map(str, config))
                    build = functools.partial(linear_case, name, layer, m, how, config)
                    yield Case("linear", f"{name} {layer} m={m}", variant, build)


DECODE_SWEEP = [
    (block_n, warps, stages, per_sm)
    for block_n, warps in ((32, 4), (64, 4), (128, 4), (128, 8))
    for stages in (3, 4, 5)
    for per_sm in (2, 4)
]
PREFILL_SWEEP = [
    (block_m, block_n, warps, stages)
    for block_m, warps in ((64, 4), (128, 4), (128, 8))
    for block_n in (64, 128)
    for stages in (3, 4)
]
SKINNY_SWEEP = [
    SkinnyConfig(block_n, block_k, split_k, 4, stages)
    for block_n, block_k, stages in ((64, 128, 4), (32, 128, 4), (32, 256, 3))
    for split_k in (1, 2, 4, 8)
]


GEMV_SWEEP = [
    GemvConfig(block_n, block_k, warps)
    for block_n in (1, 2, 4, 8)
    for block_k in (256, 512, 1024, 2048, 4096)
    for warps in (1, 2, 4, 8)
    if block_k >= 256 * warps and block_n * block_k <= 2048 * warps
]


def compile_case(case: Case) -> str | None:
    """Run a case once on small inputs, which leaves its kernels in Triton's cache."""
    try:
        case.build(small=True).run()
        torch.cuda.synchronize()
    except Exception as error:  # a tiling that does not fit: its line will say so
        return f"{case.name} {case.variant}: {error}"
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    names = ["decode", "prefill", "linear", "step", "cascade", "sampling"]
    parser.add_argument("--sections", nargs="+", choices=names, default=names)
    parser.add_argument("--sweep", action="store_true", help="time every tiling")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="compilers")
    parser.add_argument("--json", help="write all lines to this file as well")
    args = parser.parse_args()
    todo = list(cases(args.sections, args.sweep))
    # Larger models share the linear kernels of the 3B.
    distinct = {(c.section, c.name.replace("7B", "3B"), c.variant): c for c in todo}
    context = multiprocessing.get_context("spawn")
    with context.Pool(args.processes) as workers:
        failures = [x for x in workers.imap_unordered(compile_case, distinct.values()) if x]
    print(f"{len(todo)} cases, {len(failures)} do not compile", *failures[:3], flush=True)
    facts = {"machine": machine(), "pdl": launch.pdl_options(torch.device("cuda"))["PDL"]}
    lines: list[dict[str, Any]] = []
    ceiling = {"num_bytes": 1.0, "flops": 1.0}
    for case in todo:
        line: dict[str, Any] = {"section": case.section, "case": case.name, "variant": case.variant}
        try:
            work = case.build()
            line["us"] = us = round(timed(work), 2)
        except Exception as error:
            lines.append(line | {"error": str(error)[:200]})
            continue
        for unit, amount in (("num_bytes", work.num_bytes), ("flops", work.flops)):
            if not amount:
                continue
            rate = amount / us * 1e6
            if case.section == "ceiling":
                ceiling[unit] = rate
            line["GB/s" if unit == "num_bytes" else "TFLOP/s"] = round(
                rate / (1e9 if unit == "num_bytes" else 1e12), 1
            )
            line["share"] = round(rate / ceiling[unit], 3)
        lines.append(line)
        if args.json and len(lines) % 100 == 0:
            save(args.json, facts, lines)
        if not args.sweep:
            print("  ".join(str(v) for v in line.values()), flush=True)
    if args.sweep:
        print_best(lines)
    if args.json:
        save(args.json, facts, lines)
    print(json.dumps(facts | ({} if args.sweep else {"lines": lines})))


def save(path: str, facts: dict[str, Any], lines: list[dict[str, Any]]) -> None:
    """Write the lines so far as JSON, with where they are from."""
    with open(path, "w") as file:
        json.dump({"benchmark": "kernels", **facts, "lines": lines}, file, indent=1)


def print_best(lines: list[dict[str, Any]]) -> None:
    """Print the fastest variants of every case beside its default and the library."""
    by_case: dict[str, list[dict[str, Any]]] = {}
    for line in lines:
        if "us" in line:
            by_case.setdefault(f"{line['section']} {line['case']}", []).append(line)
    for name, found in by_case.items():
        plain = {line["variant"]: line["us"] for line in found if line["variant"].isalpha()}
        best = sorted(found, key=lambda line: line["us"])[:3]
        text = ", ".join(f"{x['variant']} {x['us']}" for x in best)
        print(f"{name}: {plain} share {best[0].get('share')} best {text}", flush=True)


if __name__ == "__main__":
    main()
