"""Benchmarks are commands beside each other, not a package: import them as they import."""

import sys
import threading
import time
from pathlib import Path

import pytest
import uvicorn

from pageserve.api.app import build_app
from pageserve.api.context import ServingContext
from pageserve.config import ServerArgs

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "tests")]


@pytest.fixture
def serve():
    """A function that serves an engine over real HTTP and returns its URL."""
    running = []

    def start(engine, args=ServerArgs()):  # noqa: B008
        app = build_app(ServingContext(engine, args, ("tiny",), tokenizer=engine.tokenizer))
        http = uvicorn.Server(uvicorn.Config(app, port=0, lifespan="off", log_level="error"))
        thread = threading.Thread(target=http.run)
        thread.start()
        running.append((http, thread))
        while not http.started:
            time.sleep(0.01)
        return f"http://127.0.0.1:{http.servers[0].sockets[0].getsockname()[1]}"

    yield start
    for http, thread in running:
        http.should_exit = True
        thread.join()
