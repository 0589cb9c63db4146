"""The server process under signals, a stuck engine, odd addresses and oversized requests.

With a tiny model of random weights, so that it starts quickly.
"""

import concurrent.futures
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest
from server_process import ROOT, ServerProcess, run_to_exit

CMPL = "/v1/completions"
ENDLESS = {"prompt": [5, 6, 7], "max_tokens": 32_000, "ignore_eos": True}


@pytest.fixture(scope="module")
def model(tiny_checkpoint):
    return str(tiny_checkpoint("llama", max_position_embeddings=65_536))


@pytest.fixture
def start(model):
    return lambda *flags, **options: ServerProcess("--model", model, *flags, **options)


class Stream:
    """A streamed request, read in a thread of its own."""

    def __init__(self, server, **fields):
        self.frames = []
        self.ended = threading.Event()
        self._body = {**ENDLESS, "stream": True, **fields}
        self._url = server.url + CMPL
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        try:
            with httpx.stream("POST", self._url, json=self._body, timeout=60) as response:
                for line in response.iter_lines():
                    if line.startswith("data: "):
                        self.frames.append(line.removeprefix("data: "))
        finally:
            self.ended.set()

    def wait_for_frames(self, count):
        wait(lambda: len(self.frames) >= count)

    def last_error(self):
        assert self.ended.wait(30)
        assert "[DONE]" not in self.frames
        return json.loads(self.frames[-1])["error"]["code"]


def wait(condition, timeout=30.0):
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, "timed out"
        time.sleep(0.01)


def alive(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


# --- signals --------------------------------------------------------------------------------------


@pytest.mark.parametrize("seconds", ["0", "1"])
def test_what_does_not_end_in_the_drain_time_gets_an_error(start, seconds):
    """C131: streams get a frame, a whole reply 503, nobody a cut socket; exit code 0, no child."""
    with start("--drain-timeout", seconds, "--max-num-seqs", "3") as server:
        streams = [Stream(server) for _ in range(2)]
        with concurrent.futures.ThreadPoolExecutor() as pool:
            # Four requests for three seats: one of them waits.
            whole = [
                pool.submit(httpx.post, server.url + CMPL, json=ENDLESS, timeout=60)
                for _ in range(2)
            ]
            wait(lambda: server.metric("vllm:num_requests_running") == 3)
            wait(lambda: server.metric("vllm:num_requests_waiting") == 1)
            engine = server.engine_pid()
            server.process.send_signal(signal.SIGTERM)
            assert [s.last_error() for s in streams] == ["server_draining"] * 2
            for answer in whole:
                assert answer.result().status_code == 503
                assert answer.result().json()["error"]["code"] == "server_draining"
        assert server.process.wait(10) == 0
        wait(lambda: not alive(engine))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("seconds", [0, 0.3, 1])
def test_signals_to_the_whole_group_during_the_load(start, number, seconds):
    """C132: the engine does not die before the front, not even while it still imports, and nothing
    is left behind."""
    with start(wait_ready=False) as server:
        wait(lambda: server.get("/live").status_code == 200)
        time.sleep(seconds)  # different places of the load
        group = server.process.pid
        os.killpg(group, number)
        assert server.process.wait(10) == 0
        assert "Traceback" not in server.text()
        wait(lambda: not _group_lives(group))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_engine_is_not_left_behind_by_a_server_that_ends_during_its_imports(number, tmp_path):
    """Before it can drain, or for good. The engine still imports, too: when it first looks for its
    parent, that is another one."""
    server = subprocess.Popen(
        [sys.executable, "server.py", "--port", "0"],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    children = Path(f"/proc/{server.pid}/task/{server.pid}/children")
    pids: list[int] = []

    def launched() -> bool:
        pids[:] = map(int, children.read_text().split())
        return any(b"spawn_main" in Path(f"/proc/{i}/cmdline").read_bytes() for i in pids)

    wait(launched)
    time.sleep(0.2)  # it has read what it is to do
    server.send_signal(number)
    assert server.wait(10) == -number
    wait(lambda: not any(map(alive, pids)))
    assert list(tmp_path.iterdir()) == []


def test_second_signal_during_the_load_leaves_at_once(start):
    """C132"""
    with start(wait_ready=False) as server:
        wait(lambda: server.get("/live").status_code == 200)
        server.process.send_signal(signal.SIGTERM)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(10) in (0, 130)
        wait(lambda: not _group_lives(server.process.pid))


def _group_lives(group):
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if int(fields[2]) == group and fields[0] != "Z":
                return True
    return False


# --- a stuck engine -------------------------------------------------------------------------------


def test_stuck_engine_fails_liveness_and_may_recover_or_be_told_to_leave(start):
    """C135: a step that never ends, here a stopped process, with work waiting; idle is not it."""
    with start("--stall-timeout", "1", "--drain-timeout", "0") as server:
        engine = server.engine_pid()
        os.kill(engine, signal.SIGSTOP)
        time.sleep(1.5)
        assert server.get("/live").status_code == server.get("/health").status_code == 200
        stream = Stream(server, max_tokens=3)
        for path in ("/live", "/health"):
            wait(lambda path=path: server.get(path).status_code == 503, 10)
        os.kill(engine, signal.SIGCONT)
        assert stream.ended.wait(30) and stream.frames[-1] == "[DONE]"
        wait(lambda: server.get("/live").status_code == 200, 10)
        stream = Stream(server)
        stream.wait_for_frames(1)
        os.kill(engine, signal.SIGSTOP)
        server.process.send_signal(signal.SIGTERM)
        assert stream.last_error() == "server_draining"
        server.process.wait(30)
        wait(lambda: not alive(engine))


# --- addresses and processes ----------------------------------------------------------------------


def _has_ipv6():
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


@pytest.mark.skipif(not _has_ipv6(), reason="no IPv6 on this machine")
def test_ipv6_host_and_the_port_it_chose(start):
    """C139: port 0 prints the chosen one, in a URL that can be used as it is."""
    with start("--host", "::1", wait_ready=False) as server:
        url = f"http://[::1]:{server.port}"
        assert server.port and f"listening on {url}\n" in server.text()
        assert httpx.get(url + "/live").status_code == 200


def test_host_that_is_not_ours():
    """C139: one sentence that names the host, before anything is loaded."""
    result = run_to_exit(["--host", "192.0.2.1", "--port", "0"])
    assert result.returncode == 1
    assert "--host 192.0.2.1" in result.stderr and "Traceback" not in result.stderr


def test_several_front_workers_are_refused():
    """C140: there is no such option, so no second engine with weights of its own."""
    result = run_to_exit(["--workers", "2"])
    assert result.returncode != 0
    assert "--workers" in result.stderr


# --- clients --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(model):
    flags = ("--max-num-batched-tokens", "16", "--max-num-seqs", "2")
    with ServerProcess("--model", model, *flags) as process:
        yield process


def text_of(server):
    body = {"prompt": "a", "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    return httpx.post(server.url + CMPL, json=body, timeout=30).json()["choices"][0]["text"]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("when", ["prefill", "queue"])
def test_client_that_leaves_before_the_first_token(server, stream, when):
    """Conformance 48, C072: the blocks of a prompt of which a few chunks are computed come back."""
    expected = text_of(server)
    company = [Stream(server) for _ in range(2)] if when == "queue" else []
    for other in company:
        other.wait_for_frames(1)
    started = server.metric("vllm:iteration_tokens_total_count")
    body = json.dumps({**ENDLESS, "prompt": [5] * 20_000, "stream": stream}).encode()
    with socket.create_connection(("127.0.0.1", server.port)) as raw:
        head = f"POST {CMPL} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        raw.sendall(head.encode() + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
        if when == "queue":
            wait(lambda: server.metric("vllm:num_requests_waiting") == 1)
        else:
            wait(lambda: server.metric("vllm:kv_cache_usage_perc") > 0)
            wait(lambda: server.metric("vllm:iteration_tokens_total_count") > started + 2)
    if when == "queue":
        wait(lambda: server.metric("vllm:num_requests_waiting") == 0)
        assert all(not other.ended.is_set() for other in company)
        for entry in server.get("/v1/requests").json()["data"]:
            httpx.post(f"{server.url}/v1/requests/{entry['id']}/cancel")
        assert {other.last_error() for other in company} == {"request_cancelled"}
    server.wait_quiet()
    assert text_of(server) == expected


OVERSIZED = {
    "n": {"n": 5_000_000},
    "best_of": {"best_of": 10**6},
    "logprobs": {"logprobs": 10**9},
    "prompt_logprobs": {"prompt_logprobs": 10**9},
    "prompts": {"prompt": [[1]] * 10**5},
    "stop strings": {"stop": ["x"] * 10**5},
    "a stop string": {"stop": "x" * 5_000_000},
    "logit_bias": {"logit_bias": {str(i): 1 for i in range(10**6)}},
    "min_tokens": {"min_tokens": 10**9},
    "a prompt": {"prompt": "x" * 20_000_000},
}


def test_oversized_requests_take_no_memory(server):
    """C125: refused, with less than 100 MB of memory that stays."""

    def resident():
        pages = Path(f"/proc/{server.process.pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")

    expected, before = text_of(server), resident()
    for name, fields in OVERSIZED.items():
        response = httpx.post(server.url + CMPL, json={"prompt": "a", **fields}, timeout=60)
        assert response.status_code == 400, name
        assert len(response.content) < 2048
    body = b'{"prompt":"' + b"x" * 200_000_000
    headers = {"content-type": "application/json"}
    with contextlib.suppress(httpx.WriteError):  # the connection may close before all is sent
        assert httpx.post(server.url + CMPL, content=body, headers=headers).status_code == 413
    assert text_of(server) == expected
    assert resident() - before < 100e6
    server.wait_quiet()


def test_models_defaults_apply_unless_switched_off(model, tmp_path):
    """C088: generation_config.json lies under the request; --generation-config none ignores it."""
    path = shutil.copytree(model, tmp_path / "model")
    (path / "generation_config.json").write_text('{"temperature": 0.6, "top_k": 20}')
    for flags, expected in (((), (0.6, 20)), (("--generation-config", "none"), (None, None))):
        with ServerProcess("--model", str(path), *flags) as server:
            found = server.get("/server_info").json()["defaults"]
            assert (found["temperature"], found["top_k"]) == expected
