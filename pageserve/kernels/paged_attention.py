"""Attention over the paged KV pool: one kernel for decodes, one for prompt chunks.

Decode is a stream of KV through the chip, so its work is cut into equal parts, not per row: the
tiles of all rows form one line, every program takes the same number of consecutive tiles, and a row
that several programs share is merged by the last of them to finish. The cut is computed on the
device (:func:`plan_decode`) once a step for all layers, so a CUDA graph replays it on new lengths.

A layer's pool is [2, num_blocks, num_kv_heads, block_size, head_dim]; blocks are read in place.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from pageserve.kernels.launch import check, dot, num_sms, pdl_options, pdl_wait

LOG2_E = 1.4426950408889634


@dataclass(frozen=True)
class DecodePlan:
    """The cut of a step's decode work, and the scratch its programs share. P programs per KV head,
    R rows, G query heads per KV head."""

    tile_start: torch.Tensor  # [R + 1] int32, first tile of each row on the line of all tiles
    first_row: torch.Tensor  # [P] int32, row of each program's first tile
    counters: torch.Tensor  # [R, Hkv] int32, parts of a shared row that are done
    partial: torch.Tensor  # [Hkv, P + R, G, D] float32, unnormalised outputs of shared rows' parts
    stats: torch.Tensor  # [Hkv, P + R, 2, G] float32, their running maximum and sum
    block_n: int  # tokens per tile


def _tile_shape(head_dim: int, dtype: torch.dtype) -> tuple[int, int, int, int]:
    """Return (tokens per tile, warps, stages, programs per multiprocessor) of a decode."""
    if dtype == torch.float32:
        return 32, 4, 2, 2
    return (64, 4, 3, 4) if head_dim <= 64 else (64, 4, 3, 2)


def num_decode_programs(device: torch.device, num_kv_heads: int, per_sm: int) -> int:
    """Return how many programs per KV head fill ``device``."""
    return max(1, num_sms(device) * per_sm // num_kv_heads)


@triton.jit
def _plan_kernel(
    seq_lens_ptr,  # [R]
    query_start_loc_ptr,  # [R + 1], read if MIXED
    tile_start_ptr,  # [R + 1]
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
    first_tile = program * ((total + P - 1) // P)
    first_row = tl.sum((tile_end[None, :] <= first_tile[:, None]).to(tl.int32), 1)
    tl.store(first_row_ptr + program, first_row, mask=program < P)
    if tl.program_id(0) == 0:
        tl.store(tile_start_ptr + row + 1, tile_end, mask=mask)
        tl.store(tile_start_ptr, 0)
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
    tile, _, _, per_sm = _tile_shape(head_dim, dtype)
    programs = num_programs or num_decode_programs(device, num_kv_heads, per_sm)
    block_n = block_n or tile
    group = num_heads // num_kv_heads
    ints = {"dtype": torch.int32, "device": device}
    floats = {"dtype": torch.float32, "device": device}
    plan = DecodePlan(
        tile_start=torch.empty(rows + 1, **ints),
        first_row=torch.empty(programs, **ints),
        counters=torch.empty(rows * num_kv_heads, **ints),
        partial=torch.empty(num_kv_heads, programs + rows, group, head_dim, **floats),
        stats=torch.empty(num_kv_heads, programs + rows, 2, group, **floats),
        block_n=block_n,
    )
    block_p = 16
    _plan_kernel[(triton.cdiv(programs, block_p),)](
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
        BLOCK_R=triton.next_power_of_2(rows),
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
    PARTS_PAD: tl.constexpr,
):
    """Return the normalised output [GROUP_PAD, D_PAD] of a row from its ``parts``."""
    g = tl.arange(0, GROUP_PAD)
    d = tl.arange(0, D_PAD)
    part = tl.arange(0, PARTS_PAD)
    running_max = tl.full([GROUP_PAD], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_PAD], tl.float32)
    acc = tl.zeros([GROUP_PAD, D_PAD], tl.float32)
    for begin in range(0, parts, PARTS_PAD):
        mask = ((begin + part) < parts)[:, None] & (g < GROUP)[None, :]
        stats = stats_ptr + (begin + part)[:, None] * (2 * GROUP) + g[None, :]
        # Other programs wrote these: read them where they are coherent.
        maxima = tl.load(stats, mask=mask, other=float("-inf"), cache_modifier=".cg")
        sums = tl.load(stats + GROUP, mask=mask, other=0.0, cache_modifier=".cg")
        rows = ((begin + part)[:, None] * GROUP + g[None, :]) * HEAD_DIM
        values = tl.load(
            partial_ptr + rows[:, :, None] + d[None, None, :],
            mask=mask[:, :, None] & (d < HEAD_DIM)[None, None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        new_max = tl.maximum(running_max, tl.max(maxima, 0))
        safe_max = tl.where(new_max == float("-inf"), 0.0, new_max)
        rescale = tl.exp2(running_max - safe_max)
        weights = tl.exp2(maxima - safe_max[None, :])
        total = total * rescale + tl.sum(weights * sums, 0)
        acc = acc * rescale[:, None] + tl.sum(values * weights[:, :, None], 0)
        running_max = new_max
    return acc / tl.where(total > 0, total, 1.0)[:, None]


@triton.jit
def _decode_kernel(
    query_ptr,  # [T, Hq, D]
    kv_ptr,  # [2, num_blocks, Hkv, BLOCK_SIZE, D]
    block_table_ptr,  # [*, max_blocks]
    row_slots_ptr,  # [R], read if HAS_SLOTS
    query_start_loc_ptr,  # [R + 1], read if MIXED
    seq_lens_ptr,  # [R]
    tile_start_ptr,  # [R + 1]
    first_row_ptr,  # [P]
    counters_ptr,  # [R, Hkv]
    partial_ptr,  # [Hkv, P + R, GROUP, D]
    stats_ptr,  # [Hkv, P + R, 2, GROUP]
    out_ptr,  # [T, Hq, D]
    scale_log2,
    R,
    P,
    query_stride,
    kv_stride,
    block_stride,
    table_stride,
    HAS_SLOTS: tl.constexpr,
    MIXED: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    D_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PARTS_PAD: tl.constexpr,
    PDL: tl.constexpr,
):
    pid = tl.program_id(0)
    kv_head = tl.program_id(1)
    m = tl.arange(0, BLOCK_M)
    g = tl.arange(0, GROUP_PAD)
    d = tl.arange(0, D_PAD)
    n = tl.arange(0, BLOCK_N)
    head_mask = (m < GROUP)[:, None] & (d < HEAD_DIM)[None, :]
    group_mask = (g < GROUP)[:, None] & (d < HEAD_DIM)[None, :]
    partial_ptr += kv_head * (P + R) * GROUP * HEAD_DIM
    stats_ptr += kv_head * (P + R) * 2 * GROUP
    key_ptr = kv_ptr + kv_head * BLOCK_SIZE * HEAD_DIM
    value_ptr = key_ptr + kv_stride
    pdl_wait(PDL)
    all_tiles = tl.load(tile_start_ptr + R)
    per_program = (all_tiles + P - 1) // P
    tile = pid * per_program
    end = tl.minimum(tile + per_program, all_tiles)
    row = tl.load(first_row_ptr + pid)
    while tile < end:
        row_start = tl.load(tile_start_ptr + row)
        row_end = tl.load(tile_start_ptr + row + 1)
        seq_len = tl.load(seq_lens_ptr + row)
        token = row.to(tl.int64)
        if MIXED:
            token = tl.load(query_start_loc_ptr + row).to(tl.int64)
        table_row = row.to(tl.int64)
        if HAS_SLOTS:
            table_row = tl.load(row_slots_ptr + row).to(tl.int64)
        table = block_table_ptr + table_row * table_stride
        head_rows = (kv_head * GROUP + m)[:, None] * HEAD_DIM + d[None, :]
        query = tl.load(query_ptr + token * query_stride + head_rows, mask=head_mask, other=0.0)
        running_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, D_PAD], tl.float32)
        stop = tl.minimum(end, row_end)
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
            scores = dot(query, tl.trans(key)) * scale_log2
            scores = tl.where(valid[None, :], scores, float("-inf"))
            new_max = tl.maximum(running_max, tl.max(scores, 1))
            safe_max = tl.where(new_max == float("-inf"), 0.0, new_max)
            weights = tl.exp2(scores - safe_max[:, None])
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
                        parts, GROUP, GROUP_PAD, HEAD_DIM, D_PAD, PARTS_PAD,
                    )  # fmt: skip
                    merged_out = out_row + g[:, None] * HEAD_DIM + d[None, :]
                    tl.store(merged_out, merged.to(out_ptr.dtype.element_ty), mask=group_mask)
        tile = stop
        row += 1


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
    num_heads, head_dim = query.shape[1:]
    num_kv_heads, block_size = kv_cache.shape[2:4]
    group, rows = num_heads // num_kv_heads, seq_lens.shape[0]
    check(num_heads % num_kv_heads == 0, f"{num_heads} heads over {num_kv_heads} KV heads")
    if out is None:
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    if rows == 0:
        return out
    _, warps, stages, _ = _tile_shape(head_dim, query.dtype)
    programs = plan.first_row.shape[0]
    group_pad, d_pad = triton.next_power_of_2(group), triton.next_power_of_2(head_dim)
    _decode_kernel[(programs, num_kv_heads)](
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
        scale * LOG2_E,
        rows,
        programs,
        query.stride(0),
        kv_cache.stride(0),
        kv_cache.stride(1),
        block_table.stride(0),
        HAS_SLOTS=row_slots is not None,
        MIXED=query_start_loc is not None,
        GROUP=group,
        GROUP_PAD=group_pad,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        D_PAD=d_pad,
        BLOCK_SIZE=block_size,
        BLOCK_M=max(16, group_pad),
        BLOCK_N=plan.block_n,
        PARTS_PAD=max(1, 4096 // (group_pad * d_pad)),
        num_warps=num_warps or warps,
        num_stages=num_stages or stages,
        **pdl_options(query.device),
    )
    return out


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
        scores = dot(query, tl.trans(key)) * scale_log2
        if MASKED:
            scores = tl.where(position[None, :] <= limit[:, None], scores, float("-inf"))
        new_max = tl.maximum(running_max, tl.max(scores, 1))
        safe_max = tl.where(new_max == float("-inf"), 0.0, new_max)
        weights = tl.exp2(scores - safe_max[:, None])
        rescale = tl.exp2(running_max - safe_max)
        total = total * rescale + tl.sum(weights, 1)
        acc = acc * rescale[:, None]
        acc += dot(weights.to(value.dtype), value)
        running_max = new_max
    return acc, running_max, total


@triton.jit
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
    kv_stride,
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
    table_row = row.to(tl.int64)
    if HAS_SLOTS:
        table_row = tl.load(row_slots_ptr + row).to(tl.int64)
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
    return 128, 64, 8 if head_dim > 64 else 4, 3


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
    ``seq_lens[r]`` tokens. ``skip_decodes`` leaves rows of one token as they are in ``out``.
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
    _prefill_kernel[(num_kv_heads, tokens // block_q + rows)](
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
