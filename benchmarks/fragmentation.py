"""What an allocator of KV memory leaves unused over time: runs of slots against blocks.

    equal runs   every request holds a run of the longest allowed length, allocated up front
    first fit    a run of prompt + max_tokens at the lowest hole that is long enough
    blocks of N  the engine's scheduler and pool: blocks on demand

Prompt and output lengths are uniform, bimodal or heavy-tailed; a client asks for the next power of
two above its output. Everything arrives at once, so the pool is always in demand.

    internal   share of the allocated slots that hold no token
    external   1 - longest hole / free slots: how torn the free memory is. Any free block serves any
               request, so blocks have none
    blocked    share of the steps in which the first waiting request does not fit although enough
               slots are free: external fragmentation that costs something
    idle       share of the pool that is free while requests wait. Blocks keep some free on purpose,
               so that one admission more does not force a preemption in the next steps
    use        share of the pool that holds tokens; the pool would be perfect at 100 %

What this does not show: the time an allocator takes, buddy or compacting allocators, the allocator
of PyTorch or CUDA underneath (the pool is one allocation), an open loop of arrivals.

    python benchmarks/fragmentation.py [--slots 16384] [--load 40] [--json FILE]
"""

import argparse
import random
import statistics
from collections.abc import Callable
from pathlib import Path

from common import machine, report
from contiguous import Allocator, EqualRuns, FirstFit, Moment, serve_contiguous
from plots import figures, line_style
from simulation import EOS, Arrival, bimodal, heavy_tailed, simulate, uniform

from pageserve.core.scheduler import Scheduler
from pageserve.messages import SchedulerOutput

LONGEST = 512  # tokens of a prompt, and of an output
DISTRIBUTIONS: dict[str, Callable[[random.Random], int]] = {
    "uniform": uniform(1, LONGEST),
    "bimodal": bimodal(uniform(8, 48), uniform(384, LONGEST), 0.25),
    "heavy-tailed": heavy_tailed(60, LONGEST, sigma=1.2),
}
BLOCK_SIZES = (16, 4)


def requests(length: Callable[[random.Random], int], num_tokens: int) -> list[Arrival]:
    """Return requests of about ``num_tokens`` tokens in all that arrive at once."""
    rng = random.Random(0)
    arrivals: list[Arrival] = []
    while num_tokens > 0:
        prompt, output = length(rng), length(rng)
        budget = 1 << (output - 1).bit_length()  # the next power of two
        arrivals.append(Arrival(0.0, prompt, output, max_tokens=budget))
        num_tokens -= prompt + output
    return arrivals


class Record:
    """One sample a step, as long as requests wait."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.internal: list[float] = []
        self.external: list[float] = []
        self.blocked: list[bool] = []
        self.idle: list[float] = []
        self.use: list[float] = []

    def add(self, moment: Moment) -> None:
        """Take a sample unless nothing waits any more."""
        if not moment.num_waiting:
            return
        self.internal.append(1 - moment.used / (self.slots - moment.free))
        self.external.append(1 - moment.largest_hole / moment.free if moment.free else 0.0)
        self.blocked.append(moment.largest_hole < moment.wanted <= moment.free)
        self.idle.append(moment.free / self.slots)
        self.use.append(moment.used / self.slots)

    def summary(self) -> dict[str, float]:
        """Return the means over the second half, when the pool has aged."""
        return {
            name: statistics.mean(values[len(values) // 2 :])
            for name, values in vars(self).items()
            if isinstance(values, list)
        }


def run_contiguous(arrivals: list[Arrival], allocator: Allocator, slots: int) -> Record:
    """Serve the requests from reserved runs."""
    record = Record(slots)
    serve_contiguous(arrivals, allocator, lambda step, moment: record.add(moment))
    return record


def run_blocks(arrivals: list[Arrival], slots: int, block_size: int) -> Record:
    """Serve the requests with the engine's scheduler and pool."""
    scheduler = Scheduler(
        num_blocks=slots // block_size,
        block_size=block_size,
        max_num_seqs=slots,  # only the pool is to limit anything
        max_num_batched_tokens=slots,
        max_model_len=slots,
        enable_prefix_caching=False,
        eos_token_ids=[EOS],
    )
    record = Record(slots)

    def observe(clock: float, step: SchedulerOutput) -> None:
        stats = scheduler.stats()
        free = stats.num_free_blocks * block_size
        # Wherever they lie, free blocks make one table: the largest hole is all that is free.
        record.add(Moment(stats.num_running, stats.num_waiting, stats.used_slots, free, free, 0))

    simulate(scheduler, arrivals, observe=observe)
    return record


def study(slots: int, num_tokens: int) -> dict[str, dict[str, Record]]:
    """Run every distribution through every allocator; deterministic."""
    records: dict[str, dict[str, Record]] = {}
    for name, length in DISTRIBUTIONS.items():
        arrivals = requests(length, num_tokens)
        records[name] = {
            "equal runs": run_contiguous(arrivals, EqualRuns(slots, 2 * LONGEST), slots),
            "first fit": run_contiguous(arrivals, FirstFit(slots), slots),
        }
        for size in BLOCK_SIZES:
            records[name][f"blocks of {size}"] = run_blocks(arrivals, slots, size)
    return records


def draw(records: dict[str, dict[str, Record]], path: Path, num_steps: int) -> None:
    """Internal and external fragmentation over the first ``num_steps`` steps, a picture each."""
    steps = range(0, num_steps, max(num_steps // 300, 1))  # more points than pixels help nobody
    for kind in ("internal", "external"):
        titles = [f"{kind} fragmentation, {name}" for name in records]
        picture = path.with_name(f"{path.name}_{kind}")
        with figures(picture, titles, xlabel="step", ylabel="%") as panels:
            for axes, by_allocator in zip(panels, records.values(), strict=True):
                for index, (name, record) in enumerate(by_allocator.items()):
                    values = getattr(record, kind)
                    shown = [i for i in steps if i < len(values)]
                    style = {**line_style(index), "linewidth": 1.0, "markevery": 0.1}
                    axes.plot(shown, [100 * values[i] for i in shown], label=name, **style)
                axes.set_ylim(0, 100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--slots", type=int, default=16384, help="tokens that the pool holds")
    parser.add_argument("--load", type=float, default=40.0, help="tokens offered, in pools")
    parser.add_argument("--steps", type=int, default=1500, help="steps in the pictures")
    parser.add_argument("--json", help="write the result here, pictures beside it")
    args = parser.parse_args()
    records = study(args.slots, int(args.load * args.slots))
    rows = {
        name: {allocator: record.summary() for allocator, record in by_allocator.items()}
        for name, by_allocator in records.items()
    }
    for name, by_allocator in rows.items():
        print(f"{name:<14} internal  external  blocked   idle    use")
        for allocator, r in by_allocator.items():
            print(
                f"  {allocator:<12} {r['internal']:>7.1%} {r['external']:>9.1%}"
                f" {r['blocked']:>8.1%} {r['idle']:>6.1%} {r['use']:>6.1%}"
            )
    print()
    if args.json:
        draw(records, Path(args.json).with_suffix(""), args.steps)
    report(
        {
            "benchmark": "fragmentation",
            "not_shown": "an allocator's time; buddy or compacting allocators; open-loop arrivals",
            "machine": machine(),
            "slots": args.slots,
            "load": args.load,
            "longest": LONGEST,
            "rows": rows,
        },
        args.json,
    )


if __name__ == "__main__":
    main()
