"""The process of :mod:`pageserve.kernels.compiler`, started without importing Triton."""

import os
import signal
import subprocess
import sys
from contextlib import suppress

PIPE_BYTES = 1 << 20  # that the helper may be behind without holding the caller up
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # a fork copies one

CompilerProcess = subprocess.Popen[str]


def start_compiler() -> CompilerProcess:
    """Start the helper, which takes seconds to import Triton; end it by :func:`stop_compiler`."""
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "pageserve.kernels.compiler"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **ONE_THREAD, "PYTHONPATH": os.pathsep.join(sys.path)},
        start_new_session=True,  # Ctrl-C is for its caller, and its forks form a group
    )
    import fcntl  # not on every system, but where there is CUDA

    assert process.stdin is not None
    with suppress(OSError):  # a user may have too many large ones, and then it is slower
        fcntl.fcntl(process.stdin, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    return process


def stop_compiler(process: CompilerProcess) -> None:
    """Leave nothing of it behind, whatever it is doing."""
    if process.returncode is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
