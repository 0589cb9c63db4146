"""How long the engine's loop waits for grammars' masks, on a clock that only the fakes move."""

import itertools
from collections import deque
from collections.abc import Iterable
from types import SimpleNamespace

import pytest

from pageserve.engine import core
from pageserve.engine.core import (
    MASK_SHARE,
    MASK_SHARE_LIMIT,
    MASK_TIMEOUT,
    SLACK_STEPS,
    EngineCore,
)

HOST = 0.0002  # seconds to plan and launch a step


class Machine:
    """A device that takes ``step`` seconds a step, one after the other, and masks that never come:
    every wait for them lasts as long as it may."""

    def __init__(self, step: float, synchronous: bool, launches: Iterable[float] = (HOST,)) -> None:
        self.now = 100.0
        self.launches = itertools.cycle(launches)
        self.step = step
        self.synchronous = synchronous
        self.free = 0.0  # when the device has done all it was given
        self.waits: list[float] = []

    def monotonic(self) -> float:
        return self.now

    def absorb_grammars(self, timeout: float, idle: bool = False) -> list[object]:
        self.waits.append(timeout)
        self.now += timeout
        return []

    def execute(self, plan: object) -> object:
        self.now += next(self.launches)
        self.free = done = max(self.free, self.now) + self.step
        if self.synchronous:
            self.now = done

        def result() -> None:
            self.now = max(self.now, done)

        return SimpleNamespace(result=result)


def run(machine: Machine, depth: int, monkeypatch: pytest.MonkeyPatch, steps: int = 200) -> float:
    """Return the seconds of a step once the loop has settled."""
    monkeypatch.setattr(core, "time", machine)
    engine = EngineCore.__new__(EngineCore)
    engine._depth, engine._in_flight, engine._timeline = depth, deque(), None
    engine._slacks = deque([0.0], maxlen=SLACK_STEPS)
    engine._step_seconds = engine._ready = 0.0
    engine.worker = SimpleNamespace(execute=machine.execute, replayed_tokens=0)  # type: ignore[assignment]
    engine.scheduler = SimpleNamespace(  # type: ignore[assignment]
        absorb_grammars=machine.absorb_grammars,
        schedule=object,
        num_scheduled_tokens=1,
        update=lambda plan, result: [],
        begin_masks=lambda: None,
    )
    for _ in range(50):
        engine.step()
    start = machine.now
    for _ in range(steps):
        engine.step()
    return (machine.now - start) / steps


@pytest.mark.parametrize("step", [0.0003, 0.0006, 0.0008, 0.002, 0.02])
def test_masks_take_no_time_from_a_device_that_runs_ahead(step, monkeypatch):
    machine = Machine(step, synchronous=False)
    assert run(machine, 2, monkeypatch) < 1.05 * max(step, HOST)
    if step > 2 * MASK_TIMEOUT:
        assert machine.waits[-1] == MASK_TIMEOUT  # which is to spare


@pytest.mark.parametrize("launches", [(0.0003, 0.0008), (0.0002, 0.0002, 0.00085)])
def test_steps_that_take_long_to_launch_leave_no_time_for_masks(launches, monkeypatch):
    """As those with masks do: what the steps between them have to spare is not theirs."""
    machine = Machine(0.0009, synchronous=False, launches=launches)
    assert run(machine, 2, monkeypatch, 6 * 30) < 1.05 * machine.step


@pytest.mark.parametrize("step", [0.0003, 0.005, 0.06, 0.2, 5.0])
def test_a_device_that_does_not_is_held_up_by_a_small_share(step, monkeypatch):
    machine = Machine(step, synchronous=True)
    assert run(machine, 1, monkeypatch) < 1.03 * (step + HOST)
    # Never nothing: masks that only began when the step has run would miss the next one, too.
    wait = min(MASK_SHARE * (step + HOST), MASK_SHARE_LIMIT)
    assert machine.waits[-1] == pytest.approx(wait, rel=0.1)
