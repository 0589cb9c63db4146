"""Rotary position embedding: pairs (i, i + head_dim / 2) of a head turn with the position.

The cosines and sines are computed once, in float32, with the very operations transformers uses,
so that both agree to the last bit.
"""

import math

import torch

from pageserve.model_config import RopeConfig


def compute_cos_sin(rope: RopeConfig, head_dim: int, num_positions: int) -> torch.Tensor:
    """Return float32 [num_positions, head_dim] on the CPU: cosines in the first half of a row,
    sines in the second, both times the attention factor."""
    positions = torch.arange(num_positions, dtype=torch.float32)
    angles = positions[:, None] * compute_inv_freq(rope, head_dim)
    return torch.cat((angles.cos(), angles.sin()), -1) * attention_factor(rope)


def compute_inv_freq(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """Return the angle per position of each pair, float32 [head_dim / 2]."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    inv_freq = 1.0 / rope.theta**exponents
    if rope.freq_divisors is not None:
        inv_freq = inv_freq / torch.tensor(rope.freq_divisors)
    if rope.type == "linear":
        return inv_freq / rope.factor
    if rope.type == "llama3":
        return _llama3(inv_freq, rope)
    if rope.type == "yarn":
        return _yarn(inv_freq, rope, head_dim)
    return inv_freq  # default, and dynamic within the trained context


def attention_factor(rope: RopeConfig) -> float:
    """Return the scale of cosines and sines: 1 but for YaRN, which sharpens attention by it."""
    if rope.type != "yarn":
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(rope.factor) + 1.0

    if rope.mscale and rope.mscale_all_dim:
        return mscale(rope.mscale) / mscale(rope.mscale_all_dim)
    return mscale(1.0)


def _llama3(inv_freq: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    """Keep short wavelengths, divide long ones by the factor, blend between."""
    low, high = rope.low_freq_factor, rope.high_freq_factor
    original = rope.original_max_position_embeddings
    wavelength = 2 * math.pi / inv_freq
    smooth = ((original / wavelength - low) / (high - low)).clamp(0, 1)
    return (1 - smooth) * inv_freq / rope.factor + smooth * inv_freq


def _yarn(inv_freq: torch.Tensor, rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """Blend from kept to divided frequencies over a range of pairs set by two numbers of turns."""

    def pair_with(turns: float) -> float:
        ratio = rope.original_max_position_embeddings / (turns * 2 * math.pi)
        return head_dim * math.log(ratio) / (2 * math.log(rope.theta))

    low, high = pair_with(rope.beta_fast), pair_with(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # a step, not a division by zero
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return inv_freq / rope.factor * ramp + inv_freq * (1 - ramp)
