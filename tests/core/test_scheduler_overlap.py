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
    "obstacle", ["no slot", "no budget", "no block", "unlike tokens", "salt", "scores", "gone"]
)
def test_fork_that_cannot_share_is_queued(obstacle: str) -> None:
    changes = {
        "no slot": {"max_num_seqs": 1},
        "no budget": {"max_num_batched_tokens": 1},
        "no block": {"num_blocks": 4},
    }
    driver = Driver(create_scheduler(**changes.get(obstacle, {})))
    driver.add(create_request("a", 6, max_tokens=5))
    while not driver.tokens["a"]:
        driver.step()
    prompt = driver.added["a"].prompt_token_ids
    if obstacle == "unlike tokens":
        prompt = [1, *prompt[1:]]
    salt = "s" if obstacle == "salt" else None
    parent = "nobody" if obstacle == "gone" else "a"
    scores = 0 if obstacle == "scores" else None
    request = create_request("b", prompt, cache_salt=salt, prompt_logprobs=scores)
    driver.add(request, parent_id=parent)
    assert len(driver.scheduler.waiting) == 1
    driver.run()
    driver.check_tokens()


def test_fork_too_long_for_the_pool_or_in_use_is_refused() -> None:
    driver = Driver(create_scheduler(max_model_len=8))
    driver.add(create_request("a", 7, max_tokens=None))
    driver.step()
    tokens = driver.added["a"].prompt_token_ids + driver.tokens["a"]
    output = driver.add(create_request("b", tokens), parent_id="a")
    assert output is not None and output.finish_reason == "error"


def add_family(driver: Driver, num_tokens: int, *max_tokens: int, **changes: object) -> list[int]:
    """Add c0 and what shares its prompt, c1, c2, …, as one request with n > 1 does."""
    driver.add(create_request("c0", num_tokens, max_tokens=max_tokens[0], **changes))
    prompt = driver.added["c0"].prompt_token_ids
    for n, tokens in enumerate(max_tokens[1:], 1):
        driver.add(create_request(f"c{n}", prompt, max_tokens=tokens, **changes), parent_id="c0")
        driver.scheduler.check_integrity()
    return prompt


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("max_tokens", [1, 9])
def test_children_wait_for_the_prompt_and_share_it(
    depth: int, caching: bool, max_tokens: int
) -> None:
    """C067: one prefill for all choices, in chunks here, and also where the first one ends with
    its first token: all full blocks are shared, the partly filled one is copied."""
    scheduler = create_scheduler(max_num_batched_tokens=8, enable_prefix_caching=caching)
    driver = Driver(scheduler, depth=depth)
    add_family(driver, 30, max_tokens, 9, 9, 9)
    assert scheduler.stats().num_waiting == 4 and not scheduler.running
    shared = []
    while scheduler.has_work():
        driver.step()
        shared.append(scheduler.stats().num_shared_blocks)
    driver.check_tokens()
    assert driver.worker.num_tokens_computed == 30 + (max_tokens - 1) + 3 * 9
    assert max(shared) == 8  # 30 tokens, blocks of 4
    alone = depth == max_tokens == 1  # the last to write no longer shares with the first
    assert sum(len(step.block_updates) for step in driver.steps) == 3 - alone
    # 7 shared blocks, and for each choice one partly filled block and at most two for its output.
    assert scheduler.stats().peak_used_blocks <= 7 + 4 * 3 < 4 * 8
    assert [driver.first[f"c{n}"].num_cached_tokens for n in range(4)] == [0, 29, 29, 29]


def test_children_of_a_parent_that_goes_away_are_queued() -> None:
    for aborted in (["c0"], ["c0", "c2"], ["c1", "c0"], ["c1"], ["c0", "c1", "c2"]):
        for steps in range(4):
            driver = Driver(create_scheduler(max_num_batched_tokens=8), depth=2)
            add_family(driver, 20, 5, 5, 5)
            for _ in range(steps):
                driver.step()
            driver.abort(*aborted)
            driver.scheduler.check_integrity()
            driver.run()
            driver.check_tokens()


def test_children_of_a_preempted_parent_are_queued() -> None:
    """The first decode that needs a block takes those of a prompt behind it that is under way."""
    driver = Driver(create_scheduler(num_blocks=11, max_num_batched_tokens=2, watermark=0.0))
    driver.add(create_request("a", 12, max_tokens=30))
    while not driver.tokens["a"]:
        driver.step()
    add_family(driver, 18, 3, 3, 3)
    waited = preempted = False
    while driver.scheduler.has_work():
        driver.step()
        waited |= "c0" in driver.scheduler._children
        parent = driver.scheduler.requests.get("c0")
        preempted |= parent is not None and parent.num_preemptions > 0 and parent.num_tokens == 18
    driver.check_tokens()
    assert waited and preempted


def test_children_do_not_pass_a_request_before_them() -> None:
    """A parent may have overtaken a request that waits for blocks; its children wait behind it."""
    driver = Driver(create_scheduler(num_blocks=16, watermark=0.0))
    driver.add(create_request("first", 16, max_tokens=8))
    driver.step()
    driver.add(create_request("big", 56, max_tokens=2))
    add_family(driver, 6, 3, 3)
    driver.step()
    statuses = [driver.scheduler.requests[name].status for name in ("big", "c0", "c1")]
    assert statuses == [RequestStatus.WAITING, RequestStatus.RUNNING, RequestStatus.WAITING]
    driver.run()
    driver.check_tokens()


# --- log probabilities of prompts -----------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("max_tokens", [0, 1, 5])
def test_prompt_scores_come_once_and_do_not_read_the_cache(depth: int, max_tokens: int) -> None:
    """Conformance 30; C033: with max_tokens 0 no token comes out, not even in a full context."""
    driver = Driver(create_scheduler(max_num_batched_tokens=7, max_model_len=21), depth=depth)
    prompt = list(range(21 if max_tokens == 0 else 20))
    for name in ("a", "b"):  # the second one finds the cache warm
        request = create_request(name, prompt, max_tokens=max_tokens, prompt_logprobs=0)
        driver.add(request)
        driver.run()
        assert driver.final[name].num_cached_tokens == 0
        assert len(driver.prompt_logprobs[name]) == len(prompt) - 1
        assert driver.final[name].finish_reason == "length"
    driver.add(create_request("c", prompt[:20], max_tokens=1))
    driver.run()
    assert driver.final["c"].num_cached_tokens == 19  # what they computed serves others
    driver.check_tokens()


def test_preempted_prompt_scores_are_not_put_out_twice() -> None:
    driver = Driver(create_scheduler(num_blocks=11, max_num_batched_tokens=2, watermark=0.0))
    driver.add(create_request("a", 12, max_tokens=30))
    while not driver.tokens["a"]:
        driver.step()
    driver.add(create_request("b", 18, max_tokens=3, prompt_logprobs=0))
    driver.run()
    driver.check_tokens()
    assert driver.final["b"].num_preemptions


def test_prompt_that_fills_the_context_is_refused_where_a_token_is_wanted() -> None:
    driver = Driver(create_scheduler(max_model_len=8))
    assert driver.add(create_request("a", 8, max_tokens=1)).error is not None
    assert driver.add(create_request("b", 9, max_tokens=0)).error is not None
    assert driver.add(create_request("c", 8, max_tokens=0)) is None
    driver.run()
    assert driver.final["c"].finish_reason == "length" and not driver.tokens["c"]


def test_model_of_the_fake_worker_depends_on_the_whole_prefix() -> None:
    assert len({next_token([n, *range(30)]) for n in range(40)}) > 10
