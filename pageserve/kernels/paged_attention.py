"""Attention over the paged KV pool: one kernel for decodes, one for prompt chunks.

Decode is a stream of KV through the chip, so its work is cut into equal parts, not per row: the
tiles of all rows form one line, every program takes the same number of consecutive tiles, and a row
that several programs share is merged by the last of them to finish. The cut is computed on the
device (:func:`plan_decode`) once a step for all layers, so a CUDA graph replays it on new lengths.

A layer's pool is [2, num_blocks, num_kv_heads, block_size, head_dim]; blocks are read in place.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from pageserve.kernels.launch import check, dot, launch, num_sms, pdl_options, pdl_wait

LOG2_E = 1.4426950408889634
MERGE_COST = tl.constexpr(0.16)  # of a part of a row, in times of reading a tile
UNROLL = tl.constexpr(8)  # parts of a row whose loads are under way together


@dataclass(frozen=True)
class DecodePlan:
    """The cut of a step's decode work, and the scratch its programs share. P programs per KV head,
    R rows, G query heads per KV head."""

    tile_start: torch.Tensor  # [R + 2] int32, first tile of each row on the line of all tiles,
    # their number, and the number of tiles per program
    first_row: torch.Tensor  # [P] int32, row of each program's first tile
    counters: torch.Tensor  # [R, Hkv] int32, parts of a shared row that are done
    partial: torch.Tensor  # [Hkv, P + R, G, D] float32, unnormalised outputs of shared rows' parts
    stats: torch.Tensor  # [Hkv, P + R, 2, G] float32, their running maximum and sum
    block_n: int  # tokens per tile


class DecodeConfig(NamedTuple):
    """How a decode is cut and compiled."""

    block_n: int  # tokens per tile
    num_warps: int
    num_stages: int
    per_sm: int  # programs per multiprocessor


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


def num_decode_programs(device: torch.device, num_kv_heads: int, per_sm: int) -> int:
    """Return how many programs per KV head fill ``device``."""
    return max(1, num_sms(device) * per_sm // num_kv_heads)


@triton.jit(do_not_specialize=["R", "num_counters", "P"])
def _plan_kernel(
    seq_lens_ptr,  # [R]
    query_start_loc_ptr,  # [R + 1], read if MIXED
    tile_start_ptr,  # [R + 2]
    first_row_ptr,  # [P]
    counters_ptr,  # [R * Hkv]
    R,
    num_counters,
    P,
    MIXED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_P: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.arange(0, BLOCK_R)
    mask = row < R
    pdl_wait(PDL)
    tiles = (tl.load(seq_lens_ptr + row, mask=mask, other=0) + BLOCK_N - 1) // BLOCK_N
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
    per_program = tl.maximum(tl.maximum((total + P - 1) // P, worth_it), 1)
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


def plan_decode(
    seq_lens: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    query_start_loc: torch.Tensor | None = None,
    num_programs: int | None = None,
    block_n: int | None = None,
) -> DecodePlan:
    """Cut the decode work of rows with ``seq_lens`` [R] int32 into equal parts, on the device.

    With ``query_start_loc`` [R + 1], rows of other than one query token are left out.
    """
    device, rows = seq_lens.device, seq_lens.shape[0]
    config = decode_config(head_dim, dtype, rows)
    programs = num_programs or num_decode_programs(device, num_kv_heads, config.per_sm)
    block_n = block_n or config.block_n
    group = num_heads // num_kv_heads
    ints = {"dtype": torch.int32, "device": device}
    floats = {"dtype": torch.float32, "device": device}
    plan = DecodePlan(
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
        plan.tile_start,
        plan.first_row,
        plan.counters,
        rows,
        rows * num_kv_heads,
        programs,
        MIXED=query_start_loc is not None,
        BLOCK_N=block_n,
        BLOCK_R=64 if rows <= 64 else max(512, triton.next_power_of_2(rows)),  # few to compile
        BLOCK_P=block_p,
        num_warps=4,
        **pdl_options(device),
    )
    return plan


@triton.jit
def _merge_parts(
    partial_ptr,  # [parts, GROUP, D], from the row's first part
    stats_ptr,  # [parts, 2, GROUP]
    parts,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    D_PAD: tl.constexpr,
):
    """Return the normalised output [GROUP_PAD, D_PAD] of a row from its ``parts``.

    Other programs wrote them, so they are read where they are coherent.
    """
    g = tl.arange(0, GROUP_PAD)
    d = tl.arange(0, D_PAD)
    offsets = g[:, None] * HEAD_DIM + d[None, :]
    mask = (g < GROUP)[:, None] & (d < HEAD_DIM)[None, :]
    running_max = tl.full([GROUP_PAD], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_PAD], tl.float32)
    acc = tl.zeros([GROUP_PAD, D_PAD], tl.float32)
    for begin in range(0, parts, UNROLL):
        for i in tl.static_range(UNROLL):
            part = begin + i
            stats = stats_ptr + part * (2 * GROUP) + g
            stats_mask = (g < GROUP) & (part + 0 * g < parts)
            maxima = tl.load(stats, stats_mask, other=float("-inf"), cache_modifier=".cg")
            sums = tl.load(stats + GROUP, stats_mask, other=0.0, cache_modifier=".cg")
            values = tl.load(
                partial_ptr + part * (GROUP * HEAD_DIM) + offsets,
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
    return acc / tl.where(total > 0, total, 1.0)[:, None]


@triton.jit
def _rotated(
    x_ptr,  # [rows, HEAD_DIM]
    angles_ptr,  # [HEAD_DIM] float32, cos | sin of the position
    norm_ptr,  # [HEAD_DIM]
    rows,  # [N]
    mask,  # [N, D_PAD]
    eps,
    NORM: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    D_PAD: tl.constexpr,
):
    """Return heads [N, D_PAD], normed if NORM and rotated (half-split)."""
    HALF: tl.constexpr = HEAD_DIM // 2
    d = tl.arange(0, D_PAD)
    other = tl.where(d < HALF, d + HALF, d - HALF)
    x = tl.load(x_ptr + rows[:, None] * HEAD_DIM + d[None, :], mask=mask, other=0.0)
    pair = tl.load(x_ptr + rows[:, None] * HEAD_DIM + other[None, :], mask=mask, other=0.0)
    angle = tl.where(d < HALF, d, d - HALF)
    cos = tl.load(angles_ptr + angle, mask=d < HEAD_DIM, other=0.0)
    sin = tl.load(angles_ptr + HALF + angle, mask=d < HEAD_DIM, other=0.0)
    sin = tl.where(d < HALF, -sin, sin)
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
    return (x * cos[None, :] + pair * sin[None, :]).to(dtype)


@triton.jit
def _row_facts(
    tile_start_ptr, seq_lens_ptr, query_start_loc_ptr, row_slots_ptr, row, R,
    HAS_SLOTS: tl.constexpr, MIXED: tl.constexpr,
):  # fmt: skip
    """Return (end of the row's tiles, its length, its query token, its row of the block table);
    zeros behind the last row."""
    there = row < R
    row_end = tl.load(tile_start_ptr + row + 1, mask=there, other=0)
    seq_len = tl.load(seq_lens_ptr + row, mask=there, other=0)
    token = row.to(tl.int64)
    if MIXED:
        token = tl.load(query_start_loc_ptr + row, mask=there, other=0).to(tl.int64)
    table_row = row.to(tl.int64)
    if HAS_SLOTS:
        table_row = tl.load(row_slots_ptr + row, mask=there, other=0).to(tl.int64)
    return row_end, seq_len, token, table_row


@triton.jit(do_not_specialize=["R"])
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
    scale_log2,
    eps,
    R,
    query_stride,
    kv_stride: tl.int64,
    block_stride,
    table_stride,
    HAS_SLOTS: tl.constexpr,
    MIXED: tl.constexpr,
    ROPE: tl.constexpr,
    NORM: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    D_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    BLOCK_M: tl.constexpr = 16 if GROUP_PAD < 16 else GROUP_PAD
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
    pdl_wait(PDL)
    per_program = tl.load(tile_start_ptr + R + 1)
    tile = pid * per_program
    end = tl.minimum(tile + per_program, tl.load(tile_start_ptr + R))
    row = tl.load(first_row_ptr + pid)
    row_start = tl.load(tile_start_ptr + row)
    row_end, seq_len, token, table_row = _row_facts(
        tile_start_ptr, seq_lens_ptr, query_start_loc_ptr, row_slots_ptr, row, R, HAS_SLOTS, MIXED
    )  # fmt: skip
    while tile < end:
        # What the next row begins with is on its way while this row's tiles are read.
        next_end, next_len, next_token, next_table_row = _row_facts(
            tile_start_ptr, seq_lens_ptr, query_start_loc_ptr, row_slots_ptr, row + 1, R,
            HAS_SLOTS, MIXED,
        )  # fmt: skip
        stop = tl.minimum(end, row_end)
        table = block_table_ptr + table_row * table_stride
        query_row = query_ptr + token * query_stride
        if ROPE:
            last = tl.maximum(seq_len - 1, 0)
            angles = cos_sin_ptr + last.to(tl.int64) * HEAD_DIM
            query = _rotated(
                query_row, angles, q_norm_ptr, kv_head * GROUP + m, head_mask, eps,
                NORM, HEAD_DIM, D_PAD,
            )  # fmt: skip
            if stop == row_end:  # the program that reads the new token's tile writes it first
                one = tl.arange(0, 1)
                new_mask = (seq_len > one)[:, None] & (d < HEAD_DIM)[None, :]
                k_row = NUM_KV_HEADS * GROUP + kv_head + one
                new_key = _rotated(
                    query_row, angles, k_norm_ptr, k_row, new_mask, eps, NORM, HEAD_DIM, D_PAD
                )
                v_row = (k_row + NUM_KV_HEADS)[:, None] * HEAD_DIM + d[None, :]
                new_value = tl.load(query_row + v_row, mask=new_mask, other=0.0)
                new_block = tl.load(table + last // BLOCK_SIZE).to(tl.int64)
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
            if parts == 1:
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
                    merged = _merge_parts(
                        partial_ptr + first * GROUP * HEAD_DIM,
                        stats_ptr + first * 2 * GROUP,
                        parts, GROUP, GROUP_PAD, HEAD_DIM, D_PAD,
                    )  # fmt: skip
                    merged_out = out_row + g[:, None] * HEAD_DIM + d[None, :]
                    tl.store(merged_out, merged.to(out_ptr.dtype.element_ty), mask=group_mask)
        tile = stop
        row += 1
        row_start = row_end
        row_end = next_end
        seq_len = next_len
        token = next_token
        table_row = next_table_row


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
    num_warps: int | None = None,
    num_stages: int | None = None,
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
        query, kv_cache, block_table, seq_lens, scale, plan, row_slots, query_start_loc, out,
        num_warps=num_warps, num_stages=num_stages,
    )  # fmt: skip
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
) -> torch.Tensor:
    """Return :func:`paged_decode` [R, Hq, D] of ``qkv`` [R, (Hq + 2 Hkv) * D], in one launch with
    :func:`rope_and_cache` before it.

    The new token of row r stands at position ``seq_lens[r] - 1``, and its k and v are written there
    by the block table; rows of length 0 write nothing. ``cos_sin`` [max_pos, D] float32.
    """
    rows, (head_dim, num_kv_heads) = qkv.shape[0], (kv_cache.shape[4], kv_cache.shape[2])
    check(
        qkv.shape[1] == (num_heads + 2 * num_kv_heads) * head_dim,
        f"qkv has {qkv.shape[1]} columns, not {num_heads + 2 * num_kv_heads} heads",
    )
    out = torch.empty(rows, num_heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    _launch_decode(
        qkv, kv_cache, block_table, seq_lens, scale, plan, row_slots, None, out,
        cos_sin, q_norm_weight, k_norm_weight, eps,
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
    launch(
        _decode_kernel,
        (plan.first_row.shape[0], num_kv_heads),
        query,
        kv_cache,
        block_table,
        row_slots if row_slots is not None else seq_lens,
        query_start_loc if query_start_loc is not None else seq_lens,
        seq_lens,
        plan.tile_start,
        plan.first_row,
        plan.counters,
        plan.partial,
        plan.stats,
        out,
        cos_sin if cos_sin is not None else plan.stats,
        q_norm_weight if q_norm_weight is not None else query,
        k_norm_weight if k_norm_weight is not None else query,
        scale * LOG2_E,
        eps,
        rows,
        query.stride(0),
        kv_cache.stride(0),
        kv_cache.stride(1),
        block_table.stride(0),
        HAS_SLOTS=row_slots is not None,
        MIXED=query_start_loc is not None,
        ROPE=cos_sin is not None,
        NORM=q_norm_weight is not None,
        GROUP=group,
        GROUP_PAD=triton.next_power_of_2(group),
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        D_PAD=triton.next_power_of_2(head_dim),
        BLOCK_SIZE=block_size,
        BLOCK_N=plan.block_n,
        num_warps=num_warps or config.num_warps,
        num_stages=num_stages or config.num_stages,
        **pdl_options(query.device),
    )


@triton.jit
def _find_row(query_start_loc_ptr, query_block, R, BLOCK_Q: tl.constexpr):
    """Return the last row whose first query block is at most ``query_block``.

    Row r starts at block ``query_start_loc[r] // BLOCK_Q + r``: enough room for every row's rest.
    """
    low = 0
    high = R
    while high - low > 1:
        middle = (low + high) // 2
        start = tl.load(query_start_loc_ptr + middle) // BLOCK_Q + middle
        if start <= query_block:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def _prefill_tiles(
    acc, running_max, total, query, key_ptr, value_ptr, table, begin, end, limit, seq_len,
    scale_log2, block_stride,
    MASKED: tl.constexpr, HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Fold KV tiles [begin, end) into the running softmax; row i sees positions up to limit[i]."""
    d = tl.arange(0, D_PAD)
    n = tl.arange(0, BLOCK_N)
    for t in range(begin, end):
        position = t * BLOCK_N + n
        if MASKED:
            valid = position < seq_len
            block = tl.load(table + position // BLOCK_SIZE, mask=valid, other=0).to(tl.int64)
        else:
            block = tl.load(table + position // BLOCK_SIZE).to(tl.int64)
        kv_rows = block * block_stride + (position % BLOCK_SIZE) * HEAD_DIM
        offsets = kv_rows[:, None] + d[None, :]
        if MASKED:
            kv_mask = valid[:, None] & (d < HEAD_DIM)[None, :]
            key = tl.load(key_ptr + offsets, mask=kv_mask, other=0.0)
            value = tl.load(value_ptr + offsets, mask=kv_mask, other=0.0)
        elif D_PAD == HEAD_DIM:
            key = tl.load(key_ptr + offsets)
            value = tl.load(value_ptr + offsets)
        else:
            key = tl.load(key_ptr + offsets, mask=(d < HEAD_DIM)[None, :], other=0.0)
            value = tl.load(value_ptr + offsets, mask=(d < HEAD_DIM)[None, :], other=0.0)
        scores = dot(query, tl.trans(key))
        if MASKED:
            scores = tl.where(position[None, :] <= limit[:, None], scores, float("-inf"))
        new_max = tl.maximum(running_max, tl.max(scores, 1) * scale_log2)
        safe_max = tl.where(new_max == float("-inf"), 0.0, new_max)
        weights = tl.exp2(scores * scale_log2 - safe_max[:, None])
        rescale = tl.exp2(running_max - safe_max)
        total = total * rescale + tl.sum(weights, 1)
        acc = acc * rescale[:, None]
        acc += dot(weights.to(value.dtype), value)
        running_max = new_max
    return acc, running_max, total


@triton.jit(do_not_specialize=["R"])
def _prefill_kernel(
    query_ptr,  # [T, Hq, D]
    kv_ptr,  # [2, num_blocks, Hkv, BLOCK_SIZE, D]
    block_table_ptr,  # [*, max_blocks]
    row_slots_ptr,  # [R], read if HAS_SLOTS
    query_start_loc_ptr,  # [R + 1]
    seq_lens_ptr,  # [R]
    out_ptr,  # [T, Hq, D]
    scale_log2,
    R,
    query_stride,
    kv_stride: tl.int64,
    block_stride,
    table_stride,
    HAS_SLOTS: tl.constexpr,
    SKIP_DECODES: tl.constexpr,
    GROUP: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    D_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_Q: tl.constexpr,  # query tokens of a tile; BLOCK_Q * GROUP <= BLOCK_M
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    kv_head = tl.program_id(0)
    # The last tiles of a prompt see the most keys: start with them.
    query_block = tl.num_programs(1) - 1 - tl.program_id(1)
    pdl_wait(PDL)
    row = _find_row(query_start_loc_ptr, query_block, R, BLOCK_Q)
    start = tl.load(query_start_loc_ptr + row)
    length = tl.load(query_start_loc_ptr + row + 1) - start
    first = (query_block - (start // BLOCK_Q + row)) * BLOCK_Q  # in the row
    if first >= length:
        return
    if SKIP_DECODES and length == 1:
        return
    table_row = row.to(tl.int64)
    if HAS_SLOTS:
        table_row = tl.load(row_slots_ptr + row).to(tl.int64)
    if table_row < 0:
        return
    seq_len = tl.load(seq_lens_ptr + row)
    context = seq_len - length
    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, D_PAD)
    query_token = first + m // GROUP
    head = kv_head * GROUP + m % GROUP
    mask = (m < BLOCK_Q * GROUP) & (query_token < length)
    mask2 = mask[:, None] & (d < HEAD_DIM)[None, :]
    token = (start + query_token).to(tl.int64)
    pointers = query_ptr + (token * query_stride + head * HEAD_DIM)[:, None] + d[None, :]
    query = tl.load(pointers, mask=mask2, other=0.0)
    table = block_table_ptr + table_row * table_stride
    key_ptr = kv_ptr + kv_head * BLOCK_SIZE * HEAD_DIM
    value_ptr = key_ptr + kv_stride
    limit = context + query_token
    running_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, D_PAD], tl.float32)
    full = (context + first + 1) // BLOCK_N  # tiles that every query of the block sees whole
    last = tl.minimum(first + BLOCK_Q, length)
    stop = (context + last + BLOCK_N - 1) // BLOCK_N
    acc, running_max, total = _prefill_tiles(
        acc, running_max, total, query, key_ptr, value_ptr, table, 0, full, limit, seq_len,
        scale_log2, block_stride, False, HEAD_DIM, D_PAD, BLOCK_SIZE, BLOCK_N,
    )  # fmt: skip
    acc, running_max, total = _prefill_tiles(
        acc, running_max, total, query, key_ptr, value_ptr, table, full, stop, limit, seq_len,
        scale_log2, block_stride, True, HEAD_DIM, D_PAD, BLOCK_SIZE, BLOCK_N,
    )  # fmt: skip
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    rows = token * (NUM_KV_HEADS * GROUP * HEAD_DIM) + head * HEAD_DIM
    tl.store(out_ptr + rows[:, None] + d[None, :], acc.to(out_ptr.dtype.element_ty), mask=mask2)


def _prefill_shape(
    group: int, head_dim: int, dtype: torch.dtype, max_query_len: int
) -> tuple[int, int, int, int]:
    """Return (rows of the query tile, tokens per KV tile, warps, stages) of a prefill."""
    if dtype == torch.float32:
        return max(16, triton.next_power_of_2(group)), 16, 4, 2
    if max_query_len * group <= 64:
        return max(64, triton.next_power_of_2(group)), 64, 4, 3
    return 128, 64, 4, 4


def paged_prefill(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    max_query_len: int,
    scale: float,
    row_slots: torch.Tensor | None = None,
    skip_decodes: bool = False,
    out: torch.Tensor | None = None,
    config: tuple[int, int, int, int] | None = None,
) -> torch.Tensor:
    """Return the causal attention [T, Hq, D] of a flat batch of rows over the paged pool.

    Row r owns query tokens ``query_start_loc[r] : query_start_loc[r + 1]``, the last of its
    ``seq_lens[r]`` tokens. ``skip_decodes`` leaves rows of one token as they are in ``out``;
    so does a slot of -1 with its row.
    ``config`` overrides (query tile rows, KV tile tokens, warps, stages).
    """
    tokens, num_heads, head_dim = query.shape
    num_kv_heads, block_size = kv_cache.shape[2:4]
    group, rows = num_heads // num_kv_heads, seq_lens.shape[0]
    check(num_heads % num_kv_heads == 0, f"{num_heads} heads over {num_kv_heads} KV heads")
    if out is None:
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    if tokens == 0:
        return out
    block_m, block_n, warps, stages = config or _prefill_shape(
        group, head_dim, query.dtype, max_query_len
    )
    block_q = block_m // group
    launch(
        _prefill_kernel,
        (num_kv_heads, tokens // block_q + rows),
        query,
        kv_cache,
        block_table,
        row_slots if row_slots is not None else seq_lens,
        query_start_loc,
        seq_lens,
        out,
        scale * LOG2_E,
        rows,
        query.stride(0),
        kv_cache.stride(0),
        kv_cache.stride(1),
        block_table.stride(0),
        HAS_SLOTS=row_slots is not None,
        SKIP_DECODES=skip_decodes,
        GROUP=group,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        D_PAD=triton.next_power_of_2(head_dim),
        BLOCK_SIZE=block_size,
        BLOCK_M=block_m,
        BLOCK_Q=block_q,
        BLOCK_N=block_n,
        num_warps=warps,
        num_stages=stages,
        **pdl_options(query.device),
    )
    return out
