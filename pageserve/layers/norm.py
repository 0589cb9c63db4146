"""Root-mean-square normalisation."""

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from pageserve.layers.module import Module


class RMSNorm(Module):
    """RMS normalisation with a learned ``weight`` [size]."""

    def __init__(self, size: int, eps: float, **factory: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, **factory), requires_grad=False)
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise the last dimension of ``x`` [..., size] and scale it by the weight."""
        if x.is_cuda:
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        # On the CPU F.rms_norm is a chain of nine operations; these five, and two casts of 16-bit
        # numbers, give the same values.
        wide = x.float()
        norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        eps = _scalar(self.eps, x.device)
        mean_square = torch.addcmul(eps, norm, norm, value=1 / x.shape[-1])
        return wide.mul(mean_square.rsqrt_()).to(x.dtype).mul_(self.weight)


@functools.cache
def _scalar(value: float, device: torch.device) -> torch.Tensor:
    return torch.tensor(value, device=device)
