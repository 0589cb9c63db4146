"""Offline throughput of one engine on seeded workloads: token ids in, token ids out.

Prints the floor of a decode step (bytes over the measured copy bandwidth) first, then output
tokens per second over the whole call, and JSON as the last line. The workloads are those that the
load client drives over HTTP, so the two can be compared.

What this does not show: HTTP, arrivals over time, sampling other than greedy.

    python benchmarks/offline.py --model DIR --workload decode --n 64
"""

import argparse
import random
import time
from collections.abc import Callable
from typing import Any

import torch
from common import machine, memory_bandwidth, name_of, report

from pageserve.layers import linear as layers_linear
from pageserve.llm import LLM
from pageserve.messages import AddRequest
from pageserve.sampling_params import SamplingParams

Workload = list[tuple[list[int], int]]


def workload(name: str, n: int, seed: int = 0, vocab: int = 49000) -> Workload:
    """``n`` pairs of prompt ids and output budget; same seed, same requests."""
    rng = random.Random(seed)

    def ids(count: int) -> list[int]:
        return [rng.randrange(100, vocab) for _ in range(count)]

    def log_normal(low: int, high: int, mu: float, sigma: float) -> int:
        return min(high, max(low, int(rng.lognormvariate(mu, sigma))))

    shared = ids(2048) if name == "prefix" else []
    make: dict[str, Callable[[], tuple[list[int], int]]] = {
        "single": lambda: (ids(512), 256),
        "decode": lambda: (ids(32), 256),
        "chat": lambda: (ids(log_normal(16, 2048, 5.2, 0.9)), log_normal(8, 1024, 5.0, 0.8)),
        "prefix": lambda: (shared + ids(64), 64),
        "long": lambda: (ids(16000), 64),
        "nano": lambda: (ids(rng.randint(100, 1024)), rng.randint(100, 1024)),
    }
    return [make[name]() for _ in range(n)]


def run(llm: LLM, requests: Workload) -> dict[str, Any]:
    """Feed all requests to the engine at once and drain it; no detokenising."""
    engine = llm.engine
    engine.scheduler.reset_prefix_cache()
    steps = engine.stats().steps_total
    start = time.perf_counter()
    for i, (ids, budget) in enumerate(requests):
        params = SamplingParams(temperature=0, max_tokens=budget, ignore_eos=True)
        engine.add(AddRequest(f"{start}-{i}", ids, params, time.monotonic()))
    tokens = 0
    while engine.has_work():
        tokens += sum(len(o.new_token_ids) for o in engine.step())
    seconds = time.perf_counter() - start
    assert tokens == sum(budget for _, budget in requests)
    return {
        "requests": len(requests),
        "output_tokens": tokens,
        "seconds": seconds,
        "tokens_per_s": tokens / seconds,
        "steps": engine.stats().steps_total - steps,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--workload", action="append", metavar="NAME:N", required=True)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--option", action="append", default=[], metavar="NAME=INT")
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--json")
    args = parser.parse_args()
    options = {k: int(v) for k, v in (o.split("=") for o in args.option)}
    # Before the engine takes the memory.
    bandwidth = memory_bandwidth("cuda" if torch.cuda.is_available() else "cpu")
    start = time.perf_counter()
    llm = LLM(model=args.model, dtype=args.dtype, **options)
    load_seconds = time.perf_counter() - start
    weights = sum(p.numel() * p.element_size() for p in llm.engine.worker.model.parameters())
    print(f"bandwidth {bandwidth / 1e9:.0f} GB/s, weights {weights / 1e9:.2f} GB, so a decode step")
    print(f"takes at least {weights / bandwidth * 1e3:.3f} ms; started in {load_seconds:.1f} s\n")
    vocab = min(49000, llm.engine.worker.model_config.vocab_size)
    rows = {}
    for spec in args.workload:
        name, count = spec.split(":")
        requests = workload(name, int(count), vocab=vocab)
        longest = max(len(ids) + budget for ids, budget in requests)
        if longest > llm.engine.ready.max_model_len:
            parser.error(f"{spec} needs a context of {longest} tokens, which the model has not")
        run(llm, requests[: min(len(requests), 8)])  # compile and warm up
        runs = sorted((run(llm, requests) for _ in range(args.repeat)), key=lambda r: r["seconds"])
        median = rows[spec] = runs[len(runs) // 2]
        if int(count) == 1:  # a step reads every weight at least, so no more than 1
            median["bandwidth_share"] = weights * median["steps"] / median["seconds"] / bandwidth
        print(
            f"{spec:<14} {median['tokens_per_s']:>10.0f} tok/s  {median['steps']} steps", flush=True
        )
    report(
        {
            "benchmark": "offline",
            "not_shown": "HTTP; arrivals over time; sampling other than greedy",
            "model": name_of(args.model),
            "machine": machine(),
            "bandwidth_gb_s": bandwidth / 1e9,
            "weights_gb": weights / 1e9,
            "load_seconds": load_seconds,
            "options": options,
            "choices": _choices(llm),
            "rows": rows,
        },
        args.json,
    )


def _choices(llm: LLM) -> dict[str, Any]:
    """What was chosen by timing at start-up, with the times in µs."""
    graphs = llm.engine.worker.runner.graphs
    if graphs is None or not torch.cuda.is_available():
        return {}
    linear = {}
    for key, times in layers_linear._chooser(graphs.device).times.items():
        m, n, k, _, *fused = key
        names = ("bias", "residual", "norm", "silu")
        with_ = "+".join(name for name, there in zip(names, fused, strict=True) if there)
        linear[f"m={m} {n}x{k} {with_}"] = dict(sorted(times.items(), key=lambda item: item[1]))
    backend = graphs.backend
    return {
        "linear": linear,
        "prefill_config": backend.prefill_config,
        "library_prefill_costs": dict(backend.library_costs),
        "prefill_ms": dict(backend.times),
    }


if __name__ == "__main__":
    main()
