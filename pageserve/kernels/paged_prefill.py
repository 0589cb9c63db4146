"""Attention of prompt chunks over the paged KV pool, in tiles of queries of all heads of a group.

A layer's pool is [2, num_blocks, num_kv_heads, block_size, head_dim]; blocks are read in place.
"""

import torch
import triton
import triton.language as tl

from pageserve.kernels.launch import check, dot, launch, pdl_options, pdl_wait

LOG2_E = 1.4426950408889634


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
def attend_tiles(
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
    acc, running_max, total = attend_tiles(
        acc, running_max, total, query, key_ptr, value_ptr, table, 0, full, limit, seq_len,
        scale_log2, block_stride, False, HEAD_DIM, D_PAD, BLOCK_SIZE, BLOCK_N,
    )  # fmt: skip
    acc, running_max, total = attend_tiles(
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
