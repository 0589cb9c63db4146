"""SiLU and multiply, the activation between the two halves of a gated MLP."""

import torch
import triton
import triton.language as tl

from pageserve.kernels.launch import launch, pdl_options, pdl_wait


@triton.jit
def _silu_mul_kernel(
    gate_up_ptr,  # [T, 2I]
    out_ptr,  # [T, I]
    in_stride,
    I,  # noqa: E741
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < I
    pdl_wait(PDL)
    pointers = gate_up_ptr + row * in_stride + columns
    gate = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(pointers + I, mask=mask, other=0.0).to(tl.float32)
    dtype = out_ptr.dtype.element_ty
    activated = (gate / (1 + tl.exp(-gate))).to(dtype).to(tl.float32)
    tl.store(out_ptr + row * I + columns, (activated * up).to(dtype), mask=mask)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Return ``silu(gate) * up`` [T, I] of ``gate_up`` [T, 2I], gate in the first half."""
    rows, double = gate_up.shape
    size = double // 2
    out = torch.empty(rows, size, dtype=gate_up.dtype, device=gate_up.device)
    if rows == 0:
        return out
    block = min(1024, triton.next_power_of_2(size))
    launch(
        _silu_mul_kernel,
        (rows, triton.cdiv(size, block)),
        gate_up,
        out,
        gate_up.stride(0),
        size,
        BLOCK=block,
        num_warps=4,
        **pdl_options(gate_up.device),
    )
    return out
