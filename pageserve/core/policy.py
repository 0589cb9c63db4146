"""Scheduling policies: the order of the waiting, the order of the running, and a brake.

Waiting requests are admitted from the front of their order, running ones are preempted from the
back of theirs. Both orders are total and fixed once a request is queued, so a heap holds the one
and a sorted list the other and no step costs more for a longer queue.
"""

import heapq
from collections.abc import Callable
from dataclasses import dataclass

from pageserve.core.request import Request, RequestStatus

Key = tuple[int, ...]

AGEING = 8  # shortest-prompt: a token of length weighs as much as this many tokens of service
PRESSURE = 0.25  # memory-aware: share of free blocks below which prompts are slowed down
LEAST_CHUNK = 16  # memory-aware: prompt tokens a step may always have


@dataclass(frozen=True)
class Policy:
    """Two sort keys, smallest first, how many prompt tokens a step may take of its budget while
    others are decoding, given the free share of the pool, and the level inside of which tenants
    share fairly (smallest first)."""

    waiting_key: Callable[[Request], Key]
    running_key: Callable[[Request], Key]
    prompt_budget: Callable[[int, float], int]
    level: Callable[[Request], Key]

    def urgency(self, request: Request) -> Key:
        """Return what goes before fairness, smallest first: the level, and in it the requests that
        had begun."""
        return (*self.level(request), 0 if request.num_preemptions else 1)


def by_arrival(request: Request) -> Key:
    """First come, first served. A preempted request came before all that were never admitted."""
    return (request.arrival,)


def by_priority(request: Request) -> Key:
    """Smallest ``priority`` first, then by arrival; strict, so urgent work may displace other."""
    return (request.priority, request.arrival)


def by_prompt_length(request: Request) -> Key:
    """Shortest prompt first, preempted requests before all.

    Ageing needs no re-sorting: what counts is the length plus the clock at arrival, so a request
    can only be passed by those that arrive before AGEING * its length further tokens have been
    scheduled, and none waits for ever.
    """
    if request.num_preemptions:
        return (0, request.arrival)
    return (1, AGEING * request.num_prompt_tokens + request.arrival_clock, request.arrival)


def one_level(request: Request) -> Key:
    """All requests are equally urgent."""
    return ()


def priority_level(request: Request) -> Key:
    """Requests of another priority are another matter."""
    return (request.priority,)


def whole_budget(budget: int, free_share: float) -> int:
    """Prompts may take all that the decodes leave."""
    return budget


def throttled_budget(budget: int, free_share: float) -> int:
    """Prompts slow down in proportion as the pool runs full; never to a stop."""
    return max(int(budget * min(free_share / PRESSURE, 1.0)), min(budget, LEAST_CHUNK))


POLICIES: dict[str, Policy] = {
    "fcfs": Policy(by_arrival, by_arrival, whole_budget, one_level),
    "priority": Policy(by_priority, by_priority, whole_budget, priority_level),
    "memory-aware": Policy(by_arrival, by_arrival, throttled_budget, one_level),
    "shortest-prompt": Policy(by_prompt_length, by_arrival, whole_budget, one_level),
}


class WaitingQueue:
    """A heap of waiting requests. Requests that finish while they wait stay behind as dead entries
    and are dropped when they surface or outnumber the living: removal is O(1) amortised."""

    def __init__(self, key: Callable[[Request], Key]) -> None:
        self._key = key
        self._heap: list[tuple[Key, Request]] = []  # keys are unique, requests never compared
        self._num_dead = 0

    def __len__(self) -> int:
        return len(self._heap) - self._num_dead

    def push(self, request: Request) -> None:
        """Queue a request where its key puts it."""
        heapq.heappush(self._heap, (self._key(request), request))

    def pop(self) -> Request:
        """Take the first living request; raises IndexError when there is none."""
        self.peek()
        return heapq.heappop(self._heap)[1]

    def peek(self) -> Request:
        """Return the first living request and leave it there; raises IndexError."""
        while not _lives(self._heap[0][1]):
            heapq.heappop(self._heap)
            self._num_dead -= 1
        return self._heap[0][1]

    def discard(self) -> None:
        """Note that a queued request has finished."""
        self._num_dead += 1
        if self._num_dead > 64 and self._num_dead * 2 > len(self._heap):
            self._heap = [(key, request) for key, request in self._heap if _lives(request)]
            heapq.heapify(self._heap)
            self._num_dead = 0

    def requests(self) -> list[Request]:
        """Return all living requests in order (for checks and shutdown, not for every step)."""
        return [request for _, request in sorted(self._heap) if _lives(request)]


def _lives(request: Request) -> bool:
    return request.status <= RequestStatus.PREEMPTED
