"""RMSNorm, alone and fused with the residual addition before it."""

import torch
import triton
import triton.language as tl

from pageserve.kernels.launch import launch, pdl_options, pdl_wait


@triton.jit
def _rms_norm_kernel(
    x_ptr,  # [T, H]
    residual_ptr,  # [T, H]
    weight_ptr,  # [H]
    out_ptr,  # [T, H]
    new_residual_ptr,  # [T, H]
    x_stride,
    residual_stride,
    eps,
    H,
    ADD: tl.constexpr,
    BLOCK_H: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK_H)
    mask = columns < H
    weight = tl.load(weight_ptr + columns, mask=mask, other=0.0)
    pdl_wait(PDL)
    x = tl.load(x_ptr + row * x_stride + columns, mask=mask, other=0.0)
    if ADD:
        residual = tl.load(residual_ptr + row * residual_stride + columns, mask=mask, other=0.0).to(
            tl.float32
        )
        # Rounded to the stream's precision first: the norm must see what the next layer adds to.
        x = (x.to(tl.float32) + residual).to(x_ptr.dtype.element_ty)
        tl.store(new_residual_ptr + row * H + columns, x, mask=mask)
    x = x.to(tl.float32)
    rstd = 1 / tl.sqrt(tl.sum(x * x) / H + eps)
    normed = (x * rstd).to(weight.dtype).to(tl.float32) * weight.to(tl.float32)
    tl.store(out_ptr + row * H + columns, normed.to(out_ptr.dtype.element_ty), mask=mask)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return ``x / rms(x) * weight`` for ``x`` [T, H] and ``weight`` [H], in x's dtype."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, x, weight, eps, out, out, add=False)
    return out


def fused_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (``rms_norm(x + residual)``, ``x + residual``), all [T, H]."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    new_residual = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, residual, weight, eps, out, new_residual, add=True)
    return out, new_residual


def _launch(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor,
    new_residual: torch.Tensor,
    add: bool,
) -> None:
    rows, hidden = x.shape
    if rows == 0:
        return
    block = triton.next_power_of_2(hidden)
    launch(
        _rms_norm_kernel,
        (rows,),
        x,
        residual,
        weight,
        out,
        new_residual,
        x.stride(0),
        residual.stride(0),
        eps,
        hidden,
        ADD=add,
        BLOCK_H=block,
        num_warps=min(16, max(1, block // 512)),
        **pdl_options(x.device),
    )
