"""Everything that touches a device, once per device: load, size the pool, run steps."""

import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from pageserve import __version__
from pageserve.attention import AttentionBackend
from pageserve.attention.torch_blockwise import TorchBlockwiseBackend
from pageserve.config import ConfigError, EngineConfig
from pageserve.hub import resolve_model
from pageserve.kernels.compiler_process import CompilerProcess
from pageserve.messages import SchedulerOutput
from pageserve.model_config import ModelConfig, load_model_config
from pageserve.models import load_model
from pageserve.tokenizer import load_tokenizer
from pageserve.utils import cdiv
from pageserve.worker.memory import GIB, MemoryPlan, plan_memory
from pageserve.worker.model_runner import ModelRunner, StepHandle
from pageserve.worker.request_states import RequestStates

if TYPE_CHECKING:  # imports Triton, which only CUDA machines need to have
    from pageserve.kernels.compiler import KernelCompiler
    from pageserve.worker.cuda_graphs import CUDAGraphRunner

logger = logging.getLogger("pageserve.worker")


class Worker:
    """Owns the model, the KV pool and the model runner of one device."""

    def __init__(
        self,
        config: EngineConfig,
        progress: Callable[[str, int, int], None] | None = None,
        compiler: CompilerProcess | None = None,
    ) -> None:
        """Load ``config.model.model``; ``progress(phase, done, total)`` is called on the way.

        A ``compiler`` that was started before saves a GPU's start-up seconds.
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
        rehearses = backend.supports_cuda_graph and device == "cuda"
        with _kernel_compiler(compiler) if rehearses else nullcontext() as kernel_compiler:
            with _naming_flags("the weights", "a smaller model, or a --dtype of fewer bytes"):
                self.model = load_model(
                    path,
                    self.model_config,
                    backend=backend,
                    dtype=dtype,
                    device=torch.device(device),
                    max_model_len=config.model.max_model_len,
                    progress=progress,
                )
            self.tokenizer = load_tokenizer(path)
            vocab_limit = min(self.tokenizer.size, self.model_config.vocab_size)
            graph_bytes = 0
            if kernel_compiler is not None:
                graph_bytes = self._rehearse(kernel_compiler, config, vocab_limit, dtype, progress)
        plan = plan_memory(
            config,
            self.model_config,
            weight_bytes=self.model.weight_bytes(device),
            free_bytes=free_device_bytes(config, graph_bytes),
        )
        self.num_kv_blocks = plan.num_blocks
        self.memory_bytes = {"weights": plan.weight_bytes, "kv_cache": plan.pool_bytes}
        model = self.model_config
        kv_cache = allocate_kv_cache(plan, model, dtype, device)
        self.runner = ModelRunner(
            self.model,
            backend,
            kv_cache,
            max_num_seqs=config.scheduler.max_num_seqs,
            max_model_len=config.model.max_model_len,
            vocab_limit=vocab_limit,
            eos_token_ids=list(model.eos_token_ids),
            timed=config.scheduler.trace is not None,
        )
        if backend.supports_cuda_graph:
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

    def _rehearse(
        self,
        compiler: "KernelCompiler",
        config: EngineConfig,
        vocab_limit: int,
        dtype: torch.dtype,
        progress: Callable[[str, int, int], None] | None,
    ) -> int:
        """Compile the kernels and meet the largest steps, on a pool of two layers; return the bytes
        to leave for graphs. What the largest step takes stays reserved, and so is counted."""
        from pageserve.worker.cuda_graphs import REHEARSAL_TOKENS

        if progress is not None:
            progress("compiling kernels", 0, 0)
        model, block_size = self.model_config, config.cache.block_size
        num_layers = min(2, model.num_layers)  # the last one narrows to the tokens that sample
        shape = (num_layers, 2, cdiv(REHEARSAL_TOKENS, block_size), model.num_kv_heads, block_size)
        with _naming_flags("the largest step", "--max-num-batched-tokens or --max-num-seqs"):
            kv_cache = torch.zeros(*shape, model.head_dim, dtype=dtype, device="cuda")
            assert config.scheduler.max_num_seqs is not None
            assert config.model.max_model_len is not None
            states = RequestStates(
                config.scheduler.max_num_seqs,
                config.model.max_model_len,
                block_size,
                vocab_limit,
                kv_cache.device,
            )
            graphs = self._make_graphs(config, kv_cache, states, vocab_limit)
            return graphs.rehearse(compiler, capturing=not config.scheduler.enforce_eager)

    def _use_graphs(
        self, config: EngineConfig, progress: Callable[[str, int, int], None] | None
    ) -> None:
        runner = self.runner
        graphs = self._make_graphs(config, runner.kv_cache, runner.states, runner.vocab_limit)
        if config.model.device == "cuda" and not config.scheduler.enforce_eager:
            with _naming_flags("CUDA graphs", "--gpu-memory-utilization or --max-num-seqs"):
                graphs.capture(
                    None
                    if progress is None
                    else lambda n, of: progress("capturing CUDA graphs", n, of)
                )
        runner.graphs = graphs

    def _make_graphs(
        self,
        config: EngineConfig,
        kv_cache: torch.Tensor,
        states: RequestStates,
        vocab_limit: int,
    ) -> "CUDAGraphRunner":
        from pageserve.worker.cuda_graphs import CUDAGraphRunner

        assert config.scheduler.max_num_seqs is not None
        assert config.scheduler.max_num_batched_tokens is not None
        return CUDAGraphRunner(
            self.model,
            kv_cache,
            states,
            vocab_limit=vocab_limit,
            max_num_seqs=config.scheduler.max_num_seqs,
            max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        )

    def execute(self, step: SchedulerOutput) -> StepHandle:
        """Launch a step."""
        return self.runner.execute(step)

    @property
    def replayed_tokens(self) -> int:
        """Size of the CUDA graph that the last step replayed, 0 if it used none."""
        return 0 if self.runner.graphs is None else self.runner.graphs.replayed_tokens

    def prepare_idle(self) -> bool:
        """Spend a moment without work on what later steps will want; False: nothing is left."""
        return self.runner.graphs is not None and self.runner.graphs.capture_next()


def _kernel_compiler(process: CompilerProcess | None) -> "KernelCompiler":
    from pageserve.kernels.compiler import KernelCompiler

    return KernelCompiler(process)


@contextmanager
def _naming_flags(what: str, remedy: str) -> Iterator[None]:
    """Turn the device's running out of memory into a :class:`ConfigError` that says what helps."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ConfigError(f"no GPU memory for {what}: choose {remedy}") from error


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
    """Bytes of GPU memory the pool may take, less ``reserve`` bytes for what is still to come; None
    where the host's memory counts instead."""
    if config.model.device != "cuda":
        return None
    free, total = torch.cuda.mem_get_info()
    return int(total * config.cache.gpu_memory_utilization) - (total - free) - reserve


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
