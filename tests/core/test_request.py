"""When a request stops, and the hash chain over its blocks."""

import time

import pytest
from fake_worker import create_request

from pageserve.core.request import HashMemo, Request, RequestStatus, root_hash

EOS_IDS = frozenset({0, 1})


def request_with(output: list[int], max_num_tokens: int = 100, **params: object) -> Request:
    message = create_request("r", [9, 9, 9], **({"ignore_eos": False} | params))  # type: ignore[arg-type]
    request = Request(
        message, arrival=0, seed=0, max_num_tokens=max_num_tokens, eos_token_ids=EOS_IDS
    )
    request.token_ids += output
    request.num_tokens = len(request.token_ids)
    return request


def test_statuses_after_preempted_are_finished() -> None:
    finished = [s for s in RequestStatus if s > RequestStatus.PREEMPTED]
    assert finished and all(s.name.startswith("FINISHED") for s in finished)
    assert not any(s.name.startswith("FINISHED") for s in set(RequestStatus) - set(finished))


@pytest.mark.parametrize(
    ("output", "params", "expected"),
    [
        ([5, 1], {}, ("FINISHED_STOPPED", None)),  # second of two EOS ids
        ([5, 1], {"ignore_eos": True}, None),
        ([5, 7], {"stop_token_ids": [7]}, ("FINISHED_STOPPED", 7)),
        ([5, 1], {"stop_token_ids": [1]}, ("FINISHED_STOPPED", None)),  # EOS comes first
        ([5, 1], {"stop_token_ids": [1], "ignore_eos": True}, ("FINISHED_STOPPED", 1)),
        ([1], {"min_tokens": 2}, None),
        ([7], {"min_tokens": 2, "stop_token_ids": [7]}, None),
        ([5, 1], {"min_tokens": 2}, ("FINISHED_STOPPED", None)),
        ([5, 6, 7], {"max_num_tokens": 6}, ("FINISHED_LENGTH", None)),
        ([5, 6, 1], {"max_num_tokens": 6}, ("FINISHED_STOPPED", None)),  # stop beats length
        ([5, 6, 1], {"max_num_tokens": 6, "min_tokens": 9}, ("FINISHED_LENGTH", None)),
        ([5, 6], {"max_num_tokens": 6}, None),
    ],
)
def test_first_matching_stop_rule_decides(
    output: list[int], params: dict[str, object], expected: tuple[str, int | None] | None
) -> None:
    stop = request_with(output, **params).check_stop()  # type: ignore[arg-type]
    assert (stop and (stop[0].name, stop[1])) == expected


def hashes_of(token_ids: list[int], block_size: int, salt: str | None = None) -> list[bytes]:
    message = create_request("r", token_ids, cache_salt=salt)
    request = Request(message, arrival=0, seed=0, max_num_tokens=10**9, eos_token_ids=EOS_IDS)
    request.extend_block_hashes(block_size)
    return request.block_hashes


def test_only_full_blocks_are_hashed() -> None:
    assert [len(hashes_of(list(range(n)), 4)) for n in (1, 3, 4, 5, 8)] == [0, 0, 1, 1, 2]


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ([10, 20, 30, 40], [10, 20 + 31, 30 - 1, 40]),  # a polynomial hash of base 31 collides
        ([1, 2, 3, 4], [4, 3, 2, 1]),
        ([1, 2, 3, 4], [1, 2, 3, 5]),
        ([1, 23, 0, 0], [12, 3, 0, 0]),  # digits run together
        ([0, 1, 0, 0], [256, 0, 0, 0]),
    ],
)
def test_unlike_blocks_have_unlike_hashes(a: list[int], b: list[int]) -> None:
    """C060: weak hashes let one user's KV answer another's prompt."""
    assert hashes_of(a, 4) != hashes_of(b, 4)


def test_hash_covers_the_parent_and_the_salt() -> None:
    """C060: equal blocks after unlike parents, or under unlike salts, are unlike."""
    assert hashes_of([1, 2, 9, 9], 2)[1] != hashes_of([3, 4, 9, 9], 2)[1]
    chains = [hashes_of([1, 2], 2, salt)[0] for salt in (None, "", "a", "b")]
    assert len(set(chains)) == 4
    assert hashes_of([1, 2], 2, "a") == hashes_of([1, 2], 2, "a")
    assert root_hash(None) != root_hash("")


def test_hashes_of_a_growing_request_equal_those_computed_at_once() -> None:
    tokens = list(range(100, 137))
    request = request_with([])
    request.token_ids, request.num_tokens, request.block_hashes = [], 0, []
    for token in tokens:
        request.token_ids.append(token)
        request.num_tokens += 1
        request.extend_block_hashes(4)
    assert request.block_hashes == hashes_of(tokens, 4)


def test_a_memo_gives_the_hashes_that_hashing_gives() -> None:
    memo, first = HashMemo(max_blocks=25), list(range(100, 140))
    prompts = [
        (first, None),
        (first[:23], None),  # shorter than what is known
        ([*first[:18], *range(50)], None),  # goes another way in the middle of a block
        (first, "salt"),
        ([*first, 1, 2, 3], None),
        ([7] * 40, None),  # a third beginning, for which the memo forgets one
        ([8] * 120, None),  # more than it keeps
        ([*first, 4], "salt"),
        ([1, 2], None),  # not a block
    ]
    for tokens, salt in prompts:
        message = create_request("r", tokens, cache_salt=salt)
        request = Request(message, arrival=0, seed=0, max_num_tokens=99, eos_token_ids=EOS_IDS)
        request.extend_block_hashes(4, memo)
        assert request.block_hashes == hashes_of(tokens, 4, salt)
        request.token_ids += [5] * 9  # an answer must not get into what is known of prompts
        request.num_tokens += 9
        request.extend_block_hashes(4, memo)
        assert request.block_hashes == hashes_of(request.token_ids, 4, salt)


def test_only_new_blocks_are_hashed_and_hashing_is_cheap() -> None:
    """C118: 50,000 tokens in blocks of 16, then one more turn, then look-ups that add nothing."""
    message = create_request("r", [i % 150_000 for i in range(50_000)])
    request = Request(message, arrival=0, seed=0, max_num_tokens=10**9, eos_token_ids=EOS_IDS)

    def cost() -> float:
        start = time.process_time()
        request.extend_block_hashes(16)
        return time.process_time() - start

    whole = cost()
    assert whole < 0.1  # 20 ms on an idle core, here with room for busy test machines
    before = list(request.block_hashes)
    request.token_ids += range(160)
    request.num_tokens += 160
    assert cost() < whole / 5 and len(request.block_hashes) == len(before) + 10
    assert all(a is b for a, b in zip(before, request.block_hashes, strict=False))
    assert cost() < whole / 50
