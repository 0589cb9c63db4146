"""Everything that touches a device, once per device: load, size the pool, run steps."""

import hashlib
import json
import logging
import os
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import torch

from pageserve import __version__
from pageserve.attention import AttentionBackend
from pageserve.attention.torch_blockwise import TorchBlockwiseBackend
from pageserve.config import ConfigError, EngineConfig
from pageserve.hub import resolve_model
from pageserve.messages import SchedulerOutput
from pageserve.model_config import ModelConfig, load_model_config
from pageserve.models import load_model
from pageserve.tokenizer import load_tokenizer
from pageserve.worker.memory import DTYPE_BYTES, GIB, MemoryPlan, plan_memory
from pageserve.worker.model_runner import ModelRunner, StepHandle

logger = logging.getLogger("pageserve.worker")


class Worker:
    """Owns the model, the KV pool and the model runner of one device."""

    def __init__(
        self, config: EngineConfig, progress: Callable[[str, int, int], None] | None = None
    ) -> None:
        """Load ``config.model.model``; ``progress(phase, done, total)`` is called on the way.

        Raises :class:`pageserve.model_config.ModelError` and :class:`ConfigError`.
        """
        path = resolve_model(config.model.model, progress)
        self.model_config = load_model_config(path)
        device = choose_device(config.model.device)
        self.config = config = resolve(config, self.model_config, device)
        dtype = getattr(torch, config.model.dtype)
        assert config.model.max_model_len is not None
        assert config.scheduler.max_num_seqs is not None

        backend = make_backend(config, self.model_config)
        self.model = load_model(
            path,
            self.model_config,
            backend=backend,
            dtype=dtype,
            device=torch.device(device),
            max_model_len=config.model.max_model_len,
            progress=progress,
        )
        plan = plan_memory(
            config,
            self.model_config,
            num_params=sum(p.numel() for p in self.model.parameters()),
            free_bytes=free_device_bytes(config),
        )
        self.num_kv_blocks = plan.num_blocks
        self.memory_bytes = {"weights": plan.weight_bytes, "kv_cache": plan.pool_bytes}
        model = self.model_config
        self.tokenizer = load_tokenizer(path)
        kv_cache = allocate_kv_cache(plan, model, dtype, device)
        self.runner = ModelRunner(
            self.model,
            backend,
            kv_cache,
            max_num_seqs=config.scheduler.max_num_seqs,
            max_model_len=config.model.max_model_len,
            vocab_limit=min(self.tokenizer.size, model.vocab_size),
            eos_token_ids=list(model.eos_token_ids),
            timed=config.scheduler.trace is not None,
        )
        if config.model.attention_backend == "triton":
            self._use_graphs(config, progress)
        self.fingerprint = _fingerprint(path, config)
        logger.info(
            "%s on %s in %s, %s attention; %d KV blocks of %d tokens (%.2f GiB), "
            "room for %.1f requests of %d tokens",
            config.model.model,
            config.model.device,
            config.model.dtype,
            config.model.attention_backend,
            plan.num_blocks,
            plan.block_size,
            plan.pool_bytes / GIB,
            plan.max_concurrency,
            plan.max_model_len,
        )
        if model.context_note:
            logger.warning("%s", model.context_note)

    def _use_graphs(
        self, config: EngineConfig, progress: Callable[[str, int, int], None] | None
    ) -> None:
        from pageserve.worker.cuda_graphs import CUDAGraphRunner

        assert config.scheduler.max_num_seqs is not None
        assert config.scheduler.max_num_batched_tokens is not None
        graphs = CUDAGraphRunner(
            self.model,
            self.runner.kv_cache,
            self.runner.states,
            vocab_limit=self.runner.vocab_limit,
            max_num_seqs=config.scheduler.max_num_seqs,
            max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        )
        if config.model.device == "cuda" and not config.scheduler.enforce_eager:
            graphs.capture(
                None if progress is None else lambda n, of: progress("capturing CUDA graphs", n, of)
            )
        self.runner.graphs = graphs

    def execute(self, step: SchedulerOutput) -> StepHandle:
        """Launch a step."""
        return self.runner.execute(step)

    @property
    def replayed_tokens(self) -> int:
        """Size of the CUDA graph that the last step replayed, 0 if it used none."""
        return 0 if self.runner.graphs is None else self.runner.graphs.replayed_tokens


def allocate_kv_cache(
    plan: MemoryPlan, model: ModelConfig, dtype: torch.dtype, device: str
) -> torch.Tensor:
    """Return the pool, zeroed: [num_layers, 2, num_blocks, num_kv_heads, block_size, head_dim].

    Raises :class:`ConfigError` if the device has not that much memory.
    """
    shape = (model.num_layers, 2, plan.num_blocks, model.num_kv_heads, plan.block_size)
    try:
        return torch.zeros(*shape, model.head_dim, dtype=dtype, device=device)
    except RuntimeError as error:  # also what the host's allocator raises
        raise ConfigError(
            f"no memory for a KV pool of {plan.pool_bytes / GIB:.2f} GiB on {device}: lower "
            "--num-kv-blocks, --kv-cache-memory or --gpu-memory-utilization"
        ) from error


def choose_device(wanted: str) -> str:
    """Return the device to use; raise :class:`ConfigError` if the wanted one is not there."""
    available = {
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available(),
        "cpu": True,
    }
    if wanted == "auto":
        return next(name for name, there in available.items() if there)
    if not available[wanted]:
        raise ConfigError(f"--device {wanted}: this machine has no such device")
    return wanted


def resolve(config: EngineConfig, model: ModelConfig, device: str) -> EngineConfig:
    """Fill in what follows from model and device: lengths, batch sizes, dtype and backend."""
    config = config.resolve(device=device, max_position_embeddings=model.max_position_embeddings)
    dtype, backend = config.model.dtype, config.model.attention_backend
    if dtype == "auto":
        dtype = "float32" if device == "cpu" else model.dtype
    if backend == "auto":
        backend = "triton" if device == "cuda" else "torch_blockwise"
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if backend == "triton" and device != "cuda" and not interpreted:
        raise ConfigError(
            f"--attention-backend triton needs a CUDA GPU; on {device} use torch_blockwise "
            "(or Triton's interpreter, TRITON_INTERPRET=1, to debug the kernels)"
        )
    return replace(config, model=replace(config.model, dtype=dtype, attention_backend=backend))


def free_device_bytes(config: EngineConfig, reserve: int = 0) -> int | None:
    """Bytes of GPU memory the pool may take, less ``reserve`` parameters that are still to be
    loaded; None where the host's memory counts instead."""
    if config.model.device != "cuda":
        return None
    free, total = torch.cuda.mem_get_info()
    to_load = reserve * DTYPE_BYTES[config.model.dtype]
    return int(total * config.cache.gpu_memory_utilization) - (total - free) - to_load


def make_backend(config: EngineConfig, model: ModelConfig) -> AttentionBackend:
    """Return the attention backend; Triton is imported only if it is wanted."""
    if config.model.attention_backend == "triton":
        from pageserve.attention.triton import TritonBackend

        return TritonBackend()
    dtype = getattr(torch, config.model.dtype)
    return TorchBlockwiseBackend(
        model.num_heads,
        model.num_kv_heads,
        model.head_dim,
        config.cache.block_size,
        dtype,
        device=config.model.device,
    )


def _fingerprint(path: Path, config: EngineConfig) -> str:
    """``fp_`` and ten hex digits over whatever may change a token: version, files, settings."""
    files = sorted(p for p in path.iterdir() if p.is_file()) if path.is_dir() else [path]
    facts = [__version__, asdict(config.model), config.cache.block_size]
    facts += [(f.name, f.stat().st_size, int(f.stat().st_mtime)) for f in files]
    return "fp_" + hashlib.sha256(json.dumps(facts, default=str).encode()).hexdigest()[:10]
