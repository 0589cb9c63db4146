"""Tenants take turns: who is admitted when, counted in steps and tokens."""

import itertools
import random

import pytest
from fake_worker import Driver, create_request

from pageserve.core.fairness import MAX_ABSENT, FairQueue
from pageserve.core.policy import POLICIES
from pageserve.core.request import Request, RequestStatus
from pageserve.core.scheduler import Scheduler
from pageserve.messages import ModelRunnerOutput


def new_scheduler(policy: str = "fcfs", **changes: object) -> Scheduler:
    options = {
        "num_blocks": 256, "block_size": 4, "max_num_seqs": 1, "max_num_batched_tokens": 32,
        "max_model_len": 64, "seed": 0, "policy": policy,
    }  # fmt: skip
    return Scheduler(**(options | changes))  # type: ignore[arg-type]


def order_of_admission(driver: Driver) -> list[str]:
    """Run everything in the one slot; ids in the order of their first tokens."""
    while driver.scheduler.has_work():
        driver.launch()
        driver.absorb()
    driver.scheduler.check_integrity()
    return list(driver.first)


@pytest.fixture
def run():
    """Add (id, tenant, changes) in order to a one-slot scheduler, run; ids as admitted."""

    def run(requests, policy="fcfs", **changes):
        driver = Driver(new_scheduler(policy, **changes))
        for request_id, tenant, options in requests:
            driver.add(create_request(request_id, **({"prompt": 4} | options), tenant=tenant))
        return order_of_admission(driver)

    return run


def test_a_thousand_queued_requests_do_not_delay_another_tenant(run):
    requests = [(f"a{i}", "a", {"max_tokens": 1}) for i in range(1000)]
    order = run([*requests, ("b0", "b", {}), ("b1", "b", {})])
    assert order.index("b0") <= 2 and order.index("b1") <= 4
    assert [i for i in order if i[0] == "a"] == [f"a{i}" for i in range(1000)]  # FCFS inside


def test_turns_go_by_tokens_not_by_requests(run):
    long = [(f"a{i}", "a", {"prompt": 20, "max_tokens": 12}) for i in range(20)]
    short = [(f"b{i}", "b", {"prompt": 4, "max_tokens": 4}) for i in range(80)]
    order = run([*long, *short])
    first = order[:50]
    served = {
        "a": 32 * sum(i[0] == "a" for i in first), "b": 8 * sum(i[0] == "b" for i in first)
    }  # fmt: skip
    assert abs(served["a"] - served["b"]) <= 2 * 32


def test_weights_are_shares(run):
    heavy = [(f"a{i}", "a", {"weight": 3}) for i in range(60)]
    light = [(f"b{i}", "b", {"weight": 1}) for i in range(60)]
    first = run([*light, *heavy])[:40]
    assert 28 <= sum(i[0] == "a" for i in first) <= 32


def test_quiet_hours_are_neither_saved_up_nor_charged(run):
    driver = Driver(new_scheduler())
    for i in range(20):
        driver.add(create_request(f"a{i}", 4, tenant="a"))
    while driver.scheduler.has_work():
        driver.step()
    for i in range(20):
        driver.add(create_request(f"b{i}", 4, tenant="b"))
        driver.add(create_request(f"c{i}", 4, tenant="a"))
    order = order_of_admission(driver)[20:]
    for n in range(4, 40):
        assert abs(sum(i[0] == "b" for i in order[:n]) - n / 2) <= 2


@pytest.mark.parametrize("weight", [1, 3])
@pytest.mark.parametrize("num_seqs", [1, 4])
@pytest.mark.parametrize("delay", [0, 1, 5])
def test_leaving_after_every_answer_pays_for_it(delay, num_seqs, weight):
    """One tenant has a backlog of short answers; the other's long ones are asked for only when
    those before have ended, so that it has nothing to do in between. Both get their share."""
    scheduler = new_scheduler(max_num_seqs=num_seqs, max_model_len=512)
    served, ids, order = {"a": 0, "b": 0}, itertools.count(), []
    due: list[int] = [0] * num_seqs

    def add(tenant: str, max_tokens: int, weight: int) -> None:
        name = f"{tenant}{next(ids)}"
        scheduler.add(create_request(name, 1, max_tokens, tenant=tenant, weight=weight))

    for _ in range(2000):
        add("a", 4, weight)
    for step in range(3000):
        for _ in range(sum(t <= step for t in due)):
            add("b", 100, 1)
        due = [t for t in due if t > step]
        plan = scheduler.schedule()
        if plan is None:
            continue
        result = ModelRunnerOutput(plan.step_id, [7] * sum(row.samples for row in plan.rows))
        for output in scheduler.update(plan, result):
            tenant = output.request_id[0]
            served[tenant] += len(output.new_token_ids)
            if output.finish_reason and tenant == "b":
                due.append(step + 1 + delay)
            if output.finish_reason and tenant == "a":
                order.append(int(output.request_id[1:]))
    scheduler.check_integrity()
    share = served["a"] / (served["a"] + served["b"])
    assert abs(share - weight / (weight + 1)) < 0.1
    assert order == sorted(order)


def test_tenants_of_one_request_are_not_remembered_for_ever():
    queue = FairQueue(POLICIES["fcfs"])
    stays = new_request(0, "stays")
    queue.join(stays)  # runs all the time, so that the queue is never idle
    queue.push(stays)
    queue.admitted(queue.pop(), 1)
    for arrival in range(1, 10_001):
        request = new_request(arrival, f"t{arrival}")
        queue.join(request)
        queue.push(request)
        queue.admitted(queue.pop(), 8)
        request.num_tokens += arrival % 50
        queue.leave(request)
        assert len(queue._levels[()].tenants) <= 64 + 2 * (MAX_ABSENT + 1)
    queue.check_integrity([stays])
    queue.leave(stays)
    assert not queue._levels


def test_a_debt_is_forgotten_once_the_clock_has_passed_it():
    queue = FairQueue(POLICIES["fcfs"])
    requests = [new_request(i, "a") for i in range(200)]
    debtor = new_request(1000, "b")
    for request in (*requests, debtor):
        queue.join(request)
        queue.push(request)
    for tenant in "ab":
        request = queue.pop()
        assert request.tenant == tenant
        queue.admitted(request, 8)
    debtor.num_tokens += 1000
    queue.leave(debtor)
    again = new_request(1001, "b")
    queue.join(again)
    queue.push(again)
    for _ in range(126):  # 8 + 125 * 8 tokens: until both have been served the same
        request = queue.pop()
        assert request.tenant == "a"
        queue.admitted(request, 8)
    assert queue.pop() is again
    queue.admitted(again, 8)
    queue.admitted(queue.pop(), 8)
    queue.leave(again)
    late = new_request(1002, "c")
    queue.join(late)
    queue.push(late)
    tenants = queue._levels[()].tenants
    assert tenants["c"].served == 1016 and "b" not in tenants


def test_priority_is_stricter_than_fairness(run):
    requests = [(f"a{i}", "a", {"priority": -1}) for i in range(10)]
    requests += [(f"b{i}", "b", {}) for i in range(3)]
    assert run(requests, "priority")[:10] == [f"a{i}" for i in range(10)]


def test_each_priority_is_shared_on_its_own():
    """What urgent work was served moves no clock but its own: neither a tenant that comes later
    nor the one that sent it waits until others have been served as much."""
    queue = FairQueue(POLICIES["priority"])
    requests = [new_request(0, "a", priority=-1), *(new_request(i, "b") for i in range(1, 9))]
    for request in requests:
        queue.join(request)
        queue.push(request)
    for arrival in (9, 10):  # one after the other, each admitted at once
        urgent = queue.pop()
        assert urgent.priority == -1
        queue.admitted(urgent, 100_000)
        requests.append(new_request(arrival, "a", priority=-1))
        queue.join(requests[-1])
        queue.push(requests[-1])
    queue.admitted(queue.pop(), 100_000)
    for arrival, tenant in ((11, "c"), (12, "a")):
        requests.append(new_request(arrival, tenant))
        queue.join(requests[-1])
        queue.push(requests[-1])
    order = []
    for _ in range(4):
        order.append(queue.pop())
        queue.admitted(order[-1], 8)
    assert [r.tenant for r in order] == ["b", "c", "a", "b"]
    queue.check_integrity(requests)


def test_one_tenant_is_the_policy_alone(run):
    requests = [(f"r{i}", "", {"prompt": n}) for i, n in enumerate((9, 3, 20, 1))]
    assert run(requests) == ["r0", "r1", "r2", "r3"]
    assert run(requests, "shortest-prompt") == ["r3", "r1", "r0", "r2"]


def new_request(arrival: int, tenant: str, num_tokens: int = 8, **changes: object) -> Request:
    message = create_request(f"r{arrival}", num_tokens, tenant=tenant, **changes)
    return Request(
        message, arrival=arrival, seed=0, max_num_tokens=100, eos_token_ids=frozenset[int]()
    )


def test_preempted_request_goes_before_every_tenant():
    queue = FairQueue(POLICIES["fcfs"])
    requests = [new_request(i, "ab"[i % 2]) for i in range(6)]
    for request in requests:
        queue.join(request)
        queue.push(request)
    first = queue.pop()
    queue.admitted(first, 10_000)  # its tenant is far behind now
    first.num_preemptions, first.status = 1, RequestStatus.PREEMPTED
    queue.push(first)
    assert queue.pop() is first


@pytest.mark.parametrize("policy", POLICIES)
def test_random_lives_against_a_plain_search(policy):
    """Every pop is the minimum over all waiting; nothing is lost, and the heap stays small."""
    draw = random.Random(1)
    queue, waiting, running = FairQueue(POLICIES[policy]), [], []
    for arrival in range(3000):
        action = draw.choice(["add", "add", "admit", "block", "abort", "finish"])
        if action == "add":
            name = draw.choice("abc")
            priority = draw.randrange(2)
            request = new_request(arrival, name, draw.randrange(1, 30), priority=priority)
            queue.join(request)
            queue.push(request)
            waiting.append(request)
        elif action in ("admit", "block") and waiting:
            urgency = POLICIES[policy].urgency
            served = {r: queue._tenant_of(r).served for r in waiting}
            best = min((urgency(r), served[r]) for r in waiting)
            request = queue.pop()
            assert (urgency(request), served[request]) == best
            own = [r for r in waiting if r.tenant == request.tenant]
            assert request is min(own, key=POLICIES[policy].waiting_key)
            if action == "block":
                queue.push(request)
                continue
            waiting.remove(request)
            running.append(request)
            queue.admitted(request, request.num_tokens)
            request.status = RequestStatus.RUNNING
        elif action == "abort" and waiting:
            request = waiting.pop(draw.randrange(len(waiting)))
            request.status = RequestStatus.FINISHED_ABORTED
            queue.discard(request)
            queue.leave(request)
        elif action == "finish" and running:
            request = running.pop(draw.randrange(len(running)))
            request.num_tokens += draw.randrange(20)
            queue.leave(request)
        assert len(queue) == len(waiting)
        assert len(queue._turns) <= 65 + 2 * len(waiting)
        if arrival % 50 == 0:
            queue.check_integrity(waiting + running)
            assert sorted(r.arrival for r in queue.requests()) == sorted(r.arrival for r in waiting)


def test_order_told_is_the_order_taken():
    driver = Driver(new_scheduler(max_num_seqs=1))
    for i in range(12):
        driver.add(create_request(f"r{i}", 3 + i, tenant="abc"[i % 3], max_tokens=1))
    told = [
        p.request_id for p in sorted(driver.scheduler.progress(), key=lambda p: p.queue_position)
    ]
    assert order_of_admission(driver) == told


def test_many_questions_cost_one_walk_over_the_queue(monkeypatch):
    """Every stream asks a few times a second, and all of them wait for the step that answers."""
    driver = Driver(new_scheduler())
    for name in "abc":
        driver.add(create_request(name, 5))
    queue, walks = driver.scheduler.waiting, []
    requests = queue.requests
    monkeypatch.setattr(queue, "requests", lambda: walks.append(1) or requests())

    def places() -> list[int]:
        return [p.queue_position for i in "abc" for p in driver.scheduler.progress([i])]

    assert places() == places() == [1, 2, 3] and len(walks) == 1
    driver.scheduler.schedule()
    assert places() == places() == [0, 1, 2] and len(walks) == 2
    driver.scheduler.abort(["b"])
    assert places() == places() == [0, 1] and len(walks) == 3


def test_progress_says_where_requests_are():
    driver = Driver(new_scheduler(max_num_batched_tokens=8))
    driver.add(create_request("r", 20, max_tokens=3))
    driver.add(create_request("w", 5))
    driver.step()
    progress = {p.request_id: p for p in driver.scheduler.progress(["w", "gone", "r"])}
    assert set(progress) == {"r", "w"}
    r, w = progress["r"], progress["w"]
    assert (r.queue_position, r.num_computed_tokens, r.num_output_tokens) == (0, 8, 0)
    assert (w.queue_position, w.num_prompt_tokens, w.num_computed_tokens) == (1, 5, 0)
