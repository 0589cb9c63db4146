"""Orders of the waiting and the running, and the queue that holds the former."""

import pytest
from fake_worker import create_request

from pageserve.core.policy import (
    AGEING,
    LEAST_CHUNK,
    POLICIES,
    PRESSURE,
    WaitingQueue,
)
from pageserve.core.request import Request, RequestStatus


def new_request(
    arrival: int, num_tokens: int = 8, priority: int = 0, arrival_clock: int = 0
) -> Request:
    return Request(
        create_request(f"r{arrival}", num_tokens, priority=priority),
        arrival=arrival,
        arrival_clock=arrival_clock,
        seed=0,
        max_num_tokens=100,
        eos_token_ids=frozenset[int](),
    )


def drain(queue: WaitingQueue) -> list[int]:
    return [queue.pop().arrival for _ in range(len(queue))]


@pytest.mark.parametrize(
    ("policy", "order"),
    [
        ("fcfs", [0, 1, 2, 3]),
        ("memory-aware", [0, 1, 2, 3]),
        ("priority", [2, 0, 3, 1]),
        ("shortest-prompt", [3, 1, 2, 0]),
    ],
)
def test_order_of_the_waiting(policy: str, order: list[int]) -> None:
    queue = WaitingQueue(POLICIES[policy].waiting_key)
    for arrival, (length, priority) in enumerate([(30, 0), (20, 1), (20, -1), (10, 0)]):
        queue.push(new_request(arrival, length, priority))
    assert [r.arrival for r in queue.requests()] == order
    assert drain(queue) == order


@pytest.mark.parametrize("policy", POLICIES)
def test_preempted_request_goes_back_to_the_front(policy: str) -> None:
    queue = WaitingQueue(POLICIES[policy].waiting_key)
    preempted = new_request(0, 90)
    preempted.status, preempted.num_preemptions = RequestStatus.PREEMPTED, 1
    for request in (new_request(1, 5), preempted, new_request(2, 2)):
        queue.push(request)
    assert queue.pop() is preempted


def test_ageing_bounds_how_long_a_long_prompt_is_passed() -> None:
    """Passed only by those that came before AGEING times its length was scheduled."""
    queue = WaitingQueue(POLICIES["shortest-prompt"].waiting_key)
    bound = AGEING * 100
    for request in (
        new_request(0, 100),
        new_request(1, 1, arrival_clock=bound - AGEING - 1),
        new_request(2, 1, arrival_clock=bound),
    ):
        queue.push(request)
    assert drain(queue) == [1, 0, 2]


def test_memory_aware_slows_prompts_down_under_pressure() -> None:
    budget = POLICIES["memory-aware"].prompt_budget
    assert budget(1000, 1.0) == budget(1000, PRESSURE) == 1000
    assert budget(1000, PRESSURE / 2) == 500
    assert budget(1000, 0.0) == LEAST_CHUNK
    assert budget(3, 0.0) == 3 and budget(0, 0.0) == 0
    assert POLICIES["fcfs"].prompt_budget(1000, 0.0) == 1000


def test_requests_that_finish_while_waiting_are_gone() -> None:
    queue = WaitingQueue(POLICIES["fcfs"].waiting_key)
    requests = [new_request(i) for i in range(1000)]
    for request in requests:
        queue.push(request)
    for request in requests:
        if request.arrival % 10:
            request.status = RequestStatus.FINISHED_ABORTED
            queue.discard()
            assert len(queue._heap) <= 2 * len(queue) + 64  # the dead do not pile up
    assert len(queue) == 100 and len(queue.requests()) == 100
    assert drain(queue) == list(range(0, 1000, 10))
    with pytest.raises(IndexError):
        queue.pop()
