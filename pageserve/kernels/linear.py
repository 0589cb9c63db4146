"""Linear layers of few rows, which are a stream of weights: GEMV for one, skinny GEMM for more.

``weight`` is [N, K] row-major as in ``torch.nn.Linear``. What surrounds the product costs a launch
of its own in a library; here it is folded in, see :class:`Fusion`.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch.nn import functional

from pageserve.kernels.activation import silu_mul
from pageserve.kernels.launch import (
    INTERPRETED,
    check,
    compiling,
    dot,
    launch,
    num_sms,
    pdl_options,
    pdl_wait,
)
from pageserve.kernels.rms_norm import rms_norm

MAX_SKINNY_ROWS = 64


class Fusion(NamedTuple):
    """What is computed along with ``x @ weight.T`` [M, N]; whatever is None is left out.

    In this order: ``x`` is normed by its root mean square, ``bias`` is added, a fused gate-up
    weight [2N, K] becomes ``silu(gate) * up`` (without bias), and ``residual`` is added.
    """

    bias: torch.Tensor | None = None  # [N]
    residual: torch.Tensor | None = None  # [M, N], may be overwritten
    norm_weight: torch.Tensor | None = None  # [K]
    eps: float = 1e-6
    silu: bool = False


class GemvConfig(NamedTuple):
    """Outputs and columns of a program's tile, and its warps."""

    block_n: int
    block_k: int
    num_warps: int


GEMV_TILES = [GemvConfig(*c) for c in ((2, 512, 1), (4, 512, 2), (4, 256, 1), (2, 1024, 2))]
SILU_GEMV_TILES = [GemvConfig(*c) for c in ((1, 512, 1), (2, 512, 1), (1, 256, 1), (1, 1024, 1))]


class SkinnyConfig(NamedTuple):
    """Outputs and columns of a tile, parts of K, warps and pipeline stages."""

    block_n: int
    block_k: int
    split_k: int
    num_warps: int
    num_stages: int


@triton.jit
def _load_weight(
    w_ptr, n, k, N, K, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    """Return the tile [n, k] of the weight [N, K]; it is read once, so it need not stay cached."""
    pointers = w_ptr + n.to(tl.int64)[:, None] * K + k[None, :]
    if EVEN_N and EVEN_K:
        return tl.load(pointers, eviction_policy="evict_first")
    mask = (n < N)[:, None] & (k < K)[None, :]
    return tl.load(pointers, mask=mask, other=0.0, eviction_policy="evict_first")


@triton.jit
def _finish(
    total, n, row, mask, bias_ptr, residual_ptr, out_ptr, residual_stride, N,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    """Add bias and residual to float32 outputs, round once before the residual, and store."""
    dtype = out_ptr.dtype.element_ty
    if HAS_BIAS:
        total += tl.load(bias_ptr + n, mask=mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        pointers = residual_ptr + row * residual_stride + n
        residual = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
        total = total.to(dtype).to(tl.float32) + residual
    tl.store(out_ptr + row * N + n, total.to(dtype), mask=mask)


@triton.jit
def _gemv_kernel(
    x_ptr,  # [K]
    w_ptr,  # [N, K], or [2N, K] if SILU
    bias_ptr,  # [N]
    residual_ptr,  # [N]
    norm_ptr,  # [K]
    out_ptr,  # [N]
    eps,
    N,
    K,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    NORM: tl.constexpr,
    SILU: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    SINGLE: tl.constexpr,  # one tile spans K
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    # Weights are constants: the first tile is on its way before the input exists.
    weight = _load_weight(w_ptr, n, k, N, K, EVEN_N, EVEN_K)
    up_ptr = w_ptr + tl.cast(N, tl.int64) * K
    if SILU:
        up_weight = _load_weight(up_ptr, n, k, N, K, EVEN_N, EVEN_K)
    if NORM:
        gain = tl.load(norm_ptr + k, mask=k < K, other=0.0)
    pdl_wait(PDL)
    x = tl.load(x_ptr + k, mask=k < K, other=0.0).to(tl.float32)
    acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    squares = tl.zeros([BLOCK_K], tl.float32)
    if not SINGLE:
        for begin in range(BLOCK_K, K, BLOCK_K):
            columns = begin + k
            next_weight = _load_weight(w_ptr, n, columns, N, K, EVEN_N, EVEN_K)
            next_x = tl.load(x_ptr + columns, mask=columns < K, other=0.0)
            if SILU:
                next_up = _load_weight(up_ptr, n, columns, N, K, EVEN_N, EVEN_K)
            if NORM:
                squares += x * x
                x *= gain.to(tl.float32)
                gain = tl.load(norm_ptr + columns, mask=columns < K, other=0.0)
            acc += x[None, :] * weight.to(tl.float32)
            weight = next_weight
            if SILU:
                up += x[None, :] * up_weight.to(tl.float32)
                up_weight = next_up
            x = next_x.to(tl.float32)
    if NORM:
        squares += x * x
        x *= gain.to(tl.float32)
    acc += x[None, :] * weight.to(tl.float32)
    total = tl.sum(acc, 1)
    if SILU:
        up += x[None, :] * up_weight.to(tl.float32)
        up_total = tl.sum(up, 1)
    if NORM:
        rstd = 1 / tl.sqrt(tl.sum(squares) / K + eps)
        total *= rstd
        if SILU:
            up_total *= rstd
    if SILU:
        total = total / (1 + tl.exp(-total)) * up_total
    _finish(
        total, n, 0, n < N, bias_ptr, residual_ptr, out_ptr, 0, N, HAS_BIAS, HAS_RESIDUAL
    )  # fmt: skip


def gemv_config(n: int, k: int, silu: bool = False) -> GemvConfig:
    """Return the tile for ``n`` outputs of ``k`` columns (``silu``: of two weights), as measured on
    an H200: eight 16-byte loads in flight per thread, and no more columns than there are."""
    if k <= 1024:
        return GemvConfig(2, 512, 1) if silu else GemvConfig(4, 1024, 2 if n >= 1 << 16 else 4)
    if silu:
        return GemvConfig(1, 2048, 4) if k % 2048 == 0 else GemvConfig(1, 512, 1)
    if k <= 2048 and n < 1 << 16:
        return GemvConfig(4, 1024, 2)
    return GemvConfig(2, 2048, 4 if n >= 1024 else 8)


def gemv_tiles(n: int, k: int, silu: bool) -> list[GemvConfig]:
    """Return the tiles worth timing, :func:`gemv_config`'s first. What is best depends on how K
    divides and how many programs there are; the head's programs are plenty whatever the tile."""
    tiles = [gemv_config(n, k, silu)]
    if n < 1 << 16:
        tiles += SILU_GEMV_TILES if silu else GEMV_TILES
    return list(dict.fromkeys(tile for tile in tiles if tile.block_k < 2 * k))


def gemv(
    x: torch.Tensor, weight: torch.Tensor, fusion: Fusion, config: GemvConfig | None = None
) -> torch.Tensor:
    """Return the product [1, N] of ``x`` [1, K]; raises ValueError on more rows."""
    bias, residual, norm_weight, eps, silu = fusion
    m, n, k = _shape(x, weight, fusion)
    check(m == 1, f"gemv takes one row, not {m}")
    out = torch.empty(1, n, dtype=x.dtype, device=x.device)
    block_n, block_k, warps = config or gemv_config(n, k, silu)
    launch(
        _gemv_kernel,
        (triton.cdiv(n, block_n),),
        x,
        weight,
        _or(bias, x),
        _or(residual, x),
        _or(norm_weight, x),
        out,
        eps,
        n,
        k,
        HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None,
        NORM=norm_weight is not None,
        SILU=silu,
        EVEN_N=n % block_n == 0,
        EVEN_K=k % block_k == 0,
        SINGLE=k <= block_k,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        num_warps=warps,
        **pdl_options(x.device),
    )
    return out


def _shape(x: torch.Tensor, weight: torch.Tensor, fusion: Fusion) -> tuple[int, int, int]:
    """Return (M, N, K) of a product; raises ValueError for what does not go together."""
    (m, k), (n, columns) = x.shape, weight.shape
    check(columns == k and weight.is_contiguous(), "weight must be [N, K] row-major")
    check(not (fusion.silu and fusion.bias is not None), "SiLU·mul takes no bias")
    return m, n // 2 if fusion.silu else n, k


def _or(tensor: torch.Tensor | None, other: torch.Tensor) -> torch.Tensor:
    return other if tensor is None else tensor


# --- skinny GEMM ----------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["M"])
def _skinny_kernel(
    x_ptr,  # [M, K]
    w_ptr,  # [N, K], or [2N, K] if SILU
    bias_ptr,  # [N]
    residual_ptr,  # [M, N]
    out_ptr,  # [M, N]
    partial_ptr,  # [SPLIT_K, 1 or 2, M, N] float32
    counters_ptr,  # [N / BLOCK_N] int32, all zero between launches
    x_stride,
    residual_stride,
    M,
    N,
    K,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    SILU: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,  # every part of K is a whole number of tiles
    SPLIT_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    n_block = tl.program_id(0)
    part = tl.program_id(1)
    n = n_block * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    up_ptr = w_ptr + tl.cast(N, tl.int64) * K
    length = (K + SPLIT_K * BLOCK_K - 1) // (SPLIT_K * BLOCK_K) * BLOCK_K
    pdl_wait(PDL)
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for begin in range(part * length, tl.minimum(part * length + length, K), BLOCK_K):
        columns = begin + k
        weight = _load_weight(w_ptr, n, columns, N, K, EVEN_N, EVEN_K)
        mask = (row < M)[None, :] & (columns < K)[:, None]
        x = tl.load(x_ptr + row[None, :] * x_stride + columns[:, None], mask=mask, other=0.0)
        acc += dot(weight, x)
        if SILU:
            up += dot(_load_weight(up_ptr, n, columns, N, K, EVEN_N, EVEN_K), x)
    mask = (row < M)[None, :] & (n < N)[:, None]
    last = True
    if SPLIT_K > 1:
        tile = partial_ptr + row[None, :] * N + n[:, None]
        size = M * N * (2 if SILU else 1)
        tl.store(tile + part * size, acc, mask=mask)
        if SILU:
            tl.store(tile + part * size + M * N, up, mask=mask)
        tl.debug_barrier()
        done = tl.atomic_add(counters_ptr + n_block, 1, sem="acq_rel", scope="gpu")
        last = done == SPLIT_K - 1
        if last:
            tl.store(counters_ptr + n_block, 0)
            # In the order of the parts, whoever finished last: the sum is reproducible.
            acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
            up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
            for other in tl.static_range(SPLIT_K):
                other_tile = tile + other * size
                acc += tl.load(other_tile, mask=mask, other=0.0, cache_modifier=".cg")
                if SILU:
                    up += tl.load(other_tile + M * N, mask=mask, other=0.0, cache_modifier=".cg")
    if last:
        if SILU:
            acc = acc / (1 + tl.exp(-acc)) * up
        _finish(
            acc, n[:, None], row[None, :], mask, bias_ptr, residual_ptr, out_ptr,
            residual_stride, N, HAS_BIAS, HAS_RESIDUAL,
        )  # fmt: skip


@functools.cache
def _zero_counters(device: torch.device) -> torch.Tensor:
    return torch.zeros(65536, dtype=torch.int32, device=device)


def skinny_config(n: int, k: int, silu: bool, device: torch.device) -> SkinnyConfig:
    """Return the tiling for ``n`` outputs of ``k`` columns (``silu``: of two weights).

    From a sweep on an H200: 64 outputs a tile, and parts of K until the tiles about fill the
    device; longer tiles of K only where a part has room for several.
    """
    tiles = triton.cdiv(n, 64)
    if silu:
        if tiles >= num_sms(device):
            return SkinnyConfig(64, 64, 1, 4, 4)
        return SkinnyConfig(32, 128, 1, 4, 3)
    split_k = 1
    while split_k < 8 and tiles * split_k * 4 <= num_sms(device) * 3 and k >= 448 * split_k:
        split_k *= 2
    if k < 512 * split_k:
        return SkinnyConfig(64, 64, split_k, 4, 6)
    return SkinnyConfig(64, 128, split_k, 4, 4 if split_k > 1 else 3)


def skinny_linear(
    x: torch.Tensor, weight: torch.Tensor, fusion: Fusion, config: SkinnyConfig | None = None
) -> torch.Tensor:
    """Return the product [M, N] for up to 64 rows, on the matrix units; a norm is its own launch.

    Raises ValueError on more rows. Launches on one device must follow each other in one stream.
    """
    bias, residual, norm_weight, eps, silu = fusion
    m, n, k = _shape(x, weight, fusion)
    check(1 <= m <= MAX_SKINNY_ROWS, f"skinny_linear takes 1 to {MAX_SKINNY_ROWS} rows, not {m}")
    if norm_weight is not None:
        x = rms_norm(x, norm_weight, eps)
    out = torch.empty(m, n, dtype=x.dtype, device=x.device)
    block_n, block_k, split_k, warps, stages = config or skinny_config(n, k, silu, x.device)
    size = split_k * m * n * (2 if silu else 1) if split_k > 1 else 0
    partial = torch.empty(size, dtype=torch.float32, device=x.device)
    launch(
        _skinny_kernel,
        (triton.cdiv(n, block_n), split_k),
        x,
        weight,
        _or(bias, x),
        _or(residual, x),
        out,
        partial,
        _zero_counters(x.device),
        x.stride(0),
        residual.stride(0) if residual is not None else 0,
        m,
        n,
        k,
        HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None,
        SILU=silu,
        EVEN_N=n % block_n == 0,
        EVEN_K=k % block_k == 0,
        SPLIT_K=split_k,
        BLOCK_M=max(16, triton.next_power_of_2(m)),
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        num_warps=warps,
        num_stages=stages,
        **pdl_options(x.device),
    )
    return out


# --- choice ---------------------------------------------------------------------------------------


def library_linear(x: torch.Tensor, weight: torch.Tensor, fusion: Fusion) -> torch.Tensor:
    """Return the product [M, N] of any number of rows by the library's kernel."""
    bias, residual, norm_weight, eps, silu = fusion
    if norm_weight is not None:
        x = rms_norm(x, norm_weight, eps)
    if residual is not None and bias is None and not silu:
        return residual.addmm_(x, weight.t())
    out = functional.linear(x, weight, bias)
    if silu:
        out = silu_mul(out)
    return out if residual is None else out.add_(residual)


Linear = Callable[[torch.Tensor, torch.Tensor, Fusion], torch.Tensor]


def linear_candidates(m: int, n: int, k: int, silu: bool) -> dict[str, Linear]:
    """Return the ways to compute ``n`` outputs of ``k`` columns for ``m`` rows, by name."""
    candidates: dict[str, Linear] = {"library": library_linear}
    if m <= MAX_SKINNY_ROWS:
        candidates["skinny"] = skinny_linear
    if m == 1:
        for tile in gemv_tiles(n, k, silu):
            name = "gemv " + "/".join(map(str, tile))
            candidates[name] = functools.partial(gemv, config=tile)
    return candidates


@dataclass
class LinearChooser:
    """Times the ways to compute a linear layer once per shape and remembers the fastest."""

    device: torch.device
    repeats: int = 7
    times: dict[tuple[Any, ...], dict[str, float]] = field(default_factory=dict)  # µs
    choices: dict[tuple[Any, ...], Linear] = field(default_factory=dict)

    def choose(self, m: int, weight: torch.Tensor, fusion: Fusion) -> Linear:
        """Return the fastest of gemv (in one of its tiles), skinny_linear and library_linear for
        ``m`` rows of input; ``fusion`` says what will be fused, its residual may have other rows.

        Off the GPU it is always the library, as it is for a shape first seen while a graph is being
        captured, where nothing can be timed.
        """
        rows, k = weight.shape
        n = rows // 2 if fusion.silu else rows
        candidates = linear_candidates(m, n, k, fusion.silu)
        timed = self.device.type == "cuda" and weight.dtype != torch.float32 and not INTERPRETED
        if not timed or len(candidates) == 1:
            return library_linear
        tensors = (fusion.bias, fusion.residual, fusion.norm_weight)
        key = (m, rows, k, weight.dtype, *(t is not None for t in tensors), fusion.silu)
        if key not in self.choices and torch.cuda.is_current_stream_capturing():
            return library_linear
        if key not in self.choices:
            random = functools.partial(torch.randn, device=self.device, dtype=weight.dtype)
            x = random(m, k)
            if fusion.residual is not None:
                fusion = fusion._replace(residual=random(m, n))
            if compiling():
                for candidate in candidates.values():
                    candidate(x, weight, fusion)
                return library_linear
            weights = self._copies(weight)
            self.times[key] = times = {
                name: self._time(f, x, weights, fusion) for name, f in candidates.items()
            }
            self.choices[key] = candidates[min(times, key=times.__getitem__)]
        return self.choices[key]

    def _copies(self, weight: torch.Tensor) -> list[torch.Tensor]:
        """Return the weight and enough copies that none is in the cache when its turn comes."""
        cache = torch.cuda.get_device_properties(self.device).L2_cache_size
        count = min(32, 2 * cache // (weight.numel() * weight.element_size()))
        return [weight, *(weight.clone() for _ in range(count))]

    def _time(
        self, f: Linear, x: torch.Tensor, weights: list[torch.Tensor], fusion: Fusion
    ) -> float:
        """Return the median time in µs of one call, replayed in a graph over all weights."""

        def run() -> None:
            for weight in weights:
                f(x, weight, fusion)

        run()
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        # By hand: torch.cuda.graph collects garbage first, which takes longer than all the rest.
        with torch.cuda.stream(torch.cuda.Stream(self.device)):
            graph.capture_begin()
            run()
            graph.capture_end()
        torch.cuda.synchronize(self.device)
        times = []
        for _ in range(self.repeats):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1e3 / len(weights))
        return sorted(times)[len(times) // 2]
