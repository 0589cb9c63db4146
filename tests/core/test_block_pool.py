"""The pool's books: reference counts, LRU order, the hash table."""

import random

import pytest

from pageserve.core.block_pool import BlockPool


def test_blocks_are_taken_least_recently_used_first() -> None:
    pool = BlockPool(4)
    first, second = pool.allocate(2)
    pool.cache(first, b"1")
    pool.cache(second, b"2")
    pool.release([second, first])  # second has been free for longer
    assert pool.allocate(4) == [2, 3, second, first]
    pool.check_integrity()


def test_a_block_without_a_hash_is_taken_before_cached_ones() -> None:
    pool = BlockPool(3)
    cached, plain, _ = pool.allocate(3)
    pool.cache(cached, b"h")
    pool.release([cached])
    pool.release([plain])
    assert pool.allocate(1) == [plain]
    assert pool.get(b"h") == cached


def test_reused_block_is_not_found_under_its_old_hash() -> None:
    """C056: the table must not point at a block that was given to new contents."""
    pool = BlockPool(1)
    block_ids = pool.allocate(1)
    pool.cache(block_ids[0], b"old")
    pool.release(block_ids)
    assert pool.get(b"old") == block_ids[0] and pool.num_cached_blocks == 1
    assert pool.allocate(1) == block_ids
    assert pool.get(b"old") is None and pool.num_cached_blocks == 0
    pool.check_integrity()


def test_touching_a_cached_block_saves_it_from_eviction() -> None:
    pool = BlockPool(2)
    block_ids = pool.allocate(1)
    pool.cache(block_ids[0], b"h")
    pool.release(block_ids)
    pool.touch(block_ids)
    assert pool.num_free_blocks == 1 and pool.num_cached_blocks == 0
    assert pool.allocate(1) != block_ids
    assert pool.get(b"h") == block_ids[0]


def test_reference_counts_and_shared_blocks() -> None:
    """C057: a count that starts at 0 or falls below it loses the block."""
    pool = BlockPool(2)
    block_ids = pool.allocate(1)
    pool.touch(block_ids)
    pool.touch(block_ids)
    assert pool.ref_counts[block_ids[0]] == 3 and pool.num_shared_blocks == 1
    for free, shared in ((1, 1), (1, 0), (2, 0)):
        pool.release(block_ids)
        assert (pool.num_free_blocks, pool.num_shared_blocks) == (free, shared)
    with pytest.raises(AssertionError, match="released more often"):
        pool.release(block_ids)


def test_second_block_with_equal_contents_stays_without_a_hash() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(2)
    assert pool.cache(first, b"h") and not pool.cache(second, b"h")
    assert pool.get(b"h") == first
    pool.release([second])
    assert pool.get(b"h") == first
    pool.check_integrity()


def test_forget_and_reset() -> None:
    pool = BlockPool(4)
    held, free, other = pool.allocate(3)
    for block_id, block_hash in ((held, b"1"), (free, b"2"), (other, b"3")):
        pool.cache(block_id, block_hash)
    pool.release([free])
    pool.forget([held, free, 3])
    assert pool.get(b"1") is pool.get(b"2") is None and pool.num_cached_blocks == 0
    pool.reset()
    assert pool.get(b"3") is None
    pool.check_integrity()


def test_peak_counts_allocated_and_touched_blocks() -> None:
    pool = BlockPool(8)
    block_ids = pool.allocate(5)
    pool.cache(block_ids[0], b"h")
    pool.release(block_ids)
    pool.touch(block_ids[:1])
    pool.allocate(3)
    assert pool.peak_used_blocks == 5


def test_allocating_more_than_is_free_is_a_bug() -> None:
    pool = BlockPool(2)
    pool.allocate(1)
    with pytest.raises(AssertionError, match="than are free"):
        pool.allocate(2)


def test_a_pool_needs_a_block() -> None:
    with pytest.raises(ValueError, match="at least one block"):
        BlockPool(0)


@pytest.mark.parametrize("damage", ["ref_count", "hash", "free_list", "cached", "shared"])
def test_check_integrity_sees_damage(damage: str) -> None:
    pool = BlockPool(4)
    block_ids = pool.allocate(2)
    pool.cache(block_ids[0], b"h")
    if damage == "ref_count":
        pool.ref_counts[3] = 1
    elif damage == "hash":
        pool.hashes[block_ids[0]] = b"other"
    elif damage == "free_list":
        pool._next[2] = 2
    elif damage == "cached":
        pool.num_cached_blocks = 1
    else:
        pool.num_shared_blocks = 1
    with pytest.raises(AssertionError):
        pool.check_integrity()


@pytest.mark.parametrize("seed", range(5))
def test_random_use_agrees_with_a_naive_pool(seed: int) -> None:
    """Against a model that keeps the free blocks in a plain list."""
    rng = random.Random(seed)
    pool = BlockPool(7)
    held: list[int] = []
    free = list(range(7))
    for n in range(500):
        action = rng.random()
        if action < 0.4 and free:
            block_id = pool.allocate(1)[0]
            assert block_id == free.pop(0)
            held.append(block_id)
        elif action < 0.6 and held:
            block_id = rng.choice(held)
            if pool.hashes[block_id] is None:
                assert pool.cache(block_id, n.to_bytes(2, "big"))
        elif action < 0.75:
            block_id = rng.randrange(7)
            if block_id in held or pool.hashes[block_id] is not None:
                pool.touch([block_id])
                if block_id in free:
                    free.remove(block_id)
                held.append(block_id)
        elif held:
            block_id = held.pop(rng.randrange(len(held)))
            pool.release([block_id])
            if block_id not in held:
                free.insert(0 if pool.hashes[block_id] is None else len(free), block_id)
        pool.check_integrity()
        assert pool._free_list() == free
