"""The scheduler's rules one by one, one step at a time (planning ahead has its own file)."""

import time
from typing import Any

import pytest
from fake_worker import (
    EOS,
    Driver,
    create_request,
    create_requests,
    create_scheduler,
    next_token,
)

from pageserve.core.policy import POLICIES
from pageserve.core.request import RequestStatus
from pageserve.core.scheduler import LOOK_AHEAD, MAX_OVERTAKEN
from pageserve.messages import ModelRunnerOutput, SchedulerOutput
from pageserve.utils import COMMON_TOKENS


def spans(step: SchedulerOutput | None) -> list[tuple[int, int, int]]:
    """(slot, first token, number of tokens) of every row."""
    assert step is not None
    return [(r.slot, r.num_computed_tokens, r.num_scheduled_tokens) for r in step.rows]


# --- what goes into a step ------------------------------------------------------------------------


def test_prompt_then_decodes() -> None:
    driver = Driver(create_scheduler())
    driver.add(create_request("a", 10, max_tokens=3))
    driver.run()
    assert [spans(s) for s in driver.steps] == [[(0, 0, 10)], [(0, 10, 1)], [(0, 11, 1)]]
    assert all(row.samples for s in driver.steps for row in s.rows)
    driver.check_tokens()


def test_long_prompt_is_chunked_and_samples_once() -> None:
    driver = Driver(create_scheduler(max_num_batched_tokens=8))
    driver.add(create_request("a", 20, max_tokens=1))
    driver.run()
    assert [spans(s)[0][1:] for s in driver.steps] == [(0, 8), (8, 8), (16, 4)]
    assert [s.rows[0].samples for s in driver.steps] == [False, False, True]
    assert len(driver.steps[0].new_requests) == 1
    assert not any(s.new_requests or s.rows[0].new_block_ids for s in driver.steps[1:])


def test_prompt_that_fits_a_step_is_not_cut_for_a_sliver() -> None:
    driver = Driver(create_scheduler(max_num_batched_tokens=32, max_num_seqs=4))
    driver.add(create_request("a", 28, max_tokens=1))
    driver.add(create_request("b", 24, max_tokens=1))  # the 4 tokens left are less than a quarter
    driver.add(create_request("c", 40, max_tokens=1))  # has to be cut anyway
    driver.run()
    chunks = [[span[1:] for span in spans(s)] for s in driver.steps]
    assert chunks == [[(0, 28)], [(0, 24), (0, 8)], [(8, 32)]]
    driver.check_tokens()


def test_sliver_rule_starves_nobody() -> None:
    """Decodes that leave every step less than a quarter of a prompt do not keep it out."""
    driver = Driver(create_scheduler(num_blocks=512, max_num_batched_tokens=32, max_num_seqs=30))
    for n in range(28):
        driver.add(create_request(f"d{n}", 1, max_tokens=60))
    driver.step()
    driver.add(create_request("prompt", 30, max_tokens=1))
    driver.step()
    assert spans(driver.steps[-1])[-1] == (28, 0, 4)


def test_decodes_come_first_and_are_never_short_of_budget() -> None:
    """C071: long prompts that keep coming do not hold up a running stream."""
    driver = Driver(create_scheduler(num_blocks=512, max_num_batched_tokens=64))
    driver.add(create_request("stream", 5, max_tokens=100))
    driver.step()
    for n in range(20):
        driver.add(create_request(f"p{n}", 400, max_tokens=1))
        before = len(driver.tokens["stream"])
        for _ in range(3):
            driver.step()
        assert len(driver.tokens["stream"]) == before + 3
        assert driver.steps[-1].rows[0].num_scheduled_tokens == 1
        assert driver.steps[-1].num_scheduled_tokens == 64
    driver.run()
    driver.check_tokens()


def test_rows_that_decode_precede_chunks_even_of_earlier_requests() -> None:
    driver = Driver(create_scheduler(max_num_batched_tokens=8))
    driver.add(create_request("short", 4, max_tokens=30))
    driver.add(create_request("long", 20, max_tokens=2))
    driver.add(create_request("one", 1, max_tokens=30))
    for _ in range(4):
        driver.step()
    for step in driver.steps:
        kinds = [r.num_scheduled_tokens == 1 and r.samples for r in step.rows]
        assert kinds == sorted(kinds, reverse=True)
    driver.run()
    driver.check_tokens()


def test_budget_below_the_number_of_requests_starves_nobody() -> None:
    driver = Driver(create_scheduler(max_num_seqs=8, max_num_batched_tokens=3))
    for request in create_requests(6, 5, max_tokens=10):
        driver.add(request)
    driver.step()
    while driver.scheduler.has_work():
        running = {r.request_id: r.num_computed_tokens for r in driver.scheduler.running}
        driver.step()
        assert len(running) <= 3
        assert driver.steps[-1].num_scheduled_tokens <= 3
    driver.check_tokens()


@pytest.mark.parametrize("block_size", [1, 3, 4, 16])
@pytest.mark.parametrize("budget", [1, 5, 64])
def test_chunks_and_blocks_do_not_change_the_tokens(block_size: int, budget: int) -> None:
    driver = Driver(
        create_scheduler(block_size=block_size, num_blocks=96, max_num_batched_tokens=budget)
    )
    for request in create_requests(4, 13, max_tokens=7):
        driver.add(request)
    driver.run()
    driver.check_tokens()
    assert driver.scheduler.stats().preemptions_total == 0


def test_nothing_to_do_plans_nothing() -> None:
    scheduler = create_scheduler()
    assert scheduler.schedule() is None and not scheduler.has_work()
    assert scheduler.stats().steps_total == 0


def test_slots_are_dense_lowest_first() -> None:
    driver = Driver(create_scheduler())
    for request in create_requests(3, 4, max_tokens=20):
        driver.add(request)
    driver.step()
    driver.abort("r0", "r1")
    driver.add(create_request("x", 4))
    driver.step()
    assert {r.request_id: r.slot for r in driver.scheduler.running} == {"r2": 2, "x": 0}


# --- ends -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("params", "length", "reason", "stop_reason"),
    [
        ({"max_tokens": 5}, 5, "length", None),
        ({"max_tokens": 50, "ignore_eos": False}, 3, "stop", None),
        ({"max_tokens": 50, "stop_token_ids": [11]}, 2, "stop", 11),
        ({"max_tokens": 3, "ignore_eos": False}, 3, "stop", None),  # stop before length
        ({"max_tokens": None}, 12, "length", None),  # max_model_len - prompt
        ({"max_tokens": 50, "ignore_eos": False, "min_tokens": 3}, 3, "stop", None),
        ({"max_tokens": 6, "ignore_eos": False, "min_tokens": 4}, 6, "length", None),
    ],
)
def test_how_a_request_ends(
    params: dict[str, Any], length: int, reason: str, stop_reason: int | None
) -> None:
    script = [10, 11, EOS, *range(12, 40)]
    driver = Driver(
        create_scheduler(max_model_len=16), model=lambda tokens: script[len(tokens) - 4]
    )
    driver.add(create_request("a", 4, **params))
    driver.run()
    final = driver.final["a"]
    assert driver.tokens["a"] == script[:length]
    assert (final.finish_reason, final.stop_reason) == (reason, stop_reason)


@pytest.mark.parametrize("num_tokens", [127, 128])
def test_prompt_of_the_pools_size_runs_and_ends_with_length(num_tokens: int) -> None:
    """C068: fits by prompt but not with its output."""
    driver = Driver(create_scheduler(num_blocks=8, block_size=16, max_num_batched_tokens=512))
    driver.add(create_request("a", num_tokens, max_tokens=50))
    driver.add(create_request("b", 5))
    driver.run(max_steps=200)
    assert len(driver.tokens["a"]) == 129 - num_tokens
    assert driver.final["a"].finish_reason == "length"
    driver.check_tokens()


def test_prompt_that_can_never_fit_is_refused_at_once() -> None:
    """C068: retried for ever, it would hold up all behind it."""
    driver = Driver(create_scheduler(num_blocks=8, block_size=16))
    output = driver.add(create_request("a", 130))
    assert output is not None and output.finish_reason == "error"
    assert "130" in str(output.error) and "128" in str(output.error)
    driver.add(create_request("b", 5))
    driver.run(max_steps=10)
    assert driver.final["b"].finish_reason == "length"


@pytest.mark.parametrize("num_tokens", [0, 16, 17])
def test_prompt_without_room_for_output_is_refused(num_tokens: int) -> None:
    driver = Driver(create_scheduler(max_model_len=16))
    output = driver.add(create_request("a", num_tokens))
    assert output is not None and output.finish_reason == "error" and output.error
    assert num_tokens == 0 or "maximum context length is 16 tokens" in output.error
    assert num_tokens == 0 or "prompt is too long" in output.error
    assert not driver.scheduler.has_work()
    driver.check_tokens()


def test_corrupted_logits_end_one_request_and_spoil_no_cache() -> None:
    driver = Driver(
        create_scheduler(), model=lambda tokens: -1 if len(tokens) == 14 else next_token(tokens)
    )
    driver.add(create_request("bad", 12, max_tokens=20))
    driver.add(create_request("good", 20, max_tokens=20))
    driver.run()
    final = driver.final["bad"]
    assert final.finish_reason == "error" and str(final.error).startswith("internal_error")
    assert len(driver.tokens["bad"]) == 2
    assert driver.final["good"].finish_reason == "length"
    assert driver.scheduler.stats().num_cached_blocks == (20 + 19) // 4  # all of them good's
    driver.add(create_request("bad2", driver.added["bad"].prompt_token_ids, max_tokens=1))
    driver.run()
    assert driver.final["bad2"].num_cached_tokens == 0


def test_logprobs_reach_the_requests_that_asked() -> None:
    driver = Driver(create_scheduler())
    driver.add(create_request("with", 4, max_tokens=2, logprobs=0))
    driver.add(create_request("without", 5, max_tokens=2))
    for last in (False, True):
        outputs = {o.request_id: o for o in driver.step()}
        logprobs = outputs["with"].new_logprobs
        assert logprobs and [e.token_id for e in logprobs] == outputs["with"].new_token_ids
        assert outputs["without"].new_logprobs is None
        assert (outputs["with"].finish_reason is not None) is last


def test_result_must_match_its_step() -> None:
    scheduler = create_scheduler()
    scheduler.add(create_request("a", 4))
    step = scheduler.schedule()
    assert step is not None
    with pytest.raises(ValueError, match="result of step"):
        scheduler.update(step, ModelRunnerOutput(step.step_id + 1, [1]))
    scheduler.update(step, ModelRunnerOutput(step.step_id, [1]))
    with pytest.raises(KeyError):
        scheduler.update(step, ModelRunnerOutput(step.step_id, [1]))
    step = scheduler.schedule()
    assert step is not None
    with pytest.raises(ValueError, match="zip"):
        scheduler.update(step, ModelRunnerOutput(step.step_id, [1, 2]))


# --- aborts and ids -------------------------------------------------------------------------------


def test_abort_is_idempotent_and_ignores_unknown_ids() -> None:
    driver = Driver(create_scheduler())
    driver.add(create_request("a", 4))
    driver.step()
    driver.abort("a", "a", "unknown")
    driver.abort("a")
    assert driver.final["a"].finish_reason == "abort" and not driver.scheduler.has_work()
    assert driver.scheduler.abort(["a", "b"]) == []


def test_no_block_is_lost_whenever_requests_are_aborted() -> None:
    """C066: 200 requests, half aborted while waiting, in mid-prefill, decoding or at the end."""
    driver = Driver(create_scheduler(max_num_batched_tokens=16))
    for n in range(200):
        driver.add(create_request(f"r{n}", 5 + n % 17, max_tokens=1 + n % 7))
    for n in range(0, 200, 2):
        driver.abort(f"r{n * 37 % 200}")
        driver.step()
        driver.scheduler.check_integrity()
    driver.run()
    driver.check_tokens()
    stats = driver.scheduler.stats()
    assert stats.num_used_blocks == 0 and stats.num_free_blocks == 64
    assert 0 < stats.num_cached_blocks <= stats.num_free_blocks
    driver.add(create_request("whole pool", 64 * 4, max_tokens=5))
    driver.run()
    assert len(driver.tokens["whole pool"]) == 1


def test_duplicate_live_id_is_refused_and_ids_may_be_used_again() -> None:
    """C076: outputs must not cross, nor a late abort kill the newcomer."""
    driver = Driver(create_scheduler(), depth=2)
    driver.add(create_request("id", 4, max_tokens=50))
    driver.step()
    with pytest.raises(ValueError, match="in use"):
        driver.scheduler.add(create_request("id", 4))
    driver.abort("id")  # a step that samples for it is still in flight
    again = Driver(driver.scheduler, depth=2, model=driver.worker.model)
    again.worker, again.in_flight = driver.worker, driver.in_flight
    again.add(create_request("id", [1, 2, 3], max_tokens=6))
    again.run()
    again.check_tokens()
    assert len(again.tokens["id"]) == 6


def test_every_request_is_in_exactly_one_place_between_calls() -> None:
    """C075: a request that is in no list is never answered."""
    driver = Driver(create_scheduler(num_blocks=8, max_num_seqs=3))
    for request in create_requests(9, 6, max_tokens=12):
        driver.add(request)
    while driver.scheduler.has_work():
        driver.step()
        scheduler = driver.scheduler
        places = [r.request_id for r in [*scheduler.running, *scheduler.waiting.requests()]]
        assert sorted([*places, *driver.final]) == sorted(driver.added)


# --- the prefix cache -----------------------------------------------------------------------------


@pytest.mark.parametrize("num_tokens", [16, 32, 31, 33])
@pytest.mark.parametrize("together", [False, True])
def test_repeated_prompt_gets_the_same_answer(num_tokens: int, together: bool) -> None:
    """C054: fully cached prompts, at and around a multiple of the block."""
    driver = Driver(create_scheduler(num_blocks=8, block_size=16))
    for n in range(4):
        driver.add(create_request(f"r{n}", list(range(num_tokens)), max_tokens=8))
        if not together or n == 0:
            driver.run()
    driver.run()
    driver.check_tokens()
    cached = [driver.final[f"r{n}"].num_cached_tokens for n in range(4)]
    assert cached[0] == 0
    assert all(c == min(num_tokens // 16 * 16, num_tokens - 1) for c in cached[1:])


def test_equal_prompts_planned_in_one_step_share_their_blocks() -> None:
    driver = Driver(create_scheduler())
    for n in range(3):
        driver.add(create_request(f"r{n}", list(range(9)), max_tokens=8))
    driver.step()
    assert [r.num_scheduled_tokens for r in driver.steps[0].rows] == [1, 1, 9]
    assert driver.scheduler.stats().num_shared_blocks == 2
    assert driver.worker.num_tokens_computed == 11
    driver.run()
    driver.check_tokens()


def test_equal_block_aligned_prompts_in_one_step_do_not_copy_unwritten_blocks() -> None:
    driver = Driver(create_scheduler())
    for n in range(3):
        driver.add(create_request(f"r{n}", list(range(8)), max_tokens=8))
    driver.step()
    assert driver.steps[0].block_updates == []
    assert [r.num_scheduled_tokens for r in driver.steps[0].rows] == [8, 4, 4]
    driver.run()
    driver.check_tokens()


def test_second_turn_finds_the_first_answer() -> None:
    driver = Driver(create_scheduler())
    driver.add(create_request("turn 1", 10, max_tokens=7))
    driver.run()
    history = driver.added["turn 1"].prompt_token_ids + driver.tokens["turn 1"]
    driver.add(create_request("turn 2", [*history, 3, 4], max_tokens=3))
    driver.run()
    assert driver.final["turn 2"].num_cached_tokens == 16  # all that were computed
    driver.check_tokens()


def test_output_of_a_running_request_is_shared() -> None:
    driver = Driver(create_scheduler())
    driver.add(create_request("a", 6, max_tokens=50))
    for _ in range(12):
        driver.step()
    tokens = driver.added["a"].prompt_token_ids + driver.tokens["a"]
    driver.add(create_request("b", tokens, max_tokens=3))
    driver.step()
    assert len(tokens) == 18 and driver.first["b"].num_cached_tokens == 16
    driver.run()
    driver.check_tokens()


def test_cached_tokens_are_reported_on_the_first_output() -> None:
    driver = Driver(create_scheduler())
    for name in ("a", "b"):
        driver.add(create_request(name, list(range(9)), max_tokens=3))
        driver.run()
    assert driver.first["b"].num_cached_tokens == 8
    assert driver.first["a"].num_cached_tokens == 0
    stats = driver.scheduler.stats()
    assert (stats.prefix_cache_queries_total, stats.prefix_cache_hits_total) == (18, 8)


def test_rows_with_a_common_prefix_stand_together() -> None:
    first, second = (list(range(n, n + COMMON_TOKENS)) for n in (1000, 2000))
    prompts = {"a": [*first, 1], "b": [*second, 2], "c": 40, "d": [*first, 3], "e": [*second, 4]}
    options = {"num_blocks": 128, "max_num_batched_tokens": 1024, "max_num_seqs": 8}
    driver = Driver(create_scheduler(**options))
    for name, prompt in prompts.items():
        driver.add(create_request(name, prompt))
    driver.run()
    slots = [row.slot for row in driver.steps[1].rows]
    assert sorted(slots) == [0, 1, 2, 3, 4]
    places = dict(zip("abcde", map(slots.index, range(5)), strict=True))
    assert abs(places["a"] - places["d"]) == abs(places["b"] - places["e"]) == 1
    driver.check_tokens()


def test_no_decode_reads_what_another_one_writes() -> None:
    """A step of decodes alone writes keys and values while it reads those of other rows."""
    options = {"block_size": 1, "num_blocks": 256, "max_num_batched_tokens": 64}
    driver = Driver(create_scheduler(**options))
    prompt = list(range(100, 120))
    driver.add(create_request("first", prompt[:-1], max_tokens=1))
    driver.run()
    for name, tokens in (("a", prompt), ("b", [*prompt, 1]), ("c", [*prompt, 2])):
        driver.add(create_request(name, tokens))
    driver.run()
    for step in driver.steps:
        tables = {new.slot: new.block_ids for new in step.new_requests}
        written = {tables[r.slot][r.num_computed_tokens] for r in step.rows if r.slot in tables}
        if all(r.num_scheduled_tokens == 1 for r in step.rows):
            for r in step.rows:
                read = tables.get(r.slot, [])[: r.num_computed_tokens]
                assert not written & set(read)
    driver.check_tokens()


def test_forks_do_not_count_as_prefix_cache_hits() -> None:
    driver = Driver(create_scheduler())
    driver.add(create_request("a", list(range(9)), max_tokens=9))
    for i in range(3):
        driver.add(create_request(f"f{i}", list(range(9)), max_tokens=9), parent_id="a")
    driver.run()
    stats = driver.scheduler.stats()
    assert driver.worker.num_tokens_computed < 2 * 9 + 4 * 9, "they share the prompt"
    assert (stats.prefix_cache_queries_total, stats.prefix_cache_hits_total) == (9, 0)


def test_reset_prefix_cache_forgets_without_hurting_the_running() -> None:
    driver = Driver(create_scheduler())
    driver.add(create_request("a", list(range(9)), max_tokens=20))
    driver.step()
    driver.scheduler.reset_prefix_cache()
    driver.scheduler.check_integrity()
    driver.add(create_request("b", list(range(9)), max_tokens=3))
    driver.run()
    assert driver.final["b"].num_cached_tokens == 0
    driver.check_tokens()


def test_cache_can_be_switched_off() -> None:
    driver = Driver(create_scheduler(enable_prefix_caching=False))
    for n in range(3):
        driver.add(create_request(f"r{n}", list(range(8)), max_tokens=5))
    driver.run()
    driver.check_tokens()
    stats = driver.scheduler.stats()
    assert stats.num_cached_blocks == stats.prefix_cache_queries_total == 0


# --- admission and preemption ---------------------------------------------------------------------


def test_no_preemption_when_the_pool_is_big_enough() -> None:
    """C078: every token is computed once."""
    lengths = [1, 2, 4, 8, 16, 32, 48, 64]
    prompts = [7] * 8
    num_blocks = sum(-(-(p + n - 1) // 4) for p, n in zip(prompts, lengths, strict=True))
    driver = Driver(create_scheduler(num_blocks=num_blocks))
    for n, length in enumerate(lengths):
        driver.add(create_request(f"r{n}", 7, max_tokens=length))
    driver.run()
    driver.check_tokens()
    assert driver.scheduler.stats().preemptions_total == 0
    assert driver.worker.num_tokens_computed == sum(prompts) + sum(n - 1 for n in lengths)


def test_admission_leaves_a_block_for_each_running_request() -> None:
    driver = Driver(create_scheduler(num_blocks=10, block_size=16, max_num_batched_tokens=256))
    for n in range(8):
        driver.add(create_request(f"r{n}", 16, max_tokens=16))
    driver.step()
    assert len(driver.scheduler.running) == 5  # 5 blocks used, 5 left, one for each
    for _ in range(15):
        driver.step()
    assert driver.scheduler.stats().preemptions_total == 0
    driver.run()
    driver.check_tokens()


def test_watermark_is_a_share_of_the_pool() -> None:
    driver = Driver(create_scheduler(num_blocks=100, watermark=0.5, max_num_batched_tokens=512))
    for n in range(3):
        driver.add(create_request(f"r{n}", 30 * 4, max_tokens=2))
    driver.step()
    assert len(driver.scheduler.running) == 1  # a second one would leave 40 of 100
    driver.run()


def test_request_alone_is_admitted_whatever_the_watermark() -> None:
    driver = Driver(create_scheduler(num_blocks=4, watermark=0.9))
    driver.add(create_request("a", 16, max_tokens=4))
    driver.run(max_steps=3)
    driver.check_tokens()


def test_full_pool_preempts_the_last_arrived() -> None:
    driver = Driver(create_scheduler(num_blocks=8, enable_prefix_caching=False))
    for request in create_requests(2, 8, max_tokens=20):
        driver.add(request)
    while driver.scheduler.stats().preemptions_total == 0:
        driver.step()
    first, last = (driver.scheduler.requests[name] for name in ("r0", "r1"))
    assert first.status is RequestStatus.RUNNING and first.num_preemptions == 0
    assert last.status is RequestStatus.PREEMPTED and last.slot == -1 and not last.block_ids
    assert last.num_computed_tokens == 0
    driver.run()
    driver.check_tokens()
    assert driver.final["r1"].num_preemptions == last.num_preemptions >= 1
    assert len(driver.tokens["r1"]) == 20


def test_preemption_follows_priority_not_arrival() -> None:
    driver = Driver(create_scheduler(num_blocks=8, policy="priority"))
    driver.add(create_request("late", 8, max_tokens=20, priority=1))
    driver.add(create_request("urgent", 8, max_tokens=20, priority=0))
    driver.run()
    driver.check_tokens()
    assert driver.final["urgent"].num_preemptions == 0
    assert driver.final["late"].num_preemptions > 0


def test_no_admission_in_a_step_that_preempted() -> None:
    """Not even of an urgent one that waited for no more than a slot."""
    driver = Driver(create_scheduler(num_blocks=8, max_num_seqs=2, policy="priority"))
    for priority, request in enumerate(create_requests(2, 8, max_tokens=30)):
        request.priority = priority
        driver.add(request)
    driver.step()
    driver.add(create_request("urgent", 1, max_tokens=1, priority=-1))
    while driver.scheduler.stats().preemptions_total == 0:
        driver.step()
    assert not driver.steps[-1].new_requests and "urgent" not in driver.final
    driver.step()
    assert "urgent" in driver.final
    driver.run()
    driver.check_tokens()


@pytest.mark.parametrize("policy", POLICIES)
def test_first_in_order_is_never_preempted(policy: str) -> None:
    """Nobody is preempted for a request behind it, so the first always advances."""
    driver = Driver(create_scheduler(num_blocks=9, policy=policy))
    for n, request in enumerate(create_requests(6, 6, max_tokens=28)):
        request.priority = n % 2
        driver.add(request)
    while driver.scheduler.has_work():
        running = driver.scheduler.running
        first = running[0] if running else None
        driver.step()
        assert first is None or first.status is not RequestStatus.PREEMPTED
    assert driver.scheduler.stats().preemptions_total > 0
    driver.check_tokens()


def test_big_request_at_the_head_lets_some_small_ones_pass() -> None:
    """C069: R holds 10 of 16 blocks, H waits for 12, ten small ones need one each."""
    driver = Driver(create_scheduler(num_blocks=16, block_size=16, max_num_seqs=16))
    driver.add(create_request("R", 145, max_tokens=14, ignore_eos=True))
    for _ in range(3):
        driver.step()
    driver.add(create_request("H", 180, max_tokens=4))
    for n in range(10):
        driver.add(create_request(f"s{n}", 8, max_tokens=2))
    driver.step()
    assert {r.request_id for r in driver.scheduler.running} >= {"R", "s0", "s1"}
    driver.run(max_steps=60)
    driver.check_tokens()
    assert driver.scheduler.stats().preemptions_total == 0


def test_endless_stream_of_small_requests_does_not_starve_a_big_one() -> None:
    """C069: at most MAX_OVERTAKEN pass it, then all wait."""
    driver = Driver(create_scheduler(num_blocks=16, max_num_seqs=4))
    driver.add(create_request("R", 40, max_tokens=5))
    driver.step()
    driver.add(create_request("H", 44, max_tokens=1))
    overtaken = 0
    for n in range(200):
        driver.add(create_request(f"s{n}", 3, max_tokens=2))
        driver.step()
        if "H" in driver.final:
            break
        overtaken = driver.scheduler.requests["H"].num_overtaken
    assert "H" in driver.final and n < 40
    assert 0 < overtaken <= MAX_OVERTAKEN
    driver.run()
    driver.check_tokens()


def test_preempted_request_is_overtaken_by_nobody() -> None:
    driver = Driver(create_scheduler(num_blocks=8))
    for request in create_requests(2, 8, max_tokens=23):
        driver.add(request)
    while driver.scheduler.stats().preemptions_total == 0:
        driver.step()
    driver.add(create_request("small", 1, max_tokens=1))
    preempted = driver.scheduler.requests["r1"]
    while preempted.status is RequestStatus.PREEMPTED:
        assert "small" not in driver.first
        driver.step()
    driver.run()
    driver.check_tokens()


@pytest.mark.parametrize("policy", POLICIES)
def test_planning_looks_at_a_bounded_part_of_the_queue(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C119: 2,000 queued behind one that does not fit; and hashes are computed once."""
    scheduler = create_scheduler(num_blocks=16, policy=policy, max_num_seqs=4)
    driver = Driver(scheduler)
    driver.add(create_request("R", 40, max_tokens=20, priority=-1))
    driver.step()
    for n in range(2000):
        driver.add(create_request(f"r{n}", 48, max_tokens=2))
    looked_up: list[str] = []
    get_computed_blocks = scheduler.kv_cache_manager.get_computed_blocks

    def counting(request: Any) -> list[int]:
        looked_up.append(request.request_id)
        return get_computed_blocks(request)

    monkeypatch.setattr(scheduler.kv_cache_manager, "get_computed_blocks", counting)
    for _ in range(12):
        step = scheduler.schedule()
        assert step is not None
        driver._collect(scheduler.update(step, driver.worker.execute(step)))
    assert len(looked_up) <= 2 * (LOOK_AHEAD + 1)
    first = looked_up[0]
    hashes = scheduler.requests[first].block_hashes
    counting(scheduler.requests[first])
    assert scheduler.requests[first].block_hashes is hashes and len(hashes) == 12
    assert scheduler.abort([f"r{n}" for n in range(2000)]) and not len(scheduler.waiting)
    driver.abort("R")
    scheduler.check_integrity()


def test_cost_of_a_step_and_of_an_abort_does_not_grow_with_the_queue() -> None:
    """C119, measured: ratios in one process, generous for busy machines."""

    def cost(num_queued: int) -> tuple[float, float]:
        driver = Driver(create_scheduler(num_blocks=16, max_num_seqs=4))
        driver.add(create_request("R", 40, max_tokens=20))
        driver.step()
        for n in range(num_queued):
            driver.scheduler.add(create_request(f"r{n}", 48, max_tokens=2))
        steps = []
        for _ in range(12):
            start = time.perf_counter()
            step = driver.scheduler.schedule()
            steps.append(time.perf_counter() - start)
            assert step is not None
            driver.scheduler.update(step, driver.worker.execute(step))
        start = time.perf_counter()
        for n in range(num_queued):
            driver.scheduler.abort([f"r{n}"])
        return min(steps), (time.perf_counter() - start) / num_queued

    few, many = cost(100), cost(5000)
    assert many[0] < 10 * few[0] and many[1] < 10 * few[1]


def test_memory_aware_gives_prompts_less_when_the_pool_runs_full() -> None:
    def chunk_beside_a_decode(policy: str) -> int:
        driver = Driver(create_scheduler(policy=policy, max_num_batched_tokens=32))
        driver.add(create_request("a", 220, max_tokens=20))
        while not driver.tokens.get("a"):
            driver.step()
        driver.add(create_request("b", 20, max_tokens=2))
        driver.step()
        largest = max(r.num_scheduled_tokens for r in driver.steps[-1].rows)
        driver.run()
        driver.check_tokens()
        return largest

    assert chunk_beside_a_decode("memory-aware") < chunk_beside_a_decode("fcfs") == 20


def test_memory_aware_does_not_slow_a_prompt_for_nobody() -> None:
    driver = Driver(create_scheduler(policy="memory-aware"))
    driver.add(create_request("a", 240, max_tokens=1))
    driver.run()
    assert [s.num_scheduled_tokens for s in driver.steps] == [64, 64, 64, 48]


# --- seeds, times, statistics, arguments ----------------------------------------------------------


def seeds_of(scheduler: Any, *seeds: int | None) -> list[int]:
    for n, seed in enumerate(seeds):
        scheduler.add(create_request(f"r{n}", 4, seed=seed))
    step = scheduler.schedule()
    return [new.seed for new in step.new_requests]


def test_seeds_fit_64_bits_and_follow_the_engines() -> None:
    assert seeds_of(create_scheduler(), 5, -1, -(2**63)) == [5, 2**64 - 1, 2**63]
    drawn = seeds_of(create_scheduler(), None, None)
    assert drawn[0] != drawn[1] and all(0 <= s < 2**64 for s in drawn)
    assert drawn != seeds_of(create_scheduler(), None, None)
    repeated = [seeds_of(create_scheduler(seed=3), None, None) for _ in range(2)]
    assert repeated[0] == repeated[1] != seeds_of(create_scheduler(seed=4), None, None)


def test_seed_outlives_preemption() -> None:
    driver = Driver(create_scheduler(num_blocks=8))
    for request in create_requests(2, 8, max_tokens=20):
        driver.add(request)
    driver.run()
    news = [new for step in driver.steps for new in step.new_requests]
    assert len(news) > 2 and news[-1].seed == news[1].seed
    assert news[-1].num_prompt_tokens == 8 and len(news[-1].token_ids) > 8


def test_scheduled_time_is_that_of_the_first_step() -> None:
    driver = Driver(create_scheduler())
    driver.add(create_request("a", 4, max_tokens=3))
    before = time.monotonic()
    driver.step()
    after = time.monotonic()
    driver.run()
    times = {driver.first["a"].scheduled_time, driver.final["a"].scheduled_time}
    assert len(times) == 1 and before <= times.pop() <= after


def test_stats_while_running() -> None:
    driver = Driver(create_scheduler(max_num_seqs=2))
    for request in create_requests(3, 6, max_tokens=4):
        driver.add(request)
    driver.step()
    stats = driver.scheduler.stats()
    assert (stats.num_running, stats.num_waiting) == (2, 1)
    assert (stats.num_used_blocks, stats.num_free_blocks, stats.peak_used_blocks) == (4, 60, 4)
    assert (stats.used_slots, stats.num_scheduled_tokens, stats.steps_total) == (12, 12, 1)
    driver.run()
    assert driver.scheduler.stats().peak_used_blocks == 6


@pytest.mark.parametrize(
    "changes",
    [
        {"num_blocks": 0},
        {"block_size": 0},
        {"max_num_seqs": 0},
        {"max_num_batched_tokens": 0},
        {"max_model_len": 0},
        {"policy": "fastest"},
        {"watermark": 1.0},
    ],
)
def test_values_that_cannot_work_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"at least|must"):
        create_scheduler(**changes)
