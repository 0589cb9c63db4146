"""The process of :mod:`pageserve.kernels.compiler`, started without importing Triton."""

import os
import signal
import subprocess
import sys

PIPE_BYTES = 1 << 20  # that the helper may be behind without holding the caller up
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # a fork copies one

CompilerProcess = subprocess.Popen[str]


def start_compiler() -> CompilerProcess:
    """Start the helper, which takes seconds to import Triton; end it by :func:`stop_compiler`."""
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "pageserve.kernels.compiler"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        pipesize=PIPE_BYTES,
        env={**os.environ, **ONE_THREAD, "PYTHONPATH": os.pathsep.join(sys.path)},
        start_new_session=True,  # Ctrl-C is for its caller, and its forks form a group
    )


def stop_compiler(process: CompilerProcess) -> None:
    """Leave nothing of it behind, whatever it is doing."""
    if process.returncode is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
