"""Self-attention of one layer over the paged KV pool."""

from dataclasses import dataclass
from typing import Any, Self

import torch

from pageserve.attention import AttentionBackend, AttentionMetadata
from pageserve.layers.linear import Linear, MergedLinear
from pageserve.layers.module import Module
from pageserve.layers.norm import RMSNorm
from pageserve.model_config import ModelConfig


@dataclass(frozen=True)
class AttentionStep:
    """What all layers of a step share, computed once."""

    metadata: AttentionMetadata
    positions: torch.Tensor  # [num_tokens]
    cos_sin: torch.Tensor  # [max_model_len, head_dim] float32, see compute_cos_sin
    torch_inputs: "TorchInputs | None"  # for backends without a kernel for rotation and KV write
    narrowed: AttentionMetadata | None = None  # set: only the last token of each row goes on

    @classmethod
    def build(
        cls,
        positions: torch.Tensor,
        cos_sin: torch.Tensor,
        kv_cache: torch.Tensor,  # [num_layers, 2, num_blocks, num_kv_heads, block_size, head_dim]
        metadata: AttentionMetadata,
        backend: AttentionBackend,
        num_heads: int,
    ) -> Self:
        """Prepare a step for all layers."""
        inputs = None
        if backend.fuses_rope:
            backend.begin_step(metadata, kv_cache[0], num_heads)
        else:
            inputs = TorchInputs.build(positions, cos_sin, kv_cache, metadata, num_heads)
        return cls(metadata, positions, cos_sin, inputs)


@dataclass(frozen=True)
class TorchInputs:
    """Rotation rows and KV places of a step's tokens."""

    # [num_tokens, num_heads + num_kv_heads, head_dim] float32: written out for every head, as a
    # broadcast costs more in each layer than the copy does once.
    cos: torch.Tensor
    sin: torch.Tensor  # the same, first half negated
    kv_rows: torch.Tensor  # [num_written, 2 * num_kv_heads], rows of a layer's pool of vectors
    written: torch.Tensor | None  # [num_written] tokens that own a slot; None: all do

    @classmethod
    def build(
        cls,
        positions: torch.Tensor,
        cos_sin: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
        num_heads: int,
    ) -> Self:
        """Look up the rotation of each position and the pool rows of each token's vectors."""
        cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, -1)
        heads = num_heads + kv_cache.shape[3]
        slots, written = metadata.slot_mapping, None
        if bool((slots < 0).any()):
            written = (slots >= 0).nonzero().squeeze(1)
            slots = slots[written]
        return cls(
            torch.cat((cos, cos), -1).expand(-1, heads, -1).contiguous(),
            torch.cat((-sin, sin), -1).expand(-1, heads, -1).contiguous(),
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
    inputs: TorchInputs,
    num_heads: int,
    num_kv_heads: int,
    q_norm: RMSNorm | None,  # over head_dim, with k_norm: normalise heads first
    k_norm: RMSNorm | None,
) -> torch.Tensor:  # [num_tokens, num_heads, head_dim]
    """Turn queries and keys to their positions, write keys and values to the pool and return the
    queries, a view of ``qkv``, which is overwritten."""
    num_tokens, head_dim = qkv.shape[0], kv_cache.shape[-1]
    qkv = qkv.view(num_tokens, num_heads + 2 * num_kv_heads, head_dim)
    if q_norm is not None and k_norm is not None:
        query, key = qkv[:, :num_heads], qkv[:, num_heads : num_heads + num_kv_heads]
        query.copy_(q_norm(query))
        key.copy_(k_norm(key))
    _rotate_(qkv[:, : num_heads + num_kv_heads], inputs.cos, inputs.sin)
    kv = qkv[:, num_heads:] if inputs.written is None else qkv[inputs.written, num_heads:]
    kv_cache.view(-1, head_dim)[inputs.kv_rows] = kv
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
        self.q_norm = self.k_norm = None
        if config.qk_norm:
            self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps, **factory)
            self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps, **factory)

    def forward(
        self,
        residual: torch.Tensor,
        norm: RMSNorm,
        kv_cache: torch.Tensor,  # this layer's pool
        step: AttentionStep,
    ) -> torch.Tensor:
        """Return ``residual`` [num_tokens, hidden_size] plus the attention of its norm; of a
        narrowed step that of each row's last token, [num_rows, hidden_size]."""
        qkv = self.qkv_proj(residual, norm=norm)
        if step.torch_inputs is None:
            attended = self.backend.rope_and_forward(
                qkv,
                step.positions,
                step.cos_sin,
                kv_cache,
                step.metadata,
                self.scale,
                None if self.q_norm is None else self.q_norm.weight,
                None if self.k_norm is None else self.k_norm.weight,
                self.eps,
                step.narrowed,
            )
        else:
            heads = (self.num_heads, self.num_kv_heads)
            query = rope_and_cache(
                qkv, kv_cache, step.torch_inputs, *heads, self.q_norm, self.k_norm
            )
            metadata = step.metadata
            if step.narrowed is not None:
                query, metadata = query[metadata.last_tokens], step.narrowed
            attended = self.backend.forward(query, kv_cache, metadata, self.scale)
        if step.narrowed is not None:
            residual = residual[step.metadata.last_tokens]
        return self.o_proj(attended.reshape(residual.shape[0], -1), residual=residual)
