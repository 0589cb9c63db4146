"""The README's examples: found by language and first words, run as they stand."""

import os
import re
import subprocess
import sys

from server_process import ROOT, ServerProcess

README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", README, re.S)


def blocks(language: str, word: str = "") -> list[str]:
    """Return the blocks of a language that have ``word`` in them."""
    return [code for name, code in BLOCKS if name == language and word in code]


def needs_clients(code: str) -> bool:
    """Whether a block needs what ``.[clients]`` installs."""
    return any(name in code for name in ("langchain_openai", "litellm", "lm_eval"))


def run_block(language: str, code: str, server: ServerProcess, *more: str) -> str:
    """Run a block against the test's port, a shell's with ``more`` arguments behind it; return what
    it prints."""
    code = code.strip().replace("http://127.0.0.1:8000", server.url)
    if language == "python":
        command = [sys.executable, "-c", code]
    else:
        command = ["bash", "-c", " ".join([code, *more])]
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "PATH": path, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
