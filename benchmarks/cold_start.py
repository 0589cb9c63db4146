"""What a first start takes, with nothing in Triton's cache, and what of it goes to what.

Starts the server with its default flags until it is ready, then the engine alone in a process of
its own, whose time is cut into phases: what a phase calls that is a phase itself does not count.
Each finds an empty cache; with --warm each starts once more and finds what the first one left. A
start before all others brings the files of libraries and compilers into memory.

What this does not show: how long that takes where they come from a slow disk.

    python benchmarks/cold_start.py --model DIR [--warm] [--json FILE]
"""

import argparse
import functools
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import machine, name_of, report

ROOT = Path(__file__).resolve().parents[1]


class Phases:
    """Seconds by phase; one that begins within another interrupts it."""

    def __init__(self, first: str, began: float) -> None:
        """``began`` is of the clock ``time.monotonic``, which processes share."""
        self.seconds: dict[str, float] = defaultdict(float)
        self._open = [first]
        self._last = began

    def _book(self) -> None:
        now = time.monotonic()
        self.seconds[self._open[-1]] += now - self._last
        self._last = now

    def begin(self, phase: str) -> None:
        self._book()
        self._open.append(phase)

    def end(self) -> None:
        self._book()
        self._open.pop()

    def wrap(self, owner: Any, name: str, phase: str) -> None:
        """Count what ``owner.name`` does as ``phase``."""
        call: Callable[..., Any] = getattr(owner, name)

        @functools.wraps(call)
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.begin(phase)
            try:
                return call(*args, **kwargs)
            finally:
                self.end()

        setattr(owner, name, counted)


class Kernels(logging.Handler):
    """Collects from the compiler's log lines what each kernel took."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: dict[str, float] = {}

    def emit(self, record: logging.LogRecord) -> None:
        if record.msg == "compiled %s in %.2f s" and isinstance(record.args, tuple):
            name, seconds = record.args
            self.seconds[str(name)] = float(str(seconds))


def start_engine(model: str, began: float) -> dict[str, Any]:
    """Start the engine in this process, which began at ``began``."""
    phases = Phases("imports", began)
    from pageserve.attention.triton import TritonBackend
    from pageserve.config import EngineConfig, ModelArgs
    from pageserve.engine.core import EngineCore
    from pageserve.kernels.compiler import KernelCompiler
    from pageserve.kernels.linear import LinearChooser
    from pageserve.worker import worker
    from pageserve.worker.cuda_graphs import CUDAGraphRunner

    kernels = Kernels()
    log = logging.getLogger(KernelCompiler.__module__)
    log.setLevel(logging.DEBUG)
    log.addHandler(kernels)
    phases.wrap(worker, "choose_device", "CUDA")
    phases.wrap(worker, "load_model", "weights")
    phases.wrap(worker, "load_tokenizer", "tokenizer")
    phases.wrap(worker.Worker, "_rehearse", "rehearsal")
    phases.wrap(KernelCompiler, "wait", "waiting for kernels")
    phases.wrap(worker, "allocate_kv_cache", "pool")
    phases.wrap(CUDAGraphRunner, "capture", "capture")
    phases.wrap(TritonBackend, "measure", "timing attention")
    phases.wrap(LinearChooser, "_time", "timing products")
    phases.begin("other")
    core = EngineCore(EngineConfig(ModelArgs(model=model)))
    phases.end()
    core.close()
    return {"phases": dict(phases.seconds), "kernels": kernels.seconds}


def time_server(model: str, cache: str) -> float:
    """Return the seconds from the command to a server that is ready."""
    began = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "server.py", "--model", model, "--port", "0"],
        cwd=ROOT,
        env={**os.environ, "TRITON_CACHE_DIR": cache},
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    lines = []
    try:
        for line in process.stderr:
            lines.append(line)
            if "ready:" in line:
                return time.monotonic() - began
    finally:
        process.terminate()
        process.communicate()
    raise RuntimeError("the server did not start:\n" + "".join(lines))


def time_engine(model: str, cache: str) -> dict[str, Any]:
    """Return the phases of an engine's start in a fresh process, and its kernels."""
    done = subprocess.run(
        [sys.executable, __file__, "--model", model, "--began", str(time.monotonic())],
        env={**os.environ, "TRITON_CACHE_DIR": cache},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--warm", action="store_true", help="start a second time, too")
    parser.add_argument("--json")
    parser.add_argument("--began", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.began is not None:
        print(json.dumps(start_engine(args.model, args.began)))
        return
    with tempfile.TemporaryDirectory() as cache:
        first = time_server(args.model, cache)
    starts: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as server, tempfile.TemporaryDirectory() as engine:
        for name in ["cold", "warm"][: 1 + args.warm]:
            starts[name] = {"server_seconds": time_server(args.model, server)}
            starts[name] |= time_engine(args.model, engine)
    kernels = starts["cold"]["kernels"]
    print(f"{len(kernels)} kernels, {sum(kernels.values()):.1f} s of CPU:")
    for kernel, seconds in sorted(kernels.items(), key=lambda item: -item[1]):
        print(f"{seconds:7.2f} s  {kernel}")
    print("\nseconds" + " " * 17 + "".join(f"{name:>8}" for name in starts))
    for phase in starts["cold"]["phases"]:
        cells = (start["phases"].get(phase, 0.0) for start in starts.values())
        print(f"{phase:<24}" + "".join(f"{cell:8.2f}" for cell in cells))
    totals = (sum(start["phases"].values()) for start in starts.values())
    print(f"{'engine':<24}" + "".join(f"{total:8.2f}" for total in totals))
    servers = (start["server_seconds"] for start in starts.values())
    print(f"{'server':<24}" + "".join(f"{seconds:8.2f}" for seconds in servers))
    print(f"the first start of all took {first:.2f} s\n")
    report(
        {
            "benchmark": "cold_start",
            "model": name_of(args.model),
            "machine": machine(),
            "first_server_seconds": first,
            "starts": starts,
        },
        args.json,
    )


if __name__ == "__main__":
    main()
