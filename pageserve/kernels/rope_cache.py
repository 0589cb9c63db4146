"""Rotary embedding of q and k, optional per-head q/k norm, and the write of k and v to the pool."""

import torch
import triton
import triton.language as tl

from pageserve.kernels.launch import check, launch, pdl_options, pdl_wait


@triton.jit
def _rotate_heads(
    x_ptr,  # [heads, HEAD_DIM] of one token
    heads,  # [N] head indices: q heads, then k heads, then v heads
    mask,  # [N]
    cos,  # [HALF_PAD] float32
    sin,
    q_norm_ptr,
    k_norm_ptr,
    num_heads,
    num_kv_heads,
    eps,
    NORM: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF_PAD: tl.constexpr,
):
    """Return both halves [N, HALF_PAD] of the heads: q and k normed and rotated, v as it is."""
    HALF: tl.constexpr = HEAD_DIM // 2
    d = tl.arange(0, HALF_PAD)
    mask2 = mask[:, None] & (d < HALF)[None, :]
    pointers = x_ptr + heads[:, None] * HEAD_DIM + d[None, :]
    low = tl.load(pointers, mask=mask2, other=0.0)
    high = tl.load(pointers + HALF, mask=mask2, other=0.0)
    dtype = low.dtype
    low = low.to(tl.float32)
    high = high.to(tl.float32)
    is_v = (heads >= num_heads + num_kv_heads)[:, None]
    if NORM:
        rstd = 1 / tl.sqrt((tl.sum(low * low, 1) + tl.sum(high * high, 1)) / HEAD_DIM + eps)
        is_q = (heads < num_heads)[:, None]
        in_half = d < HALF
        q_low = tl.load(q_norm_ptr + d, mask=in_half, other=0.0).to(tl.float32)
        q_high = tl.load(q_norm_ptr + HALF + d, mask=in_half, other=0.0).to(tl.float32)
        k_low = tl.load(k_norm_ptr + d, mask=in_half, other=0.0).to(tl.float32)
        k_high = tl.load(k_norm_ptr + HALF + d, mask=in_half, other=0.0).to(tl.float32)
        weight_low = tl.where(is_q, q_low[None, :], k_low[None, :])
        weight_high = tl.where(is_q, q_high[None, :], k_high[None, :])
        normed_low = (low * rstd[:, None]).to(dtype).to(tl.float32) * weight_low
        normed_high = (high * rstd[:, None]).to(dtype).to(tl.float32) * weight_high
        low = tl.where(is_v, low, normed_low.to(dtype).to(tl.float32))
        high = tl.where(is_v, high, normed_high.to(dtype).to(tl.float32))
    rotated_low = tl.where(is_v, low, low * cos[None, :] - high * sin[None, :])
    rotated_high = tl.where(is_v, high, high * cos[None, :] + low * sin[None, :])
    return rotated_low.to(dtype), rotated_high.to(dtype)


@triton.jit
def _rope_and_cache_kernel(
    qkv_ptr,  # [T, (Hq + 2 Hkv) * D]
    positions_ptr,  # [T]
    cos_sin_ptr,  # [max_pos, D] float32, cos | sin
    kv_ptr,  # [2, num_blocks, Hkv, block_size, D]
    slot_mapping_ptr,  # [T] int64
    q_norm_ptr,  # [D]
    k_norm_ptr,  # [D]
    q_out_ptr,  # [T, Hq, D]
    qkv_stride,
    kv_stride: tl.int64,
    block_stride,
    eps,
    num_heads,
    num_kv_heads,
    NORM: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    PDL: tl.constexpr,
):
    HALF: tl.constexpr = HEAD_DIM // 2
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    mask = heads < num_heads + 2 * num_kv_heads
    d = tl.arange(0, HALF_PAD)
    pdl_wait(PDL)
    position = tl.load(positions_ptr + token).to(tl.int64)
    slot = tl.load(slot_mapping_ptr + token).to(tl.int64)
    angles = cos_sin_ptr + position * HEAD_DIM + d
    cos = tl.load(angles, mask=d < HALF, other=0.0)
    sin = tl.load(angles + HALF, mask=d < HALF, other=0.0)
    low, high = _rotate_heads(
        qkv_ptr + token * qkv_stride, heads, mask, cos, sin, q_norm_ptr, k_norm_ptr,
        num_heads, num_kv_heads, eps, NORM, HEAD_DIM, HALF_PAD,
    )  # fmt: skip
    is_q = heads < num_heads
    in_half = (d < HALF)[None, :]
    q_pointers = q_out_ptr + (token * num_heads + heads[:, None]) * HEAD_DIM + d[None, :]
    q_mask = (mask & is_q)[:, None] & in_half
    tl.store(q_pointers, low, mask=q_mask)
    tl.store(q_pointers + HALF, high, mask=q_mask)
    kv_head = tl.maximum(heads - num_heads, 0)
    is_v = (kv_head >= num_kv_heads).to(tl.int64)
    kv_head = kv_head - is_v * num_kv_heads
    block = slot // BLOCK_SIZE
    rows = is_v * kv_stride + block * block_stride
    rows += (kv_head * BLOCK_SIZE + slot % BLOCK_SIZE) * HEAD_DIM
    first_written = tl.where(slot >= 0, num_heads, num_heads + 2 * num_kv_heads)
    kv_mask = (mask & (heads >= first_written))[:, None] & in_half
    kv_pointers = kv_ptr + rows[:, None] + d[None, :]
    tl.store(kv_pointers, low, mask=kv_mask)
    tl.store(kv_pointers + HALF, high, mask=kv_mask)


def rope_and_cache(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
    q_norm_weight: torch.Tensor | None = None,
    k_norm_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
) -> torch.Tensor:
    """Return the rotated q [T, Hq, D] and write k and v of this step to the pool.

    ``qkv`` [T, (Hq + 2 Hkv) * D], ``positions`` [T], ``cos_sin`` [max_pos, D] float32 (the D/2
    cosines, then the sines), ``kv_cache`` [2, num_blocks, Hkv, block_size, D], ``slot_mapping``
    [T] int64 (-1: not written). Rotation is half-split; the norm weights [D] apply before it.
    Raises ValueError on a shape that does not fit.
    """
    tokens = qkv.shape[0]
    block_size, head_dim = kv_cache.shape[3:]
    total = num_heads + 2 * num_kv_heads
    check(qkv.shape[1] == total * head_dim, f"qkv has {qkv.shape[1]} columns, not {total} heads")
    check(cos_sin.shape[1] == head_dim, f"cos_sin has {cos_sin.shape[1]} columns, not {head_dim}")
    q = torch.empty(tokens, num_heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    if tokens == 0:
        return q
    # Few tokens: spread the heads over programs. Many: let a program take all of a token's heads.
    block_heads = 2 if tokens < 64 else min(16, triton.next_power_of_2(total))
    norm = q_norm_weight is not None
    launch(
        _rope_and_cache_kernel,
        (tokens, triton.cdiv(total, block_heads)),
        qkv,
        positions,
        cos_sin,
        kv_cache,
        slot_mapping,
        q_norm_weight if norm else qkv,
        k_norm_weight if norm else qkv,
        q,
        qkv.stride(0),
        kv_cache.stride(0),
        kv_cache.stride(1),
        eps,
        num_heads,
        num_kv_heads,
        NORM=norm,
        HEAD_DIM=head_dim,
        HALF_PAD=triton.next_power_of_2(head_dim // 2),
        BLOCK_SIZE=block_size,
        BLOCK_HEADS=block_heads,
        num_warps=1 if tokens < 64 else 4,
        **pdl_options(qkv.device),
    )
    return q
