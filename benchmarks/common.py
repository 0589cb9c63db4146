"""What the benchmarks share: the workload, percentiles, machine facts, the result line."""

import json
import os
import platform
import random
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"
SYSTEM = (
    "You are a helpful assistant on the site of a public library. Answer the visitor's question "
    "in one short paragraph of plain English. Do not use lists or headings, do not guess: if you "
    "are not sure of a fact, say so, and name a kind of book in which the visitor can look it up."
)
QUESTIONS = (
    "What is the capital of France?",
    "Why is the sky blue?",
    "How do bees make honey?",
    "What does a compiler do?",
    "Name three uses of copper.",
    "Who wrote the play Hamlet, and what is it about?",
    "How far away is the Moon, and how do we know?",
    "What is the difference between weather and climate?",
    "Explain how a refrigerator keeps food cold.",
    "Why do leaves change colour in autumn?",
    "What is a prime number? Give five examples.",
    "How does a bill become a law in a parliament?",
    "What causes the tides?",
    "Describe how bread is baked, from flour to loaf.",
    "What is photosynthesis and why does it matter?",
    "How does a bicycle stay upright when it moves?",
    "What was the first program ever written for a machine?",
    "Why is salt put on icy roads in winter?",
    "How do vaccines work?",
    "What is inflation, and who does it hurt the most?",
    "Why does a magnet attract iron but not wood?",
    "How do whales sleep without drowning?",
    "What is the largest desert in the world?",
    "How does the internet find the right computer?",
)


@dataclass(frozen=True)
class Job:
    """A prompt of token ids and exactly how many tokens to generate for it."""

    prompt_token_ids: list[int]
    budget: int


def chat_jobs(tokenizer: Any, count: int, low: int, high: int, turn: int = 0) -> list[Job]:
    """``count`` chat prompts that share a system message, with budgets uniform in [low, high];
    another ``turn`` has other questions and the same budgets. Models without a chat template get
    the same as plain text."""
    from pageserve.api.chat import render_chat

    rng = random.Random(0)
    jobs = []
    for i in range(count):
        question = QUESTIONS[i % len(QUESTIONS)]
        if i >= len(QUESTIONS) or turn:
            question = f"({turn}.{i}) {question}"
        messages = [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": question},
        ]
        if tokenizer.chat_template is None:
            ids = tokenizer.encode(f"{SYSTEM}\n\n{question}\n", add_special_tokens=True)
        else:
            ids = tokenizer.encode(render_chat(tokenizer, messages), add_special_tokens=False)
        jobs.append(Job(ids, rng.randint(low, high)))
    return jobs


def percentile(values: Sequence[float], p: float) -> float:
    """Nearest-rank percentile, ``p`` from 0 to 100."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(p / 100 * len(ordered)))]


def machine() -> dict[str, Any]:
    """Hardware, versions, commit and command, for the result line."""
    facts: dict[str, Any] = {
        "command": _command(),
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "commit": _commit(),
    }
    if torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name()
    return facts


def memory_bandwidth(device: str) -> float:
    """Bytes per second between a device and its memory: what all threads of this host read (best of
    five), or what a large copy on the GPU reads and writes. Takes 8 GiB of the GPU meanwhile."""
    if device == "cuda":
        return _copy_bandwidth()
    data = torch.ones(128 * 2**20)
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        data.sum()
        best = min(best, time.perf_counter() - start)
    return data.nbytes / best


def _copy_bandwidth() -> float:
    source = torch.empty(2**30, dtype=torch.int32, device="cuda")
    target = torch.empty_like(source)
    target.copy_(source)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(5):
        target.copy_(source)
    end.record()
    end.synchronize()
    num_bytes = 5 * 2 * source.nbytes
    del source, target
    torch.cuda.empty_cache()
    return num_bytes / (start.elapsed_time(end) / 1e3)


def synchronise(device: str) -> None:
    """Wait until a device has done all its work, so that a clock may be read."""
    if device == "cuda":
        torch.cuda.synchronize()


def name_of(model: str) -> str:
    """What a result calls a model: the last part of a path, which others do not have."""
    return Path(model).name if Path(model).exists() else model


def report(result: dict[str, Any], json_path: str | None) -> None:
    """Print the result as the last line, and write it to a file if one is named."""
    line = json.dumps(result)
    if json_path:
        Path(json_path).write_text(json.dumps(result, indent=1) + "\n")
    print(line)
    sys.stdout.flush()


def _command() -> str:
    """This process' command line as one would type it in the root of the repository, without the
    folders of this machine."""
    script = Path(sys.argv[0])
    given = [Path(a).name if a.startswith("/") else a for a in sys.argv[1:]]
    return shlex.join(["python", f"{script.parent.name}/{script.name}", *given])


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(x.split(":", 1)[1].strip() for x in lines if x.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()


def _commit() -> str:
    """The checked-out commit, "-dirty" if any file but a result differs from it."""
    here = Path(__file__).parent

    def git(*args: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["git", *args], cwd=here, capture_output=True, text=True)

    commit = git("describe", "--always").stdout.strip()
    if not commit:
        return "unknown"
    code = git("diff", "--quiet", "HEAD", "--", ":/", ":(exclude)results")
    return commit + "-dirty" * (code.returncode != 0)
