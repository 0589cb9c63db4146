"""The README's examples, copied as they stand, against a real server."""

import json

import pytest
from readme import blocks, needs_clients, run_block
from server_process import ServerProcess


@pytest.fixture(scope="module")
def server():
    with ServerProcess("--max-model-len", "512") as process:
        yield process


def test_curl(server):
    reply, stream = (run_block("bash", code, server) for code in blocks("bash", "curl"))
    assert "Paris" in json.loads(reply)["choices"][0]["message"]["content"]
    assert stream.rstrip().endswith("data: [DONE]")


@pytest.mark.parametrize(
    "code",
    [code for code in blocks("python") if not needs_clients(code)],
    ids=["sdk", "structured output", "tools", "offline"],
)
def test_python(server, code):
    assert run_block("python", code, server).strip()
