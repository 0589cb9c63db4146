"""How many sequences a KV pool holds: blocks on demand against reservation of the whole budget.

Both share one budget of token slots and both are kept saturated: the load offered at once is
twenty times the pool. The real scheduler and pool serve it without a model; a step brings every
resident sequence one token. The reservation gives each request prompt + max_tokens slots for its
whole life, and is spared the holes that a real contiguous allocator has (see fragmentation.py).

    sequences   residents in a saturated step, mean
    waste       share of the slots in allocated blocks that hold no token (internal fragmentation)
    use         share of the pool's slots that hold a token
    entries     block-table entries of a resident sequence: what small blocks cost; kernels walk
                them, and each is an allocation (and, with prefix caching, a hash)

What this does not show: speed. Small blocks cost attention kernels bandwidth, and more residents
help only as far as the device has compute for them. Prompts here are short, as the gain falls with
the share of the prompt in a sequence: --prompt 32 96 shows by how much. Prefix sharing is off.

Admission leaves a block free for each running sequence, so that it causes no preemption in the next
steps. Where sequences are a few blocks long that is much of the pool, and blocks of 16 hold no more
than reservation does: LOG.md says what other rules would give and cost.

    python benchmarks/capacity.py [--slots 16384] [--load 20] [--prompt 8 40] [--json FILE]
"""

import argparse
import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import machine, report
from contiguous import Ideal, Moment, serve_contiguous
from plots import figures, line_style
from simulation import EOS, Arrival, heavy_tailed, simulate, uniform

from pageserve.core.scheduler import Scheduler
from pageserve.messages import SchedulerOutput

BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64)
MOST_WASTE = 0.04  # what the chosen block size may leave empty


@dataclass(frozen=True)
class Workload:
    """Output lengths, and the budget that every request asks for."""

    budget: int
    output_tokens: Callable[[random.Random], int]


WORKLOADS = {
    "low variance": Workload(32, uniform(14, 32)),  # mean 23
    "heavy tail": Workload(256, heavy_tailed(39, 256)),  # mean 60
}


def load(workload: Workload, prompt: tuple[int, int], num_tokens: int) -> list[Arrival]:
    """Return requests of ``num_tokens`` tokens in all that arrive at once."""
    rng = random.Random(0)
    draw_prompt = uniform(*prompt)
    arrivals: list[Arrival] = []
    while num_tokens > 0:
        lengths = draw_prompt(rng), workload.output_tokens(rng)
        arrivals.append(Arrival(0.0, *lengths, max_tokens=workload.budget))
        num_tokens -= sum(lengths)
    return arrivals


def reserve(arrivals: list[Arrival], slots: int, warm_up: int) -> dict[str, Any]:
    """Serve the load, each request holding prompt + budget slots from admission to its end."""
    moments: list[Moment] = []

    def observe(step: int, moment: Moment) -> None:
        if moment.num_waiting and step >= warm_up:
            moments.append(moment)

    steps = serve_contiguous(arrivals, Ideal(slots), observe)
    used = sum(m.used for m in moments)
    return {
        "sequences": statistics.mean(m.num_running for m in moments),
        "waste": 1 - used / sum(slots - m.free for m in moments),
        "use": used / (slots * len(moments)),
        "steps": steps,
    }


def page(arrivals: list[Arrival], slots: int, block_size: int, warm_up: int) -> dict[str, Any]:
    """Serve the load with the engine's scheduler and a pool of as many slots."""
    scheduler = Scheduler(
        num_blocks=slots // block_size,
        block_size=block_size,
        max_num_seqs=slots,  # neither the batch
        max_num_batched_tokens=slots,  # nor the step is to limit anything, only the pool
        max_model_len=slots,
        enable_prefix_caching=False,
        eos_token_ids=[EOS],
    )
    residents, used, allocated, entries = [], [], [], []
    computed = 0

    def observe(clock: float, step: SchedulerOutput) -> None:
        nonlocal computed
        computed += step.num_scheduled_tokens
        stats = scheduler.stats()
        if stats.num_waiting and clock >= warm_up:
            residents.append(stats.num_running)
            used.append(stats.used_slots)
            allocated.append(stats.num_used_blocks * block_size)
            entries.append(scheduler.kv_cache_manager.num_table_entries)

    simulate(scheduler, arrivals, observe=observe)
    stats = scheduler.stats()
    needed = sum(a.prompt_tokens + a.output_tokens - 1 for a in arrivals)
    return {
        "sequences": statistics.mean(residents),
        "waste": 1 - sum(used) / sum(allocated),
        "use": statistics.mean(used) / slots,
        "steps": stats.steps_total,
        "entries": sum(entries) / sum(residents),
        "preemptions": stats.preemptions_total,
        "recomputed": computed / needed - 1,
    }


def study(slots: int, load_factor: float, prompt: tuple[int, int]) -> dict[str, Any]:
    """Run every workload and block size; the result is deterministic."""
    rows: dict[str, Any] = {}
    for name, workload in WORKLOADS.items():
        arrivals = load(workload, prompt, int(load_factor * slots))
        contiguous = reserve(arrivals, slots, workload.budget)
        rows[name] = {
            "budget": workload.budget,
            "requests": len(arrivals),
            "mean_prompt": statistics.mean(a.prompt_tokens for a in arrivals),
            "mean_output": statistics.mean(a.output_tokens for a in arrivals),
            "contiguous": contiguous,
            "paged": {},
        }
        for block_size in BLOCK_SIZES:
            paged = page(arrivals, slots, block_size, workload.budget)
            paged["gain"] = paged["sequences"] / contiguous["sequences"]
            rows[name]["paged"][str(block_size)] = paged
    return {"block_size": choose_block_size(rows), "workloads": rows}


def choose_block_size(rows: dict[str, Any]) -> int:
    """Return the largest block size that leaves less than MOST_WASTE empty in every workload."""
    fits = [
        b
        for b in BLOCK_SIZES
        if all(r["paged"][str(b)]["waste"] < MOST_WASTE for r in rows.values())
    ]
    return max(fits)


def draw(result: dict[str, Any], path: Path) -> None:
    """Gain, waste and table length over block sizes."""
    titles = ["Sequences resident, against reservation", "Slots left empty", "Table entries"]
    with figures(path, titles, xlabel="block size (tokens)") as panels:
        for axes, key, scale in zip(panels, ("gain", "waste", "entries"), (1, 100, 1), strict=True):
            for index, (name, row) in enumerate(result["workloads"].items()):
                values = [scale * row["paged"][str(b)][key] for b in BLOCK_SIZES]
                axes.plot(BLOCK_SIZES, values, label=name, **line_style(index))
            axes.axvline(result["block_size"], color="0.6", linewidth=0.8)
            axes.set_xscale("log", base=2)
            axes.set_xticks(BLOCK_SIZES, map(str, BLOCK_SIZES))
            axes.set_ylim(bottom=0)
        panels[0].axhline(1, color="0.4", linewidth=0.8)
        for axes, label in zip(panels, ("x", "%", "per sequence"), strict=True):
            axes.set_ylabel(label)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--slots", type=int, default=16384, help="tokens that the pool holds")
    parser.add_argument("--load", type=float, default=20.0, help="tokens offered, in pools")
    parser.add_argument("--prompt", type=int, nargs=2, default=(8, 40), metavar=("LOW", "HIGH"))
    parser.add_argument("--json", help="write the result here, pictures beside it")
    args = parser.parse_args()
    result = study(args.slots, args.load, tuple(args.prompt))
    for name, row in result["workloads"].items():
        contiguous = row["contiguous"]
        print(
            f"{name}: {row['requests']} requests, prompts {row['mean_prompt']:.0f}, outputs "
            f"{row['mean_output']:.0f} of at most {row['budget']}; reserved: "
            f"{contiguous['sequences']:.1f} sequences, {100 * contiguous['use']:.0f} % in use"
        )
        print("  block  sequences   gain  waste    use  entries  preempted  recomputed")
        for size, r in row["paged"].items():
            print(
                f"  {size:>5} {r['sequences']:>10.1f} {r['gain']:>5.2f}x {r['waste']:>6.1%}"
                f" {r['use']:>6.0%} {r['entries']:>8.1f} {r['preemptions']:>10}"
                f" {r['recomputed']:>11.1%}"
            )
    print(f"largest block size with less than {MOST_WASTE:.0%} waste: {result['block_size']}\n")
    if args.json:
        draw(result, Path(args.json).with_suffix(""))
    report(
        {
            "benchmark": "capacity",
            "not_shown": "speed; attention over small blocks; long prompts; prefix sharing",
            "machine": machine(),
            "slots": args.slots,
            "load": args.load,
            "prompt": list(args.prompt),
            **result,
        },
        args.json,
    )


if __name__ == "__main__":
    main()
