"""The README's examples, copied as they stand, against a real server."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from server_process import ServerProcess

README = (Path(__file__).resolve().parents[2] / "README.md").read_text()
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", README, re.S)
CURLS = [code for language, code in BLOCKS if language == "bash" and code.startswith("curl")]
PYTHONS = [code for language, code in BLOCKS if language == "python"]


@pytest.fixture(scope="module")
def server():
    with ServerProcess("--max-model-len", "512") as process:
        yield process


def run(command, server):
    """Run an example against the test's port; returns what it prints."""
    command = [part.replace("http://127.0.0.1:8000", server.url) for part in command]
    env = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_curl(server):
    reply, stream = (run(["bash", "-c", code], server) for code in CURLS)
    assert "Paris" in json.loads(reply)["choices"][0]["message"]["content"]
    assert stream.rstrip().endswith("data: [DONE]")


@pytest.mark.parametrize("code", PYTHONS, ids=["sdk", "structured output", "tools", "offline"])
def test_python(server, code):
    assert run([sys.executable, "-c", code], server).strip()
