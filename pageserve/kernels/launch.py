"""Launching and compiling kernels, programmatic dependent launch, and the tile product.

A kernel launched with ``launch_pdl`` may start while its predecessor still runs. The rule here:
a kernel reads constants (weights) at will, calls :func:`pdl_wait` before it touches anything else,
and only then lets its own successor start. So all kernels but the direct predecessor are complete
when a kernel starts, and all are once it has waited. What is sure to be older than the predecessor
may therefore be read before that, too, and written what neither touches (see ``paged_decode.py``).
"""

import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import triton
import triton.language as tl

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET", "0") == "1")


_compiling = False


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """Launch ``kernel`` on ``grid``; within :func:`only_compiling` have it compiled instead."""
    if _compiling:
        kernel.warmup(*args, grid=grid, **options)
    else:
        kernel[grid](*args, **options)


def compiling() -> bool:
    """Whether launches only compile, so that nothing they were to write is there."""
    return _compiling


@contextmanager
def only_compiling() -> Iterator[None]:
    """Within the ``with``, compile what is launched, and run nothing."""
    global _compiling
    _compiling = True
    try:
        yield
    finally:
        _compiling = False


@triton.jit
def dot(a, b):
    """Return the float32 product of two tiles, float32 operands at full precision."""
    if INTERPRETED:  # its numpy has no bfloat16 product
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def pdl_wait(PDL: tl.constexpr):
    """Wait until all earlier kernels are complete, then allow the next one to start."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@functools.cache
def pdl_options(device: torch.device) -> dict[str, Any]:
    """Return the launch options of a kernel that follows the rule above, for ``device``."""
    if INTERPRETED or device.type != "cuda" or os.environ.get("PAGESERVE_PDL", "1") == "0":
        return {"PDL": False}
    if torch.cuda.get_device_capability(device)[0] < 9:
        return {"PDL": False}
    return {"PDL": True, "launch_pdl": True}


@functools.cache
def num_sms(device: torch.device) -> int:
    """Return the number of multiprocessors of ``device`` (4 for the interpreter)."""
    if device.type != "cuda":
        return 4
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Return the bytes of shared memory a program can have (as on an H200 for the interpreter)."""
    if device.type != "cuda":
        return 232448
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


def check(condition: bool, message: str) -> None:
    """Raise ValueError with ``message`` unless ``condition`` holds."""
    if not condition:
        raise ValueError(message)
