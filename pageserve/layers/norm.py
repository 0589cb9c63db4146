"""Root-mean-square normalisation, alone and together with the residual sum before it."""

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from pageserve.layers.module import Module


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalise the last dimension of ``x`` [..., n] and scale it by ``weight`` [n]."""
    if x.dtype is not torch.float32:
        return F.rms_norm(x, weight.shape, weight, eps)
    # On the CPU F.rms_norm is a chain of nine operations; these five give the same values.
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    mean_square = torch.addcmul(_scalar(eps, x.device), norm, norm, value=1 / x.shape[-1])
    return x.mul(mean_square.rsqrt_()).mul_(weight)


@functools.cache
def _scalar(value: float, device: torch.device) -> torch.Tensor:
    return torch.tensor(value, device=device)


def fused_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``rms_norm(x + residual)`` and the sum, all [num_tokens, n]; may overwrite both."""
    residual = x.add_(residual)
    return rms_norm(residual, weight, eps), residual


class RMSNorm(Module):
    """RMS normalisation with a learned ``weight`` [size]."""

    def __init__(self, size: int, eps: float, **factory: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, **factory), requires_grad=False)
        self.eps = eps

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the normalised ``x + residual`` and the sum itself, the next residual."""
        if residual is None:
            return rms_norm(x, self.weight, self.eps), x
        return fused_add_rms_norm(x, residual, self.weight, self.eps)
