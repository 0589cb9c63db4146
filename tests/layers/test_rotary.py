"""Frequencies and tables against transformers', to the last bit where the formula is the same."""

from typing import get_args

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from pageserve.layers.rotary import attention_factor, compute_cos_sin, compute_inv_freq
from pageserve.model_config import RopeConfig, RopeType

HEAD_DIM = 64
LLAMA3 = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
CASES = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "llama3 x32": LLAMA3 | {"factor": 32.0},
    "llama3 x8": LLAMA3 | {"factor": 8.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "yarn long": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    "yarn attention": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "attention_factor": 0.8,
    },
    "yarn mscale": {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "mscale": 1.0,
        "mscale_all_dim": 0.8,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "truncate": False,
    },
}


def hugging_face(parameters: dict, theta: float) -> LlamaRotaryEmbedding:
    config = LlamaConfig(
        hidden_size=HEAD_DIM * 2,
        num_attention_heads=2,
        max_position_embeddings=32768,
        rope_parameters=parameters | {"rope_theta": theta},
    )
    return LlamaRotaryEmbedding(config)


def ours(parameters: dict, theta: float) -> RopeConfig:
    values = {key: value for key, value in parameters.items() if key != "rope_type"}
    return RopeConfig(theta, parameters["rope_type"], **values)


@pytest.mark.parametrize("theta", [10000.0, 500000.0])
@pytest.mark.parametrize("name", CASES)
def test_frequencies_equal_transformers(name, theta):
    reference = hugging_face(CASES[name], theta)
    rope = ours(CASES[name], theta)
    torch.testing.assert_close(
        compute_inv_freq(rope, HEAD_DIM), reference.inv_freq, rtol=1e-6, atol=0
    )
    assert attention_factor(rope) == pytest.approx(reference.attention_scaling, rel=1e-12)


@pytest.mark.parametrize("name", CASES)
def test_tables_equal_transformers_far_out(name):
    positions = torch.tensor([0, 1, 100, 5000, 20000])
    cos, sin = hugging_face(CASES[name], 500000.0)(torch.zeros(1), positions[None])
    table = compute_cos_sin(ours(CASES[name], 500000.0), HEAD_DIM, 20001)[positions]
    half = HEAD_DIM // 2
    # Far out a last-bit difference of a frequency is magnified by the position.
    torch.testing.assert_close(table[:, :half], cos[0, :, :half], rtol=0, atol=2e-3)
    torch.testing.assert_close(table[:, half:], sin[0, :, :half], rtol=0, atol=2e-3)


@pytest.mark.parametrize("name", ["default", "linear", "dynamic"])
def test_plain_tables_are_bit_equal(name):
    positions = torch.arange(4096)
    cos, sin = hugging_face(CASES[name], 10000.0)(torch.zeros(1), positions[None])
    table = compute_cos_sin(ours(CASES[name], 10000.0), HEAD_DIM, 4096)
    assert torch.equal(table, torch.cat((cos[0, :, :32], sin[0, :, :32]), -1))


@pytest.mark.parametrize("factor", [32.0, 8.0])
def test_llama3_bands(factor):
    """Pairs 0-14 keep their frequency, 15-17 are blended, 18-31 are divided by the factor."""
    plain = compute_inv_freq(RopeConfig(500000.0), HEAD_DIM)
    scaled = compute_inv_freq(ours(LLAMA3 | {"factor": factor}, 500000.0), HEAD_DIM)
    assert torch.equal(scaled[:15], plain[:15])
    assert torch.equal(scaled[18:], plain[18:] / factor)
    assert (scaled[15:18] < plain[15:18]).all() and (scaled[15:18] > plain[15:18] / factor).all()


def test_yarn_default_attention_factor():
    assert attention_factor(ours(CASES["yarn"], 10000.0)) == pytest.approx(1.1386294)


def test_divisors_of_a_gguf_file_apply():
    divisors = tuple(1.0 + i for i in range(HEAD_DIM // 2))
    plain = compute_inv_freq(RopeConfig(), HEAD_DIM)
    scaled = compute_inv_freq(RopeConfig(freq_divisors=divisors), HEAD_DIM)
    torch.testing.assert_close(scaled, plain / torch.tensor(divisors), rtol=0, atol=0)


def test_every_rope_type_is_compared_with_transformers():
    assert {case["rope_type"] for case in CASES.values()} == set(get_args(RopeType))
