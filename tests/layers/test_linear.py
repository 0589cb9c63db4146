"""Products on the CPU, in whatever layout their weights lie, against the same in float64."""

import pytest
import torch
import torch.nn.functional as F
from helpers import DenseReferenceBackend

from pageserve.layers.linear import Linear
from pageserve.layers.norm import RMSNorm
from pageserve.model_config import load_model_config
from pageserve.models import DecoderForCausalLM, load_model

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def make_linear(in_features, out_features, dtype, bias=False):
    torch.manual_seed(0)
    linear = Linear(in_features, out_features, bias, dtype=dtype)
    weight = torch.randn(out_features, in_features).div_(in_features**0.5).to(dtype)
    linear.weight.data.copy_(weight)
    if linear.bias is not None:
        linear.bias.data.copy_(torch.randn(out_features))
    linear.prepare()
    return linear, weight


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(64, 96), (48, 256), (257, 33)])  # narrow, wide, odd
@pytest.mark.parametrize("bias", [False, True])
@torch.inference_mode()
def test_products_of_any_number_of_rows(dtype, shape, bias):
    linear, weight = make_linear(*shape, dtype, bias)
    exact = None if linear.bias is None else linear.bias.double()
    for rows in (0, 1, 2, 7, 16, 40):
        x, residual = torch.randn(rows, shape[0]).to(dtype), torch.randn(rows, shape[1]).to(dtype)
        expected = F.linear(x.double(), weight.double(), exact)
        close = {"rtol": 2 * torch.finfo(dtype).eps, "atol": 16 * torch.finfo(dtype).eps}
        torch.testing.assert_close(linear(x).double(), expected, **close)
        summed = linear(x, residual=residual.clone()).double()
        torch.testing.assert_close(summed, expected + residual.double(), **close)


@pytest.mark.parametrize("dtype", DTYPES)
@torch.inference_mode()
def test_norm_and_gate_around_a_product(dtype):
    linear, weight = make_linear(64, 256, dtype)
    norm = RMSNorm(64, 1e-6, dtype=dtype)
    norm.weight.data.copy_(torch.randn(64))
    for rows in (1, 5):
        x = torch.randn(rows, 64).to(dtype)
        normed = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt()
        gate, up = ((normed * norm.weight.double()) @ weight.double().t()).chunk(2, -1)
        out = linear(x, norm=norm, silu=True).double()
        close = {"rtol": 0.0, "atol": 40 * torch.finfo(dtype).eps}
        torch.testing.assert_close(out, F.silu(gate) * up, **close)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", ["qwen2", "llama"])  # with a tied head, and one of its own
def test_bytes_of_weights_are_known_before_they_are_loaded(tiny_checkpoint, family, dtype):
    path = tiny_checkpoint(family)
    config = load_model_config(path)
    factory = {"backend": DenseReferenceBackend(), "dtype": dtype, "max_model_len": 64}
    model = load_model(path, config, device="cpu", **factory)
    tensors = list(model.parameters())
    for linear in model.modules():
        if isinstance(linear, Linear) and linear.packed is not None and not linear.weight.is_mkldnn:
            tensors.append(linear.packed)
    assert model.weight_bytes("cpu") == sum(x.nbytes for x in tensors)
    shapes = DecoderForCausalLM(config, device="meta", **factory)
    assert shapes.weight_bytes("cpu") == model.weight_bytes("cpu")
    assert shapes.weight_bytes("cuda") == config.num_parameters * dtype.itemsize


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_weights_of_16_bits_lie_in_memory_once(dtype):
    linear, _ = make_linear(64, 96, dtype)
    if linear.packing("cpu") is None:
        pytest.skip("this processor has no instructions for the type, so nothing is packed")
    assert linear.weight.numel() == 64 * 96
    held = [x for x in (*vars(linear).values(), *linear.parameters()) if torch.is_tensor(x)]
    assert all(x.is_mkldnn for x in held)
