"""Attention of decodes, one query token a row, over the paged KV pool.

Decode is a stream of KV through the chip, so its work is cut into equal parts, not per row: the
tiles of all rows form one line, every program takes the same number of consecutive tiles, and a row
that several programs share is merged by the last of them to finish. The cut is computed on the
device (:func:`plan_decode`) once a step for all layers, so a CUDA graph replays it on new lengths.

Rows that begin with the same blocks each read them again, from the cache at best. In a cascade
(after Hydragen and FlashInfer) a kernel of its own attends to what a group of rows has in common,
with the queries of all as one tile; the decode kernel attends to the rest at the same time, and
merges both.

A layer's pool is [2, num_blocks, num_kv_heads, block_size, head_dim]; blocks are read in place.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from pageserve.kernels.launch import (
    check,
    dot,
    launch,
    num_sms,
    pdl_options,
    pdl_wait,
    shared_memory,
)
from pageserve.kernels.paged_prefill import LOG2_E, attend_tiles

MERGE_COST = tl.constexpr(0.16)  # of a part of a row, in times of reading a tile
UNROLL = tl.constexpr(8)  # parts of a row whose loads are under way together
MAX_WIDTH = 64  # queries of a group of rows, which are one tile


class DecodeConfig(NamedTuple):
    """How a decode is cut and compiled."""

    block_n: int  # tokens per tile
    num_warps: int
    num_stages: int
    per_sm: int  # programs per multiprocessor


@dataclass(frozen=True)
class Cut:
    """A line of tiles cut into programs, and the scratch these share. P programs per KV head, R
    rows, G query heads per KV head."""

    tile_start: torch.Tensor  # [R + 2] int32, first tile of each row on the line of all tiles,
    # their number, and the number of tiles per program
    first_row: torch.Tensor  # [P] int32, row of each program's first tile
    counters: torch.Tensor  # [R, Hkv] int32, parts of a shared row that are done
    partial: torch.Tensor  # [Hkv, P + R, G, D] float32, unnormalised outputs of shared rows' parts
    stats: torch.Tensor  # [Hkv, P + R, 2, G] float32, their running maximum and sum
    block_n: int  # tokens per tile


@dataclass(frozen=True)
class Cascade:
    """What groups of ``group_rows`` consecutive rows have in common. Its work is cut like that of
    a decode whose rows are the groups, with as many queries as all rows of one have."""

    group_rows: int
    common_lens: torch.Tensor  # [groups] int32, tokens that all rows of a group share
    cut: Cut
    config: DecodeConfig


@dataclass(frozen=True)
class DecodePlan:
    """The cut of a step's decode work, of what is left of it by a ``cascade``."""

    cut: Cut
    cascade: Cascade | None = None


def decode_config(head_dim: int, dtype: torch.dtype, rows: int) -> DecodeConfig:
    """Return how to decode ``rows`` rows, from a sweep on an H200.

    Many rows want more programs on a multiprocessor, which hide how each begins and ends its rows;
    few want large tiles, which are merged less often.
    """
    if dtype == torch.float32:
        return DecodeConfig(32, 4, 2, 2)
    if rows <= 8:
        return DecodeConfig(128, 4, 4, 2)
    if head_dim <= 64:
        return DecodeConfig(128, 4, 3, 3)
    return DecodeConfig(128, 4, 2, 2) if rows <= 64 else DecodeConfig(64, 4, 2, 4)


def cascade_config(head_dim: int, dtype: torch.dtype, device: torch.device) -> DecodeConfig | None:
    """Return how to attend to what groups of rows have in common: in tiles of 128 tokens, on
    devices with less shared memory in smaller ones; None if not even those of 16 fit."""
    stages, warps, block_n = (2, 8, 32) if dtype == torch.float32 else (2, 4, 128)
    vector = triton.next_power_of_2(head_dim) * dtype.itemsize
    room = shared_memory(device) - 4096  # for reductions
    while (MAX_WIDTH + stages * 2 * block_n) * vector > room:
        block_n //= 2
        if block_n < 16:
            return None
    return DecodeConfig(block_n, warps, stages, 1)


def cascade_rows(
    num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> int:
    """Return how many rows share a tile of a cascade; below 2 there is none.

    Not more than gain by it: a row that has little in common spoils it for its whole group.
    """
    if cascade_config(head_dim, dtype, device) is None:
        return 0
    return min(16, MAX_WIDTH // triton.next_power_of_2(num_heads // num_kv_heads))


def num_decode_programs(device: torch.device, num_kv_heads: int, per_sm: int) -> int:
    """Return how many programs per KV head fill ``device``."""
    return max(1, num_sms(device) * per_sm // num_kv_heads)


@triton.jit(do_not_specialize=["R", "num_counters", "P"])
def _plan_kernel(
    seq_lens_ptr,  # [R]
    query_start_loc_ptr,  # [R + 1], read if MIXED
    common_lens_ptr,  # [R / GROUP_ROWS], read if GROUP_ROWS
    tile_start_ptr,  # [R + 2]
    first_row_ptr,  # [P]
    counters_ptr,  # [R * Hkv]
    R,
    num_counters,
    P,
    MIXED: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    MIN_TILES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_P: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.arange(0, BLOCK_R)
    mask = row < R
    pdl_wait(PDL)
    tokens = tl.load(seq_lens_ptr + row, mask=mask, other=0)
    if GROUP_ROWS:
        tokens -= tl.load(common_lens_ptr + row // GROUP_ROWS, mask=mask, other=0)
    tiles = (tokens + BLOCK_N - 1) // BLOCK_N
    # A row without KV (padding) still gets a tile, whose result is zero.
    tiles = tl.where(mask, tl.maximum(tiles, 1), 0)
    if MIXED:
        start = tl.load(query_start_loc_ptr + row, mask=mask, other=0)
        end = tl.load(query_start_loc_ptr + row + 1, mask=mask, other=0)
        tiles = tl.where(end - start == 1, tiles, 0)
    tile_end = tl.cumsum(tiles, 0)
    total = tl.sum(tiles)
    program = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    # Equal shares, but not so small that merging a row's parts takes longer than reading them.
    worth_it = (tl.sqrt(tl.max(tiles, 0).to(tl.float32) * MERGE_COST)).to(tl.int32)
    per_program = tl.maximum(tl.maximum((total + P - 1) // P, worth_it), MIN_TILES)
    first_tile = program * per_program
    first_row = tl.sum((tile_end[None, :] <= first_tile[:, None]).to(tl.int32), 1)
    first_row = tl.minimum(first_row, R)  # of a program without work, which counts padding too
    tl.store(first_row_ptr + program, first_row, mask=program < P)
    if tl.program_id(0) == 0:
        tl.store(tile_start_ptr + row + 1, tile_end, mask=mask)
        tl.store(tile_start_ptr, 0)
        tl.store(tile_start_ptr + R + 1, per_program)
        for begin in range(0, num_counters, BLOCK_R):
            tl.store(counters_ptr + begin + row, 0, mask=begin + row < num_counters)


@triton.jit(do_not_specialize=["R"])
def _common_kernel(
    seq_lens_ptr,  # [R]
    block_table_ptr,  # [*, max_blocks]
    row_slots_ptr,  # [R], read if HAS_SLOTS
    common_lens_ptr,  # [R / ROWS]
    R,
    table_stride,
    HAS_SLOTS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCKS: tl.constexpr,  # compared at a time
    PDL: tl.constexpr,
):
    group = tl.program_id(0)
    row = group * ROWS + tl.arange(0, ROWS)
    pdl_wait(PDL)
    seq_len = tl.load(seq_lens_ptr + row, mask=row < R, other=0)
    live = seq_len > 0  # padding follows the rows
    table_row = row.to(tl.int64)
    first = (group * ROWS).to(tl.int64)
    if HAS_SLOTS:
        table_row = tl.load(row_slots_ptr + row, mask=live, other=0).to(tl.int64)
        first = tl.load(row_slots_ptr + first).to(tl.int64)
    # A row's newest token is written while the common ones are read: it must not be one of them.
    limit = tl.min(tl.where(live, seq_len - 1, 2147483647))
    limit = tl.where(tl.sum(live.to(tl.int32)) > 1, limit, 0)
    common = limit // BLOCK_SIZE
    begin = 0
    while begin < common:
        column = begin + tl.arange(0, BLOCKS)
        there = column < common
        expected = tl.load(block_table_ptr + first * table_stride + column, mask=there, other=0)
        blocks = tl.load(
            block_table_ptr + table_row[:, None] * table_stride + column[None, :],
            mask=live[:, None] & there[None, :],
            other=0,
        )
        differs = live[:, None] & there[None, :] & (blocks != expected[None, :])
        first_difference = tl.min(tl.min(tl.where(differs, column[None, :], common), 1), 0)
        common = tl.minimum(common, first_difference)
        begin += BLOCKS
    tl.store(common_lens_ptr + group, common * BLOCK_SIZE // BLOCK_N * BLOCK_N)


def _cut(
    seq_lens: torch.Tensor,
    group: int,
    num_kv_heads: int,
    head_dim: int,
    programs: int,
    block_n: int,
    query_start_loc: torch.Tensor | None = None,
    common_lens: torch.Tensor | None = None,
    group_rows: int = 0,
    min_tiles: int = 1,
) -> Cut:
    """Cut rows of ``group`` queries per KV head, without what ``group_rows`` have in common, into
    parts of ``min_tiles`` or more."""
    device, rows = seq_lens.device, seq_lens.shape[0]
    ints = {"dtype": torch.int32, "device": device}
    floats = {"dtype": torch.float32, "device": device}
    cut = Cut(
        tile_start=torch.empty(rows + 2, **ints),
        first_row=torch.empty(programs, **ints),
        counters=torch.empty(rows * num_kv_heads, **ints),
        partial=torch.empty(num_kv_heads, programs + rows, group, head_dim, **floats),
        stats=torch.empty(num_kv_heads, programs + rows, 2, group, **floats),
        block_n=block_n,
    )
    block_p = 16
    launch(
        _plan_kernel,
        (triton.cdiv(programs, block_p),),
        seq_lens,
        seq_lens if query_start_loc is None else query_start_loc,
        seq_lens if common_lens is None else common_lens,
        cut.tile_start,
        cut.first_row,
        cut.counters,
        rows,
        rows * num_kv_heads,
        programs,
        MIXED=query_start_loc is not None,
        GROUP_ROWS=group_rows,
        MIN_TILES=min_tiles,
        BLOCK_N=block_n,
        BLOCK_R=64 if rows <= 64 else max(512, triton.next_power_of_2(rows)),  # few to compile
        BLOCK_P=block_p,
        num_warps=4,
        **pdl_options(device),
    )
    return cut


def plan_decode(
    seq_lens: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    query_start_loc: torch.Tensor | None = None,
    num_programs: int | None = None,
    block_n: int | None = None,
    cascade: Cascade | None = None,
) -> DecodePlan:
    """Cut the decode work of rows with ``seq_lens`` [R] int32 into equal parts, on the device.

    With ``query_start_loc`` [R + 1], rows of other than one query token are left out; with a
    ``cascade``, so is what it attends to.
    """
    config = decode_config(head_dim, dtype, seq_lens.shape[0])
    programs = num_programs or num_decode_programs(seq_lens.device, num_kv_heads, config.per_sm)
    cut = _cut(
        seq_lens, num_heads // num_kv_heads, num_kv_heads, head_dim, programs,
        block_n or config.block_n, query_start_loc,
        *((cascade.common_lens, cascade.group_rows) if cascade is not None else (None, 0)),
    )  # fmt: skip
    return DecodePlan(cut, cascade)


def plan_cascade(
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    row_slots: torch.Tensor | None = None,
    num_programs: int | None = None,
) -> Cascade | None:
    """Find, on the device, the blocks that groups of consecutive rows begin with, and cut the work
    on them; arguments as of :func:`plan_decode` and :func:`paged_decode`.

    None where a tile has no room for the queries of two rows, or the device none for a tile.
    """
    rows, device = seq_lens.shape[0], seq_lens.device
    config = cascade_config(head_dim, dtype, device)
    group_rows = cascade_rows(num_heads, num_kv_heads, head_dim, dtype, device)
    if group_rows < 2 or config is None:
        return None
    groups = triton.cdiv(rows, group_rows)
    common_lens = torch.empty(groups, dtype=torch.int32, device=device)
    launch(
        _common_kernel,
        (groups,),
        seq_lens,
        block_table,
        row_slots if row_slots is not None else seq_lens,
        common_lens,
        rows,
        block_table.stride(0),
        HAS_SLOTS=row_slots is not None,
        ROWS=group_rows,
        BLOCK_SIZE=block_size,
        BLOCK_N=config.block_n,
        BLOCKS=max(16, 2048 // group_rows),
        num_warps=4,
        **pdl_options(device),
    )
    programs = num_programs or num_decode_programs(device, num_kv_heads, config.per_sm)
    width = group_rows * triton.next_power_of_2(num_heads // num_kv_heads)
    cut = _cut(
        common_lens, width, num_kv_heads, head_dim, programs, config.block_n,
        min_tiles=2 if rows <= 32 else 4,  # each part is merged once a row; from a sweep
    )  # fmt: skip
    return Cascade(group_rows, common_lens, cut, config)


@triton.jit
def _merge_parts(
    acc,  # [GROUP_PAD, D_PAD]
    running_max,  # [GROUP_PAD]
    total,  # [GROUP_PAD]
    partial_ptr,  # [parts, WIDTH, D], from the row's first part and query on
    stats_ptr,  # [parts, 2, WIDTH]
    parts,
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    D_PAD: tl.constexpr,
):
    """Fold the ``parts`` of a row into its running softmax.

    Other programs wrote them, so they are read where they are coherent.
    """
    g = tl.arange(0, GROUP_PAD)
    d = tl.arange(0, D_PAD)
    offsets = g[:, None] * HEAD_DIM + d[None, :]
    mask = (g < GROUP)[:, None] & (d < HEAD_DIM)[None, :]
    for begin in range(0, parts, UNROLL):
        for i in tl.static_range(UNROLL):
            part = begin + i
            stats = stats_ptr + part * (2 * WIDTH) + g
            stats_mask = (g < GROUP) & (part + 0 * g < parts)
            maxima = tl.load(stats, stats_mask, other=float("-inf"), cache_modifier=".cg")
            sums = tl.load(stats + WIDTH, stats_mask, other=0.0, cache_modifier=".cg")
            values = tl.load(
                partial_ptr + part * (WIDTH * HEAD_DIM) + offsets,
                mask & stats_mask[:, None],
                other=0.0,
                cache_modifier=".cg",
            )
            new_max = tl.maximum(running_max, maxima)
            safe_max = tl.where(new_max == float("-inf"), 0.0, new_max)
            rescale = tl.exp2(running_max - safe_max)
            weight = tl.exp2(maxima - safe_max)
            total = total * rescale + weight * sums
            acc = acc * rescale[:, None] + values * weight[:, None]
            running_max = new_max
    return acc, running_max, total


@triton.jit
def _rotated(
    x_ptr,  # [rows, HEAD_DIM]; if MANY [N, 1] of these, one for each head
    angles_ptr,  # [HEAD_DIM] float32, cos | sin of the position; if MANY likewise
    norm_ptr,  # [HEAD_DIM]
    rows,  # [N]
    mask,  # [N, D_PAD]
    eps,
    NORM: tl.constexpr,
    MANY: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    D_PAD: tl.constexpr,
):
    """Return heads [N, D_PAD], normed if NORM and rotated (half-split)."""
    HALF: tl.constexpr = HEAD_DIM // 2
    d = tl.arange(0, D_PAD)
    other = tl.where(d < HALF, d + HALF, d - HALF)
    x_ptr += rows[:, None] * HEAD_DIM
    x = tl.load(x_ptr + d[None, :], mask=mask, other=0.0, cache_modifier=".cg")
    pair = tl.load(x_ptr + other[None, :], mask=mask, other=0.0, cache_modifier=".cg")
    angle = tl.where(d < HALF, d, d - HALF)
    if MANY:
        angle_mask = (d < HEAD_DIM)[None, :]
        cos = tl.load(angles_ptr + angle[None, :], mask=angle_mask, other=0.0)
        sin = tl.load(angles_ptr + HALF + angle[None, :], mask=angle_mask, other=0.0)
    else:  # not the same with one row: that takes more registers than four programs can have
        cos = tl.load(angles_ptr + angle, mask=d < HEAD_DIM, other=0.0)[None, :]
        sin = tl.load(angles_ptr + HALF + angle, mask=d < HEAD_DIM, other=0.0)[None, :]
    sin = tl.where((d < HALF)[None, :], -sin, sin)
    dtype = x.dtype
    x = x.to(tl.float32)
    pair = pair.to(tl.float32)
    if NORM:
        rstd = 1 / tl.sqrt(tl.sum(x * x, 1) / HEAD_DIM + eps)
        gain = tl.load(norm_ptr + d, mask=d < HEAD_DIM, other=0.0).to(tl.float32)
        pair_gain = tl.load(norm_ptr + other, mask=d < HEAD_DIM, other=0.0).to(tl.float32)
        x = ((x * rstd[:, None]).to(dtype).to(tl.float32) * gain[None, :]).to(dtype)
        pair = ((pair * rstd[:, None]).to(dtype).to(tl.float32) * pair_gain[None, :]).to(dtype)
        x = x.to(tl.float32)
        pair = pair.to(tl.float32)
    return (x * cos + pair * sin).to(dtype)


@triton.jit
def _row_facts(
    tile_start_ptr, seq_lens_ptr, query_start_loc_ptr, row_slots_ptr, common_lens_ptr, row, R,
    HAS_SLOTS: tl.constexpr, MIXED: tl.constexpr, GROUP_ROWS: tl.constexpr,
):  # fmt: skip
    """Return (end of the row's tiles, its length, its query token, its row of the block table, the
    tokens in front that a cascade attends to); zeros behind the last row."""
    there = row < R
    row_end = tl.load(tile_start_ptr + row + 1, there, other=0, cache_modifier=".cg")
    seq_len = tl.load(seq_lens_ptr + row, there, other=0, cache_modifier=".cg")
    token = row.to(tl.int64)
    if MIXED:
        start = tl.load(query_start_loc_ptr + row, there, other=0, cache_modifier=".cg")
        token = start.to(tl.int64)
    table_row = row.to(tl.int64)
    if HAS_SLOTS:
        slot = tl.load(row_slots_ptr + row, there, other=0, cache_modifier=".cg")
        table_row = slot.to(tl.int64)
    common_len = 0
    if GROUP_ROWS:
        group = row // GROUP_ROWS
        common_len = tl.load(common_lens_ptr + group, there, other=0, cache_modifier=".cg")
    return row_end, seq_len, token, table_row, common_len


@triton.jit(do_not_specialize=["R", "common_parts"])
def _decode_kernel(
    query_ptr,  # [T, Hq, D]; if ROPE [R, Hq + 2 Hkv, D], unrotated, with the new k and v
    kv_ptr,  # [2, num_blocks, Hkv, BLOCK_SIZE, D]
    block_table_ptr,  # [*, max_blocks]
    row_slots_ptr,  # [R], read if HAS_SLOTS
    query_start_loc_ptr,  # [R + 1], read if MIXED
    seq_lens_ptr,  # [R]
    tile_start_ptr,  # [R + 2]
    first_row_ptr,  # [P]
    counters_ptr,  # [R, Hkv]
    partial_ptr,  # [Hkv, P + R, GROUP, D]
    stats_ptr,  # [Hkv, P + R, 2, GROUP]
    out_ptr,  # [T, Hq, D]
    cos_sin_ptr,  # [max_pos, D] float32, read if ROPE
    q_norm_ptr,  # [D], read if NORM
    k_norm_ptr,  # [D], read if NORM
    common_lens_ptr,  # [N] for N groups of rows; these four are read if GROUP_ROWS
    common_start_ptr,  # [N + 2], the cascade's tiles
    common_partial_ptr,  # [Hkv, common_parts, WIDTH, D]
    common_stats_ptr,  # [Hkv, common_parts, 2, WIDTH]
    scale_log2,
    eps,
    R,
    query_stride,
    kv_stride: tl.int64,
    block_stride,
    table_stride,
    common_parts,  # P + N of the cascade
    HAS_SLOTS: tl.constexpr,
    MIXED: tl.constexpr,
    ROPE: tl.constexpr,
    NORM: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    D_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    BLOCK_M: tl.constexpr = 16 if GROUP_PAD < 16 else GROUP_PAD
    WIDTH: tl.constexpr = GROUP_ROWS * GROUP_PAD
    pid = tl.program_id(0)
    kv_head = tl.program_id(1)
    m = tl.arange(0, BLOCK_M)
    g = tl.arange(0, GROUP_PAD)
    d = tl.arange(0, D_PAD)
    n = tl.arange(0, BLOCK_N)
    head_mask = (m < GROUP)[:, None] & (d < HEAD_DIM)[None, :]
    group_mask = (g < GROUP)[:, None] & (d < HEAD_DIM)[None, :]
    num_parts = tl.num_programs(0) + R
    partial_ptr += kv_head * num_parts * GROUP * HEAD_DIM
    stats_ptr += kv_head * num_parts * 2 * GROUP
    key_ptr = kv_ptr + kv_head * BLOCK_SIZE * HEAD_DIM
    value_ptr = key_ptr + kv_stride
    if not ROPE:  # else the plan is older than the kernel before
        pdl_wait(PDL)
    per_program = tl.load(tile_start_ptr + R + 1, cache_modifier=".cg")
    tile = pid * per_program
    end = tl.minimum(tile + per_program, tl.load(tile_start_ptr + R, cache_modifier=".cg"))
    row = tl.load(first_row_ptr + pid, cache_modifier=".cg")
    row_start = tl.load(tile_start_ptr + row, cache_modifier=".cg")
    row_end, seq_len, token, table_row, common_len = _row_facts(
        tile_start_ptr, seq_lens_ptr, query_start_loc_ptr, row_slots_ptr, common_lens_ptr, row, R,
        HAS_SLOTS, MIXED, GROUP_ROWS,
    )  # fmt: skip
    # Behind a cascade, all this reads is older than that: it waits only before it merges.
    if ROPE and GROUP_ROWS == 0:
        pdl_wait(PDL)
    while tile < end:
        # What the next row begins with is on its way while this row's tiles are read.
        next_end, next_len, next_token, next_table_row, next_common_len = _row_facts(
            tile_start_ptr, seq_lens_ptr, query_start_loc_ptr, row_slots_ptr, common_lens_ptr,
            row + 1, R, HAS_SLOTS, MIXED, GROUP_ROWS,
        )  # fmt: skip
        stop = tl.minimum(end, row_end)
        table = block_table_ptr + table_row * table_stride
        query_row = query_ptr + token * query_stride
        if ROPE:
            last = tl.maximum(seq_len - 1, 0)
            angles = cos_sin_ptr + last.to(tl.int64) * HEAD_DIM
            query = _rotated(
                query_row, angles, q_norm_ptr, kv_head * GROUP + m, head_mask, eps,
                NORM, False, HEAD_DIM, D_PAD,
            )  # fmt: skip
            if stop == row_end:  # the program that reads the new token's tile writes it first
                one = tl.arange(0, 1)
                new_mask = (seq_len > one)[:, None] & (d < HEAD_DIM)[None, :]
                k_row = NUM_KV_HEADS * GROUP + kv_head + one
                new_key = _rotated(
                    query_row, angles, k_norm_ptr, k_row, new_mask, eps,
                    NORM, False, HEAD_DIM, D_PAD,
                )  # fmt: skip
                v_row = (k_row + NUM_KV_HEADS)[:, None] * HEAD_DIM + d[None, :]
                new_value = tl.load(
                    query_row + v_row, mask=new_mask, other=0.0, cache_modifier=".cg"
                )
                new_block = tl.load(table + last // BLOCK_SIZE, cache_modifier=".cg").to(tl.int64)
                new_row = new_block * block_stride + (last % BLOCK_SIZE) * HEAD_DIM
                tl.store(key_ptr + new_row + one[:, None] + d[None, :], new_key, mask=new_mask)
                tl.store(value_ptr + new_row + one[:, None] + d[None, :], new_value, mask=new_mask)
                tl.debug_barrier()
        else:
            head_rows = (kv_head * GROUP + m)[:, None] * HEAD_DIM + d[None, :]
            query = tl.load(query_row + head_rows, mask=head_mask, other=0.0)
        running_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, D_PAD], tl.float32)
        for t in range(tile - row_start, stop - row_start):
            position = t * BLOCK_N + n
            if GROUP_ROWS:
                position += common_len
            valid = position < seq_len
            block = tl.load(table + position // BLOCK_SIZE, mask=valid, other=0).to(tl.int64)
            kv_rows = block * block_stride + (position % BLOCK_SIZE) * HEAD_DIM
            offsets = kv_rows[:, None] + d[None, :]
            # Slots past the sequence may hold anything, NaN included: they are never read.
            kv_mask = valid[:, None] & (d < HEAD_DIM)[None, :]
            key = tl.load(key_ptr + offsets, mask=kv_mask, other=0.0)
            value = tl.load(value_ptr + offsets, mask=kv_mask, other=0.0)
            scores = dot(query, tl.trans(key))
            scores = tl.where(valid[None, :], scores, float("-inf"))
            new_max = tl.maximum(running_max, tl.max(scores, 1) * scale_log2)
            safe_max = tl.where(new_max == float("-inf"), 0.0, new_max)
            weights = tl.exp2(scores * scale_log2 - safe_max[:, None])
            rescale = tl.exp2(running_max - safe_max)
            total = total * rescale + tl.sum(weights, 1)
            acc = acc * rescale[:, None]
            acc += dot(weights.to(value.dtype), value)
            running_max = new_max
        out_row = out_ptr + (token * NUM_KV_HEADS + kv_head) * GROUP * HEAD_DIM
        first_part = row_start // per_program
        parts = (row_end - 1) // per_program - first_part + 1
        if stop > tile:
            whole_row = parts == 1
            if GROUP_ROWS:
                whole_row &= common_len == 0
            if whole_row:
                whole = acc / tl.where(total > 0, total, 1.0)[:, None]
                whole_out = out_row + m[:, None] * HEAD_DIM + d[None, :]
                tl.store(whole_out, whole.to(out_ptr.dtype.element_ty), mask=head_mask)
            else:
                part = pid + row  # unique: each next part of the line steps one of the two
                part_out = partial_ptr + (part * GROUP + m[:, None]) * HEAD_DIM + d[None, :]
                tl.store(part_out, acc, mask=head_mask)
                stats = stats_ptr + part * 2 * GROUP + m
                tl.store(stats, running_max, mask=m < GROUP)
                tl.store(stats + GROUP, total, mask=m < GROUP)
                tl.debug_barrier()
                counter = counters_ptr + row * NUM_KV_HEADS + kv_head
                done = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
                if done == parts - 1:
                    tl.store(counter, 0)  # ready for the next layer
                    first = first_part + row
                    merged, merged_max, merged_total = _merge_parts(
                        tl.zeros([GROUP_PAD, D_PAD], tl.float32),
                        tl.full([GROUP_PAD], float("-inf"), tl.float32),
                        tl.zeros([GROUP_PAD], tl.float32),
                        partial_ptr + first * GROUP * HEAD_DIM,
                        stats_ptr + first * 2 * GROUP,
                        parts, GROUP, GROUP, GROUP_PAD, HEAD_DIM, D_PAD,
                    )  # fmt: skip
                    if GROUP_ROWS and (common_len > 0) & (seq_len > 0):
                        group = row // GROUP_ROWS
                        facts = common_start_ptr + group
                        common_start = tl.load(facts, cache_modifier=".cg")
                        common_end = tl.load(facts + 1, cache_modifier=".cg")
                        groups = tl.cdiv(R, GROUP_ROWS)
                        per_common = tl.load(common_start_ptr + groups + 1, cache_modifier=".cg")
                        first_common = common_start // per_common
                        last_common = (common_end - 1) // per_common
                        place = kv_head * common_parts + first_common + group
                        offset = row % GROUP_ROWS * GROUP_PAD
                        if ROPE:
                            pdl_wait(PDL)
                        merged, merged_max, merged_total = _merge_parts(
                            merged, merged_max, merged_total,
                            common_partial_ptr + (place * WIDTH + offset) * HEAD_DIM,
                            common_stats_ptr + place * 2 * WIDTH + offset,
                            last_common - first_common + 1,
                            WIDTH, GROUP, GROUP_PAD, HEAD_DIM, D_PAD,
                        )  # fmt: skip
                    merged /= tl.where(merged_total > 0, merged_total, 1.0)[:, None]
                    merged_out = out_row + g[:, None] * HEAD_DIM + d[None, :]
                    tl.store(merged_out, merged.to(out_ptr.dtype.element_ty), mask=group_mask)
        tile = stop
        row += 1
        row_start = row_end
        row_end = next_end
        seq_len = next_len
        token = next_token
        table_row = next_table_row
        if GROUP_ROWS:
            common_len = next_common_len
    if GROUP_ROWS and ROPE:
        pdl_wait(PDL)


@triton.jit
def _group_facts(
    tile_start_ptr, common_lens_ptr, row_slots_ptr, group, groups,
    HAS_SLOTS: tl.constexpr, GROUP_ROWS: tl.constexpr,
):  # fmt: skip
    """Return (first tile of a group, the end of its tiles, the tokens its rows have in common, the
    row of the block table of its first one); zeros behind the last group."""
    there = group < groups
    start = tl.load(tile_start_ptr + group, mask=there, other=0, cache_modifier=".cg")
    end = tl.load(tile_start_ptr + group + 1, mask=there, other=0, cache_modifier=".cg")
    common_len = tl.load(common_lens_ptr + group, mask=there, other=0, cache_modifier=".cg")
    table_row = (group * GROUP_ROWS).to(tl.int64)
    if HAS_SLOTS:
        slot = tl.load(row_slots_ptr + table_row, mask=there, other=0, cache_modifier=".cg")
        table_row = slot.to(tl.int64)
    return start, end, common_len, table_row


@triton.jit(do_not_specialize=["R"])
def _cascade_kernel(
    query_ptr,  # [R, Hq, D]; if ROPE [R, Hq + 2 Hkv, D], unrotated
    kv_ptr,  # [2, num_blocks, Hkv, BLOCK_SIZE, D]
    block_table_ptr,  # [*, max_blocks]
    row_slots_ptr,  # [R], read if HAS_SLOTS
    seq_lens_ptr,  # [R], read if ROPE
    common_lens_ptr,  # [N]
    tile_start_ptr,  # [N + 2]
    first_group_ptr,  # [P]
    partial_ptr,  # [Hkv, P + N, WIDTH, D]
    stats_ptr,  # [Hkv, P + N, 2, WIDTH]
    cos_sin_ptr,  # [max_pos, D] float32, read if ROPE
    q_norm_ptr,  # [D], read if NORM
    scale_log2,
    eps,
    R,
    query_stride,
    kv_stride: tl.int64,
    block_stride,
    table_stride,
    HAS_SLOTS: tl.constexpr,
    ROPE: tl.constexpr,
    NORM: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    D_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    WIDTH: tl.constexpr = GROUP_ROWS * GROUP_PAD
    pid = tl.program_id(0)
    kv_head = tl.program_id(1)
    m = tl.arange(0, WIDTH)
    d = tl.arange(0, D_PAD)
    head = kv_head * GROUP + m % GROUP_PAD
    key_ptr = kv_ptr + kv_head * BLOCK_SIZE * HEAD_DIM
    value_ptr = key_ptr + kv_stride
    groups = tl.cdiv(R, GROUP_ROWS)
    first_part = kv_head * (tl.num_programs(0) + groups)
    if not ROPE:  # else the plan is older than the kernel before
        pdl_wait(PDL)
    per_program = tl.load(tile_start_ptr + groups + 1, cache_modifier=".cg")
    tile = pid * per_program
    end = tl.minimum(tile + per_program, tl.load(tile_start_ptr + groups, cache_modifier=".cg"))
    group = tl.load(first_group_ptr + pid, cache_modifier=".cg")
    group_start, group_end, common_len, table_row = _group_facts(
        tile_start_ptr, common_lens_ptr, row_slots_ptr, group, groups, HAS_SLOTS, GROUP_ROWS
    )
    if ROPE:
        pdl_wait(PDL)
    while tile < end:
        stop = tl.minimum(end, group_end)
        if common_len > 0:
            table = block_table_ptr + table_row * table_stride
            row = group * GROUP_ROWS + m // GROUP_PAD
            mask = ((m % GROUP_PAD < GROUP) & (row < R))[:, None] & (d < HEAD_DIM)[None, :]
            query_row = query_ptr + row.to(tl.int64)[:, None] * query_stride
            if ROPE:
                seq_len = tl.load(seq_lens_ptr + row, mask=row < R, other=0)
                last = tl.maximum(seq_len - 1, 0).to(tl.int64)
                angles = cos_sin_ptr + last[:, None] * HEAD_DIM
                query = _rotated(
                    query_row, angles, q_norm_ptr, head, mask, eps, NORM, True, HEAD_DIM, D_PAD
                )
            else:
                query = tl.load(query_row + head[:, None] * HEAD_DIM + d[None, :], mask, other=0.0)
            acc, running_max, total = attend_tiles(
                tl.zeros([WIDTH, D_PAD], tl.float32),
                tl.full([WIDTH], float("-inf"), tl.float32),
                tl.zeros([WIDTH], tl.float32),
                query, key_ptr, value_ptr, table, tile - group_start, stop - group_start, 0, 0,
                scale_log2, block_stride, False, HEAD_DIM, D_PAD, BLOCK_SIZE, BLOCK_N,
            )  # fmt: skip
            part = first_part + pid + group
            out = partial_ptr + (part.to(tl.int64) * WIDTH + m[:, None]) * HEAD_DIM
            tl.store(out + d[None, :], acc, mask=(d < HEAD_DIM)[None, :])
            stats = stats_ptr + part * 2 * WIDTH + m
            tl.store(stats, running_max)
            tl.store(stats + WIDTH, total)
        tile = stop
        group += 1
        group_start, group_end, common_len, table_row = _group_facts(
            tile_start_ptr, common_lens_ptr, row_slots_ptr, group, groups, HAS_SLOTS, GROUP_ROWS
        )


def paged_decode(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    plan: DecodePlan,
    row_slots: torch.Tensor | None = None,
    query_start_loc: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the attention [T, Hq, D] of every row's single ``query`` token over its KV.

    ``kv_cache`` is a layer's pool, ``block_table`` [R, max_blocks] int32 (with ``row_slots`` [R]
    a table of slots: row r uses ``block_table[row_slots[r]]``), ``seq_lens`` [R] int32. A row of
    length 0 yields zeros. ``plan`` is :func:`plan_decode` of the same lengths; if it was given
    ``query_start_loc``, pass it here too: rows of other lengths then stay as they are in ``out``.
    """
    check(
        query.shape[1] % kv_cache.shape[2] == 0,
        f"{query.shape[1]} heads over {kv_cache.shape[2]} KV heads",
    )
    if out is None:
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    _launch_decode(
        query, kv_cache, block_table, seq_lens, scale, plan, row_slots, query_start_loc, out
    )
    return out


def rope_and_paged_decode(
    qkv: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cos_sin: torch.Tensor,
    scale: float,
    plan: DecodePlan,
    num_heads: int,
    row_slots: torch.Tensor | None = None,
    q_norm_weight: torch.Tensor | None = None,
    k_norm_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    num_warps: int | None = None,
    num_stages: int | None = None,
) -> torch.Tensor:
    """Return :func:`paged_decode` [R, Hq, D] of ``qkv`` [R, (Hq + 2 Hkv) * D], in one launch with
    :func:`rope_and_cache` before it.

    The new token of row r stands at position ``seq_lens[r] - 1``, and its k and v are written there
    by the block table; rows of length 0 write nothing. ``cos_sin`` [max_pos, D] float32.

    All but ``qkv`` is read before the kernel in front has ended: at least one must lie between this
    and what made the plan, ``seq_lens`` and ``row_slots``. No row may read a block that another one
    writes.
    """
    rows, (head_dim, num_kv_heads) = qkv.shape[0], (kv_cache.shape[4], kv_cache.shape[2])
    check(
        qkv.shape[1] == (num_heads + 2 * num_kv_heads) * head_dim,
        f"qkv has {qkv.shape[1]} columns, not {num_heads + 2 * num_kv_heads} heads",
    )
    out = torch.empty(rows, num_heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    _launch_decode(
        qkv, kv_cache, block_table, seq_lens, scale, plan, row_slots, None, out,
        cos_sin, q_norm_weight, k_norm_weight, eps, num_warps, num_stages,
    )  # fmt: skip
    return out


def _launch_decode(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    plan: DecodePlan,
    row_slots: torch.Tensor | None,
    query_start_loc: torch.Tensor | None,
    out: torch.Tensor,
    cos_sin: torch.Tensor | None = None,
    q_norm_weight: torch.Tensor | None = None,
    k_norm_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    num_warps: int | None = None,
    num_stages: int | None = None,
) -> None:
    num_heads, head_dim = out.shape[1:]
    num_kv_heads, block_size = kv_cache.shape[2:4]
    group, rows = num_heads // num_kv_heads, seq_lens.shape[0]
    if rows == 0:
        return
    config = decode_config(head_dim, query.dtype, rows)
    cut, cascade = plan.cut, plan.cascade
    shape = {
        "HAS_SLOTS": row_slots is not None,
        "ROPE": cos_sin is not None,
        "NORM": q_norm_weight is not None,
        "GROUP": group,
        "GROUP_PAD": triton.next_power_of_2(group),
        "GROUP_ROWS": 0 if cascade is None else cascade.group_rows,
        "HEAD_DIM": head_dim,
        "D_PAD": triton.next_power_of_2(head_dim),
        "BLOCK_SIZE": block_size,
        **pdl_options(query.device),
    }
    if cascade is not None:
        launch(
            _cascade_kernel,
            (cascade.cut.first_row.shape[0], num_kv_heads),
            query,
            kv_cache,
            block_table,
            row_slots if row_slots is not None else seq_lens,
            seq_lens,
            cascade.common_lens,
            cascade.cut.tile_start,
            cascade.cut.first_row,
            cascade.cut.partial,
            cascade.cut.stats,
            cos_sin if cos_sin is not None else cut.stats,
            q_norm_weight if q_norm_weight is not None else query,
            scale * LOG2_E,
            eps,
            rows,
            query.stride(0),
            kv_cache.stride(0),
            kv_cache.stride(1),
            block_table.stride(0),
            BLOCK_N=cascade.cut.block_n,
            num_warps=cascade.config.num_warps,
            num_stages=cascade.config.num_stages,
            **shape,
        )
    launch(
        _decode_kernel,
        (cut.first_row.shape[0], num_kv_heads),
        query,
        kv_cache,
        block_table,
        row_slots if row_slots is not None else seq_lens,
        query_start_loc if query_start_loc is not None else seq_lens,
        seq_lens,
        cut.tile_start,
        cut.first_row,
        cut.counters,
        cut.partial,
        cut.stats,
        out,
        cos_sin if cos_sin is not None else cut.stats,
        q_norm_weight if q_norm_weight is not None else query,
        k_norm_weight if k_norm_weight is not None else query,
        *(
            (seq_lens, cut.tile_start, cut.partial, cut.stats)
            if cascade is None
            else (
                cascade.common_lens,
                cascade.cut.tile_start,
                cascade.cut.partial,
                cascade.cut.stats,
            )
        ),
        scale * LOG2_E,
        eps,
        rows,
        query.stride(0),
        kv_cache.stride(0),
        kv_cache.stride(1),
        block_table.stride(0),
        0 if cascade is None else cascade.cut.partial.shape[1],
        MIXED=query_start_loc is not None,
        NUM_KV_HEADS=num_kv_heads,
        BLOCK_N=cut.block_n,
        num_warps=num_warps or config.num_warps,
        num_stages=num_stages or config.num_stages,
        **shape,
    )
