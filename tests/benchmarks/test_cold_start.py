"""The phases of a start add up to the whole of it."""

import cold_start
import pytest


class Owner:
    def __init__(self, clock: list[float]) -> None:
        self.clock = clock

    def outer(self, fails: bool = False) -> str:
        self.clock[0] += 1
        self.inner()
        self.clock[0] += 2
        if fails:
            raise ValueError
        return "done"

    def inner(self) -> None:
        self.clock[0] += 10


def test_a_phase_within_another_interrupts_it(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(cold_start.time, "monotonic", lambda: clock[0])
    for name in ("outer", "inner"):
        monkeypatch.setattr(Owner, name, getattr(Owner, name))
    phases = cold_start.Phases("first", 96.0)
    phases.wrap(Owner, "outer", "long")
    phases.wrap(Owner, "inner", "short")
    owner = Owner(clock)
    assert owner.outer() == "done"
    with pytest.raises(ValueError):
        owner.outer(fails=True)
    clock[0] += 5
    phases.begin("last")
    clock[0] += 7
    phases.end()
    assert phases.seconds == {"first": 4 + 5, "long": 6, "short": 20, "last": 7}
