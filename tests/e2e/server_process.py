"""A real server process for tests: started on a free port, stopped and checked at the end."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import httpx

ROOT = Path(__file__).resolve().parents[2]
START_TIMEOUT = 120.0


class ServerProcess:
    """``python server.py --port 0 …`` as a context manager; ``url`` is where it listens."""

    def __init__(self, *flags: str, wait_ready: bool = True, env: dict[str, str] | None = None):
        self.flags = flags
        self.wait_ready = wait_ready
        self.env = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1", **(env or {})}
        self.log: list[str] = []
        self.port = 0

    def __enter__(self) -> Self:
        self.process = subprocess.Popen(
            [sys.executable, "server.py", "--port", "0", *self.flags],
            cwd=ROOT,
            env=self.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,  # so that a test can signal the group, as a terminal does
        )
        threading.Thread(target=self._read_log, daemon=True).start()
        self._wait(lambda: self.port, "the port")
        if self.wait_ready:
            self._wait(lambda: self.get("/health").status_code == 200, "/health 200")
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(40)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                raise

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, timeout=10)

    def engine_pid(self) -> int:
        """Process id of the engine: the server's only child that runs multiprocessing.spawn."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        for pid in map(int, children.split()):
            if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes():
                return pid
        raise AssertionError("no engine process: " + self.text())

    def metric(self, name: str) -> float:
        """Sum of a metric's samples of exactly this name."""
        lines = self.get("/metrics").text.splitlines()
        found = [x for x in lines if re.match(re.escape(name) + r"[{ ]", x)]
        assert found, f"no metric {name}"
        return sum(float(line.rsplit(" ", 1)[1]) for line in found)

    def wait_quiet(self, timeout: float = 10.0) -> None:
        """Wait until nothing runs or waits and no block is held."""
        self._wait(
            lambda: (
                self.metric("vllm:num_requests_running") == 0
                and self.metric("vllm:num_requests_waiting") == 0
                and self.metric("vllm:kv_cache_usage_perc") == 0
            ),
            "an idle engine",
            timeout,
        )

    def text(self) -> str:
        return "".join(self.log)

    def _read_log(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.log.append(line)
            if not self.port and (match := re.search(r"listening on \S+:(\d+)", line)):
                self.port = int(match.group(1))

    def _wait(self, condition: object, what: str, timeout: float = START_TIMEOUT) -> None:
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            if self.process.poll() is not None:
                raise AssertionError(f"server left with {self.process.returncode}: {self.text()}")
            try:
                if condition():  # type: ignore[operator]
                    return
            except httpx.TransportError:
                pass  # not listening yet
            time.sleep(0.05)
        raise AssertionError(f"no {what} within {timeout} s: {self.text()}")


def run_to_exit(flags: Sequence[str], timeout: float = 60) -> subprocess.CompletedProcess[str]:
    """Run the server with flags that must make it leave by itself."""
    return subprocess.run(
        [sys.executable, "server.py", *flags],
        cwd=ROOT,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=timeout,
    )
