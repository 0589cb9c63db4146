"""Inputs of a step, built on the device from the request table, and the sampled ids' way back.

The table is ``token_ids`` [num_slots, max_model_len] and ``block_tables`` [num_slots, max_blocks].
A padding row has slot -1: it reads token 0 at position 0, writes no KV and attends to nothing.
"""

from dataclasses import dataclass
from typing import Self

import torch
import triton
import triton.language as tl

from pageserve.kernels.launch import launch, pdl_options, pdl_wait


@dataclass(frozen=True)
class InputBuffers:
    """Static tensors of a decode step of ``batch_size`` rows, one token each."""

    input_ids: torch.Tensor  # [B] int64
    positions: torch.Tensor  # [B] int64
    slot_mapping: torch.Tensor  # [B] int64, -1: padding
    seq_lens: torch.Tensor  # [B] int32, 0: padding
    query_start_loc: torch.Tensor  # [B + 1] int32
    row_slots: torch.Tensor  # [B] int32, row of the block tables (0 for padding)

    @classmethod
    def allocate(cls, batch_size: int, device: torch.device) -> Self:
        """Return zeroed buffers on ``device``."""
        long = {"dtype": torch.int64, "device": device}
        short = {"dtype": torch.int32, "device": device}
        return cls(
            torch.zeros(batch_size, **long),
            torch.zeros(batch_size, **long),
            torch.zeros(batch_size, **long),
            torch.zeros(batch_size, **short),
            torch.zeros(batch_size + 1, **short),
            torch.zeros(batch_size, **short),
        )


@triton.jit(do_not_specialize=["B"])
def _prepare_decode_kernel(
    rows_ptr,  # [B, 2] int32: slot, position
    token_ids_ptr,  # [num_slots, max_model_len]
    block_tables_ptr,  # [num_slots, max_blocks]
    input_ids_ptr,
    positions_ptr,
    slot_mapping_ptr,
    seq_lens_ptr,
    query_start_loc_ptr,
    row_slots_ptr,
    token_stride,
    table_stride,
    B,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = row < B
    pdl_wait(PDL)
    slot = tl.load(rows_ptr + row * 2, mask=mask, other=-1)
    live = slot >= 0
    slot = tl.where(live, slot, 0)
    position = tl.load(rows_ptr + row * 2 + 1, mask=live, other=0).to(tl.int64)
    long_slot = slot.to(tl.int64)
    token = tl.load(token_ids_ptr + long_slot * token_stride + position, mask=live, other=0)
    entry = block_tables_ptr + long_slot * table_stride + position // BLOCK_SIZE
    block = tl.load(entry, mask=live, other=0).to(tl.int64)
    kv_slot = tl.where(live, block * BLOCK_SIZE + position % BLOCK_SIZE, -1)
    tl.store(input_ids_ptr + row, token.to(tl.int64), mask=mask)
    tl.store(positions_ptr + row, position, mask=mask)
    tl.store(slot_mapping_ptr + row, kv_slot, mask=mask)
    tl.store(seq_lens_ptr + row, tl.where(live, position + 1, 0).to(tl.int32), mask=mask)
    tl.store(row_slots_ptr + row, slot, mask=mask)
    tl.store(query_start_loc_ptr + row, row, mask=row <= B)


def prepare_decode(
    rows: torch.Tensor,
    token_ids: torch.Tensor,
    block_tables: torch.Tensor,
    block_size: int,
    buffers: InputBuffers,
) -> None:
    """Fill ``buffers`` for one token per row of ``rows`` [B, 2] int32 = (slot, position)."""
    batch_size = rows.shape[0]
    block = 128
    launch(
        _prepare_decode_kernel,
        (triton.cdiv(batch_size + 1, block),),
        rows,
        token_ids,
        block_tables,
        buffers.input_ids,
        buffers.positions,
        buffers.slot_mapping,
        buffers.seq_lens,
        buffers.query_start_loc,
        buffers.row_slots,
        token_ids.stride(0),
        block_tables.stride(0),
        batch_size,
        BLOCK_SIZE=block_size,
        BLOCK=block,
        num_warps=block // 32,
        **pdl_options(rows.device),
    )


@triton.jit(do_not_specialize=["R", "T"])
def _prepare_inputs_kernel(
    rows_ptr,  # [R, 2] int32: slot, first position
    query_start_loc_ptr,  # [R + 1]
    token_ids_ptr,
    block_tables_ptr,
    input_ids_ptr,  # [T] int64
    positions_ptr,  # [T] int64
    slot_mapping_ptr,  # [T] int64
    seq_lens_ptr,  # [R] int32
    token_stride,
    table_stride,
    R,
    T,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0)  # R: the tokens past the last row's, which are padding
    offset = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    pdl_wait(PDL)
    slot = tl.load(rows_ptr + row * 2, mask=row < R, other=-1).to(tl.int64)
    first = tl.load(rows_ptr + row * 2 + 1, mask=row < R, other=0)
    start = tl.load(query_start_loc_ptr + row)
    length = tl.load(query_start_loc_ptr + row + 1, mask=row < R, other=T) - start
    live = slot >= 0
    slot = tl.maximum(slot, 0)
    mask = offset < length
    position = tl.where(live, first + offset, 0).to(tl.int64)
    read = offset < tl.where(live, length, 0)
    token = tl.load(token_ids_ptr + slot * token_stride + position, mask=read, other=0)
    entry = block_tables_ptr + slot * table_stride + position // BLOCK_SIZE
    block = tl.load(entry, mask=read, other=0).to(tl.int64)
    kv_slot = tl.where(live, block * BLOCK_SIZE + position % BLOCK_SIZE, -1)
    tl.store(input_ids_ptr + start + offset, token.to(tl.int64), mask=mask)
    tl.store(positions_ptr + start + offset, position, mask=mask)
    tl.store(slot_mapping_ptr + start + offset, kv_slot, mask=mask)
    if (tl.program_id(1) == 0) & (row < R):
        tl.store(seq_lens_ptr + row, tl.where(live, first + length, 0).to(tl.int32))


def prepare_inputs(
    rows: torch.Tensor,
    query_start_loc: torch.Tensor,
    token_ids: torch.Tensor,
    block_tables: torch.Tensor,
    block_size: int,
    num_tokens: int,
    max_query_len: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (input_ids [T], positions [T], slot_mapping [T] int64, seq_lens [R] int32).

    ``rows`` [R, 2] int32 = (slot, first position) and ``query_start_loc`` [R + 1] int32 describe
    any mix of prompt chunks and decodes. Tokens past the last row's are padding: id 0 at position
    0, not written to the pool.
    """
    device = rows.device
    input_ids, positions, slot_mapping = (
        torch.empty(num_tokens, dtype=torch.int64, device=device) for _ in range(3)
    )
    seq_lens = torch.empty(rows.shape[0], dtype=torch.int32, device=device)
    block = min(256, triton.next_power_of_2(num_tokens))
    launch(
        _prepare_inputs_kernel,
        (rows.shape[0] + 1, triton.cdiv(num_tokens, block)),
        rows,
        query_start_loc,
        token_ids,
        block_tables,
        input_ids,
        positions,
        slot_mapping,
        seq_lens,
        token_ids.stride(0),
        block_tables.stride(0),
        rows.shape[0],
        num_tokens,
        BLOCK_SIZE=block_size,
        BLOCK=block,
        num_warps=max(1, min(4, block // 64)),
        **pdl_options(device),
    )
    return input_ids, positions, slot_mapping, seq_lens


@triton.jit(do_not_specialize=["B"])
def _store_sampled_kernel(
    rows_ptr, sampled_ptr, token_ids_ptr, seen_ptr, token_stride, seen_stride, max_len, B,
    HAS_SEEN: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = row < B
    pdl_wait(PDL)
    slot = tl.load(rows_ptr + row * 2, mask=mask, other=-1).to(tl.int64)
    position = tl.load(rows_ptr + row * 2 + 1, mask=mask, other=0).to(tl.int64) + 1
    token = tl.load(sampled_ptr + row, mask=mask, other=0)
    # A failed row (-1) leaves token 0, so that a step already in flight embeds a valid id.
    token = tl.maximum(token, 0).to(token_ids_ptr.dtype.element_ty)
    tl.store(
        token_ids_ptr + slot * token_stride + position,
        token,
        mask=mask & (slot >= 0) & (position < max_len),
    )
    if HAS_SEEN:
        word = seen_ptr + slot * seen_stride + token // 32
        tl.atomic_or(word, (1 << (token % 32)).to(tl.int32), mask=mask & (slot >= 0))


def store_sampled(
    rows: torch.Tensor,
    sampled: torch.Tensor,
    token_ids: torch.Tensor,
    seen: torch.Tensor | None = None,
) -> None:
    """Write ``sampled`` [B] to ``token_ids[slot, position + 1]`` of ``rows`` [B, 2] int32, and set
    its bit in ``seen`` [slots, words] int32 if given.

    Padding rows, and positions past the table, are left alone.
    """
    batch_size = rows.shape[0]
    if batch_size == 0:
        return
    block = 128
    launch(
        _store_sampled_kernel,
        (triton.cdiv(batch_size, block),),
        rows,
        sampled,
        token_ids,
        token_ids if seen is None else seen,
        token_ids.stride(0),
        0 if seen is None else seen.stride(0),
        token_ids.shape[1],
        batch_size,
        HAS_SEEN=seen is not None,
        BLOCK=block,
        num_warps=block // 32,
        **pdl_options(rows.device),
    )
