"""A program for test_compiler.py: compiles kernels for a GPU that need not be there."""

import json
import sys
from typing import Any

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from pageserve.kernels.compiler import KernelCompiler
from pageserve.kernels.launch import launch, only_compiling

OFFSET = tl.constexpr(3)


class Driver:
    """What Triton asks of an H100's driver before it launches anything."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def launcher_cls(self, source: Any, metadata: Any) -> None:
        print("launcher of", source.name, flush=True)  # in the helper, where it is no result


@triton.jit
def shifted(x):
    return x + OFFSET


@triton.jit
def first(x_ptr, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(x_ptr + i, shifted(tl.load(x_ptr + i, mask=i < n)), mask=i < n)


@triton.jit
def second(x_ptr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(x_ptr + i, shifted(i))


@triton.jit
def broken(x_ptr, BLOCK: tl.constexpr):
    tl.store(x_ptr, tl.arange(0, BLOCK))  # a block to one place


def launch_good(x: torch.Tensor) -> None:
    launch(first, (1,), x, 100, BLOCK=128)
    launch(first, (1,), x, 100, BLOCK=128)
    launch(first, (1,), x, 100, BLOCK=256)
    launch(first, (1,), x.half(), 100, BLOCK=128)
    launch(second, (1,), x, BLOCK=128, num_warps=8)


def compile_all() -> None:
    """Compile ahead, then as if it were for a launch; print which of the latter were in the
    cache."""
    driver.set_active(Driver())
    x = torch.zeros(128)
    hits: list[tuple[str, bool]] = []
    with KernelCompiler() as compiler, compiler.compile_ahead():
        launch_good(x)
        if "broken" in sys.argv:
            launch(broken, (1,), x, BLOCK=128)
    triton.knobs.compilation.listener = lambda *, src, cache_hit, **_: hits.append(
        (src.name, cache_hit)
    )
    with only_compiling():
        launch_good(x)
    print(json.dumps(hits))
    if "broken" in sys.argv:
        with only_compiling():
            launch(broken, (1,), x, BLOCK=128)


def wait_for_death() -> None:
    """Have a kernel compiled and never come to the end."""
    driver.set_active(Driver())
    with KernelCompiler() as compiler, compiler.compile_ahead():
        launch(first, (1,), torch.zeros(128), 100, BLOCK=128)
        print(compiler.process.pid, flush=True)
        sys.stdin.read()
