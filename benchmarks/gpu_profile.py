"""What the GPU does in the steps of a workload: how busy it is, and which kernels take the time.

Records some steps in mid-run with the CUDA profiler and prints the busy share (the union of all
kernels and copies over the recorded time), the gaps between them, and the time per kernel. The
profiler slows launches down, so the busy share is a lower bound where steps are launched kernel by
kernel; steps that replay as graphs are hardly touched.

    python benchmarks/gpu_profile.py --model DIR --workload chat:512 --skip 100 --steps 50
"""

import argparse
import json
import re
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from common import machine, name_of, percentile, report
from offline import run, workload

from pageserve.llm import LLM
from pageserve.messages import AddRequest
from pageserve.sampling_params import SamplingParams

GPU_CATEGORIES = {"kernel", "gpu_memcpy", "gpu_memset"}
TOP = 25


def record(llm: LLM, spec: str, skip: int, steps: int) -> tuple[list[dict[str, Any]], int, float]:
    """Run ``steps`` steps of a workload after ``skip`` others under the profiler; return the GPU's
    trace events (times in µs), how many steps there were and their seconds on the host's clock."""
    name, count = spec.split(":")
    engine = llm.engine
    requests = workload(name, int(count), vocab=min(49000, engine.worker.model_config.vocab_size))
    run(llm, requests[:8])
    engine.scheduler.reset_prefix_cache()
    for i, (ids, budget) in enumerate(requests):
        params = SamplingParams(temperature=0, max_tokens=budget, ignore_eos=True)
        engine.add(AddRequest(str(i), ids, params, time.monotonic()))
    for _ in range(skip):
        engine.step()
    before = engine.stats().steps_total
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        start = time.perf_counter()
        for _ in range(steps):
            engine.step()
        seconds = time.perf_counter() - start
        torch.cuda.synchronize()
    num_steps = engine.stats().steps_total - before
    while engine.has_work():
        engine.step()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    return [e for e in events if e.get("cat") in GPU_CATEGORIES], num_steps, seconds


def summarise(events: Iterable[dict[str, Any]], num_steps: int) -> dict[str, Any]:
    """Return the busy share, the gaps in µs and the time per kernel name, in ms a step."""
    spans = sorted((float(e["ts"]), float(e["ts"]) + float(e["dur"])) for e in events)
    busy, gaps, end = 0.0, [], spans[0][0]
    for begin, finish in spans:
        if begin > end:
            gaps.append(begin - end)
        busy += max(0.0, finish - max(begin, end))
        end = max(end, finish)
    by_name: dict[str, list[float]] = defaultdict(list)
    for event in events:
        by_name[_short(event["name"])].append(float(event["dur"]))
    kernels = [
        {
            "name": name,
            "ms_per_step": sum(durations) / 1e3 / num_steps,
            "calls_per_step": len(durations) / num_steps,
            "median_us": percentile(durations, 50),
        }
        for name, durations in by_name.items()
    ]
    kernels.sort(key=lambda k: -float(str(k["ms_per_step"])))
    total = end - spans[0][0]
    return {
        "busy_share": busy / total,
        "ms_per_step": total / 1e3 / num_steps,
        "gaps_over_10_us_share": sum(g for g in gaps if g > 10) / total,
        "gaps_over_10_us_per_step": sum(g > 10 for g in gaps) / num_steps,
        "longest_gaps_us": sorted(gaps, reverse=True)[:5],
        "kernels": kernels[:TOP],
    }


def _short(name: str) -> str:
    name = re.sub(r"<.*", "", name.removeprefix("void "))
    return name if len(name) <= 60 else name[:57] + "..."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--workload", action="append", metavar="NAME:N", required=True)
    parser.add_argument("--skip", type=int, default=100)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--option", action="append", default=[], metavar="NAME=INT")
    parser.add_argument("--json")
    args = parser.parse_args()
    options = {k: int(v) for k, v in (o.split("=") for o in args.option)}
    llm = LLM(model=args.model, dtype=args.dtype, **options)
    profiles = {}
    for spec in args.workload:
        events, num_steps, seconds = record(llm, spec, args.skip, args.steps)
        profile = profiles[spec] = summarise(events, num_steps)
        profile["host_ms_per_step"] = seconds * 1e3 / num_steps
        print(
            f"\n{spec}: {profile['ms_per_step']:.3f} ms a step, GPU busy "
            f"{profile['busy_share']:.1%}, gaps over 10 µs {profile['gaps_over_10_us_share']:.1%}"
        )
        for k in profile["kernels"]:
            print(
                f"  {k['ms_per_step']:8.3f} ms {k['calls_per_step']:7.1f} x "
                f"{k['median_us']:8.1f} µs  {k['name']}"
            )
    report(
        {
            "benchmark": "gpu_profile",
            "model": name_of(args.model),
            "machine": machine(),
            "options": options,
            "skip": args.skip,
            "profiles": profiles,
        },
        args.json,
    )


if __name__ == "__main__":
    main()
