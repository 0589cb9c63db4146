"""What planning costs: microseconds of schedule() + update() per pure-decode step.

No device and no model: every step's tokens are made up, so the figures are the scheduler's own.
The last line of output is JSON.

What this does not show: prompts, preemption, prefix hits, grammars, the cost of sending a step.

    python benchmarks/scheduler.py [--json FILE]
"""

import argparse
import gc
import statistics
import time

from common import machine, report

from pageserve.core.scheduler import Scheduler
from pageserve.messages import AddRequest, ModelRunnerOutput, SchedulerOutput
from pageserve.sampling_params import SamplingParams

PROMPT_TOKENS = 128
BLOCK_SIZE = 16


def result_of(step: SchedulerOutput) -> ModelRunnerOutput:
    """Make up one token for every row that samples."""
    return ModelRunnerOutput(step.step_id, [7] * sum(row.samples for row in step.rows))


def create_scheduler(num_running: int, num_steps: int) -> Scheduler:
    """Return a scheduler whose pool holds ``num_running`` requests to the last step."""
    blocks = -(-(PROMPT_TOKENS + num_steps) // BLOCK_SIZE) + 2
    return Scheduler(
        num_blocks=blocks * num_running,
        block_size=BLOCK_SIZE,
        max_num_seqs=num_running,
        max_num_batched_tokens=max(8192, num_running),
        max_model_len=32768,
        eos_token_ids=[0],
    )


def add_requests(scheduler: Scheduler, count: int, first: int = 0) -> None:
    """Queue ``count`` requests with prompts of their own that never stop by themselves."""
    params = SamplingParams(max_tokens=None)
    for i in range(first, first + count):
        prompt = [1 + (i * 31 + j * 7) % 1000 for j in range(PROMPT_TOKENS)]
        assert scheduler.add(AddRequest(f"r{i}", prompt, params, 0.0)) is None


def measure(num_running: int, depth: int, num_queued: int = 0, num_steps: int = 400) -> float:
    """Return the median cost in µs of planning and absorbing one decode step."""
    scheduler = create_scheduler(num_running, num_steps + 64)
    add_requests(scheduler, num_running)
    in_flight = []
    while len(scheduler.running) < num_running or len(scheduler.waiting):
        step = scheduler.schedule()
        assert step is not None
        scheduler.update(step, result_of(step))
    add_requests(scheduler, num_queued, first=num_running)
    for _ in range(8 + depth):  # prompts are done, the pipeline is full
        step = scheduler.schedule()
        assert step is not None
        in_flight.append((step, result_of(step)))
        if len(in_flight) >= depth:
            scheduler.update(*in_flight.pop(0))
    gc.collect()
    times = []
    for _ in range(num_steps):
        start = time.perf_counter()
        step = scheduler.schedule()
        planned = time.perf_counter()
        assert step is not None and len(step.rows) == num_running
        in_flight.append((step, result_of(step)))
        resumed = time.perf_counter()
        outputs = scheduler.update(*in_flight.pop(0))
        scheduler.stats()
        times.append(planned - start + time.perf_counter() - resumed)
        assert len(outputs) == num_running
    return statistics.median(times) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", help="also write the result to this file")
    args = parser.parse_args()
    results = []
    for num_running in (32, 256, 512):
        for depth in (1, 2):
            for num_queued in (0, 2000):
                cost = measure(num_running, depth, num_queued)
                results.append(
                    {
                        "running": num_running,
                        "depth": depth,
                        "queued": num_queued,
                        "us_per_step": round(cost, 1),
                        "us_per_row": round(cost / num_running, 3),
                    }
                )
                print(
                    f"{num_running:4d} decodes, depth {depth}, {num_queued:5d} queued: "
                    f"{cost:7.1f} µs a step, {cost / num_running:.3f} µs a row"
                )
    report(
        {
            "benchmark": "scheduler",
            "not_shown": "prompts; preemption; prefix hits; grammars; sending a step",
            "machine": machine(),
            "block_size": BLOCK_SIZE,
            "results": results,
        },
        args.json,
    )


if __name__ == "__main__":
    main()
