"""Planning ahead of results: depth 2, and forks, which enter between steps."""

import pytest
from fake_worker import EOS, Driver, create_request, create_requests, create_scheduler, next_token

from pageserve.core.request import RequestStatus


def test_no_more_tokens_are_planned_than_necessary() -> None:
    """The step that brings the last token ends a request that only its length can end."""
    driver = Driver(create_scheduler(), depth=2)
    for n in range(1, 5):
        driver.add(create_request(f"r{n}", 6, max_tokens=n))
    driver.run()
    driver.check_tokens()
    assert driver.worker.num_tokens_computed == sum(6 + n - 1 for n in range(1, 5))


def test_nothing_to_plan_until_the_last_token_is_absorbed() -> None:
    driver = Driver(create_scheduler(), depth=2)
    driver.add(create_request("a", 6, max_tokens=1))
    assert driver.launch() is not None
    assert driver.launch() is None and driver.scheduler.has_work()
    assert driver.absorb()[0].finish_reason == "length"
    assert not driver.scheduler.has_work()


def test_token_planned_past_the_end_is_dropped() -> None:
    driver = Driver(
        create_scheduler(), depth=2, model=lambda t: EOS if len(t) == 8 else 1 + len(t) % 9
    )
    driver.add(create_request("a", 6, max_tokens=50, ignore_eos=False))
    driver.add(create_request("b", 7, max_tokens=50))
    while "a" not in driver.final:
        driver.step()
    assert driver.tokens["a"][-1] == EOS and len(driver.tokens["a"]) == 3
    assert len(driver.in_flight[0][0].rows) == 2  # the step in flight still has a row of it
    assert [o.request_id for o in driver.absorb()] == ["b"]
    driver.scheduler.check_integrity()
    driver.run()
    driver.check_tokens()


def test_blocks_freed_under_a_step_in_flight_may_be_reused_at_once() -> None:
    driver = Driver(create_scheduler(num_blocks=4), depth=2)
    for n in range(12):
        driver.add(create_request(f"r{n}", 7, max_tokens=6, ignore_eos=False))
    driver.run()
    driver.check_tokens()


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_depth_does_not_change_the_tokens(depth: int) -> None:
    driver = Driver(create_scheduler(num_blocks=12), depth=depth)
    for n, request in enumerate(create_requests(10, 9, max_tokens=27)):
        driver.add(request)
        if n % 3 == 0:
            driver.step()
    driver.run()
    driver.check_tokens()
    assert driver.scheduler.stats().preemptions_total > 0


def preempted_in_flight() -> Driver:
    """Stop just after a plan that preempted r1 while a token of r1 is in flight."""
    driver = Driver(create_scheduler(num_blocks=8), depth=2)
    for request in create_requests(2, 8, max_tokens=23):
        driver.add(request)
    while driver.scheduler.stats().preemptions_total == 0:
        if len(driver.in_flight) == 2:
            driver.absorb()
        driver.launch()
    assert driver.scheduler.requests["r1"].num_output_placeholders == 1
    assert len(driver.in_flight) == 2
    return driver


def test_token_in_flight_survives_preemption() -> None:
    driver = preempted_in_flight()
    before = len(driver.tokens["r1"])
    outputs = {o.request_id: o for o in driver.absorb()}
    assert len(outputs["r1"].new_token_ids) == 1 and len(driver.tokens["r1"]) == before + 1
    driver.scheduler.check_integrity()
    driver.run()
    driver.check_tokens()


def test_preempted_request_is_not_resumed_before_its_token_is_in() -> None:
    driver = preempted_in_flight()
    driver.abort("r0")  # room enough for r1 at once
    assert driver.launch() is None
    driver.absorb()
    step = driver.launch()
    assert step is not None and len(step.new_requests) == 1
    assert step.new_requests[0].token_ids[8:] == driver.tokens["r1"]
    driver.run()
    driver.check_tokens()


def test_preempted_request_may_end_with_the_token_in_flight() -> None:
    driver = preempted_in_flight()
    request = driver.scheduler.requests["r1"]
    request.max_num_tokens = request.num_tokens + 1
    outputs = {o.request_id: o for o in driver.absorb()}
    assert outputs["r1"].finish_reason == "length"
    assert len(driver.scheduler.waiting) == 0
    driver.scheduler.check_integrity()
    driver.run()


def test_abort_of_a_preempted_request_with_a_token_in_flight() -> None:
    driver = preempted_in_flight()
    driver.abort("r1")
    driver.scheduler.check_integrity()
    driver.run()
    driver.check_tokens()


def test_corrupted_token_after_preemption_ends_the_request() -> None:
    driver = preempted_in_flight()
    pool, request = driver.scheduler.kv_cache_manager.block_pool, driver.scheduler.requests["r1"]
    assert any(pool.get(h) is not None for h in request.block_hashes)  # held by nobody by now
    _, result = driver.in_flight[0]
    result.sampled_token_ids[-1] = -1
    assert driver.absorb()[-1].finish_reason == "error"
    assert all(pool.get(h) is None for h in request.block_hashes)
    driver.scheduler.check_integrity()
    driver.run()
    assert driver.final["r0"].finish_reason == "length"


def test_steps_that_decode_only_are_a_matter_of_rows() -> None:
    driver = Driver(create_scheduler(), depth=2)
    for request in create_requests(3, 6, max_tokens=6):
        driver.add(request)
    driver.run()
    for step in driver.steps[1:]:
        assert all(row.samples and row.num_scheduled_tokens == 1 for row in step.rows)
        assert not step.new_requests


# --- forks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("num_tokens", [1, 5, 6, 8])
def test_forks_continue_from_the_prompt_without_recomputing_it(depth: int, num_tokens: int) -> None:
    """C067: the partly filled block is shared until someone writes it."""
    driver = Driver(create_scheduler(), depth=depth)
    driver.add(create_request("c0", num_tokens, max_tokens=9))
    driver.step()
    prompt = driver.added["c0"].prompt_token_ids
    for n in (1, 2, 3):
        driver.add(create_request(f"c{n}", prompt, max_tokens=9), parent_id="c0")
        driver.scheduler.check_integrity()
    driver.run()
    driver.check_tokens()
    assert driver.worker.num_tokens_computed == num_tokens + 3 * 1 + 4 * 8
    copies = sum(len(step.block_updates) for step in driver.steps)
    assert copies == (0 if (num_tokens - 1) % 4 == 0 else 3)
    assert driver.final["c1"].num_cached_tokens == num_tokens - 1


def test_choices_live_on_when_one_ends() -> None:
    driver = Driver(create_scheduler(num_blocks=12), depth=2)
    driver.add(create_request("c0", 6, max_tokens=2))
    driver.step()
    for n in (1, 2):
        request = create_request(f"c{n}", driver.added["c0"].prompt_token_ids, max_tokens=8 + n)
        driver.add(request, parent_id="c0")
    driver.run()
    driver.check_tokens()
    assert [len(driver.tokens[f"c{n}"]) for n in range(3)] == [2, 9, 10]


@pytest.mark.parametrize(
    "obstacle", ["no slot", "no budget", "unlike tokens", "salt", "waiting", "gone"]
)
def test_fork_that_cannot_share_is_queued(obstacle: str) -> None:
    changes = {"no slot": {"max_num_seqs": 1}, "no budget": {"max_num_batched_tokens": 1}}
    driver = Driver(create_scheduler(**changes.get(obstacle, {})))
    driver.add(create_request("a", 6, max_tokens=5))
    while obstacle != "waiting" and not driver.tokens["a"]:
        driver.step()
    prompt = driver.added["a"].prompt_token_ids
    if obstacle == "unlike tokens":
        prompt = [1, *prompt[1:]]
    salt = "s" if obstacle == "salt" else None
    parent = "nobody" if obstacle == "gone" else "a"
    driver.add(create_request("b", prompt, cache_salt=salt), parent_id=parent)
    assert len(driver.scheduler.waiting) == (2 if obstacle == "waiting" else 1)
    driver.run()
    driver.check_tokens()


def test_fork_too_long_for_the_pool_or_in_use_is_refused() -> None:
    driver = Driver(create_scheduler(max_model_len=8))
    driver.add(create_request("a", 7, max_tokens=None))
    driver.step()
    tokens = driver.added["a"].prompt_token_ids + driver.tokens["a"]
    output = driver.scheduler.fork("a", create_request("b", tokens))
    assert output is not None and output.finish_reason == "error"


def test_fork_preempted_before_its_first_step_is_introduced_later() -> None:
    driver = Driver(create_scheduler(num_blocks=4, enable_prefix_caching=False))
    driver.add(create_request("a", 13, max_tokens=4))
    driver.step()
    prompt = driver.added["a"].prompt_token_ids
    driver.add(create_request("b", prompt[:6], max_tokens=5), parent_id="a")
    child = driver.scheduler.requests["b"]
    assert child.status is RequestStatus.RUNNING
    driver.step()
    assert child.status is RequestStatus.PREEMPTED
    driver.run()
    driver.check_tokens()


def test_model_of_the_fake_worker_depends_on_the_whole_prefix() -> None:
    assert len({next_token([n, *range(30)]) for n in range(40)}) > 10
