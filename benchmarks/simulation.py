"""The real scheduler and pool under made-up traffic: no model, no device, a clock that is counted.

The simulations (capacity, fragmentation, policies) run on it. Requests come as a trace, either made
by a workload or read from a JSONL file with one request a line:

    {"arrival": 0.25, "prompt_tokens": 120, "output_tokens": 40, "max_tokens": 256,
     "priority": 0, "prefix_group": "system-1", "prefix_tokens": 96}

Only the first three are required. ``arrival`` is in seconds; ``max_tokens`` is what the request
says it may take (default: its output) and all that the scheduler knows of its length;
``output_tokens`` is where it ends. The first ``prefix_tokens`` of a prompt are equal in its
``prefix_group``.
"""

import dataclasses
import json
import math
import random
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pageserve.core.scheduler import Scheduler
from pageserve.messages import AddRequest, ModelRunnerOutput, SchedulerOutput
from pageserve.sampling_params import SamplingParams

EOS, TEXT = 0, 1  # the only tokens that are ever generated


@dataclass(frozen=True)
class Arrival:
    """One request of a trace; see the module's docstring."""

    arrival: float
    prompt_tokens: int
    output_tokens: int
    max_tokens: int | None = None
    priority: int = 0
    prefix_group: str | None = None
    prefix_tokens: int = 0

    def __post_init__(self) -> None:
        """Raises ValueError for what no client could send."""
        budget = self.output_tokens if self.max_tokens is None else self.max_tokens
        if self.arrival < 0 or self.prompt_tokens < 1 or not 1 <= self.output_tokens <= budget:
            raise ValueError(f"impossible request: {self}")
        if not 0 <= self.prefix_tokens <= self.prompt_tokens:
            raise ValueError(f"prefix_tokens must lie within the prompt: {self}")

    @property
    def budget(self) -> int:
        """Output tokens that the request may take."""
        return self.output_tokens if self.max_tokens is None else self.max_tokens


@dataclass
class Outcome:
    """What became of a request; times in seconds of the simulated clock."""

    arrival: Arrival
    scheduled: float = math.nan
    first_token: float = math.nan
    finished: float = math.nan
    longest_gap: float = 0.0  # between two tokens
    preemptions: int = 0
    cached_tokens: int = 0
    last_token: float = math.nan

    @property
    def queue_time(self) -> float:
        """From arrival to the start of the first step it was part of."""
        return self.scheduled - self.arrival.arrival

    @property
    def ttft(self) -> float:
        """From arrival to the end of the step that brought the first token."""
        return self.first_token - self.arrival.arrival

    @property
    def latency(self) -> float:
        """From arrival to the last token."""
        return self.finished - self.arrival.arrival


def simulate(
    scheduler: Scheduler,
    arrivals: Sequence[Arrival],
    step_seconds: Callable[[SchedulerOutput], float] = lambda step: 1.0,
    observe: Callable[[float, SchedulerOutput], None] = lambda clock, step: None,
) -> list[Outcome]:
    """Serve a trace, sorted by arrival, to the end and return each request's outcome in order.

    A step begins when the one before has ended and takes ``step_seconds(step)``; what arrives
    meanwhile waits for the next. ``observe(start, step)`` is called after a step is planned. The
    scheduler needs :data:`EOS` among its ``eos_token_ids``. Raises ValueError for a request that
    can never run.
    """
    assert list(arrivals) == sorted(arrivals, key=lambda a: a.arrival), "a trace is in order"
    outcomes = [Outcome(a) for a in arrivals]
    clock, num_added, num_finished = 0.0, 0, 0
    while num_finished < len(arrivals):
        if not scheduler.has_work():
            clock = max(clock, arrivals[num_added].arrival)
        while num_added < len(arrivals) and arrivals[num_added].arrival <= clock:
            refused = scheduler.add(_message(num_added, arrivals[num_added]))
            if refused is not None:
                raise ValueError(refused.error)
            num_added += 1
        step = scheduler.schedule()
        assert step is not None, "requests starve"
        observe(clock, step)
        _note_scheduled(scheduler, step, outcomes, clock)
        clock += step_seconds(step)
        for output in scheduler.update(step, _result_of(scheduler, step, arrivals)):
            outcome = outcomes[int(output.request_id)]
            if math.isnan(outcome.first_token):
                outcome.first_token = clock
            else:
                outcome.longest_gap = max(outcome.longest_gap, clock - outcome.last_token)
            outcome.last_token = clock
            if output.finish_reason is not None:
                outcome.finished = clock
                outcome.preemptions = output.num_preemptions
                outcome.cached_tokens = output.num_cached_tokens
                num_finished += 1
    return outcomes


def read_trace(path: str | Path) -> list[Arrival]:
    """Read a JSONL trace, sorted by arrival; raises ValueError naming the line that is wrong."""
    arrivals = []
    for number, line in enumerate(Path(path).read_text().splitlines(), start=1):
        try:
            arrivals.append(Arrival(**json.loads(line)))
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path}:{number}: {error}") from error
    return sorted(arrivals, key=lambda a: a.arrival)


def write_trace(path: str | Path, arrivals: Iterable[Arrival]) -> None:
    """Write a trace that :func:`read_trace` reads back; fields at their defaults are left out."""
    defaults = {f.name: f.default for f in dataclasses.fields(Arrival)}
    lines = [
        json.dumps({k: v for k, v in dataclasses.asdict(a).items() if v != defaults[k]})
        for a in arrivals
    ]
    Path(path).write_text("".join(f"{line}\n" for line in lines))


def uniform(low: int, high: int) -> Callable[[random.Random], int]:
    """Lengths uniform in [low, high]."""
    return lambda rng: rng.randint(low, high)


def heavy_tailed(median: float, high: int, sigma: float = 1.0) -> Callable[[random.Random], int]:
    """Log-normal lengths, cut to [1, high]."""
    return lambda rng: min(high, max(1, round(rng.lognormvariate(math.log(median), sigma))))


def bimodal(
    short: Callable[[random.Random], int], long: Callable[[random.Random], int], share_long: float
) -> Callable[[random.Random], int]:
    """Lengths of two kinds."""
    return lambda rng: (long if rng.random() < share_long else short)(rng)


def _message(index: int, a: Arrival) -> AddRequest:
    params = SamplingParams(temperature=0.0, max_tokens=a.budget)
    prefix = _tokens(f"group {a.prefix_group}", a.prefix_tokens)
    own = _tokens(f"request {index}", a.prompt_tokens - a.prefix_tokens)
    return AddRequest(str(index), prefix + own, params, a.arrival, priority=a.priority)


def _tokens(name: str, count: int) -> list[int]:
    """Token ids that no other name has in the same places."""
    first = zlib.crc32(name.encode())
    return list(range(first, first + count))


def _note_scheduled(
    scheduler: Scheduler, step: SchedulerOutput, outcomes: list[Outcome], clock: float
) -> None:
    if not step.new_requests:
        return
    at_slot = {r.slot: r for r in scheduler.running}
    for new in step.new_requests:
        outcome = outcomes[int(at_slot[new.slot].request_id)]
        if math.isnan(outcome.scheduled):
            outcome.scheduled = clock


def _result_of(
    scheduler: Scheduler, step: SchedulerOutput, arrivals: Sequence[Arrival]
) -> ModelRunnerOutput:
    """Sample text until a request's trace says that it ends."""
    at_slot = {r.slot: r for r in scheduler.running}
    sampled = []
    for row in step.rows:
        if row.samples:
            request = at_slot[row.slot]
            length = request.num_tokens + 1 - request.num_prompt_tokens
            ends = length == arrivals[int(request.request_id)].output_tokens
            sampled.append(EOS if ends else TEXT)
    return ModelRunnerOutput(step.step_id, sampled)
