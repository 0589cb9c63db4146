"""A server without paging, for the simulations: each request's KV is one run of slots, reserved at
admission for its whole life. First come, first served; a step brings every resident one token."""

from bisect import insort
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from simulation import Arrival


class Allocator(Protocol):
    """Hands out runs of token slots."""

    free: int  # slots

    def largest_hole(self) -> int:
        """Return the longest run that could be handed out now."""
        ...

    def allocate(self, size: int) -> int | None:
        """Return the first slot of a run of at least ``size``, None if there is no such run."""
        ...

    def release(self, start: int) -> None:
        """Take a run back, named by its first slot."""
        ...


class Ideal:
    """Runs never leave a hole, as if memory were moved together after each one. No real allocator
    can do better, so a gain over this one is due to the reservation alone."""

    def __init__(self, slots: int) -> None:
        self.free = slots
        self._sizes: list[int] = []

    def largest_hole(self) -> int:
        return self.free

    def allocate(self, size: int) -> int | None:
        if size > self.free:
            return None
        self.free -= size
        self._sizes.append(size)
        return len(self._sizes) - 1  # addresses do not matter, so each run gets a name of its own

    def release(self, start: int) -> None:
        self.free += self._sizes[start]


class FirstFit:
    """The run starts at the lowest hole that is long enough; neighbouring holes are merged."""

    def __init__(self, slots: int) -> None:
        self.free = slots
        self._holes = [(0, slots)]  # (start, end), sorted, never adjacent
        self._ends: dict[int, int] = {}

    def largest_hole(self) -> int:
        return max((end - start for start, end in self._holes), default=0)

    def allocate(self, size: int) -> int | None:
        for index, (start, end) in enumerate(self._holes):
            if end - start >= size:
                self._holes[index : index + 1] = [(start + size, end)] * (end - start > size)
                self._ends[start] = start + size
                self.free -= size
                return start
        return None

    def release(self, start: int) -> None:
        hole = start, self._ends.pop(start)
        self.free += hole[1] - hole[0]
        insort(self._holes, hole)
        index = self._holes.index(hole)
        first, last = max(index - 1, 0), index + 2
        merged: list[tuple[int, int]] = []
        for left, right in self._holes[first:last]:
            if merged and merged[-1][1] == left:
                merged[-1] = merged[-1][0], right
            else:
                merged.append((left, right))
        self._holes[first:last] = merged


class EqualRuns:
    """Every run is ``max_length`` long, as in a server that allocates its batch up front."""

    def __init__(self, slots: int, max_length: int) -> None:
        self._length = max_length
        self._runs = list(range(slots // max_length))
        self.free = len(self._runs) * max_length

    def largest_hole(self) -> int:
        return self._length if self._runs else 0

    def allocate(self, size: int) -> int | None:
        assert size <= self._length, "longer than any request may be"
        if not self._runs:
            return None
        self.free -= self._length
        return self._runs.pop()

    def release(self, start: int) -> None:
        self.free += self._length
        self._runs.append(start)


@dataclass(frozen=True)
class Moment:
    """The pool in a step, after admission."""

    num_running: int
    num_waiting: int
    used: int  # slots that hold a token
    free: int  # slots in no run
    largest_hole: int
    wanted: int  # length of the run that the first waiting request needs, 0 if none waits


def serve_contiguous(
    arrivals: Sequence[Arrival],
    allocator: Allocator,
    observe: Callable[[int, Moment], None],
) -> int:
    """Serve requests that are all there at the start, each holding a run of prompt + budget slots;
    returns the number of steps. ``observe(step, moment)`` is called in every step."""
    waiting = deque(arrivals)
    leaving: dict[int, list[tuple[int, Arrival]]] = {}  # step → runs released before it
    num_running, used, step = 0, 0, 0
    while True:
        for start, gone in leaving.pop(step, ()):
            allocator.release(start)
            num_running -= 1
            used -= gone.prompt_tokens + gone.output_tokens - 1
        while waiting:
            new = waiting[0]
            run = allocator.allocate(new.prompt_tokens + new.budget)
            if run is None:
                break
            waiting.popleft()
            num_running += 1
            used += new.prompt_tokens - 1  # the step below counts one for every resident
            leaving.setdefault(step + new.output_tokens, []).append((run, new))
        if not num_running:
            assert not waiting, "a request is longer than the pool"
            return step
        used += num_running
        wanted = waiting[0].prompt_tokens + waiting[0].budget if waiting else 0
        hole = allocator.largest_hole()
        observe(step, Moment(num_running, len(waiting), used, allocator.free, hole, wanted))
        step += 1
