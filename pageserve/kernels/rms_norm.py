"""RMSNorm on its own, for products that cannot fold it in (see ``linear.py``)."""

import torch
import triton
import triton.language as tl

from pageserve.kernels.launch import launch, pdl_options, pdl_wait


@triton.jit
def _rms_norm_kernel(
    x_ptr,  # [T, H]
    weight_ptr,  # [H]
    out_ptr,  # [T, H]
    x_stride,
    eps,
    H,
    BLOCK_H: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK_H)
    mask = columns < H
    weight = tl.load(weight_ptr + columns, mask=mask, other=0.0)
    pdl_wait(PDL)
    x = tl.load(x_ptr + row * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
    rstd = 1 / tl.sqrt(tl.sum(x * x) / H + eps)
    normed = (x * rstd).to(weight.dtype).to(tl.float32) * weight.to(tl.float32)
    tl.store(out_ptr + row * H + columns, normed.to(out_ptr.dtype.element_ty), mask=mask)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return ``x / rms(x) * weight`` for ``x`` [T, H] and ``weight`` [H], in x's dtype."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows, hidden = x.shape
    if rows == 0:
        return out
    block = triton.next_power_of_2(hidden)
    launch(
        _rms_norm_kernel,
        (rows,),
        x,
        weight,
        out,
        x.stride(0),
        eps,
        hidden,
        BLOCK_H=block,
        num_warps=min(16, max(1, block // 512)),
        **pdl_options(x.device),
    )
    return out
