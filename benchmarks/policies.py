"""The scheduling policies on one traffic, in simulation: who waits, who is preempted, who is served
unfairly. The real scheduler plans every step; only the device is a formula.

A step is taken to last ``fixed + per_token * tokens``, whatever the lengths of the sequences. Both
constants come from measured figures in benchmarks/results: on the CPU from the one-stream and the
24-request runs of throughput.py, on the GPU from one and 256 decodes of offline.py (0.5B). The
result names them. Prefix caching is on; a request is done when its output is, which the scheduler
cannot see coming.

Workloads (at three quarters of what the device can do, so queues come and go):

    bursts   Poisson arrivals, and every now and then many at once
    long     the same without bursts, one prompt in eight being twenty times as long
    tight    bursts of short and very long prompts with long outputs, on a pool that holds a quarter
             of what the other two have, so requests are preempted

One request in ten is urgent (priority -1), which only the policy "priority" knows. Fairness is
Jain's index over the requests' speed against running alone (ideal latency / latency): 1 when all
are slowed down alike, 1/n when one has everything.

What this does not show: costs that grow with context (attention), the time planning takes (see
scheduler.py), tail effects of a real device. Trust comparisons of policies, not times.

    python benchmarks/policies.py [--device gpu] [--trace FILE] [--write-trace FILE] [--json FILE]
"""

import argparse
import dataclasses
import json
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import RESULTS, machine, percentile, report
from plots import bars, figures
from simulation import (
    EOS,
    Arrival,
    Outcome,
    heavy_tailed,
    read_trace,
    simulate,
    write_trace,
)

from pageserve.core.policy import POLICIES
from pageserve.core.scheduler import Scheduler

BLOCK_SIZE = 16
LOAD = 0.75  # of what the device can do with full batches
Length = Callable[[random.Random], int]


@dataclass(frozen=True)
class Device:
    """How long a step takes in seconds, and what a server on it is configured to."""

    fixed: float
    per_token: float
    max_num_seqs: int
    max_num_batched_tokens: int

    def step_seconds(self, num_tokens: int) -> float:
        return self.fixed + self.per_token * num_tokens

    def alone(self, a: Arrival) -> float:
        """Latency of a request that has the device to itself."""
        chunks, rest = divmod(a.prompt_tokens, self.max_num_batched_tokens)
        seconds = chunks * self.step_seconds(self.max_num_batched_tokens)
        seconds += self.step_seconds(rest) if rest else 0.0
        return seconds + (a.output_tokens - 1) * self.step_seconds(1)


def cpu_device(results: Path = RESULTS) -> Device:
    """The step that explains both the one-stream and the batched run of throughput.py."""
    measured = json.loads((results / "cpu_throughput.json").read_text())
    one, many = (measured["rows"][n] for n in ("single: pageserve", "pageserve"))
    one_step = 1 / one["tokens_per_s"]
    seconds = measured["output_tokens"] / many["tokens_per_s"]
    # Each request's last token is never computed; cached prompt tokens are not computed again.
    tokens = measured["prompt_tokens"] - many["cached_tokens"]
    tokens += measured["output_tokens"] - measured["requests"]
    per_token = (seconds - many["steps"] * one_step) / (tokens - many["steps"])
    return Device(one_step - per_token, per_token, 32, 512)


def gpu_device(results: Path = RESULTS) -> Device:
    """The step that explains one and 256 decodes of offline.py."""
    rows = json.loads((results / "gpu_offline_0.5b.json").read_text())["rows"]
    one, many = (n / rows[f"decode:{n}"]["tokens_per_s"] for n in (1, 256))
    per_token = (many - one) / 255
    return Device(one - per_token, per_token, 256, 8192)


DEVICES: dict[str, Callable[[], Device]] = {"cpu": cpu_device, "gpu": gpu_device}


@dataclass(frozen=True)
class Workload:
    """A trace, and the pool it meets in tokens for each sequence that may run at once."""

    arrivals: list[Arrival]
    pool_per_seq: int


def make_workloads(device: Device, count: int) -> dict[str, Workload]:
    """Return the three workloads, their arrivals as fast as suits the device."""
    chat = heavy_tailed(60, 400, sigma=0.7), heavy_tailed(40, 256, sigma=0.8)
    talkative = heavy_tailed(40, 160, sigma=0.7), heavy_tailed(150, 512, sigma=0.7)
    bursty = _in_bursts(_requests(*chat, count), device)
    long = _poisson(_requests(*chat, count, long_prompts=True), device)
    tight = _in_bursts(_requests(*talkative, count // 2, long_prompts=True), device)
    return {
        "bursts": Workload(bursty, 1024),
        "long": Workload(long, 1024),
        "tight": Workload(tight, 256),
    }


def _requests(
    prompt: Length, output: Length, count: int, *, long_prompts: bool = False
) -> list[Arrival]:
    """Requests without times, half of them behind one of four system prompts."""
    rng = random.Random(0)
    arrivals = []
    for index in range(count):
        is_long = long_prompts and index % 8 == 7
        group = None if is_long or rng.random() < 0.5 else f"system {rng.randrange(4)}"
        prefix_tokens = 64 if group else 0
        arrivals.append(
            Arrival(
                0.0,
                prefix_tokens + prompt(rng) * (20 if is_long else 1),
                output(rng),
                max_tokens=512,
                priority=-1 if rng.random() < 0.1 else 0,
                prefix_group=group,
                prefix_tokens=prefix_tokens,
            )
        )
    return arrivals


def _poisson(requests: list[Arrival], device: Device) -> list[Arrival]:
    """Let requests arrive independently of each other."""
    rng = random.Random(1)
    gap = _seconds_per_request(device, requests) / LOAD
    clock, arrivals = 0.0, []
    for a in requests:
        clock += rng.expovariate(1 / gap)
        arrivals.append(dataclasses.replace(a, arrival=round(clock, 6)))
    return arrivals


def _in_bursts(requests: list[Arrival], device: Device) -> list[Arrival]:
    """Let every second batch of four times the device's sequences arrive at once, the others one
    by one at half the rate that :func:`_poisson` has, so that the load is the same."""
    rng = random.Random(1)
    gap = 2 * _seconds_per_request(device, requests) / LOAD
    clock, arrivals = 0.0, []
    for index, a in enumerate(requests):
        if index // (4 * device.max_num_seqs) % 2 == 0:
            clock += rng.expovariate(1 / gap)
        arrivals.append(dataclasses.replace(a, arrival=round(clock, 6)))
    return arrivals


def _seconds_per_request(device: Device, arrivals: Sequence[Arrival]) -> float:
    """Device time a request takes when the batch is full."""
    prompt = statistics.mean(a.prompt_tokens for a in arrivals)
    output = statistics.mean(a.output_tokens for a in arrivals)
    fixed = device.fixed * output / device.max_num_seqs
    return fixed + device.per_token * (prompt + output)


def run(policy: str, workload: Workload, device: Device) -> dict[str, Any]:
    """Serve a workload under a policy and summarise what its requests saw."""
    longest = max(a.prompt_tokens + a.budget for a in workload.arrivals) + 1
    pool = max(device.max_num_seqs * workload.pool_per_seq, longest)
    scheduler = Scheduler(
        num_blocks=-(-pool // BLOCK_SIZE),
        block_size=BLOCK_SIZE,
        max_num_seqs=device.max_num_seqs,
        max_num_batched_tokens=device.max_num_batched_tokens,
        max_model_len=longest,
        policy=policy,
        eos_token_ids=[EOS],
    )
    outcomes = simulate(
        scheduler, workload.arrivals, lambda step: device.step_seconds(step.num_scheduled_tokens)
    )
    stats = scheduler.stats()
    return summary(outcomes, device) | {
        "preemptions": stats.preemptions_total,
        "steps": stats.steps_total,
        "peak_blocks": stats.peak_used_blocks / scheduler.kv_cache_manager.block_pool.num_blocks,
    }


def summary(outcomes: Sequence[Outcome], device: Device) -> dict[str, Any]:
    """Percentiles in seconds over all requests, and of the urgent and the long ones."""
    end = max(o.finished for o in outcomes)
    start = min(o.arrival.arrival for o in outcomes)
    typical = statistics.median(o.arrival.prompt_tokens for o in outcomes)
    result: dict[str, Any] = {
        "output_tokens_per_s": sum(o.arrival.output_tokens for o in outcomes) / (end - start),
        "fairness": jain([device.alone(o.arrival) / o.latency for o in outcomes]),
    }
    for name in ("queue_time", "ttft", "longest_gap", "latency"):
        values = [getattr(o, name) for o in outcomes]
        result |= {f"{name}_p50": percentile(values, 50), f"{name}_p99": percentile(values, 99)}
    groups = {
        "urgent": [o.ttft for o in outcomes if o.arrival.priority < 0],
        "long": [o.ttft for o in outcomes if o.arrival.prompt_tokens > 4 * typical],
    }
    for name, ttfts in groups.items():
        result[f"ttft_{name}_p50"] = percentile(ttfts, 50) if ttfts else None
    return result


def jain(shares: Sequence[float]) -> float:
    """Jain's fairness index, from 1/n (one has everything) to 1 (all have the same)."""
    return sum(shares) ** 2 / (len(shares) * sum(s * s for s in shares))


def draw(rows: dict[str, dict[str, Any]], path: Path) -> None:
    """Median and tail of the time to first token, and fairness, of each policy."""
    titles = ["TTFT p50 (s)", "TTFT p99 (s)", "Fairness (Jain)"]
    with figures(path, titles) as panels:
        for axes, key in zip(panels, ("ttft_p50", "ttft_p99", "fairness"), strict=True):
            series = {
                policy: [by_policy[policy][key] for by_policy in rows.values()]
                for policy in POLICIES
            }
            bars(axes, list(rows), series)  # twelve numbers would not fit; the table has them
        panels[2].set_ylim(0, 1.4)  # the legend lies above the bars


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=list(DEVICES), default="cpu", help="whose step times")
    parser.add_argument("--requests", type=int, help="(default: 64 times the batch)")
    parser.add_argument("--trace", help="replay this JSONL file (simulation.py names its fields)")
    parser.add_argument("--pool", type=int, default=1024, help="pool of --trace: tokens per slot")
    parser.add_argument("--write-trace", help="write the trace of --workload to a file and stop")
    parser.add_argument("--workload", choices=("bursts", "long", "tight"), default="bursts")
    parser.add_argument("--json", help="write the result here, pictures beside it")
    args = parser.parse_args()
    device = DEVICES[args.device]()
    if args.trace:
        workloads = {Path(args.trace).stem: Workload(read_trace(args.trace), args.pool)}
    else:
        workloads = make_workloads(device, args.requests or 64 * device.max_num_seqs)
    if args.write_trace:
        write_trace(args.write_trace, workloads[args.workload].arrivals)
        return
    print(
        f"{args.device}: a step takes {device.fixed * 1e3:.3f} ms + {device.per_token * 1e6:.1f} µs"
        f" a token; {device.max_num_seqs} sequences, {device.max_num_batched_tokens} tokens a step"
    )
    rows: dict[str, dict[str, Any]] = {}
    for name, workload in workloads.items():
        rows[name] = {policy: run(policy, workload, device) for policy in POLICIES}
        _print_table(name, rows[name])
    if args.json:
        draw(rows, Path(args.json).with_suffix(""))
    report(
        {
            "benchmark": "policies",
            "not_shown": "attention over long contexts; planning time; a real device's tail",
            "machine": machine(),
            "device": {"name": args.device, **dataclasses.asdict(device)},
            "requests": {name: len(w.arrivals) for name, w in workloads.items()},
            "rows": rows,
        },
        args.json,
    )


def _print_table(name: str, by_policy: dict[str, Any]) -> None:
    print(f"\n{name:<16} queue p50/p99 s   TTFT p50/p99 s  urgent   long   gap p99  preempt.  Jain")
    for policy, r in by_policy.items():
        urgent, long = (
            f"{r[key]:.2f}" if r[key] is not None else ""
            for key in ("ttft_urgent_p50", "ttft_long_p50")
        )
        print(
            f"  {policy:<15} {r['queue_time_p50']:>6.2f} /{r['queue_time_p99']:>6.2f} "
            f"{r['ttft_p50']:>8.2f} /{r['ttft_p99']:>6.2f} {urgent:>7} {long:>6} "
            f"{r['longest_gap_p99']:>8.2f} {r['preemptions']:>9} {r['fairness']:>5.2f}"
        )


if __name__ == "__main__":
    main()
