"""Attention over the paged pool by Triton kernels: decodes, prompt chunks and any mix of them.

Rows of one query token go to the decode kernel, whose work is cut evenly over the device whatever
the lengths; longer rows go to the prefill kernel. Which row is which is read on the device, so a
step is one launch, two if it mixes, and decode steps replay in CUDA graphs.
"""

from dataclasses import dataclass

import torch

from pageserve.attention import AttentionMetadata
from pageserve.kernels.paged_attention import (
    DecodePlan,
    paged_decode,
    paged_prefill,
    plan_decode,
    rope_and_paged_decode,
)
from pageserve.kernels.rope_cache import rope_and_cache


@dataclass
class StepPlan:
    """What the layers of a step share; the first layer fills in the cut of the decode work."""

    row_slots: torch.Tensor | None  # [num_rows] int32: block_table is a table of slots
    decode: DecodePlan | None = None


class TritonBackend:
    """Paged attention on CUDA; on the CPU it runs under Triton's interpreter, for tests."""

    supports_cuda_graph = True
    fuses_rope = True

    def build_metadata(
        self,
        query_start_loc: torch.Tensor,
        seq_lens: torch.Tensor,
        block_table: torch.Tensor,
        slot_mapping: torch.Tensor,
        max_query_len: int,
        max_seq_len: int,
        row_slots: torch.Tensor | None = None,
    ) -> AttentionMetadata:
        """Describe a step. With ``row_slots`` [num_rows], row r's blocks are
        ``block_table[row_slots[r]]``, so the table of all slots serves without a gather."""
        return AttentionMetadata(
            query_start_loc,
            seq_lens,
            block_table,
            slot_mapping,
            max_query_len,
            max_seq_len,
            StepPlan(row_slots),
        )

    def forward(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
        scale: float,
    ) -> torch.Tensor:
        """Return the causal attention of every row, [num_tokens, num_heads, head_dim]."""
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        tokens, rows = query.shape[0], metadata.seq_lens.shape[0]
        if metadata.max_query_len == 1:
            return self._decode(query, kv_cache, metadata, scale, out, mixed=False)
        mixed = tokens != rows * metadata.max_query_len  # else no row has a single token
        if mixed:
            self._decode(query, kv_cache, metadata, scale, out, mixed=True)
        return paged_prefill(
            query,
            kv_cache,
            metadata.block_table,
            metadata.query_start_loc,
            metadata.seq_lens,
            metadata.max_query_len,
            scale,
            row_slots=metadata.plan.row_slots,
            skip_decodes=mixed,
            out=out,
        )

    def rope_and_forward(
        self,
        qkv: torch.Tensor,
        positions: torch.Tensor,
        cos_sin: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
        scale: float,
        q_norm_weight: torch.Tensor | None,
        k_norm_weight: torch.Tensor | None,
        eps: float,
    ) -> torch.Tensor:
        """Rotate, store and attend; one launch for a step of decodes only."""
        num_kv_heads, head_dim = kv_cache.shape[2], kv_cache.shape[4]
        num_heads = qkv.shape[1] // head_dim - 2 * num_kv_heads
        norms = (q_norm_weight, k_norm_weight, eps)
        if metadata.max_query_len == 1:
            return rope_and_paged_decode(
                qkv,
                kv_cache,
                metadata.block_table,
                metadata.seq_lens,
                cos_sin,
                scale,
                self._decode_plan(metadata, kv_cache, num_heads, qkv.dtype, None),
                num_heads,
                metadata.plan.row_slots,
                *norms,
            )
        query = rope_and_cache(
            qkv,
            positions,
            cos_sin,
            kv_cache,
            metadata.slot_mapping,
            num_heads,
            num_kv_heads,
            *norms,
        )
        return self.forward(query, kv_cache, metadata, scale)

    def _decode(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
        scale: float,
        out: torch.Tensor,
        mixed: bool,
    ) -> torch.Tensor:
        query_start_loc = metadata.query_start_loc if mixed else None
        plan = self._decode_plan(metadata, kv_cache, query.shape[1], query.dtype, query_start_loc)
        return paged_decode(
            query,
            kv_cache,
            metadata.block_table,
            metadata.seq_lens,
            scale,
            plan,
            row_slots=metadata.plan.row_slots,
            query_start_loc=query_start_loc,
            out=out,
        )

    def _decode_plan(
        self,
        metadata: AttentionMetadata,
        kv_cache: torch.Tensor,
        num_heads: int,
        dtype: torch.dtype,
        query_start_loc: torch.Tensor | None,
    ) -> DecodePlan:
        """Return the cut of the step's decode work, made by the first layer that asks."""
        step: StepPlan = metadata.plan
        if step.decode is None:
            step.decode = plan_decode(
                metadata.seq_lens,
                num_heads,
                kv_cache.shape[2],
                kv_cache.shape[4],
                dtype,
                query_start_loc,
            )
        return step.decode
