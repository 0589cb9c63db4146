"""The gated activation of the feed-forward block."""

import torch
import torch.nn.functional as F


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Return ``silu(gate) * up`` [num_tokens, n] of ``gate_up`` [num_tokens, 2 n]."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate).mul_(up)
