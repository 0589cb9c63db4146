"""RMSNorm, rotary embedding with the cache write, and SiLU·mul against float64."""

import pytest
import reference
import torch
from reference import close

from pageserve.kernels.activation import silu_mul
from pageserve.kernels.rms_norm import rms_norm
from pageserve.kernels.rope_cache import rope_and_cache

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
EPS = 1e-5


def randn(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator).to(dtype).to(device)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows,hidden", [(1, 64), (3, 896), (0, 64), (2, 3000)])
def test_rms_norm(dtype, rows, hidden, device):
    x = randn(rows, 2 * hidden, dtype=dtype, device=device)[:, hidden:]  # rows need not be packed
    weight = randn(hidden, dtype=dtype, device=device)
    close(rms_norm(x, weight, EPS), reference.rms_norm(x, weight, EPS))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows,size", [(1, 128), (3, 1500), (0, 64)])
def test_silu_mul(dtype, rows, size, device):
    gate_up = randn(rows, 2 * size, dtype=dtype, device=device)
    close(silu_mul(gate_up), reference.silu_mul(gate_up))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [(4, 4), (14, 2), (6, 1)])
@pytest.mark.parametrize("block_size", [1, 3, 16])
@pytest.mark.parametrize("norm", [False, True])
def test_rope_and_cache(dtype, heads, block_size, norm, device):
    num_heads, num_kv_heads = heads
    tokens, head_dim, num_blocks = 5, 64, 9
    qkv = randn(tokens, (num_heads + 2 * num_kv_heads) * head_dim, dtype=dtype, device=device)
    positions = torch.tensor([0, 7, 3, 30, 1], device=device)
    cos_sin = randn(40, head_dim, dtype=torch.float32, device=device)
    pool = (2, num_blocks, num_kv_heads, block_size, head_dim)
    kv_cache = torch.full(pool, float("nan"), dtype=dtype, device=device)
    slots = torch.tensor([num_blocks * block_size - 1, 0, -1, 4, 7], device=device)
    weights = [randn(head_dim, dtype=dtype, device=device) + i for i in range(2)] if norm else []
    query = rope_and_cache(
        qkv, positions, cos_sin, kv_cache, slots, num_heads, num_kv_heads, *weights, EPS
    ) if norm else rope_and_cache(
        qkv, positions, cos_sin, kv_cache, slots, num_heads, num_kv_heads
    )  # fmt: skip
    sizes = [num_heads, num_kv_heads, num_kv_heads]
    q, k, v = qkv.view(tokens, -1, head_dim).split(sizes, 1)
    if norm:
        q, k = (reference.rms_norm(x, w, EPS) for x, w in zip((q, k), weights, strict=True))
    close(query, reference.rotate(q, positions, cos_sin), factor=2)
    expected_keys = reference.rotate(k, positions, cos_sin)
    written = torch.zeros(num_blocks, block_size, dtype=torch.bool, device=device)
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            block, offset = divmod(slot, block_size)
            written[block, offset] = True
            close(kv_cache[0, block, :, offset], expected_keys[token], factor=2)
            assert torch.equal(kv_cache[1, block, :, offset], v[token])
    untouched = kv_cache.transpose(2, 3)[:, ~written]
    assert untouched.isnan().all()


def test_rope_of_many_tokens(device):
    num_heads, num_kv_heads, head_dim, tokens = 3, 1, 64, 70
    qkv = randn(tokens, 5 * head_dim, dtype=torch.float32, device=device)
    positions = torch.arange(tokens, device=device)
    cos_sin = randn(tokens, head_dim, dtype=torch.float32, device=device)
    kv_cache = torch.empty(2, 5, num_kv_heads, 16, head_dim, device=device)
    query = rope_and_cache(qkv, positions, cos_sin, kv_cache, positions, num_heads, num_kv_heads)
    q, k, v = qkv.view(tokens, 5, head_dim).split([3, 1, 1], 1)
    close(query, reference.rotate(q, positions, cos_sin))
    keys, values = kv_cache.transpose(2, 3).flatten(1, 2)[:, :tokens]
    close(keys, reference.rotate(k, positions, cos_sin))
    assert torch.equal(values, v)


def test_rope_refuses_other_shapes(device):
    kv_cache = torch.empty(2, 1, 1, 16, 64, device=device)
    with pytest.raises(ValueError, match="columns, not 4 heads"):
        rope_and_cache(
            torch.empty(1, 100, device=device), torch.zeros(1, device=device).long(),
            torch.empty(1, 64, device=device), kv_cache, torch.zeros(1, device=device).long(), 2, 1,
        )  # fmt: skip
