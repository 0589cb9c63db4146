"""The books of the KV pool: who holds which block, which are free, which answer look-ups.

Blocks are plain ids and their state lies in parallel lists, so a pool of a million blocks costs no
objects. A free block keeps its hash until it is taken for something else: the free list is the LRU
list of the prefix cache. Knows nothing of requests or tokens.
"""

from collections.abc import Iterable


class BlockPool:
    """Reference counts, the free list and the hash table of ``num_blocks`` blocks.

    Invariant: a block that carries a hash is not written; the hash table holds at most one block
    for each hash, and a second block with equal contents stays without a hash.
    """

    def __init__(self, num_blocks: int) -> None:
        """Raises ValueError when there is not even one block."""
        if num_blocks < 1:
            raise ValueError(f"the KV pool needs at least one block, got {num_blocks}")
        self.num_blocks = num_blocks
        self.ref_counts = [0] * num_blocks
        self.hashes: list[bytes | None] = [None] * num_blocks
        self.num_free_blocks = num_blocks
        self.num_cached_blocks = 0  # free blocks that still answer look-ups
        self.num_shared_blocks = 0
        self.peak_used_blocks = 0
        self._block_of_hash: dict[bytes, int] = {}
        # The free list is a ring through the sentinel ``num_blocks``: next = first to be taken.
        self._next = [*range(1, num_blocks + 1), 0]
        self._prev = [num_blocks, *range(num_blocks)]

    def get(self, block_hash: bytes) -> int | None:
        """Return the block that holds the contents with this hash, if one does."""
        return self._block_of_hash.get(block_hash)

    def find(self, block_hashes: Iterable[bytes]) -> list[int]:
        """Return the blocks of the hashes up to the first that no block has."""
        block_ids = []
        get = self._block_of_hash.get
        for block_hash in block_hashes:
            block_id = get(block_hash)
            if block_id is None:
                break
            block_ids.append(block_id)
        return block_ids

    def num_held(self, block_ids: list[int]) -> int:
        """Return how many of the blocks somebody holds."""
        return len(block_ids) - list(map(self.ref_counts.__getitem__, block_ids)).count(0)

    def allocate(self, count: int) -> list[int]:
        """Take ``count`` blocks, the least recently used first; the caller checked they exist."""
        assert count <= self.num_free_blocks, "allocated more blocks than are free"
        block_ids = []
        for _ in range(count):
            block_id = self._next[self.num_blocks]
            self._unlink(block_id)
            if self.hashes[block_id] is not None:
                self.num_cached_blocks -= 1
                self._drop_hash(block_id)
            self.ref_counts[block_id] = 1
            block_ids.append(block_id)
        self.num_free_blocks -= count
        self._note_peak()
        return block_ids

    def touch(self, block_ids: Iterable[int]) -> None:
        """Add a reference to each block, taking it off the free list if it was there."""
        for block_id in block_ids:
            count = self.ref_counts[block_id]
            if count == 0:
                self._unlink(block_id)
                self.num_free_blocks -= 1
                self.num_cached_blocks -= self.hashes[block_id] is not None
            elif count == 1:
                self.num_shared_blocks += 1
            self.ref_counts[block_id] = count + 1
        self._note_peak()

    def release(self, block_ids: Iterable[int]) -> None:
        """Drop a reference to each block; those nobody holds become free in the given order.

        A block without a hash is of no use to anyone and is the next to be taken; one with a hash
        goes to the far end.
        """
        sentinel = self.num_blocks
        for block_id in block_ids:
            count = self.ref_counts[block_id] - 1
            assert count >= 0, f"block {block_id} was released more often than taken"
            self.ref_counts[block_id] = count
            if count == 1:
                self.num_shared_blocks -= 1
            elif count == 0:
                self.num_free_blocks += 1
                if self.hashes[block_id] is None:
                    self._link(block_id, after=sentinel)
                else:
                    self.num_cached_blocks += 1
                    self._link(block_id, after=self._prev[sentinel])

    def cache(self, block_id: int, block_hash: bytes) -> bool:
        """Let a held block answer look-ups; False if another block already does for this hash."""
        assert self.ref_counts[block_id] > 0, f"block {block_id} is free"
        assert self.hashes[block_id] is None, f"block {block_id} already has a hash"
        if block_hash in self._block_of_hash:
            return False
        self._block_of_hash[block_hash] = block_id
        self.hashes[block_id] = block_hash
        return True

    def forget(self, block_ids: Iterable[int]) -> None:
        """Make blocks, held or free, answer no look-up any more."""
        for block_id in block_ids:
            if self.hashes[block_id] is not None:
                self.num_cached_blocks -= self.ref_counts[block_id] == 0
                self._drop_hash(block_id)

    def reset(self) -> None:
        """Forget every hash."""
        self.forget(list(self._block_of_hash.values()))

    def check_integrity(self) -> None:
        """Walk all books and assert that they agree."""
        free = self._free_list()
        assert len(free) == len(set(free)) == self.num_free_blocks, "free list and its count differ"
        assert all(count >= 0 for count in self.ref_counts)
        assert set(free) == {b for b, count in enumerate(self.ref_counts) if count == 0}
        hashed = {h: b for b, h in enumerate(self.hashes) if h is not None}
        assert hashed == self._block_of_hash, "hash table and blocks differ"
        assert self.num_cached_blocks == sum(self.hashes[b] is not None for b in free)
        assert self.num_shared_blocks == sum(count > 1 for count in self.ref_counts)

    def _free_list(self) -> list[int]:
        block_ids: list[int] = []
        block_id = self._next[self.num_blocks]
        while block_id != self.num_blocks:
            assert self._prev[self._next[block_id]] == block_id, "free list is torn"
            assert len(block_ids) < self.num_blocks, "free list has a cycle"
            block_ids.append(block_id)
            block_id = self._next[block_id]
        return block_ids

    def _unlink(self, block_id: int) -> None:
        before, after = self._prev[block_id], self._next[block_id]
        self._next[before] = after
        self._prev[after] = before

    def _link(self, block_id: int, after: int) -> None:
        following = self._next[after]
        self._next[after] = self._prev[following] = block_id
        self._prev[block_id] = after
        self._next[block_id] = following

    def _drop_hash(self, block_id: int) -> None:
        block_hash = self.hashes[block_id]
        assert block_hash is not None
        del self._block_of_hash[block_hash]
        self.hashes[block_id] = None

    def _note_peak(self) -> None:
        used = self.num_blocks - self.num_free_blocks
        if used > self.peak_used_blocks:
            self.peak_used_blocks = used
