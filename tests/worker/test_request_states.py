"""The request table's host side: what rows bring to their sampling."""

import pytest
import torch

from pageserve.messages import BlockUpdate, NewRequestData, ScheduledRow, SchedulerOutput
from pageserve.sampling_params import SamplingParams
from pageserve.worker import request_states
from pageserve.worker.request_states import RequestStates

KV_CACHE = torch.zeros(1, 2, 4, 1, 4, 8)


def enter(states: RequestStates, slot: int, **params) -> None:
    new = NewRequestData(slot, [1, 2, 3], 3, [0], SamplingParams(**params), 7)
    states.apply(SchedulerOutput(1, [new], [], [ScheduledRow(slot, 0, 3, True)]), KV_CACHE)


def allowed(mask: bytes | None) -> set[int] | None:
    if mask is None:
        return None
    bits = int.from_bytes(mask, "little")
    return {i for i in range(8 * len(mask)) if bits >> i & 1}


@pytest.fixture
def states() -> RequestStates:
    return RequestStates(4, 16, 4, vocab_limit=40, device=torch.device("cpu"))


def test_an_allow_list_is_a_mask(states):
    enter(states, 2, allowed_token_ids=[39, 0, 5, 5, 40, 70])  # the last two have no logit
    mask = states.row_sampling(2, 3).bitmask
    assert allowed(mask) == {0, 5, 39} and len(mask) == 8
    enter(states, 2)
    assert states.row_sampling(2, 3).bitmask is None


def test_an_allow_list_and_a_grammar_restrict_both(states):
    enter(states, 0, allowed_token_ids=[1, 2, 33])
    enter(states, 1)
    grammar = (1 << 2 | 1 << 3 | 1 << 33).to_bytes(8, "little")
    assert allowed(states.row_sampling(0, 3, grammar).bitmask) == {2, 33}
    assert allowed(states.row_sampling(1, 3, grammar).bitmask) == {2, 3, 33}
    assert allowed(states.row_sampling(0, 3).bitmask) == {1, 2, 33}


def enter_with(states: RequestStates, tables: list[list[int]]) -> None:
    new = [
        NewRequestData(slot, [1], 1, blocks, SamplingParams(), 7)
        for slot, blocks in enumerate(tables)
    ]
    states.apply(SchedulerOutput(1, new, [], []), KV_CACHE)


@pytest.mark.parametrize(
    ("tables", "repeated"),
    [
        ([[1, 2], [3, 4], [5], [6]], 0),
        ([[1, 2, 3], [1, 2, 4], [1, 5], [1, 5]], 2 + 2),
        ([[1, 2], [1, 2], [1, 2], [3]], 2),
        ([[1], [1], [2, 3, 4], [2, 3, 4]], 1 + 3),
        ([[1, 2], [3], [3], [1, 2]], 0),  # those with something in common are in other groups
        ([[1, 2], [1, 2], [3, 4]], 2),  # the last one is alone
    ],
)
@pytest.mark.parametrize("least", [4, 8])
def test_blocks_that_neighbours_read_again(states, tables, repeated, least, monkeypatch):
    enter_with(states, [[9, 8, 7, 6]] * 4)
    assert states.num_repeated_blocks([0, 1, 2, 3], 4) == 0, "not enough for a search"
    monkeypatch.setattr(request_states, "COMMON_TOKENS", least)
    assert states.num_repeated_blocks([0, 1, 2, 3], 4) == 4 * 3
    enter_with(states, tables)
    if least == 8:  # two blocks
        repeated -= sum(table == [1] for table in tables) // 2
    assert states.num_repeated_blocks(list(range(len(tables))), 2) == repeated


def test_a_copied_block_is_no_longer_common(states, monkeypatch):
    monkeypatch.setattr(request_states, "COMMON_TOKENS", 4)
    enter_with(states, [[1, 2], [1, 2]])
    update = BlockUpdate(1, 1, 2, 3)
    states.apply(SchedulerOutput(2, [], [update], []), KV_CACHE)
    assert states.num_repeated_blocks([0, 1], 2) == 1
