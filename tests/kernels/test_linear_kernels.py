"""GEMV and skinny GEMM with every fusion against float64 products."""

import pytest
import reference
import torch
from reference import close

from pageserve.kernels.linear import (
    Fusion,
    GemvConfig,
    LinearChooser,
    SkinnyConfig,
    gemv,
    gemv_tiles,
    library_linear,
    linear_candidates,
    skinny_linear,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
EPS = 1e-5


def operands(m: int, n: int, k: int, dtype: torch.dtype, device: torch.device, silu: bool = False):
    generator = torch.Generator().manual_seed(m * n + k)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype).to(device)

    return (
        randn(m, k),
        randn(2 * n if silu else n, k) / k**0.5,
        randn(n),
        randn(m, n),
        1 + randn(k) / 8,
    )


def expected(x: torch.Tensor, weight: torch.Tensor, fusion: Fusion) -> torch.Tensor:
    x = x.double()
    if fusion.norm_weight is not None:
        x = reference.rms_norm(x, fusion.norm_weight, fusion.eps)
    out = x @ weight.double().T
    if fusion.silu:
        out = reference.silu_mul(out)
    for addend in (fusion.bias, fusion.residual):
        out = out if addend is None else out + addend.double()
    return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k,block_k", [(96, 128), (200, 64), (256, 64)])
@pytest.mark.parametrize("block_n", [1, 2, 8])
def test_gemv(dtype, k, block_k, block_n, device):
    x, weight, bias, residual, norm_weight = operands(1, 13, k, dtype, device)
    config = GemvConfig(block_n, block_k, 4)
    fusion = Fusion(bias, residual, norm_weight, EPS)
    close(gemv(x, weight, fusion, config), expected(x, weight, fusion))
    close(gemv(x, weight, Fusion(), config), expected(x, weight, Fusion()))


@pytest.mark.parametrize("dtype", DTYPES)
def test_gemv_silu(dtype, device):
    x, weight, _, _, norm_weight = operands(1, 11, 200, dtype, device, silu=True)
    fusion = Fusion(norm_weight=norm_weight, eps=EPS, silu=True)
    for config in (None, GemvConfig(2, 64, 4)):
        close(gemv(x, weight, fusion, config), expected(x, weight, fusion))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("m", [1, 5, 16, 33])
@pytest.mark.parametrize("split_k", [1, 3])
def test_skinny_linear(dtype, m, split_k, device):
    x, weight, bias, residual, norm_weight = operands(m, 40, 200, dtype, device)
    config = SkinnyConfig(16, 32, split_k, 4, 3)
    for norm in (None, norm_weight):  # twice: the counters must be ready again
        fusion = Fusion(bias, residual, norm, EPS)
        close(skinny_linear(x, weight, fusion, config), expected(x, weight, fusion))


@pytest.mark.parametrize("split_k", [1, 4])
def test_skinny_linear_silu(split_k, device):
    x, weight, _, residual, _ = operands(7, 40, 256, torch.bfloat16, device, silu=True)
    config = SkinnyConfig(32, 64, split_k, 4, 3)
    fusion = Fusion(residual=residual, silu=True)
    close(skinny_linear(x, weight, fusion, config), expected(x, weight, fusion))


@pytest.mark.parametrize("linear", [gemv, skinny_linear, library_linear])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_candidates_of_a_choice_agree(linear, dtype, device):
    x, weight, _, residual, norm_weight = operands(1, 48, 160, dtype, device, silu=True)
    fusion = Fusion(None, residual, norm_weight, EPS, True)
    close(linear(x, weight, fusion), expected(x, weight, fusion), factor=2)


SHAPES = [  # (n, k, silu): a tile per part of K, parts that do not divide, one tile for all of K
    (24, 1536, False),
    (16, 1100, True),
    (24, 300, False),
    (9, 300, True),
]


@pytest.mark.parametrize(("n", "k", "silu"), SHAPES)
def test_every_tile_that_is_timed_computes_the_layer(n, k, silu, device):
    x, weight, _, residual, norm_weight = operands(1, n, k, torch.bfloat16, device, silu)
    fusion = Fusion(None, residual, norm_weight, EPS, silu)
    want = expected(x, weight, fusion)
    candidates = linear_candidates(1, n, k, silu)
    assert len(candidates) == 2 + len(gemv_tiles(n, k, silu)) >= 4
    for linear in candidates.values():
        close(linear(x, weight, fusion._replace(residual=residual.clone())), want, factor=2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("biased", [False, True])
def test_library_adds_the_residual(biased, dtype, device):
    x, weight, bias, residual, norm_weight = operands(70, 40, 96, dtype, device)
    fusion = Fusion(bias if biased else None, residual, norm_weight, EPS)
    want = expected(x, weight, fusion)
    close(library_linear(x, weight, fusion), want)


def test_choice_is_measured_once_per_shape(device):
    chooser = LinearChooser(device, repeats=3)
    weight = torch.randn(256, 512, dtype=torch.bfloat16, device=device)
    fusion = Fusion(norm_weight=torch.ones(512, dtype=torch.bfloat16, device=device), silu=True)
    choice = chooser.choose(1, weight, fusion)
    assert chooser.choose(1, weight, fusion) is choice
    if device.type == "cuda":
        (times,) = chooser.times.values()
        fastest = linear_candidates(1, 128, 512, True)[min(times, key=times.__getitem__)]
        assert getattr(choice, "func", choice) is getattr(fastest, "func", fastest)
        assert set(times) == set(linear_candidates(1, 128, 512, True))
        assert chooser.choose(4, weight, Fusion()) in (skinny_linear, library_linear)
    else:
        assert choice is library_linear


def test_too_many_rows_are_refused(device):
    weight = torch.randn(8, 16, device=device)
    with pytest.raises(ValueError, match="one row, not 5"):
        gemv(torch.randn(5, 16, device=device), weight, Fusion())
    with pytest.raises(ValueError, match="1 to 64 rows, not 65"):
        skinny_linear(torch.randn(65, 16, device=device), weight, Fusion())
