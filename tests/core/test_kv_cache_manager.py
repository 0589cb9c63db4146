"""Block tables: sharing, copy-on-write, forks, and what the prefix cache may answer."""

import itertools

import pytest
from fake_worker import create_request

from pageserve.core.kv_cache_manager import KVCacheManager
from pageserve.core.request import NEVER, Request
from pageserve.messages import BlockUpdate

BLOCK_SIZE = 4


def create_manager(num_blocks: int = 16, **options: bool) -> KVCacheManager:
    return KVCacheManager(num_blocks, BLOCK_SIZE, **options)


def new_request(prompt: list[int] | int, name: str = "r", salt: str | None = None) -> Request:
    message = create_request(name, prompt, cache_salt=salt)
    request = Request(
        message, arrival=0, seed=0, max_num_tokens=10**6, eos_token_ids=frozenset[int]()
    )
    request.slot = 0
    return request


def enter(manager: KVCacheManager, request: Request, headroom: int = 0) -> bool:
    """Admit a request and plan its whole prompt."""
    computed = manager.get_computed_blocks(request)
    if not manager.allocate_prompt(request, computed, headroom):
        return False
    hit = request.num_computed_tokens
    request.num_computed_tokens = request.num_tokens
    manager.cache_blocks(request)
    request.num_cached_tokens = hit
    return True


def append(manager: KVCacheManager, request: Request, token_id: int) -> list[int] | None:
    """Confirm an output token, then make room for it and plan it."""
    new_block_ids: list[int] | None = []
    if request.num_computed_tokens >= request.writable_end:
        new_block_ids = manager.allocate_slots(request, 1)
        if new_block_ids is None:
            return None
    request.token_ids.append(token_id)
    request.num_tokens += 1
    request.num_computed_tokens += 1
    if request.num_tokens >= request.next_hash_at:
        manager.cache_blocks(request)
    return new_block_ids


def next_step(manager: KVCacheManager) -> list[BlockUpdate]:
    updates = manager.take_block_updates()
    manager.begin_step()
    return updates


@pytest.mark.parametrize("num_tokens", [1, 3, 4, 5, 8, 9])
def test_table_covers_exactly_the_tokens(num_tokens: int) -> None:
    """C057: at an exact fit the last block holds block_size tokens, not 0."""
    manager = create_manager()
    request = new_request(num_tokens)
    assert enter(manager, request)
    assert len(request.block_ids) == -(-num_tokens // BLOCK_SIZE)
    assert manager.used_slots(num_tokens) == num_tokens
    new_block_ids = append(manager, request, 1)
    assert new_block_ids is not None and bool(new_block_ids) == (num_tokens % BLOCK_SIZE == 0)
    assert manager.used_slots(num_tokens + 1) == num_tokens + 1
    manager.check_integrity([request])


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_free_in_every_order_returns_everything(order: tuple[int, ...]) -> None:
    """C057: sharing, appending and freeing in any order loses no block."""
    manager = create_manager()
    requests = [new_request(list(range(n)), f"r{n}") for n in (8, 9, 5)]
    for request in requests:
        assert enter(manager, request)
        append(manager, request, 99)
        next_step(manager)
    assert manager.block_pool.num_shared_blocks == 2
    for i in order:
        manager.free(requests[i])
        manager.free(requests[i])  # twice is harmless
        manager.check_integrity([r for r in requests if r.block_ids])
    pool = manager.block_pool
    assert pool.num_free_blocks == pool.num_blocks and manager.num_table_entries == 0


def test_prefix_is_shared_and_its_holders_are_counted() -> None:
    manager = create_manager()
    first, second = new_request(list(range(10))), new_request([*range(8), 50, 51, 52])
    assert enter(manager, first)
    next_step(manager)
    assert enter(manager, second)
    assert second.num_cached_tokens == 8
    assert second.block_ids[:2] == first.block_ids[:2]
    assert second.block_ids[2] != first.block_ids[2]
    assert manager.used_slots(10 + 11) == 10 + 11 - 8
    assert next_step(manager) == []


@pytest.mark.parametrize("num_tokens", [4, 7, 8, 9])
def test_at_least_one_token_is_recomputed(num_tokens: int) -> None:
    """C054: a prompt the cache knows in full still needs its last token's logits."""
    manager = create_manager()
    prompt = list(range(num_tokens))
    for n in range(3):
        request = new_request(prompt, f"r{n}")
        assert enter(manager, request)
        assert request.num_cached_tokens <= num_tokens - 1
        hit = 0 if n == 0 else min(num_tokens // BLOCK_SIZE * BLOCK_SIZE, num_tokens - 1)
        assert request.num_cached_tokens == hit
        next_step(manager)
        manager.free(request)
        manager.check_integrity([])


def test_full_hit_copies_the_last_block_before_writing_it() -> None:
    manager = create_manager()
    first, second = new_request(list(range(8))), new_request(list(range(8)))
    second.slot = 3
    assert enter(manager, first)
    next_step(manager)
    assert enter(manager, second)
    assert second.block_ids[0] == first.block_ids[0]
    assert second.block_ids[1] != first.block_ids[1]
    assert next_step(manager) == [BlockUpdate(3, 1, first.block_ids[1], second.block_ids[1])]
    manager.check_integrity([first, second])


def test_copy_source_stays_untouched_until_the_step_is_complete() -> None:
    """The source of a copy is free of holders here, yet must not become a target in this step."""
    manager = create_manager(num_blocks=4)
    first = new_request(list(range(8)))
    assert enter(manager, first)
    next_step(manager)
    manager.free(first)
    again, other = new_request(list(range(8))), new_request(8, "other")
    assert enter(manager, again)
    assert not enter(manager, other)  # three blocks in use and the source still held
    (update,) = next_step(manager)
    assert manager.block_pool.ref_counts[update.src_block_id] == 0
    assert manager.block_pool.num_cached_blocks == 1  # the source still answers look-ups


def test_block_written_in_the_same_step_is_not_a_copy_source() -> None:
    """The copy runs before the step writes: two equal prompts planned together share all whole
    blocks but the last, which the second recomputes in a block of its own."""
    manager = create_manager()
    first, second = new_request(list(range(8))), new_request(list(range(8)))
    manager.begin_step()
    assert enter(manager, first)
    assert enter(manager, second)
    assert second.num_cached_tokens == 4
    assert second.block_ids[0] == first.block_ids[0]
    assert second.block_ids[1] != first.block_ids[1]
    assert next_step(manager) == []
    third = new_request(list(range(8)))
    assert enter(manager, third)  # one step later the contents are there
    assert third.num_cached_tokens == 7 and len(next_step(manager)) == 1
    manager.check_integrity([first, second, third])


def test_full_hit_without_room_for_a_copy_recomputes_the_last_block() -> None:
    manager = create_manager(num_blocks=2)
    first = new_request(list(range(8)))
    assert enter(manager, first)
    next_step(manager)
    manager.free(first)
    again = new_request(list(range(8)))
    assert enter(manager, again)
    assert again.num_cached_tokens == 4 and next_step(manager) == []
    manager.check_integrity([again])


def test_headroom_is_left_free() -> None:
    manager = create_manager(num_blocks=4)
    request = new_request(8)
    assert not enter(manager, request, headroom=3)
    assert request.num_required_blocks == 2 and not request.block_ids
    assert manager.block_pool.num_free_blocks == 4
    assert enter(manager, request, headroom=2)


def test_blocks_of_a_prefix_are_evicted_last() -> None:
    manager = create_manager(num_blocks=4)
    first = new_request(list(range(12)))
    assert enter(manager, first)
    next_step(manager)
    manager.free(first)
    assert enter(manager, new_request(5, "other"))  # takes the spare block and the tail's
    next_step(manager)
    again = new_request(list(range(12)))
    assert manager.get_computed_blocks(again) == [0, 1]


def test_recycled_blocks_answer_for_their_new_contents_only() -> None:
    """C056: A, then B and C recycle A's blocks, then A again: nothing stale may be found."""
    manager = create_manager(num_blocks=4)
    prompts = {name: [i * 10 + n for i in range(8)] for n, name in enumerate("abc")}
    for name in "abca":
        request = new_request(prompts[name], name)
        assert enter(manager, request)
        next_step(manager)
        manager.check_integrity([request])  # hashes of held blocks are checked against tokens
        manager.free(request)
    found = {name: len(manager.get_computed_blocks(new_request(prompts[name]))) for name in "abc"}
    assert found["a"] == 2 and sum(found.values()) <= 4


def test_output_blocks_are_cached_only_once_their_tokens_are_known() -> None:
    manager = create_manager()
    request = new_request(list(range(6)))
    assert enter(manager, request)
    for _ in range(3):  # planned ahead: positions 6, 7, 8 without ids
        if request.num_computed_tokens >= request.writable_end:
            assert manager.allocate_slots(request, 1) is not None
        request.num_computed_tokens += 1
        manager.cache_blocks(request)
    assert request.num_hashed_blocks == 1
    request.token_ids += [50, 51]
    request.num_tokens += 2
    manager.cache_blocks(request)
    assert request.num_hashed_blocks == 2
    assert len(manager.get_computed_blocks(new_request([*range(6), 50, 51]))) == 2


def test_salts_do_not_share() -> None:
    manager = create_manager()
    assert enter(manager, new_request(list(range(9)), salt="a"))
    assert manager.get_computed_blocks(new_request(list(range(9)), salt="b")) == []
    assert manager.get_computed_blocks(new_request(list(range(9)))) == []
    assert len(manager.get_computed_blocks(new_request(list(range(9)), salt="a"))) == 2


def test_without_prefix_caching_nothing_is_shared_or_hashed() -> None:
    manager = create_manager(enable_prefix_caching=False)
    for _ in range(2):
        request = new_request(list(range(8)))
        assert enter(manager, request)
        assert request.num_cached_tokens == 0 and request.next_hash_at == NEVER
        assert not request.block_hashes
        manager.free(request)
    assert manager.block_pool.num_cached_blocks == 0


# --- forks ----------------------------------------------------------------------------------------


def fork(manager: KVCacheManager, parent: Request, num_tokens: int, slot: int) -> Request:
    child = new_request(parent.token_ids[:num_tokens], f"child{slot}")
    child.slot = slot
    manager.fork(parent, child)
    return child


def test_forks_share_all_blocks_and_the_last_holder_writes_in_place() -> None:
    """C067: the partly filled last prompt block is copied before a choice writes it."""
    manager = create_manager()
    parent = new_request(list(range(6)))
    assert enter(manager, parent)
    next_step(manager)
    tail = parent.block_ids[1]
    children = [fork(manager, parent, 6, slot) for slot in (1, 2)]
    assert all(c.block_ids == parent.block_ids for c in children)
    assert all(c.num_computed_tokens == 5 for c in children)
    manager.check_integrity([parent, *children])
    for request in (parent, *children):
        assert append(manager, request, 50 + request.slot) == []
    updates = next_step(manager)
    assert [(u.slot, u.index, u.src_block_id) for u in updates] == [(0, 1, tail), (1, 1, tail)]
    assert children[1].block_ids[1] == tail
    assert len({r.block_ids[1] for r in (parent, *children)}) == 3
    manager.check_integrity([parent, *children])


def test_child_may_fork_behind_a_parent_that_went_on() -> None:
    """The child's tail lies in a block the parent has filled and hashed since."""
    manager = create_manager()
    parent = new_request(list(range(6)))
    assert enter(manager, parent)
    for token in (50, 51, 52):
        append(manager, parent, token)
    next_step(manager)
    child = fork(manager, parent, 6, 1)
    manager.check_integrity([parent, child])
    assert manager.allocate_slots(child, 1) == []
    assert len(next_step(manager)) == 1
    assert child.block_ids[1] != parent.block_ids[1]
    manager.check_integrity([parent, child])


def test_lone_child_takes_a_hashed_block_out_of_the_cache_and_writes_it() -> None:
    """In a full pool there is no block for a copy and nobody left to preempt for one."""
    manager = create_manager(num_blocks=2)
    parent = new_request(list(range(8)))
    assert enter(manager, parent)
    next_step(manager)
    child = fork(manager, parent, 7, 1)
    assert manager.allocate_slots(child, 1) is None
    manager.free(parent)
    tail = child.block_ids[1]
    assert manager.block_pool.hashes[tail] is not None
    assert manager.allocate_slots(child, 1) == []
    assert child.block_ids[1] == tail and manager.block_pool.hashes[tail] is None
    assert next_step(manager) == []
    manager.check_integrity([child])


def test_fork_on_a_block_edge_copies_nothing() -> None:
    manager = create_manager()
    parent = new_request(list(range(5)))
    assert enter(manager, parent)
    next_step(manager)
    child = fork(manager, parent, 5, 1)
    assert len(child.block_ids) == 1
    new_block_ids = manager.allocate_slots(child, 1)
    assert new_block_ids is not None and len(new_block_ids) == 1
    assert next_step(manager) == []


def test_fork_copy_needs_a_block() -> None:
    manager = create_manager(num_blocks=2)
    parent = new_request(list(range(6)))
    assert enter(manager, parent)
    next_step(manager)
    child = fork(manager, parent, 6, 1)
    assert manager.allocate_slots(parent, 1) is None and next_step(manager) == []
    manager.free(parent)
    assert manager.allocate_slots(child, 1) == []
    assert next_step(manager) == []
    manager.check_integrity([child])


def test_fork_must_not_run_ahead_of_its_parent() -> None:
    manager = create_manager()
    parent = new_request(list(range(6)))
    assert manager.allocate_prompt(parent, [])
    with pytest.raises(AssertionError, match="not come that far"):
        fork(manager, parent, 6, 1)


def test_check_integrity_sees_a_wrong_table() -> None:
    manager = create_manager()
    request = new_request(8)
    assert enter(manager, request)
    manager.check_integrity([request])
    request.block_ids[0] = 15
    with pytest.raises(AssertionError):
        manager.check_integrity([request])
