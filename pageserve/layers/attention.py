"""Self-attention of one layer over the paged KV pool."""

from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import nn

from pageserve.attention import AttentionBackend, AttentionMetadata
from pageserve.layers.linear import Linear, MergedLinear
from pageserve.layers.module import Module
from pageserve.layers.norm import rms_norm
from pageserve.model_config import ModelConfig


@dataclass(frozen=True)
class AttentionStep:
    """What all layers of a step share, computed once: rotation rows and KV places."""

    metadata: AttentionMetadata
    cos: torch.Tensor  # [num_tokens, 1, head_dim] float32
    sin: torch.Tensor  # [num_tokens, 1, head_dim] float32, first half negated
    kv_rows: torch.Tensor  # [num_written, 2 * num_kv_heads], rows of a layer's pool of vectors
    written: torch.Tensor | None  # [num_written] tokens that own a slot; None: all do

    @classmethod
    def build(
        cls,
        positions: torch.Tensor,  # [num_tokens]
        cos_sin: torch.Tensor,  # [max_model_len, head_dim] float32, see compute_cos_sin
        kv_cache: torch.Tensor,  # [num_layers, 2, num_blocks, num_kv_heads, block_size, head_dim]
        metadata: AttentionMetadata,
    ) -> Self:
        """Look up the rotation of each position and the pool rows of each token's vectors."""
        cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, -1)
        slots, written = metadata.slot_mapping, None
        if bool((slots < 0).any()):
            written = (slots >= 0).nonzero().squeeze(1)
            slots = slots[written]
        return cls(
            metadata,
            torch.cat((cos, cos), -1),
            torch.cat((-sin, sin), -1),
            _kv_rows(slots, kv_cache),
            written,
        )


def _kv_rows(slots: torch.Tensor, kv_cache: torch.Tensor) -> torch.Tensor:
    """Return the rows [num_tokens, 2 * num_kv_heads] of each token's keys, then values, in a
    layer's pool seen as [2 * num_blocks * num_kv_heads * block_size, head_dim]."""
    _, _, num_blocks, num_kv_heads, block_size, _ = kv_cache.shape
    offsets = slots % block_size
    first = (slots - offsets) * num_kv_heads + offsets
    heads = torch.arange(num_kv_heads, device=slots.device) * block_size
    values_start = num_blocks * num_kv_heads * block_size
    return first[:, None] + torch.cat((heads, heads + values_start))


def rope_and_cache(
    qkv: torch.Tensor,  # [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]
    kv_cache: torch.Tensor,  # [2, num_blocks, num_kv_heads, block_size, head_dim]
    step: AttentionStep,
    num_heads: int,
    num_kv_heads: int,
    q_norm: torch.Tensor | None = None,  # [head_dim], with k_norm: normalise heads first
    k_norm: torch.Tensor | None = None,
    eps: float = 0.0,
) -> torch.Tensor:  # [num_tokens, num_heads, head_dim]
    """Turn queries and keys to their positions, write keys and values to the pool and return the
    queries, a view of ``qkv``, which is overwritten."""
    num_tokens, head_dim = qkv.shape[0], kv_cache.shape[-1]
    qkv = qkv.view(num_tokens, num_heads + 2 * num_kv_heads, head_dim)
    if q_norm is not None and k_norm is not None:
        query, key = qkv[:, :num_heads], qkv[:, num_heads : num_heads + num_kv_heads]
        query.copy_(rms_norm(query, q_norm, eps))
        key.copy_(rms_norm(key, k_norm, eps))
    _rotate_(qkv[:, : num_heads + num_kv_heads], step.cos, step.sin)
    kv = qkv[:, num_heads:] if step.written is None else qkv[step.written, num_heads:]
    kv_cache.view(-1, head_dim)[step.kv_rows] = kv
    return qkv[:, :num_heads]


def _rotate_(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotate ``x`` [num_tokens, heads, head_dim] in place, computing in float32."""
    wide = x if x.dtype is torch.float32 else x.float()
    swapped = wide.roll(x.shape[-1] // 2, -1)
    wide.mul_(cos).addcmul_(swapped, sin)
    if wide is not x:
        x.copy_(wide)


class Attention(Module):
    """Projections, rotation and attention of one layer."""

    def __init__(self, config: ModelConfig, backend: AttentionBackend, **factory: Any) -> None:
        super().__init__()
        self.backend = backend
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        self.head_dim, self.eps = config.head_dim, config.rms_norm_eps
        self.scale = config.head_dim**-0.5
        q_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        parts = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}
        self.qkv_proj = MergedLinear(config.hidden_size, parts, config.qkv_bias, **factory)
        self.o_proj = Linear(q_size, config.hidden_size, config.o_bias, **factory)
        self.q_norm = HeadNorm(self.head_dim, **factory) if config.qk_norm else None
        self.k_norm = HeadNorm(self.head_dim, **factory) if config.qk_norm else None

    def forward(
        self, hidden: torch.Tensor, kv_cache: torch.Tensor, step: AttentionStep
    ) -> torch.Tensor:
        """Map [num_tokens, hidden_size] to the same shape; ``kv_cache`` is this layer's pool."""
        query = rope_and_cache(
            self.qkv_proj(hidden),
            kv_cache,
            step,
            self.num_heads,
            self.num_kv_heads,
            None if self.q_norm is None else self.q_norm.weight,
            None if self.k_norm is None else self.k_norm.weight,
            self.eps,
        )
        attended = self.backend.forward(query, kv_cache, step.metadata, self.scale)
        return self.o_proj(attended.reshape(hidden.shape[0], -1))


class HeadNorm(Module):
    """The weight [head_dim] by which each head is normalised before its rotation."""

    def __init__(self, head_dim: int, **factory: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(head_dim, **factory), requires_grad=False)
