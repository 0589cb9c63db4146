"""Matrix products with the weights of a checkpoint."""

from typing import Any

import torch
from torch import nn

from pageserve.layers.module import Module


class Linear(Module):
    """``x @ weight.T + bias`` with ``weight`` [out_features, in_features]."""

    def __init__(self, in_features: int, out_features: int, bias: bool, **factory: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(
            torch.empty(out_features, in_features, **factory), requires_grad=False
        )
        self.bias: torch.Tensor | None = None
        if bias:
            self.bias = nn.Parameter(torch.empty(out_features, **factory), requires_grad=False)
        self.weight_t = self.weight.t()  # a view; F.linear would make it anew in every call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [num_tokens, in_features] to [num_tokens, out_features]."""
        if self.bias is None:
            return torch.mm(x, self.weight_t)
        return torch.addmm(self.bias, x, self.weight_t)


class MergedLinear(Linear):
    """Several projections of the same input as one product.

    ``parts`` maps a projection's name in checkpoints to its output features; their rows lie one
    below the other in that order.
    """

    def __init__(self, in_features: int, parts: dict[str, int], bias: bool, **factory: Any) -> None:
        super().__init__(in_features, sum(parts.values()), bias, **factory)
        self.rows: dict[str, slice] = {}
        start = 0
        for name, size in parts.items():
            self.rows[name] = slice(start, start + size)
            start += size
