"""Plain PyTorch references of the kernels, in float64 where rounding matters, and test batches."""

from dataclasses import dataclass

import torch

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}


def close(actual: torch.Tensor, expected: torch.Tensor, factor: float = 1.0) -> None:
    """Assert a small relative error over the whole tensor and for its worst element; no NaN."""
    tolerance = factor * TOLERANCE.get(actual.dtype, 2e-5)
    actual, expected = actual.double().cpu(), expected.double().cpu()
    assert actual.shape == expected.shape
    if actual.numel() == 0:
        return
    assert torch.isfinite(actual).all()
    error = actual - expected
    assert error.norm() <= tolerance / 2 * expected.norm() + 1e-12
    assert error.abs().max() <= tolerance * max(1.0, expected.abs().max().item())


@dataclass
class PagedBatch:
    """A flat batch over a pool whose foreign blocks and unused slots are NaN."""

    query: torch.Tensor  # [T, Hq, D]
    kv_cache: torch.Tensor  # [2, num_blocks, Hkv, block_size, D]
    block_table: torch.Tensor  # [R, max_blocks]
    query_start_loc: torch.Tensor  # [R + 1]
    seq_lens: torch.Tensor  # [R]
    keys: list[torch.Tensor]  # per row [seq_len, Hkv, D]
    values: list[torch.Tensor]


def paged_batch(
    query_lens: list[int],
    seq_lens: list[int],
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    seed: int = 0,
) -> PagedBatch:
    """Draw a batch whose blocks are scattered over the pool in random order."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    blocks = [-(-n // block_size) for n in seq_lens]
    num_blocks = sum(blocks) + 3
    order = torch.randperm(num_blocks, generator=generator).tolist()
    pool = (2, num_blocks, num_kv_heads, block_size, head_dim)
    kv_cache = torch.full(pool, float("nan"), dtype=dtype)
    # Entries past a row's blocks point at a poisoned block, or nowhere.
    table = torch.full((len(seq_lens), max(blocks) + 2), order.pop(), dtype=torch.int32)
    keys, values = [], []
    for row, (count, length) in enumerate(zip(blocks, seq_lens, strict=True)):
        keys.append(randn(length, num_kv_heads, head_dim))
        values.append(randn(length, num_kv_heads, head_dim))
        for index in range(count):
            block = order.pop()
            table[row, index] = block
            size = min(block_size, length - index * block_size)
            span = slice(index * block_size, index * block_size + size)
            kv_cache[0, block, :, :size] = keys[row][span].transpose(0, 1)
            kv_cache[1, block, :, :size] = values[row][span].transpose(0, 1)
    starts = torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32)
    return PagedBatch(
        randn(sum(query_lens), num_heads, head_dim).to(device),
        kv_cache.to(device),
        table.to(device),
        starts.to(device),
        torch.tensor(seq_lens, dtype=torch.int32, device=device),
        keys,
        values,
    )


def attention(batch: PagedBatch, scale: float) -> torch.Tensor:
    """Causal attention of every row over its own keys and values, in float64."""
    outputs = []
    starts = batch.query_start_loc.tolist()
    for row, (keys, values) in enumerate(zip(batch.keys, batch.values, strict=True)):
        query = batch.query[starts[row] : starts[row + 1]].double().cpu()  # [q, Hq, D]
        length, seq_len = query.shape[0], keys.shape[0]
        if seq_len == 0:
            outputs.append(torch.zeros_like(query))
            continue
        group = query.shape[1] // keys.shape[1]
        keys, values = (x.double().repeat_interleave(group, 1) for x in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", query, keys) * scale
        visible = torch.arange(seq_len)[None] <= (seq_len - length + torch.arange(length))[:, None]
        weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
        outputs.append(torch.einsum("hqk,khd->qhd", weights, values))
    return torch.cat(outputs)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / rms(x) * weight in float64, over the last dimension."""
    x = x.double()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight.double()


def rotate(x: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """Half-split rotary embedding of x [T, H, D] in float64."""
    half = x.shape[-1] // 2
    cos, sin = cos_sin.double()[positions.long()][:, None].split(half, -1)
    low, high = x.double().split(half, -1)
    return torch.cat([low * cos - high * sin, high * cos + low * sin], -1)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up in float64."""
    gate, up = gate_up.double().chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


# --- sampling -------------------------------------------------------------------------------------


def philox(key: int, numbers: torch.Tensor, position: int, kind: int = 0) -> list[torch.Tensor]:
    """Words of Philox4x32-10 with counters (number, position, kind, 0)."""
    mask = 0xFFFFFFFF
    c0, c1 = numbers.long() & mask, torch.full_like(numbers, position, dtype=torch.long)
    c2, c3 = torch.full_like(c0, kind), torch.zeros_like(c0)
    k0, k1 = key & mask, (key >> 32) & mask

    def product(a: int, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        low = a * (b & 0xFFFF)  # 48 bits
        high = a * (b >> 16) + (low >> 16)
        return high >> 16, ((high & 0xFFFF) << 16) | (low & 0xFFFF)

    for _ in range(10):
        high0, low0 = product(0xD2511F53, c0)
        high1, low1 = product(0xCD9E8D57, c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) & mask, (k1 + 0xBB67AE85) & mask
    return [c0, c1, c2, c3]


def exponential(words: torch.Tensor) -> torch.Tensor:
    """Exponential variables of random words in float64."""
    return -torch.log(((words >> 8).double() + 0.5) * 2.0**-24)


def gumbel(key: int, token_ids: torch.Tensor, position: int) -> torch.Tensor:
    """The draw's noise in float64: of 64 tokens the first one, then what others have more."""
    least, first, _, _ = philox(key, token_ids.long() // 64, position, kind=1)
    more = exponential(philox(key, token_ids, position)[0])
    more[token_ids % 64 == first % 64] = 0
    return -torch.log(exponential(least) / 64 + more)


def kept_tokens(
    logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float
) -> torch.Tensor:
    """Ids that survive min-p, then top-k, then top-p; ties are ranked by id. ``logits`` [V]."""
    scaled = (logits.float() / temperature).double().cpu()
    order = torch.argsort(scaled, descending=True, stable=True)
    mass = (scaled[order] - scaled.max()).exp()
    if min_p > 0:
        count = int((mass >= min_p).sum())
        order, mass = order[:count], mass[:count]
    if top_k > 0:
        order, mass = order[:top_k], mass[:top_k]
    if top_p < 1:
        before = mass.cumsum(0) - mass
        count = max(1, int((before < top_p * mass.sum()).sum()))
        order = order[:count]
    return order


def sample(
    logits: torch.Tensor,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    seed: int,
    position: int,
) -> int:
    """The id that the rule of the draw gives for one row of logits [V]."""
    if not logits.float().max().isfinite():
        return -1
    if temperature < 1e-5:
        return int(logits.float().argmax())
    kept = kept_tokens(logits, temperature, top_k, top_p, min_p).sort().values
    scaled = (logits.float().cpu()[kept] / temperature).double()
    return int(kept[(scaled + gumbel(seed, kept, position)).argmax()])
