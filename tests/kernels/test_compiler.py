"""Kernels compiled ahead in other processes are the ones that a launch looks for."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
KERNELS = ["first", "first", "first", "second"]  # in launch_good, each once


def start(call: str, cache: Path, *argv: str, **options: Any) -> subprocess.Popen[str]:
    path = os.pathsep.join([str(HERE), *sys.path])
    env = {**os.environ, "PYTHONPATH": path, "TRITON_CACHE_DIR": str(cache)}
    return subprocess.Popen(
        [sys.executable, "-c", f"import ahead; ahead.{call}()", *argv],
        env={**env, "TRITON_INTERPRET": "0"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def launchers(errors: str) -> list[str]:
    return sorted(x.split()[-1] for x in errors.splitlines() if x.startswith("launcher of"))


def test_launches_find_what_was_compiled_ahead(tmp_path):
    """No key differs, not even of a kernel whose callee the caller has met in another kernel, and
    what is there already is not compiled again. The C part is made once for each list of types."""
    cold = start("compile_all", tmp_path)
    output, errors = cold.communicate()
    assert cold.returncode == 0, errors
    assert json.loads(output) == [[name, True] for name in KERNELS]
    assert launchers(errors) == ["first", "first", "second"]

    warm = start("compile_all", tmp_path)
    output, errors = warm.communicate()
    assert warm.returncode == 0, errors
    assert json.loads(output) == [] and launchers(errors) == []


def test_a_kernel_that_does_not_compile_raises_at_its_launch(tmp_path):
    process = start("compile_all", tmp_path, "broken")
    output, errors = process.communicate()
    assert json.loads(output) == [[name, True] for name in KERNELS]
    assert process.returncode == 1
    assert "not all kernels were compiled ahead" in errors
    assert errors.count("CompilationError") >= 2  # in the process for it, and at the launch


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_no_process_is_left_behind(tmp_path, how):
    process = start("wait_for_death", tmp_path)
    assert process.stdout is not None
    helper = int(process.stdout.readline())
    process.send_signal(how)
    process.communicate()
    deadline = time.monotonic() + 60
    while group_lives(helper):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def group_lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
