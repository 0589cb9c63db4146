"""Attention over the paged pool in plain PyTorch, for CPU and MPS: the executable specification.

A sequence's KV is visited tile by tile. A tile is gathered from the blocks by ``index_select``,
small enough to stay in the processor's cache, attended to, and folded into the running result by
its log-sum-exp (online softmax). So the work memory is one tile, whatever the length of a sequence
and the number of sequences, and a long sequence's keys never exist in one piece.

The plan splits a step into groups. A group is either many one-token rows whose KV fits one tile
together, or at most a tile of query tokens of one row. The indices name valid tokens only (padding
repeats a row's last token), so a slot that was never written cannot reach a result.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from pageserve.attention import AttentionMetadata

TILE_BYTES = 3 << 20  # keys + values of a tile, about what the L2 caches of two cores hold
SHORT_CHUNK = 32  # query tokens up to which rows share a tile; more keep the processor busy alone


@dataclass(frozen=True)
class Tile:
    """KV tokens to attend to. ``index`` holds rows of the pool seen as [tokens, head_dim]; keys and
    values are gathered into ``workspace`` and read as ``k`` and ``v``, views of the same memory."""

    index: torch.Tensor  # [batch * num_kv_heads * num_tokens] int32
    workspace: tuple[torch.Tensor, torch.Tensor]  # keys, values: [len(index), head_dim]
    k: torch.Tensor  # [b, h, num_tokens, head_dim] as the group's queries are laid out
    v: torch.Tensor
    mask: torch.Tensor | None = None  # [batch, 1, queries or 1, num_tokens] float32, 0 or -inf
    causal: bool = False  # query i sees the tile's tokens 0 … i


@dataclass(frozen=True)
class Group:
    """Query tokens ``start:stop`` of the plan's order, and what they attend to.

    ``segment``: they are tokens of one row and share its tiles. Otherwise they are all tokens of
    several short rows that share one tile, each with its own part; ``padding`` says how the tokens
    of such rows fill up to equal numbers, None if every row has one."""

    start: int
    stop: int
    segment: bool
    tiles: list[Tile]
    padding: "Padding | None" = None


@dataclass(frozen=True)
class Padding:
    """Rows of up to ``num_queries`` tokens, padded by repeating their last one."""

    num_queries: int
    padded: torch.Tensor  # [rows * num_queries] int64: index into the group's tokens
    places: torch.Tensor  # [tokens] int64: where each token stands among the padded ones


@dataclass(frozen=True)
class Plan:
    """The groups of a step; ``order`` sorts the batch's tokens by group (None: they are)."""

    groups: list[Group]
    order: torch.Tensor | None  # [num_tokens] int64
    inverse: torch.Tensor | None  # [num_tokens] int64


class TorchBlockwiseBackend:
    """Online-softmax attention over the blocks of the pool, for float32, bfloat16 and float16."""

    supports_cuda_graph = False
    fuses_rope = False

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        tile_tokens: int | None = None,
    ) -> None:
        """``tile_tokens`` bounds a tile (default: 3 MiB of keys and values). Plans share one
        workspace, so one forward pass runs at a time."""
        token_bytes = 2 * num_kv_heads * head_dim * dtype.itemsize
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.block_size = block_size
        self.device = torch.device(device)
        self.tile_tokens = tile_tokens or max(32, TILE_BYTES // token_bytes)
        # Kept, because fresh pages for every tile would cost more than the copy.
        shape = (2, num_kv_heads * self.tile_tokens, head_dim)
        self._workspace = torch.empty(shape, dtype=dtype, device=device)

    def build_metadata(
        self,
        query_start_loc: torch.Tensor,
        seq_lens: torch.Tensor,
        block_table: torch.Tensor,
        slot_mapping: torch.Tensor,
        max_query_len: int,
        max_seq_len: int,
    ) -> AttentionMetadata:
        """Plan a step; every row must have at least one query token and no more than its length."""
        plan = self._plan(query_start_loc.tolist(), seq_lens.tolist(), block_table.cpu().numpy())
        return AttentionMetadata(
            query_start_loc,
            seq_lens,
            block_table,
            slot_mapping,
            max_query_len,
            max_seq_len,
            plan,
        )

    def narrow(self, metadata: AttentionMetadata) -> AttentionMetadata:
        """Plan the step for the last query token of each row."""
        return self.build_metadata(
            torch.arange(len(metadata.query_start_loc), dtype=torch.int32, device=self.device),
            metadata.seq_lens,
            metadata.block_table,
            metadata.slot_mapping[metadata.last_tokens],
            1,
            metadata.max_seq_len,
        )

    def forward(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
        scale: float,
    ) -> torch.Tensor:
        """Return the attention of ``query`` [num_tokens, num_heads, head_dim] in the same shape;
        tokens behind the last row (padding) come back as zeros."""
        plan: Plan = metadata.plan
        keys, values = kv_cache.view(2, -1, self.head_dim).unbind()
        ordered = query if plan.order is None else query.index_select(0, plan.order)
        outputs = [
            self._attend(ordered[group.start : group.stop], keys, values, group, scale)
            for group in plan.groups
        ]
        output = torch.cat(outputs) if len(outputs) > 1 else outputs[0]
        if plan.inverse is not None:
            output = output.index_select(0, plan.inverse)
        if len(output) < len(query):
            output = torch.cat([output, torch.zeros_like(query[len(output) :])])
        return output

    def _attend(
        self,
        query: torch.Tensor,  # [n, num_heads, head_dim]
        keys: torch.Tensor,  # [pool tokens, head_dim]
        values: torch.Tensor,
        group: Group,
        scale: float,
    ) -> torch.Tensor:
        attend = _attend_fused if query.is_cpu else _attend_plain
        # Short rows: the heads that share KV, times the tokens, are the rows of one small matrix
        # product. Segments: the tokens are, and the heads share KV by a stride of 0.
        q = query.view(len(query), self.num_kv_heads, -1, self.head_dim)
        if group.segment:
            q = q.permute(1, 2, 0, 3)
        elif group.padding is not None:
            q = self._pad(q, group.padding)
        result: tuple[torch.Tensor, torch.Tensor] | None = None
        for tile in group.tiles:
            torch.index_select(keys, 0, tile.index, out=tile.workspace[0])
            torch.index_select(values, 0, tile.index, out=tile.workspace[1])
            partial = attend(q, tile, scale)
            result = partial if result is None else _merge(*result, *partial)
        assert result is not None, "a group has a tile"
        out = result[0]
        if group.segment:
            out = out.permute(2, 0, 1, 3)
        elif group.padding is not None:
            out = self._unpad(out, group.padding)
        return out.reshape(query.shape).to(query.dtype)

    def _pad(self, q: torch.Tensor, padding: Padding) -> torch.Tensor:
        """[tokens, kv heads, group, head_dim] to [rows, kv heads, group * queries, head_dim]."""
        rows = q.index_select(0, padding.padded).unflatten(0, (-1, padding.num_queries))
        return rows.permute(0, 2, 3, 1, 4).flatten(2, 3)

    def _unpad(self, out: torch.Tensor, padding: Padding) -> torch.Tensor:
        """The reverse of :meth:`_pad`, without the padding."""
        rows = out.unflatten(2, (-1, padding.num_queries)).permute(0, 3, 1, 2, 4)
        return rows.flatten(0, 1).index_select(0, padding.places)

    # --- planning ---------------------------------------------------------------------------------

    def _plan(self, starts: list[int], lens: list[int], block_table: np.ndarray) -> Plan:
        groups: list[Group] = []
        order: list[int] = []

        def add(
            tokens: list[int] | range,
            segment: bool,
            tiles: list[Tile],
            padding: Padding | None = None,
        ) -> None:
            groups.append(Group(len(order), len(order) + len(tokens), segment, tiles, padding))
            order.extend(tokens)

        counts = [stop - start for start, stop in itertools.pairwise(starts)]
        fits = [row for row, seq_len in enumerate(lens) if seq_len <= self.tile_tokens]
        one_token = [row for row in fits if counts[row] == 1]
        for rows in self._pack(one_token, lens):
            tile = self._rows_tile(block_table[rows], [lens[row] for row in rows])
            add([starts[row] for row in rows], False, [tile])
        chunks = [row for row in fits if 1 < counts[row] <= SHORT_CHUNK]
        for rows in self._pack(chunks, lens):
            if len(rows) == 1:
                chunks.remove(rows[0])  # alone it is cheaper as a segment
                continue
            queries = [counts[row] for row in rows]
            tile = self._chunks_tile(block_table[rows], [lens[row] for row in rows], queries)
            tokens = [t for row in rows for t in range(starts[row], starts[row + 1])]
            add(tokens, False, [tile], self._padding(queries))
        for row in sorted(set(range(len(lens))).difference(one_token, chunks)):
            start, stop = starts[row], starts[row + 1]
            assert start < stop <= start + lens[row], "a row has 1 … seq_len query tokens"
            for first in range(start, stop, self.tile_tokens):
                last = min(first + self.tile_tokens, stop)
                end = lens[row] - (stop - last)  # tokens that the segment's last query sees
                tiles = self._row_tiles(block_table[row : row + 1], end, last - first)
                add(range(first, last), last - first > 1, tiles)
        if order == list(range(len(order))):
            return Plan(groups, None, None)
        by_group = torch.tensor(order)
        return Plan(groups, by_group.to(self.device), torch.argsort(by_group).to(self.device))

    def _pack(self, rows: list[int], lens: list[int]) -> Iterator[list[int]]:
        """Cut short rows into groups of similar length that fit a tile together."""
        # A padded token costs a copy, another group the start of a few operations: they balance
        # at about a quarter of a tile.
        group: list[int] = []
        longest = padding = 0
        for row in sorted(rows, key=lambda row: -lens[row]):
            padding += longest - lens[row]
            full = (len(group) + 1) * longest > self.tile_tokens
            if group and (full or padding > self.tile_tokens // 4):
                yield sorted(group)
                group = []
            if not group:
                longest, padding = lens[row], 0
            group.append(row)
        if group:
            yield sorted(group)

    def _rows_tile(self, blocks: np.ndarray, lens: list[int]) -> Tile:
        """The tile of several whole rows, padded to the longest."""
        ends, tokens = np.array(lens)[:, None], np.arange(max(lens))[None]
        if min(lens) == max(lens):
            return self._tile(blocks, tokens.repeat(len(lens), 0))
        hidden = np.where(tokens < ends, np.float32(0), np.float32(-np.inf))
        mask = torch.from_numpy(hidden).to(self.device)[:, None, None]
        return self._tile(blocks, np.minimum(tokens, ends - 1), mask=mask)

    def _chunks_tile(self, blocks: np.ndarray, lens: list[int], queries: list[int]) -> Tile:
        """The tile of several whole rows, whose last tokens are queries; see :class:`Padding`."""
        ends, tokens = np.array(lens)[:, None], np.arange(max(lens))[None]
        nth = np.minimum(np.arange(max(queries))[None], np.array(queries)[:, None] - 1)
        positions = ends - np.array(queries)[:, None] + nth  # [rows, queries]
        seen = tokens[:, None] <= positions[:, :, None]
        hidden = torch.from_numpy(np.where(seen, np.float32(0), np.float32(-np.inf)))
        num_groups = self.num_heads // self.num_kv_heads
        mask = hidden.to(self.device).repeat(1, num_groups, 1)[:, None]
        return self._tile(blocks, np.minimum(tokens, ends - 1), mask=mask)

    def _padding(self, queries: list[int]) -> Padding:
        widest = max(queries)
        counts = np.array(queries)[:, None]
        nth = np.arange(widest)[None]
        first = np.cumsum(queries)[:, None] - counts
        padded = first + np.minimum(nth, counts - 1)
        places = np.flatnonzero(nth < counts)
        index = (torch.from_numpy(x.reshape(-1)).to(self.device) for x in (padded, places))
        return Padding(widest, *index)

    def _row_tiles(self, blocks: np.ndarray, end: int, num_queries: int) -> list[Tile]:
        """The tiles of a row's first ``end`` tokens, the last ``num_queries`` being queries: first
        those that all queries see, then the queries' own, unless there is only one."""
        segment = num_queries > 1
        context = end - num_queries if segment else end
        bounds = [*range(0, context, self.tile_tokens), context]
        tiles = [
            self._tile(blocks, np.arange(first, last)[None], segment=segment)
            for first, last in itertools.pairwise(bounds)
        ]
        if segment:
            own = np.arange(context, end)[None]
            tiles.append(self._tile(blocks, own, segment=True, causal=True))
        return tiles

    def _tile(
        self,
        blocks: np.ndarray,
        tokens: np.ndarray,
        segment: bool = False,
        mask: torch.Tensor | None = None,
        causal: bool = False,
    ) -> Tile:
        """The tile of ``tokens`` [n, t] of the sequences with block tables ``blocks`` [n, …]."""
        block_ids = np.take_along_axis(blocks, tokens // self.block_size, axis=1)
        heads = np.arange(self.num_kv_heads, dtype=np.int32)[None, :, None]
        head_blocks = block_ids.astype(np.int32)[:, None] * self.num_kv_heads + heads
        offsets = (tokens % self.block_size).astype(np.int32)[:, None]
        index = torch.from_numpy((head_blocks * self.block_size + offsets).reshape(-1))
        keys, values = self._workspace[:, : len(index)].unbind()
        k, v = (space.view(*head_blocks.shape, self.head_dim) for space in (keys, values))
        if segment:
            k, v = k.transpose(0, 1), v.transpose(0, 1)
        return Tile(index.to(self.device), (keys, values), k, v, mask, causal)


# --- one tile -------------------------------------------------------------------------------------


def _attend_fused(q: torch.Tensor, tile: Tile, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of one tile, [b, h, n, head_dim], and its log-sum-exp, [b, h, n] float32."""
    k, v = tile.k.expand(*q.shape[:2], -1, -1), tile.v.expand(*q.shape[:2], -1, -1)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, tile.causal, attn_mask=tile.mask, scale=scale
    )
    return out, lse


def _attend_plain(q: torch.Tensor, tile: Tile, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The same in elementary operations, for devices without the fused one."""
    scores = (q @ tile.k.transpose(-1, -2)).float() * scale
    if tile.mask is not None:
        scores += tile.mask
    if tile.causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores.masked_fill_(future, -torch.inf)
    lse = scores.logsumexp(-1)
    return (scores - lse[..., None]).exp().to(tile.v.dtype) @ tile.v, lse


def _merge(
    out: torch.Tensor, lse: torch.Tensor, out_tile: torch.Tensor, lse_tile: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Join the attention over two disjoint sets of tokens; the result is float32."""
    # A set's share is exp(its lse) of the sum of both, which is a sigmoid of the difference.
    share = torch.sigmoid(lse_tile - lse)[..., None]
    return torch.lerp(out.float(), out_tile.float(), share), torch.logaddexp(lse, lse_tile)
