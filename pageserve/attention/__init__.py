"""Attention over the paged KV pool: what every backend is told and what it must answer.

The pool of one layer is ``[2, num_blocks, num_kv_heads, block_size, head_dim]`` (index 0 keys,
1 values). Heads lie outside the tokens of a block so that one (block, head) tile is contiguous,
which is what a CPU gather and a GPU tile load both want.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch


@dataclass(frozen=True)
class AttentionMetadata:
    """The flat batch of a step as attention sees it, built once and shared by all layers.

    Row r owns query tokens ``query_start_loc[r] : query_start_loc[r + 1]``; they are the last of
    its ``seq_lens[r]`` tokens, whose KV lies in the blocks ``block_table[r]``.
    """

    query_start_loc: torch.Tensor  # [num_rows + 1] int32
    seq_lens: torch.Tensor  # [num_rows] int32, KV tokens including this step's
    block_table: torch.Tensor  # [num_rows, max_blocks] int32
    slot_mapping: torch.Tensor  # [num_tokens] int64, block_id * block_size + offset; -1: padding
    max_query_len: int
    max_seq_len: int
    plan: Any = None  # a backend's own precomputed work, see build_metadata

    @property
    def last_tokens(self) -> torch.Tensor:
        """Index of each row's last query token [num_rows]; 0 for empty rows in front."""
        return (self.query_start_loc[1:] - 1).clamp_min(0)


class AttentionBackend(Protocol):
    """``torch_blockwise`` is the executable specification. ``supports_cuda_graph`` says that steps
    can be run by the worker's graph runner. A backend whose kernels rotate and store keys
    themselves says so by ``fuses_rope`` and is called by ``begin_step``, then in each layer by
    ``rope_and_forward``."""

    supports_cuda_graph: bool
    fuses_rope: bool

    def build_metadata(
        self,
        query_start_loc: torch.Tensor,
        seq_lens: torch.Tensor,
        block_table: torch.Tensor,
        slot_mapping: torch.Tensor,
        max_query_len: int,
        max_seq_len: int,
    ) -> AttentionMetadata:
        """Plan a step once, on the batch's index tensors (shapes as in AttentionMetadata)."""
        ...

    def narrow(self, metadata: AttentionMetadata) -> AttentionMetadata:
        """Plan the same step for the last query token of each row alone, whose KV and that of all
        others is in the pool by then."""
        ...

    def forward(
        self,
        query: torch.Tensor,  # [num_tokens, num_heads, head_dim]
        kv_cache: torch.Tensor,  # [2, num_blocks, num_kv_heads, block_size, head_dim]
        metadata: AttentionMetadata,
        scale: float,
    ) -> torch.Tensor:  # [num_tokens, num_heads, head_dim]
        """Causal attention of every row over its blocks; this step's KV is already in the pool.
        Query head h reads KV head ``h // (num_heads // num_kv_heads)``."""
        ...

    def begin_step(
        self, metadata: AttentionMetadata, kv_cache: torch.Tensor, num_heads: int
    ) -> None:
        """Compute what the layers of a step share; ``kv_cache`` is the pool of any layer."""
        ...

    def rope_and_forward(
        self,
        qkv: torch.Tensor,  # [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]
        positions: torch.Tensor,  # [num_tokens]
        cos_sin: torch.Tensor,  # [max_model_len, head_dim] float32, cosines then sines
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
        scale: float,
        q_norm_weight: torch.Tensor | None,  # [head_dim], with k_norm_weight
        k_norm_weight: torch.Tensor | None,
        eps: float,
        narrowed: AttentionMetadata | None = None,
    ) -> torch.Tensor:  # [num_tokens, num_heads, head_dim]
        """Normalise and rotate heads, write keys and values to the pool, attend; with ``narrowed``
        only the last token of each row attends, [num_rows, num_heads, head_dim]."""
        ...
