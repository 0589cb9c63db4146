"""How much memory a model takes and how many KV blocks fit beside it: arithmetic, no device."""

import os
from dataclasses import dataclass

from pageserve.config import ConfigError, EngineConfig
from pageserve.model_config import ModelConfig
from pageserve.utils import cdiv

GIB = 1 << 30
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
HOST_SHARE = 0.25  # of the host's memory that the pool may take when nobody says otherwise
HOST_LIMIT = 4 * GIB


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes and blocks; ``num_blocks * block_size`` tokens are resident at most."""

    weight_bytes: int
    block_bytes: int
    num_blocks: int
    block_size: int
    max_model_len: int

    @property
    def pool_bytes(self) -> int:
        """Size of the KV pool."""
        return self.num_blocks * self.block_bytes

    @property
    def max_concurrency(self) -> float:
        """How many requests of ``max_model_len`` tokens the pool holds at once."""
        return self.num_blocks / cdiv(self.max_model_len, self.block_size)


def block_bytes(model: ModelConfig, block_size: int, dtype: str) -> int:
    """Bytes of one KV block over all layers."""
    per_token = 2 * model.num_layers * model.num_kv_heads * model.head_dim * DTYPE_BYTES[dtype]
    return per_token * block_size


def activation_bytes(config: EngineConfig, model: ModelConfig) -> int:
    """About what the largest step of a resolved ``config`` takes on a GPU, which the worker finds
    out by trying: hidden states, projections and MLP of its tokens, logits and scratch of its
    rows."""
    scheduler = config.scheduler
    assert scheduler.max_num_seqs is not None and scheduler.max_num_batched_tokens is not None
    heads = model.num_heads + 2 * model.num_kv_heads
    per_token = 3 * model.hidden_size + heads * model.head_dim + 3 * model.intermediate_size
    size = DTYPE_BYTES[config.model.dtype]
    tokens = scheduler.max_num_batched_tokens * per_token * size
    return tokens + scheduler.max_num_seqs * model.vocab_size * (2 * size + 8)


def plan_memory(
    config: EngineConfig, model: ModelConfig, *, weight_bytes: int, free_bytes: int | None
) -> MemoryPlan:
    """Size the pool for a resolved ``config``.

    ``weight_bytes`` is what the weights take, ``free_bytes`` what the device has left for the pool,
    None on a host without a GPU, where a share of the physical memory is taken. Raises
    :class:`ConfigError` if not one block fits.
    """
    args = config.cache
    max_model_len, max_num_seqs = config.model.max_model_len, config.scheduler.max_num_seqs
    assert max_model_len is not None and max_num_seqs is not None
    size = block_bytes(model, args.block_size, config.model.dtype)
    if args.num_kv_blocks is not None:
        num_blocks = args.num_kv_blocks
    else:
        if args.kv_cache_memory is not None:
            budget = int(args.kv_cache_memory * GIB)
        elif free_bytes is not None:
            budget = free_bytes
        else:
            budget = min(int(HOST_SHARE * _host_memory()), HOST_LIMIT)
        useful = max_num_seqs * cdiv(max_model_len, args.block_size)
        num_blocks = min(budget // size, useful)
    if num_blocks < 1:
        raise ConfigError(
            f"no memory for even one KV block of {size / 2**20:.1f} MiB: raise --kv-cache-memory "
            "or --gpu-memory-utilization, or lower --block-size"
        )
    return MemoryPlan(weight_bytes, size, num_blocks, args.block_size, max_model_len)


def _host_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
