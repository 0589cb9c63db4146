"""Block tables: which blocks hold a request's keys and values, shared, copied and given back.

    token_ids    |  prefix-cache hit  |   computed    |  this step  |  rest of the prompt  |
    block_ids    |  shared, hashed    |  own, hashed when full      |  own, allocated      |
                 0                num_computed_tokens             num_tokens

The blocks of all known tokens are taken at admission, so that a prompt never stops half-way for
want of a block; only output makes a table grow afterwards. A block that carries a hash or has a
second holder is not written: its writer gets a copy (or, alone, takes it out of the cache). Knows
nothing of queues or priorities.
"""

from pageserve.core.block_pool import BlockPool
from pageserve.core.request import NEVER, HashMemo, Request
from pageserve.messages import BlockUpdate
from pageserve.utils import cdiv


class KVCacheManager:
    """Owns the block pool and the block tables of all requests."""

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True):
        """Raises ValueError for a pool without a block or a block without a token."""
        if block_size < 1:
            raise ValueError(f"block_size must be at least 1, got {block_size}")
        self.block_pool = BlockPool(num_blocks)
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.num_table_entries = 0  # over all block tables
        self._memo = HashMemo()
        self._block_updates: list[BlockUpdate] = []
        self._copy_sources: list[int] = []  # held until the step is complete
        self._cached_this_step: set[int] = set()  # answer look-ups, contents come with the step

    # --- a step -----------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Start planning a step: all that was planned before will have been written by then."""
        self._cached_this_step.clear()

    def take_block_updates(self) -> list[BlockUpdate]:
        """Return the copies the planned step needs.

        Their sources were held until now, so no source is another copy's target in one step and
        the copies may run in any order.
        """
        updates, self._block_updates = self._block_updates, []
        self.block_pool.release(self._copy_sources)
        self._copy_sources = []
        return updates

    # --- a request --------------------------------------------------------------------------------

    def get_computed_blocks(self, request: Request) -> list[int]:
        """Return the blocks of the longest cached prefix of the request's tokens, unheld.

        Positions whose successor in the prompt is still to be scored must be computed: the cache
        knows keys and values but no logits.
        """
        if not self.enable_prefix_caching:
            return []
        request.extend_block_hashes(self.block_size, self._memo)
        block_hashes = request.block_hashes
        if request.misses_prompt_logprobs:
            block_hashes = block_hashes[: request.num_prompt_logprobs // self.block_size]
        return self.block_pool.find(block_hashes)

    def allocate_prompt(self, request: Request, computed: list[int], headroom: int = 0) -> bool:
        """Give a request without blocks a table for all its known tokens.

        ``computed`` comes from :meth:`get_computed_blocks`; ``headroom`` blocks must stay free.
        Sets ``num_computed_tokens``, at most ``num_tokens - 1``: where the cache knows every
        token, the last block is copied and its last token recomputed. Returns False, and notes
        the number of blocks in the request, when the pool cannot give them.
        """
        assert not request.block_ids, f"{request.request_id} already has blocks"
        num_blocks = cdiv(request.num_tokens, self.block_size)
        copies_last = len(computed) * self.block_size == request.num_tokens
        if copies_last and computed[-1] in self._cached_this_step:
            # Copies run before the step writes, so there is nothing to copy yet: recompute it.
            computed, copies_last = computed[:-1], False
        required = self._num_required_blocks(computed, num_blocks + copies_last)
        if copies_last and required + headroom > self.block_pool.num_free_blocks:
            computed, copies_last = computed[:-1], False
            required = self._num_required_blocks(computed, num_blocks)
        if required + headroom > self.block_pool.num_free_blocks:
            request.num_required_blocks = required
            return False
        self.block_pool.touch(computed)
        request.block_ids = computed + self.block_pool.allocate(num_blocks - len(computed))
        self.num_table_entries += num_blocks
        request.num_hashed_blocks = len(computed)
        request.num_computed_tokens = len(computed) * self.block_size - copies_last
        if copies_last:
            self._copy_on_write(request, num_blocks - 1)
        self._set_marks(request)
        return True

    def allocate_slots(self, request: Request, num_new_tokens: int) -> list[int] | None:
        """Make the next ``num_new_tokens`` positions writable; return the blocks appended for it.

        Copies the block at the first of them if others hold it, and takes it out of the cache if
        not: a lone request must be able to go on in a full pool. None, and nothing done, when the
        pool cannot give the blocks.
        """
        block_ids, position = request.block_ids, request.num_computed_tokens
        index = position // self.block_size
        tail = block_ids[index : index + 1]
        copies = any(map(self._is_shared, tail))
        num_new = max(cdiv(position + num_new_tokens, self.block_size) - len(block_ids), 0)
        if num_new + copies > self.block_pool.num_free_blocks:
            return None
        if copies:
            self._copy_on_write(request, index)
        else:
            self.block_pool.forget(tail)
        new_block_ids = self.block_pool.allocate(num_new)
        block_ids += new_block_ids
        self.num_table_entries += num_new
        self._set_marks(request)
        return new_block_ids

    def cache_blocks(self, request: Request) -> None:
        """Let the request's full blocks of known, planned tokens answer look-ups.

        Prompt blocks may be offered while their step is only planned, since a step with chunks
        writes all keys and values of a layer before any row reads them (one of decodes alone does
        not). Tokens in flight have no id to hash yet.
        """
        if not self.enable_prefix_caching:
            return
        num_tokens = min(request.num_computed_tokens, request.num_tokens)
        start, end = request.num_hashed_blocks, num_tokens // self.block_size
        if start >= end:
            return
        request.extend_block_hashes(self.block_size)
        for index in range(start, end):
            block_id = request.block_ids[index]
            if self.block_pool.hashes[block_id] is None and self.block_pool.cache(
                block_id, request.block_hashes[index]
            ):
                self._cached_this_step.add(block_id)
        request.num_hashed_blocks = end
        request.next_hash_at = (end + 1) * self.block_size

    def free(self, request: Request) -> None:
        """Give all blocks back, last first so that prefixes live longest; twice is harmless."""
        self.num_table_entries -= len(request.block_ids)
        self.block_pool.release(reversed(request.block_ids))
        request.block_ids = []
        request.num_hashed_blocks = request.writable_end = 0
        request.next_hash_at = NEVER

    def forget(self, request: Request) -> None:
        """Take the request's contents out of the prefix cache, also where it holds the blocks no
        more: they are not good."""
        if not self.enable_prefix_caching:
            return
        request.extend_block_hashes(self.block_size)
        block_ids = map(self.block_pool.get, request.block_hashes)
        self.block_pool.forget([b for b in block_ids if b is not None])

    def fork(self, parent: Request, child: Request) -> None:
        """Let ``child``, whose tokens are a prefix of ``parent``'s, share the parent's blocks.

        All but the child's last token count as computed, so the parent must have planned that far
        in earlier steps. Whoever first writes the block they share in part gets a copy.
        """
        num_computed = child.num_tokens - 1
        assert not child.block_ids, f"{child.request_id} already has blocks"
        assert num_computed <= parent.num_computed_tokens, "the parent has not come that far"
        child.block_ids = parent.block_ids[: cdiv(num_computed, self.block_size)]
        self.block_pool.touch(child.block_ids)
        self.num_table_entries += len(child.block_ids)
        child.num_computed_tokens = num_computed
        child.num_hashed_blocks = num_computed // self.block_size
        self._set_marks(child)
        child.writable_end = parent.writable_end = 0  # both must ask before they write

    # --- books ------------------------------------------------------------------------------------

    def used_slots(self, num_computed_tokens: int) -> int:
        """Return how many token slots of the blocks in use hold a token.

        ``num_computed_tokens`` is the sum over all requests with blocks. What a table has beyond
        its tokens is waste, and waste lies in blocks of one holder: in full ones there is none. (A
        half-filled block that a fork shares is counted once for each until it is copied.)
        """
        used = self.block_pool.num_blocks - self.block_pool.num_free_blocks
        waste = self.num_table_entries * self.block_size - num_computed_tokens
        return used * self.block_size - waste

    def check_integrity(self, requests: list[Request]) -> None:
        """Assert that pool, block tables and hashes agree; ``requests`` are all with blocks."""
        pool = self.block_pool
        pool.check_integrity()
        ref_counts = [0] * pool.num_blocks
        for block_id in self._copy_sources:
            ref_counts[block_id] += 1
        for request in requests:
            assert len(request.block_ids) * self.block_size >= request.num_computed_tokens
            assert len(set(request.block_ids)) == len(request.block_ids)
            request.extend_block_hashes(self.block_size)
            for index, block_id in enumerate(request.block_ids):
                ref_counts[block_id] += 1
                block_hash = pool.hashes[block_id]
                if block_hash is not None and index < request.num_hashed_blocks:
                    assert block_hash == request.block_hashes[index], "block under a wrong hash"
                elif block_hash is not None:
                    assert request.writable_end == 0, "a hashed block may be written"
        assert ref_counts == pool.ref_counts, "reference counts and block tables differ"
        assert self.num_table_entries == sum(len(r.block_ids) for r in requests)

    def _num_required_blocks(self, computed: list[int], num_blocks: int) -> int:
        """Return by how much the pool's free blocks would shrink."""
        return num_blocks - self.block_pool.num_held(computed)

    def _set_marks(self, request: Request) -> None:
        request.writable_end = len(request.block_ids) * self.block_size
        if self.enable_prefix_caching:
            request.next_hash_at = (request.num_hashed_blocks + 1) * self.block_size

    def _is_shared(self, block_id: int) -> bool:
        return self.block_pool.ref_counts[block_id] - self._copy_sources.count(block_id) > 1

    def _copy_on_write(self, request: Request, index: int) -> None:
        source = request.block_ids[index]
        target = self.block_pool.allocate(1)[0]
        request.block_ids[index] = target
        self._copy_sources.append(source)
        self._block_updates.append(BlockUpdate(request.slot, index, source, target))
