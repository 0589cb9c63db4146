"""Templates that came with a request: rendered in a process of their own, bounded in time and
memory, as a thread could not be.

The parent writes one JSON object to the child's standard input and reads one from its output.
"""

import json
import logging
import math
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import jinja2

from pageserve.api.template import RENDER_LIMIT, TemplateError, render_template

logger = logging.getLogger("pageserve.api")

MAX_MEMORY = 2**30  # bytes of address space
MAX_CHARS = 2**24  # of a prompt
# Of surrogate pairs, which nothing behind takes, but for the one before these: PLAIN_MARK.
_HALVES = re.compile("[\ud801-\udfff]")
# What a clock, Windows and the interpreter itself need; nothing else is its business.
_ENVIRONMENT = ("TZ", "SYSTEMROOT", "PYTHONHOME", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")


def render_apart(source: str, variables: Mapping[str, Any]) -> str:
    """Render like :func:`pageserve.api.template.render_template`, whatever the template does.

    It may take RENDER_LIMIT of processor time, however busy the machine is, and blocks for at most
    twice as long. Raises :class:`TemplateError`.
    """
    environment = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    try:
        done = subprocess.run(
            # -P: modules are those of this process, not what lies in its working directory.
            [sys.executable, "-P", "-m", __name__, str(math.ceil(RENDER_LIMIT))],
            input=json.dumps([source, variables]).encode(),
            capture_output=True,
            timeout=2 * RENDER_LIMIT,
            env=environment,
            start_new_session=True,  # Ctrl-C is for the server, which finishes what it has begun
        )
    except subprocess.TimeoutExpired:
        raise _too_much() from None
    if done.returncode != 0:  # a signal that a limit sends, or what templates do not raise else
        what = done.stderr.decode(errors="replace").strip().rpartition("\n")[2].partition(":")[0]
        logger.warning("a request's template ended its process: %d %s", done.returncode, what)
        raise _too_much()
    answer = json.loads(done.stdout)
    if "error" in answer:
        raise TemplateError(answer["error"], answer["param"])
    prompt: str = answer["prompt"]
    return prompt


def _too_much() -> TemplateError:
    limits = f"{RENDER_LIMIT:g} s and {MAX_MEMORY >> 20} MiB"
    return TemplateError(f"The chat template cannot be rendered within {limits}", "chat_template")


def _main() -> None:
    source, variables = json.load(sys.stdin)
    _limit_resources(seconds=int(sys.argv[1]))
    try:
        prompt = render_template(source, variables)
        if len(prompt) > MAX_CHARS:
            raise TemplateError(f"The prompt has more than {MAX_CHARS} characters", "chat_template")
    except TemplateError as error:
        unreadable = isinstance(error.__cause__, jinja2.TemplateSyntaxError)
        param = "chat_template" if unreadable else error.param
        answer = {"error": str(error).encode("utf-8", "replace").decode(), "param": param}
    except MemoryError:
        answer = {"error": str(_too_much()), "param": "chat_template"}
    else:
        answer = {"prompt": _HALVES.sub("?", prompt)}
    json.dump(answer, sys.stdout)


def _limit_resources(seconds: int) -> None:
    try:
        import resource
    except ImportError:  # Windows, where time is the only limit
        return
    limits = ((resource.RLIMIT_CPU, seconds), (resource.RLIMIT_AS, MAX_MEMORY))
    for limit, value in limits:
        with suppress(ValueError):  # macOS knows no limit of address space
            resource.setrlimit(limit, (value, value))


if __name__ == "__main__":
    _main()
