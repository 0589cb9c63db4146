"""The real server process with the embedded model and the real ``openai`` client."""

import concurrent.futures
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time

import httpx
import openai
import pytest
from server_process import ROOT, ServerProcess, run_to_exit

MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]
GREEDY = {"temperature": 0, "extra_body": {"repetition_penalty": 1.0}}


@pytest.fixture(scope="module")
def server():
    with ServerProcess("--max-model-len", "1024", "--max-num-seqs", "16") as process:
        yield process


@pytest.fixture(scope="module")
def client(server):
    return openai.OpenAI(base_url=server.url + "/v1", api_key="unused", max_retries=0, timeout=60)


def _stream_text(client, **options):
    stream = client.chat.completions.create(
        model="", messages=MESSAGES, stream=True, **GREEDY, **options
    )
    return "".join(c.choices[0].delta.content or "" for c in stream if c.choices)


def test_chat_answers_in_english(client):
    reply = client.chat.completions.create(model="", messages=MESSAGES, max_tokens=24, **GREEDY)
    assert "Paris" in reply.choices[0].message.content
    assert reply.usage.completion_tokens <= 24


def test_stream_equals_reply(client):
    reply = client.chat.completions.create(model="", messages=MESSAGES, max_tokens=24, **GREEDY)
    assert _stream_text(client, max_tokens=24) == reply.choices[0].message.content


def test_completions_and_models(client, server):
    model = client.models.list().data[0]
    assert client.models.retrieve(model.id).id == model.id
    reply = client.completions.create(
        model=model.id, prompt="The capital of France is", max_tokens=5, **GREEDY
    )
    assert "Paris" in reply.choices[0].text
    assert reply.choices[0].finish_reason == "length"


def test_32_concurrent_streams_agree(client, server):
    """Twice as many streams as seats: all finish, all with the text of the lone request."""
    alone = _stream_text(client, max_tokens=16)
    with concurrent.futures.ThreadPoolExecutor(32) as pool:
        texts = list(pool.map(lambda _: _stream_text(client, max_tokens=16), range(32)))
    assert set(texts) == {alone}
    server.wait_quiet()


def test_client_that_leaves_frees_its_blocks(server):
    """C072: closing a stream before its end stops the work within a few steps."""
    body = {"messages": MESSAGES, "max_tokens": 900, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", server.url + "/v1/chat/completions", json=body, timeout=30) as r:
        lines = (x for x in r.iter_lines() if x.startswith("data: "))
        for _ in range(3):
            next(lines)
    before = server.metric("vllm:generation_tokens_total")
    server.wait_quiet()
    assert server.metric("vllm:generation_tokens_total") - before < 100


def test_half_sent_body_hurts_nobody(client, server):
    with socket.create_connection(("127.0.0.1", server.port)) as raw:
        raw.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b'Content-Length: 1000\r\n\r\n{"messages": ['
        )
        assert _stream_text(client, max_tokens=4)
    server.wait_quiet()
    assert _stream_text(client, max_tokens=4)


def test_seeded_sampling_repeats_in_a_busy_batch(client):
    def sample(seed):
        return (
            client.chat.completions.create(
                model="", messages=MESSAGES, max_tokens=12, temperature=1.0, seed=seed
            )
            .choices[0]
            .message.content
        )

    alone = [sample(seed) for seed in range(4)]
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        busy = list(pool.map(sample, [s % 4 for s in range(12)]))
    assert busy == alone * 3
    assert len(set(alone)) > 1


def test_metrics_count_what_was_served(client, server):
    server.wait_quiet()
    before = server.metric("vllm:generation_tokens_total")
    client.completions.create(
        model="", prompt="One two three", max_tokens=7, extra_body={"ignore_eos": True}
    )
    assert server.metric("vllm:generation_tokens_total") - before == 7


# --- start and end --------------------------------------------------------------------------------


def test_health_is_503_while_loading_and_unknown_work_is_refused():
    """C134: no 200 before the first request can be served."""
    with ServerProcess("--max-model-len", "256", wait_ready=False) as server:
        statuses = []
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            response = server.get("/health")
            statuses.append(response.status_code)
            if response.status_code == 200:
                break
            assert response.json()["error"]["code"] == "model_loading"
            time.sleep(0.02)
        assert statuses[0] == 503 and statuses[-1] == 200
        body = {"messages": MESSAGES, "max_tokens": 1}
        assert httpx.post(server.url + "/v1/chat/completions", json=body).status_code == 200


def test_killed_engine_ends_streams_and_the_server():
    """C135: streams get an error frame and no [DONE], the process leaves with a non-zero code."""
    with ServerProcess("--max-model-len", "1024") as server:
        body = {"messages": MESSAGES, "max_tokens": 900, "ignore_eos": True, "stream": True}
        frames = []
        url = server.url + "/v1/chat/completions"
        with httpx.stream("POST", url, json=body, timeout=30) as response:
            for line in response.iter_lines():
                if line.startswith("data: "):
                    frames.append(line[6:])
                    if len(frames) == 3:
                        os.kill(server.engine_pid(), signal.SIGKILL)
        assert json.loads(frames[-1])["error"]["code"] == "engine_dead"
        assert "[DONE]" not in frames
        assert server.process.wait(5) != 0


def test_sigterm_drains(tmp_path):
    """C131: a running stream finishes, new work gets 503, the exit code is 0; the timeline is
    complete."""
    trace = tmp_path / "trace.json"
    flags = ("--max-model-len", "1024", "--drain-timeout", "200", "--trace", str(trace))
    with ServerProcess(*flags) as server:
        body = {"messages": MESSAGES, "max_tokens": 60, "ignore_eos": True, "stream": True}
        url = server.url + "/v1/chat/completions"
        frames = []
        with httpx.stream("POST", url, json=body, timeout=200) as response:
            for line in response.iter_lines():
                if line.startswith("data: "):
                    frames.append(line[6:])
                    if len(frames) == 3:
                        server.process.send_signal(signal.SIGTERM)
                        time.sleep(0.1)
                        refused = httpx.post(url, json={"messages": MESSAGES})
                        assert refused.status_code == 503
                        assert refused.json()["error"]["code"] == "server_draining"
                        assert server.get("/ready").status_code == 503
                        assert server.get("/live").status_code == 200
        assert frames[-1] == "[DONE]"
        assert server.process.wait(10) == 0
    assert [e["name"] for e in json.loads(trace.read_text())].count("finished: length") == 1


@pytest.mark.parametrize("loading", [True, False], ids=["loading", "idle"])
def test_sigterm_with_nothing_to_drain_leaves_at_once(loading):
    """C132: within 2 s, also in the middle of a load."""
    with ServerProcess("--max-model-len", "256", wait_ready=not loading) as server:
        start = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(10) == 0
        assert time.monotonic() - start < 4  # 2 s, and room for a busy machine


def test_port_is_free_again_at_once():
    """C139: a socket in TIME_WAIT does not keep the next server from starting."""
    with ServerProcess("--max-model-len", "256", wait_ready=False) as first:
        first.get("/live")
        port = first.port
    with ServerProcess("--port", str(port), wait_ready=False) as second:
        assert second.port == port


def test_interrupts_of_the_whole_group():
    """C132: Ctrl-C reaches the engine too; the first drains, the second leaves within a second."""
    with ServerProcess("--max-model-len", "1024") as server:
        body = {"messages": MESSAGES, "max_tokens": 900, "ignore_eos": True, "stream": True}
        url = server.url + "/v1/chat/completions"
        with httpx.stream("POST", url, json=body, timeout=60) as response:
            lines = (x for x in response.iter_lines() if x.startswith("data: "))
            next(lines)
            os.killpg(server.process.pid, signal.SIGINT)
            for _ in range(3):
                assert "error" not in json.loads(next(lines)[6:])
            os.killpg(server.process.pid, signal.SIGINT)
            assert server.process.wait(2) != 0


def test_taken_port_fails_before_anything_is_loaded():
    """C139: non-zero exit in under 2 s of work, the port in the message."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        result = run_to_exit(["--port", port])
    assert result.returncode != 0
    assert port in result.stderr


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--no-such-flag"], "--no-such-flag"),
        (["--block-size", "0"], "--block-size"),
        (["--port", "70000"], "--port"),
        (["--gpu-memory-utilization", "nan"], "--gpu-memory-utilization"),
        (["--device", "cuda"], "--device"),
        (["--max-model-len", "1000000"], "--max-model-len"),
        (["--model", "/no/such/dir"], "--model"),
        (["--num-kv-blocks", "4", "--kv-cache-memory", "1"], "--num-kv-blocks"),
    ],
)
def test_impossible_flags_name_the_flag(flags, words):
    result = run_to_exit(flags if "--port" in flags else [*flags, "--port", "0"])
    assert result.returncode != 0
    assert words in result.stdout + result.stderr
    assert "Traceback" not in result.stderr


def test_model_without_a_tokenizer_says_so(tiny_checkpoint, tmp_path):
    path = shutil.copytree(tiny_checkpoint("llama"), tmp_path / "model")
    (path / "tokenizer.json").unlink()
    result = run_to_exit(["--model", str(path), "--port", "0"])
    assert result.returncode != 0
    assert "tokenizer.json" in result.stdout + result.stderr
    assert "Traceback" not in result.stderr


def test_any_failure_while_loading_ends_the_process(tiny_checkpoint):
    """Also one that nobody foresaw: the engine beside must not keep the process from ending."""
    flags = ["--model", str(tiny_checkpoint("llama")), "--port", "0"]
    program = (
        "from pageserve import cli\n"
        "from pageserve.api import server\n"
        "server.load_generation_defaults = lambda path: 1 / 0\n"
        f"raise SystemExit(cli.serve({flags!r}))"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 1 and "ZeroDivisionError" in result.stderr
