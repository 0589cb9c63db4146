"""Matrix products with the weights of a checkpoint, and what surrounds them.

A layer is four products; everything else between them (norm, bias, activation, residual sum) is an
argument of the product beside it, because a GPU folds it into one launch and a CPU saves an
operation. On CUDA the way to compute a shape is chosen by timing, see ``kernels/linear.py``.
"""

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from pageserve.layers.activation import silu_mul
from pageserve.layers.module import Module
from pageserve.layers.norm import RMSNorm
from pageserve.utils import next_power_of_2

if TYPE_CHECKING:  # imports Triton, which only CUDA machines need to have
    from pageserve.kernels.linear import LinearChooser

PACK_HINT = 16  # rows a packed weight is laid out for


class Packing(NamedTuple):
    """The use of oneDNN's own layout of a weight, which serves products of ``rows`` and more.

    It gives up to 2x for 2-32 rows of float32 where the output is wide, nothing where it is narrow;
    of 16-bit weights it is the better one for any number of rows, and then the only copy.
    """

    rows: int
    keeps_plain: bool  # for fewer rows; an embedding that serves as the head stays plain anyway


class Linear(Module):
    """``norm(x) @ weight.T + bias`` with ``weight`` [out_features, in_features]."""

    def __init__(
        self, in_features: int, out_features: int, bias: bool = False, **factory: Any
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(
            torch.empty(out_features, in_features, **factory), requires_grad=False
        )
        self.bias: torch.Tensor | None = None
        if bias:
            self.bias = nn.Parameter(torch.empty(out_features, **factory), requires_grad=False)
        self.weight_t: torch.Tensor
        self.packed: torch.Tensor | None = None  # for products of packed_rows and more
        self.packed_rows = 0

    def prepare(self) -> None:
        """Lay the loaded weight out for its device; call it once, before the first product."""
        self.weight_t = self.weight.t()  # a view; F.linear would make it anew in every call
        packing = self.packing(self.weight.device.type)
        if packing is None:
            return
        self.packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.data, PACK_HINT)
        self.packed_rows = packing.rows
        if not packing.keeps_plain:
            self.weight = nn.Parameter(self.packed, requires_grad=False)
            del self.weight_t

    def packing(self, device: str) -> Packing | None:
        """Return how :meth:`prepare` packs a weight of this shape and type on ``device``."""
        out_features, in_features = self.weight.shape
        if device != "cpu" or not torch.backends.mkldnn.is_available():
            return None
        if _computes_in_16_bits(self.weight.dtype):
            return Packing(0, keeps_plain=False)
        if self.weight.dtype is torch.float32 and out_features >= 2 * in_features:
            return Packing(2, keeps_plain=True)
        return None

    def forward(
        self,
        x: torch.Tensor,
        norm: RMSNorm | None = None,
        residual: torch.Tensor | None = None,
        silu: bool = False,
    ) -> torch.Tensor:
        """Map ``x`` [num_tokens, in_features] to [num_tokens, out_features], half of it with
        ``silu``: the product of a fused gate and up projection becomes ``silu(gate) * up``.

        ``norm`` is applied to ``x`` first; ``residual`` is added last and may be overwritten.
        """
        if x.is_cuda:
            return _on_cuda(self, x, norm, residual, silu)
        if norm is not None:
            x = norm(x)
        if self.packed is not None and x.shape[0] >= self.packed_rows:
            out = torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        elif self.bias is not None:
            out = torch.addmm(self.bias, x, self.weight_t)
        elif residual is not None and not silu:
            return residual.addmm_(x, self.weight_t)
        else:
            out = torch.mm(x, self.weight_t)
        if silu:
            out = silu_mul(out)
        return out if residual is None else residual.add_(out)


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


@functools.cache
def _computes_in_16_bits(dtype: torch.dtype) -> bool:
    """Whether oneDNN computes with these 16-bit numbers here, which its layout is made for: by
    instructions of the processor, or bfloat16 on an older one by way of float32."""
    if torch.backends.cpu.get_cpu_capability() != "AVX512":  # the layout was timed on no other
        return False
    if dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype is torch.float16 and bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())


@functools.cache
def _chooser(device: torch.device) -> "LinearChooser":
    from pageserve.kernels.linear import LinearChooser

    return LinearChooser(device)


def _on_cuda(
    layer: Linear,
    x: torch.Tensor,
    norm: RMSNorm | None,
    residual: torch.Tensor | None,
    silu: bool,
) -> torch.Tensor:
    from pageserve.kernels.linear import MAX_SKINNY_ROWS, Fusion, library_linear

    bias = layer.bias
    if silu and bias is not None:  # no model that people serve has this; keep it right, not fast
        out = silu_mul(torch.addmm(bias, x if norm is None else norm(x), layer.weight_t))
        return out if residual is None else residual.add_(out)
    norm_weight, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
    fusion = Fusion(bias, residual, norm_weight, eps, silu)
    linear = library_linear
    if x.shape[0] <= MAX_SKINNY_ROWS:
        # Timed for a few row counts, not for each.
        linear = _chooser(x.device).choose(next_power_of_2(x.shape[0]), layer.weight, fusion)
    return linear(x, layer.weight, fusion)
