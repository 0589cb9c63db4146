"""The one model: a pre-norm decoder with rotary positions, grouped KV heads and a gated MLP.

Llama, Mistral, Qwen2 and Qwen3 differ in biases, head norms and shapes only, which
:class:`~pageserve.model_config.ModelConfig` states.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from pageserve.attention import AttentionBackend, AttentionMetadata
from pageserve.layers.attention import Attention, AttentionStep
from pageserve.layers.embedding import Embedding
from pageserve.layers.linear import Linear, MergedLinear
from pageserve.layers.module import Module
from pageserve.layers.norm import RMSNorm
from pageserve.layers.rotary import compute_cos_sin
from pageserve.model_config import ModelConfig


class MLP(Module):
    """The gated feed-forward block."""

    def __init__(self, config: ModelConfig, **factory: Any) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        parts = {"gate_proj": inner, "up_proj": inner}
        self.gate_up_proj = MergedLinear(hidden, parts, config.mlp_bias, **factory)
        self.down_proj = Linear(inner, hidden, config.mlp_bias, **factory)

    def forward(self, residual: torch.Tensor, norm: RMSNorm) -> torch.Tensor:
        """Return ``residual`` [num_tokens, hidden_size] plus the block's output."""
        gated = self.gate_up_proj(residual, norm=norm, silu=True)
        return self.down_proj(gated, residual=residual)


class DecoderLayer(Module):
    """Attention and MLP; each reads the normed residual stream and adds to it."""

    def __init__(self, config: ModelConfig, backend: AttentionBackend, **factory: Any) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, **factory)
        self.self_attn = Attention(config, backend, **factory)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, **factory)
        self.mlp = MLP(config, **factory)

    def forward(
        self, residual: torch.Tensor, kv_cache: torch.Tensor, step: AttentionStep
    ) -> torch.Tensor:
        """Map the residual stream [num_tokens, hidden_size] to that of the next layer."""
        residual = self.self_attn(residual, self.input_layernorm, kv_cache, step)
        return self.mlp(residual, self.post_attention_layernorm)


class DecoderForCausalLM(Module):
    """A decoder with its head. Weights are uninitialised until a loader fills every one.

    Parameter names are those of Hugging Face checkpoints less the leading ``model.``, with q, k
    and v and gate and up merged.
    """

    cos_sin: torch.Tensor  # [max_model_len, head_dim] float32

    def __init__(
        self,
        config: ModelConfig,
        backend: AttentionBackend,
        max_model_len: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        self.config = config
        self.backend = backend
        factory: dict[str, Any] = {"dtype": dtype, "device": device}
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, **factory)
        self.layers = nn.ModuleList(
            DecoderLayer(config, backend, **factory) for _ in range(config.num_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, **factory)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, dtype=dtype, device="meta")
        if config.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight
        else:
            self.lm_head = self.lm_head.to_empty(device=device)
        cos_sin = compute_cos_sin(config.rope, config.head_dim, max_model_len)
        self.register_buffer("cos_sin", cos_sin.to(device), persistent=False)

    def prepare(self) -> None:
        """Lay all loaded weights out for the device; call it once, before the first step."""
        for module in self.modules():
            if isinstance(module, Linear):
                module.prepare()

    def weight_bytes(self, device: str) -> int:
        """Bytes that the weights take on ``device``, second copies in other layouts included, of a
        model that is prepared or not, as one on the meta device."""
        weights = list(self.parameters())
        for linear in (module for module in self.modules() if isinstance(module, Linear)):
            packing = linear.packing(device)
            shared = linear.weight is self.embed_tokens.weight
            if packing is not None and (packing.keeps_plain or shared):
                weights.append(linear.weight)
        return sum(weight.nbytes for weight in weights)

    def forward(
        self,
        input_ids: torch.Tensor,  # [num_tokens]
        positions: torch.Tensor,  # [num_tokens], all below max_model_len
        kv_cache: torch.Tensor,  # [num_layers, 2, num_blocks, num_kv_heads, block_size, head_dim]
        metadata: AttentionMetadata,
        last_only: bool = False,
    ) -> torch.Tensor:
        """Return hidden states [num_tokens, hidden_size]; this step's KV is written to the pool.

        With ``last_only`` they are those of each row's last token, [num_rows, hidden_size]: of the
        others the last layer only stores keys and values, as nothing else of it is ever read.
        A pool of fewer layers than the model's runs only the first ones: see ``rehearse``."""
        assert len(kv_cache) in (2, len(self.layers)), "a pool has every layer, a rehearsal's two"
        step = AttentionStep.build(
            positions, self.cos_sin, kv_cache, metadata, self.backend, self.config.num_heads
        )
        hidden = self.embed_tokens(input_ids)
        last = len(kv_cache) - 1
        for i, (layer, layer_cache) in enumerate(zip(self.layers, kv_cache, strict=False)):
            if i == last and last_only and metadata.max_query_len > 1:
                step = replace(step, narrowed=self.backend.narrow(metadata))
            hidden = layer(hidden, layer_cache, step)
        return hidden

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map hidden states [n, hidden_size] to logits [n, vocab_size] in the working dtype."""
        return self.lm_head(hidden, norm=self.norm)
