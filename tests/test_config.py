"""Flags come from fields, and values that cannot work are refused by the name of their flag."""

import argparse
import dataclasses

import pytest

from pageserve.config import (
    GROUPS,
    CacheArgs,
    ConfigError,
    EngineConfig,
    ModelArgs,
    SchedulerArgs,
    ServerArgs,
    add_flags,
    from_flags,
)
from pageserve.model_config import load_model_config
from pageserve.worker.memory import GIB, block_bytes, plan_memory
from pageserve.worker.worker import allocate_kv_cache, resolve


def parse(*argv: str) -> tuple[EngineConfig, ServerArgs]:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_flags(parser)
    return from_flags(parser.parse_args(argv))


def test_no_flags_means_the_defaults_of_the_fields():
    assert parse() == (EngineConfig(), ServerArgs())


def test_every_field_has_a_flag_and_a_help_text():
    parser = argparse.ArgumentParser()
    add_flags(parser)
    text = parser.format_help()
    for title, cls in GROUPS.items():
        assert f"\n{title}:\n" in text
        for f in dataclasses.fields(cls):
            assert "--" + f.name.replace("_", "-") in text
            assert f.metadata["help"]


def test_values_reach_their_fields():
    engine, server = parse(
        *("--model", "m", "--served-model-name", "a", "--served-model-name", "b", "--seed", "-1"),
        *("--no-enable-prefix-caching", "--kv-cache-memory", "1.5", "--max-num-seqs", "3"),
        *("--scheduling-policy", "priority", "--api-key", "k", "--port", "0"),
    )
    assert engine.model == ModelArgs(model="m", served_model_name=("a", "b"), seed=-1)
    assert engine.cache == CacheArgs(enable_prefix_caching=False, kv_cache_memory=1.5)
    assert engine.scheduler == SchedulerArgs(max_num_seqs=3, scheduling_policy="priority")
    assert server == ServerArgs(api_key=("k",), port=0)


@pytest.mark.parametrize(
    ("cls", "values", "flag"),
    [
        (CacheArgs, {"block_size": 0}, "--block-size must be at least 1"),
        (CacheArgs, {"block_size": 1025}, "--block-size must be at most 1024"),
        (CacheArgs, {"num_kv_blocks": -1}, "--num-kv-blocks"),
        (CacheArgs, {"kv_cache_memory": float("inf")}, "--kv-cache-memory must be a finite"),
        (CacheArgs, {"gpu_memory_utilization": float("nan")}, "--gpu-memory-utilization"),
        (CacheArgs, {"num_kv_blocks": 1, "kv_cache_memory": 1.0}, "not both"),
        (ModelArgs, {"max_model_len": 0}, "--max-model-len"),
        (ModelArgs, {"dtype": "int3"}, "--dtype must be one of auto"),
        (SchedulerArgs, {"max_num_batched_tokens": 0}, "--max-num-batched-tokens"),
        (SchedulerArgs, {"scheduling_policy": "random"}, "--scheduling-policy"),
        (ServerArgs, {"port": 65536}, "--port"),
    ],
)
def test_impossible_values_name_their_flag(cls, values, flag):
    with pytest.raises(ConfigError, match=flag):
        cls(**values)


def test_resolve_refuses_what_the_model_or_the_device_cannot_do():
    with pytest.raises(ConfigError, match=r"--max-model-len 9 is more than .* 8 tokens"):
        EngineConfig(ModelArgs(max_model_len=9)).resolve(device="cpu", max_position_embeddings=8)
    eager = EngineConfig(scheduler=SchedulerArgs(enforce_eager=True))
    with pytest.raises(ConfigError, match="--enforce-eager"):
        eager.resolve(device="cpu", max_position_embeddings=8)


def test_resolve_fills_by_device_and_keeps_what_was_said():
    def resolved(device, **options):
        config = EngineConfig(scheduler=SchedulerArgs(**options))
        return config.resolve(device=device, max_position_embeddings=100_000)

    assert resolved("cpu").model.max_model_len == 32768
    cpu, gpu = resolved("cpu").scheduler, resolved("cuda").scheduler
    assert (cpu.max_num_seqs, cpu.max_num_batched_tokens, cpu.max_steps_in_flight) == (32, 512, 1)
    assert (gpu.max_num_seqs, gpu.max_num_batched_tokens, gpu.max_steps_in_flight) == (512, 8192, 2)
    assert resolved("cuda", max_num_seqs=5, max_steps_in_flight=1).scheduler == SchedulerArgs(
        max_num_seqs=5, max_num_batched_tokens=8192, max_steps_in_flight=1
    )


# --- memory ---------------------------------------------------------------------------------------


def plan(path, free_bytes=None, *, weight_bytes=4000, max_num_seqs=None, **cache):
    config = EngineConfig(
        ModelArgs(max_model_len=64), CacheArgs(**cache), SchedulerArgs(max_num_seqs=max_num_seqs)
    )
    model = load_model_config(path)
    return plan_memory(
        resolve(config, model, "cpu"), model, weight_bytes=weight_bytes, free_bytes=free_bytes
    )


def test_pool_sizes(tiny_checkpoint):
    path = tiny_checkpoint("llama")  # 2 layers, 2 KV heads of 8
    size = block_bytes(load_model_config(path), 16, "float32")
    assert size == 2 * 2 * 2 * 8 * 16 * 4
    given = plan(path, num_kv_blocks=7)
    assert (given.num_blocks, given.pool_bytes, given.weight_bytes) == (7, 7 * size, 4000)
    assert given.max_concurrency == 7 / 4
    assert plan(path, kv_cache_memory=5.5 * size / GIB).num_blocks == 5
    assert plan(path, 9 * size).num_blocks == 9, "what the device has left"
    assert plan(path, 10**12, max_num_seqs=3).num_blocks == 3 * 4, "no more than is of use"


def test_no_room_for_a_block_names_the_flags(tiny_checkpoint):
    with pytest.raises(ConfigError, match="--kv-cache-memory"):
        plan(tiny_checkpoint("llama"), kv_cache_memory=0.0)
    with pytest.raises(ConfigError, match="--gpu-memory-utilization"):
        plan(tiny_checkpoint("llama"), -5)


def test_pool_larger_than_the_machine_names_the_flags(tiny_checkpoint):
    import torch

    path = tiny_checkpoint("llama")
    huge = plan(path, num_kv_blocks=2**44)
    with pytest.raises(ConfigError, match="--num-kv-blocks"):
        allocate_kv_cache(huge, load_model_config(path), torch.float32, "cpu")
