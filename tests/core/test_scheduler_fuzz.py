"""Random lives of a scheduler: arrivals, shared prefixes, aborts, forks, tiny pools, any depth.

After every call all books agree; each request has exactly one final output and exactly the tokens
it would get alone; all tokens are read back through the block tables; nothing starves.
"""

import random

import pytest
from fake_worker import Driver, create_request, create_scheduler, next_token
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher

from pageserve.core.policy import POLICIES
from pageserve.messages import AddRequest

CONFIGURATIONS = st.fixed_dictionaries(
    {
        "num_blocks": st.integers(1, 24),
        "block_size": st.sampled_from([1, 2, 3, 4, 7]),
        "max_num_seqs": st.integers(1, 6),
        "max_num_batched_tokens": st.integers(1, 24),
        "max_model_len": st.integers(2, 60),
        "policy": st.sampled_from(sorted(POLICIES)),
        "enable_prefix_caching": st.booleans(),
        "watermark": st.sampled_from([0.0, 0.01, 0.3]),
    }
)
GRAMMARS = [
    (LLMatcher.grammar_from_regex("[a-d]+( [a-d]+)*"), []),
    (LLMatcher.grammar_from_regex("-?[0-9]{2,4}"), []),
    (LLMatcher.grammar_from_regex("[0-9]:[a-c]{2}>"), list(range(1, 20))),
]
ARRIVAL = st.fixed_dictionaries(
    {
        "stem": st.integers(0, 2),  # prompts with equal stems share a prefix
        "shared": st.integers(0, 24),
        "own": st.integers(0, 6),
        "max_tokens": st.one_of(st.none(), st.integers(0, 20)),
        "min_tokens": st.integers(0, 3),
        "ignore_eos": st.booleans(),
        "stop_token_ids": st.sampled_from([[], [3], [3, 17]]),
        "logprobs": st.sampled_from([None, 0]),
        "prompt_logprobs": st.sampled_from([None, None, 0]),
        "priority": st.integers(-1, 1),
        "salt": st.sampled_from([None, None, "s"]),
        "grammar": st.sampled_from([None, None, None, *GRAMMARS]),
    }
)
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), ARRIVAL),
        st.tuples(st.just("add"), ARRIVAL),
        st.tuples(st.just("fork"), st.tuples(st.integers(0, 99), st.integers(0, 8), ARRIVAL)),
        st.tuples(st.just("family"), st.tuples(st.integers(1, 5), ARRIVAL)),
        st.tuples(st.just("abort"), st.integers(0, 99)),
        st.tuples(st.just("step"), st.integers(1, 6)),
        st.tuples(st.just("launch"), st.none()),
        st.tuples(st.just("absorb"), st.none()),
        st.tuples(st.just("reset"), st.none()),
    ),
    max_size=80,
)


def arrival(name: str, wishes: dict, prompt: list[int] | None = None) -> AddRequest:
    w = wishes
    if prompt is None:
        stem = [w["stem"] * 100 + i for i in range(w["shared"])]
        prompt = stem + [1000 + len(name) * 7 + int(name[1:]) * 10 + i for i in range(w["own"])]
    grammar, trigger_ids = w["grammar"] or (None, [])
    return create_request(
        name,
        prompt,
        w["max_tokens"],
        min_tokens=min(w["min_tokens"], 20 if w["max_tokens"] is None else w["max_tokens"]),
        ignore_eos=w["ignore_eos"],
        stop_token_ids=w["stop_token_ids"],
        logprobs=w["logprobs"],
        prompt_logprobs=w["prompt_logprobs"],
        priority=w["priority"],
        cache_salt=w["salt"],
        grammar=grammar,
        grammar_trigger_ids=trigger_ids,
    )


def perform(driver: Driver, action: str, argument: object) -> None:
    """One action of a life; what cannot be done now is left out."""
    names = list(driver.added)
    name = f"r{len(names)}"
    if action == "add":
        driver.add(arrival(name, argument))  # type: ignore[arg-type]
    elif action == "fork" and driver.scheduler.running:
        which, longer, wishes = argument  # type: ignore[misc]
        running = driver.scheduler.running
        parent = running[which % len(running)]
        prompt = parent.token_ids[: parent.num_prompt_tokens + longer]
        wishes = wishes | {"salt": parent.cache_salt}
        driver.add(arrival(name, wishes, prompt), parent_id=parent.request_id)
    elif action == "family":  # a prompt and several that share it, as n > 1 sends them
        count, wishes = argument  # type: ignore[misc]
        parent = arrival(name, wishes)
        driver.add(parent)
        for child in range(len(names) + 1, len(names) + count + 1):
            request = arrival(f"r{child}", wishes, parent.prompt_token_ids)
            driver.add(request, parent_id=name)
            driver.scheduler.check_integrity()
    elif action == "abort" and names:
        driver.abort(names[argument % len(names)])  # type: ignore[operator]
    elif action == "step":
        for _ in range(argument):  # type: ignore[call-overload]
            driver.step()
    elif action == "launch" and len(driver.in_flight) < driver.depth:
        driver.launch()
    elif action == "absorb" and driver.in_flight:
        driver.absorb()
    elif action == "reset":
        driver.scheduler.reset_prefix_cache()
    driver.scheduler.check_integrity()


def bound(driver: Driver) -> int:
    """Steps within which all work must be done: the first in order advances in each but the few
    that wait for a result, so one request after the other needs a few steps for each token."""
    limit = min(driver.scheduler.max_model_len, driver.scheduler.max_pool_tokens + 1)
    return 20 + 6 * sum(limit for _ in driver.scheduler.requests)


@settings(max_examples=250, deadline=None)
@given(CONFIGURATIONS, st.integers(1, 3), ACTIONS)
def test_any_life_keeps_all_promises(
    configuration: dict, depth: int, actions: list[tuple[str, object]]
) -> None:
    driver = Driver(create_scheduler(**configuration), depth=depth)
    for action, argument in actions:
        perform(driver, action, argument)
    driver.run(max_steps=bound(driver))
    driver.check_tokens()


@settings(max_examples=60, deadline=None)
@given(CONFIGURATIONS, st.integers(1, 2), ACTIONS, st.integers(0, 2**32 - 1))
def test_corrupted_tokens_end_single_requests_only(
    configuration: dict, depth: int, actions: list[tuple[str, object]], seed: int
) -> None:
    """Some prefixes make the model fail; their requests end as errors, all others as they must."""

    def model(token_ids: list[int]) -> int:
        if -1 in token_ids or next_token([seed, *token_ids]) == 0:
            return -1  # a step in flight may go on from a corrupted token
        return next_token(token_ids)

    driver = Driver(create_scheduler(**configuration), depth=depth, model=model)
    for action, argument in actions:
        perform(driver, action, argument)
    driver.run(max_steps=bound(driver))
    assert driver.final.keys() == driver.added.keys()
    for name, final in driver.final.items():
        tokens = driver.added[name].prompt_token_ids + driver.tokens[name]
        failed = str(final.error).startswith("internal_error")
        if final.finish_reason in ("stop", "length"):
            assert all(t >= 0 for t in tokens)
        assert failed == (final.finish_reason == "error" and bool(final.scheduled_time))
        assert not failed or model(tokens) == -1


def random_life(seed: int, num_actions: int) -> None:
    """A long life of few configurations, steadily loaded (hypothesis prefers short ones)."""
    rng = random.Random(seed)
    driver = Driver(
        create_scheduler(
            num_blocks=rng.randint(6, 40),
            block_size=rng.choice([1, 3, 4, 16]),
            max_num_seqs=rng.randint(2, 12),
            max_num_batched_tokens=rng.randint(4, 64),
            max_model_len=rng.randint(20, 150),
            policy=rng.choice(sorted(POLICIES)),
            enable_prefix_caching=rng.random() < 0.8,
        ),
        depth=rng.choice([1, 2]),
    )
    for _ in range(num_actions):
        wishes = {
            "stem": rng.randrange(4),
            "shared": rng.randrange(60),
            "own": rng.randrange(20),
            "max_tokens": rng.choice([None, 0, 1, 5, 30, 60]),
            "min_tokens": 0,
            "ignore_eos": rng.random() < 0.7,
            "stop_token_ids": [],
            "logprobs": None,
            "prompt_logprobs": rng.choice([None, None, 0]),
            "priority": rng.randrange(3),
            "salt": None,
            "grammar": rng.choice([None, None, *GRAMMARS]),
        }
        action = rng.choices(["add", "fork", "family", "abort", "step"], [8, 3, 2, 3, 16])[0]
        argument: object = {
            "add": wishes,
            "fork": (rng.randrange(99), rng.randrange(4), wishes),
            "family": (rng.randrange(1, 5), wishes),
            "abort": rng.randrange(10**6),
            "step": rng.randrange(1, 4),
        }[action]
        perform(driver, action, argument)
    driver.run(max_steps=bound(driver))
    driver.check_tokens()


@pytest.mark.parametrize("seed", range(8))
def test_long_life_under_load(seed: int) -> None:
    random_life(seed, 150)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 400))
def test_many_long_lives(seed: int) -> None:
    random_life(seed, 400)
