"""Kernels compiled before their first launch, in processes of their own.

Half of a compile holds the interpreter's lock, so threads do little for the dozens that a cold
start needs. A helper without a GPU imports Triton while the weights load, and forks a process for
each kernel; what these leave in Triton's cache on disk is all that the caller needs.

    caller ── a line per kernel: where it is defined, for what it is specialised ──► helper
           ◄── a line per kernel: its number, the seconds it took ──────────────────  and its forks

The helper ends with its input, so it does not outlive its caller.
"""

import hashlib
import importlib
import json
import logging
import os
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, NoReturn, Self

import triton
from triton._C.libtriton import get_cache_invalidating_env_vars
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.cache import get_cache_key, get_cache_manager, triton_key
from triton.runtime.driver import driver

from pageserve.kernels.compiler_process import CompilerProcess, start_compiler, stop_compiler
from pageserve.kernels.launch import only_compiling

logger = logging.getLogger(__name__)

MAX_PROCESSES = 16  # more than that end no sooner than the slowest kernel


class KernelCompiler:
    """The helper; a context manager that leaves no process behind."""

    def __init__(self, process: CompilerProcess | None = None) -> None:
        """Take over ``process``, started earlier, or start one."""
        self.process = process or start_compiler()
        self._names: dict[tuple[Any, str], str] = {}  # kernel and specialisation → what to call it
        self._launchers: set[tuple[Any, str]] = set()  # kernel and types that have one

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        stop_compiler(self.process)

    @contextmanager
    def compile_ahead(self) -> Iterator[None]:
        """Within the ``with``, run no kernel; at its end all that were launched are compiled.

        One that does not compile raises when it is launched in earnest. For one ``with`` only.
        """
        kind, target = type(driver.active), driver.active.get_current_target()
        self._send([kind.__module__, kind.__name__, vars(target)])
        with only_compiling(), triton.knobs.runtime.scope():
            triton.knobs.runtime.jit_cache_hook = self._submit
            yield
        if self._names:  # else all were in the cache, and the helper may still be importing
            self.wait()

    def wait(self) -> None:
        """Wait until all that was submitted is compiled."""
        start = time.perf_counter()
        output, _ = self.process.communicate()
        # What modules print while they are imported comes along.
        results = [json.loads(line) for line in output.splitlines() if line.startswith("[")]
        names = list(self._names.values())
        for number, seconds in sorted(results, key=lambda result: -result[1]):
            logger.debug("compiled %s in %.2f s", names[number], seconds)
        logger.debug(
            "compiled %d kernels in %.1f s of CPU, waited for them %.1f s",
            len(results),
            sum(seconds for _, seconds in results),
            time.perf_counter() - start,
        )
        if self.process.returncode != 0:
            logger.warning("not all kernels were compiled ahead: the first steps may be slow")

    def _submit(self, *, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        """Triton's hook for a kernel that is not in memory: whether it is compiled elsewhere."""
        specialization, kernel = compile["specialization_data"], fn.jit_function
        if (kernel, specialization) in self._names:
            return True
        source = ASTSource(
            kernel, compile["signature"], compile["constants"], compile["configs"][0]
        )
        if _is_cached(source, json.loads(specialization)["options"]):
            return False  # loaded at once
        # The C function that launches it depends on types alone: one of the forks makes it.
        types = (kernel, str(compile["signature"]))
        launcher = types not in self._launchers
        self._launchers.add(types)
        constants = (f"{kernel.arg_names[i]}={v}" for (i, *_), v in source.constants.items())
        name = " ".join((fn.name, *constants, f"num_warps={compile['num_warps']}"))
        self._names[kernel, specialization] = name
        return self._send([fn.module, fn.name, kernel.cache_key, specialization, launcher])

    def _send(self, line: list[Any]) -> bool:
        """Return whether the helper still took it; if not, it has said why."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(line) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            return False
        return True


def _is_cached(source: ASTSource, options: dict[str, Any]) -> bool:
    """Whether the cache on disk has a kernel, looked up as ``triton.compile`` does."""
    backend = make_backend(driver.active.get_current_target())
    tuples = {k: tuple(v) if isinstance(v, list) else v for k, v in options.items()}  # from JSON
    env_vars = get_cache_invalidating_env_vars()
    key = get_cache_key(source, backend, backend.parse_options(tuples), env_vars)
    manager = get_cache_manager(hashlib.sha256(key.encode()).hexdigest())
    return manager.get_group(f"{source.name[:150]}.json") is not None


# --- helper ---------------------------------------------------------------------------------------


def main() -> int:
    """Compile what standard input names, a process each; returns 0 if all went well."""
    results = os.dup(1)
    os.dup2(2, 1)  # what Triton prints is none
    parent, limit = os.getppid(), min(MAX_PROCESSES, len(os.sched_getaffinity(0)))
    warnings.simplefilter("ignore")  # the caller shows them, once for all kernels
    triton_key()  # reads all of Triton: once for all processes
    header = sys.stdin.readline()
    if not header:
        return 0
    _stand_in(*json.loads(header))
    running, failed = 0, False
    for number, line in enumerate(sys.stdin):
        if os.getppid() != parent:  # killed: nobody wants the rest
            break
        if running == limit:
            failed |= os.wait()[1] != 0
            running -= 1
        if os.fork() == 0:
            _run_job(number, line, results)
        running += 1
    for _ in range(running):
        failed |= os.wait()[1] != 0
    return int(failed)


def _stand_in(module: str, name: str, target: dict[str, Any]) -> None:
    """Make Triton believe that the caller's GPU is here; its driver itself is not asked."""
    active = getattr(importlib.import_module(module), name)()
    active.get_current_device = lambda: 0
    active.get_current_target = lambda: GPUTarget(**target)
    driver.set_active(active)


def _run_job(number: int, line: str, results: int) -> NoReturn:
    """Compile, write so to the file ``results`` and leave, without what a process does at its end:
    it is a copy of another."""
    code = 1
    try:
        module, name, cache_key, specialization, launcher = json.loads(line)
        kernel = getattr(importlib.import_module(module), name)
        # Triton's key of a function depends on which others have been asked for theirs before, so
        # the caller's is taken: under that key it will look.
        kernel.hash = cache_key
        compiled = kernel.preload(specialization)
        if launcher:
            driver.active.launcher_cls(compiled.src, compiled.metadata)
        seconds = sum(os.times()[:4])  # of CPU, with those of assembler and C compiler
        os.write(results, json.dumps([number, seconds]).encode() + b"\n")
        code = 0
    except BaseException:  # whatever it is, the caller meets it when it launches the kernel
        traceback.print_exc()
    finally:
        os._exit(code)


if __name__ == "__main__":
    os._exit(main())  # tearing torch down would be waited for
