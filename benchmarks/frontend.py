"""CPU time of the API process per streamed token, over an engine that costs next to nothing.

Three figures at --streams concurrent chat streams: reading the engine's streams and nothing more,
the whole ASGI application with a send that drops everything, and a real uvicorn with real sockets
(its clients live in another process). The last line of the output is one JSON document.

What this does not show: an engine's own time, templates and tokenising of long prompts, tools.

    python benchmarks/frontend.py --streams 64 --tokens 500 [--json FILE]
"""

import argparse
import asyncio
import json
import multiprocessing
import selectors
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import uvicorn
import uvloop

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "benchmarks")]

from common import machine, report  # noqa: E402
from fakes import byte_tokenizer  # noqa: E402

from pageserve.api.app import build_app  # noqa: E402
from pageserve.api.context import ServingContext  # noqa: E402
from pageserve.config import ServerArgs  # noqa: E402
from pageserve.engine.process import RequestStream  # noqa: E402
from pageserve.messages import (  # noqa: E402
    AddRequest,
    EngineReady,
    LoadProgress,
    RequestOutput,
    SchedulerStats,
    StepStats,
)

PATH = "/v1/chat/completions"


class Metronome:
    """An engine client whose steps give one token to every stream, as fast as the loop turns."""

    def __init__(self, tokenizer: Any) -> None:
        self.ready = EngineReady(
            8192, tokenizer.size, [tokenizer.eos_token_id], 16, 10**6, 1024, 8192, "bfloat16",
            "cuda", "triton", "fp_0123456789",
        )  # fmt: skip
        self.progress = LoadProgress("ready")
        self.startup_seconds: dict[str, float] = {}
        self.stats = SchedulerStats()
        self.on_step: Callable[[StepStats], None] = lambda step: None
        self.dead: str | None = None
        self.busy_since: float | None = None
        self.start_at = 1  # streams to wait for before the first step
        self._streams: dict[str, RequestStream] = {}
        self._left: dict[str, int] = {}
        self._ticking: asyncio.Task[None] | None = None

    def submit(self, request: AddRequest) -> AsyncIterator[RequestOutput]:
        stream = self._streams[request.request_id] = RequestStream(self, request.request_id)  # type: ignore[arg-type]
        self._left[request.request_id] = request.sampling_params.max_tokens or 1
        if self._ticking is None and len(self._streams) == self.start_at:
            self._ticking = asyncio.get_running_loop().create_task(self._tick())
        return stream

    def forget(self, request_id: str) -> None:
        self._streams.pop(request_id, None)

    def abort(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self.forget(request_id)

    async def _tick(self) -> None:
        step = 0
        while self._streams:
            await asyncio.sleep(0)
            step += 1
            self.stats = SchedulerStats(steps_total=step, num_scheduled_tokens=len(self._streams))
            self.on_step(StepStats(len(self._streams)))
            now = time.monotonic()
            for request_id, stream in list(self._streams.items()):
                self._left[request_id] -= 1
                last = not self._left[request_id]
                reason: Any = "length" if last else None
                stream.put(RequestOutput(request_id, [97], reason, scheduled_time=now))
                if last:
                    del self._streams[request_id]
        self._ticking = None


def make_app(streams: int) -> tuple[Metronome, Any]:
    tokenizer = byte_tokenizer()
    client = Metronome(tokenizer)
    client.start_at = streams
    context = ServingContext(client, ServerArgs(), ("bench",), tokenizer=tokenizer)  # type: ignore[arg-type]
    return client, build_app(context)


def body(tokens: int) -> bytes:
    message = {"role": "user", "content": "Say a, again and again."}
    fields = {"messages": [message], "stream": True, "max_tokens": tokens}
    return json.dumps(fields).encode()


# --- one figure each ------------------------------------------------------------------------------


def engine_only(streams: int, tokens: int) -> float:
    """CPU seconds to make and read the outputs, with no API at all."""
    from pageserve.sampling_params import SamplingParams

    client, _ = make_app(streams)

    async def read(i: int) -> None:
        params = SamplingParams(max_tokens=tokens)
        async for _ in client.submit(AddRequest(str(i), [1], params, 0.0)):
            pass

    async def main() -> float:
        start = time.process_time()
        await asyncio.gather(*(read(i) for i in range(streams)))
        return time.process_time() - start

    return uvloop.run(main())


def application(streams: int, tokens: int) -> float:
    """CPU seconds of the ASGI application with a send that drops everything."""
    _, app = make_app(streams)
    data = body(tokens)

    async def ask() -> int:
        messages = [{"type": "http.request", "body": data, "more_body": False}]
        sent = 0

        async def receive() -> dict[str, Any]:
            if messages:
                return messages.pop()
            await asyncio.Event().wait()
            raise AssertionError

        async def send(message: dict[str, Any]) -> None:
            nonlocal sent
            sent += len(message.get("body", b""))

        headers = [(b"content-type", b"application/json")]
        scope = {
            "type": "http", "method": "POST", "path": PATH, "headers": headers,
            "query_string": b"", "root_path": "",
        }  # fmt: skip
        await app(scope, receive, send)
        return sent

    async def main() -> float:
        start = time.process_time()
        sizes = await asyncio.gather(*(ask() for _ in range(streams)))
        assert min(sizes) > tokens * 100
        return time.process_time() - start

    return uvloop.run(main())


def over_sockets(streams: int, tokens: int) -> float:
    """CPU seconds of a uvicorn server whose clients are another process."""
    _, app = make_app(streams)
    listener = socket.create_server(("127.0.0.1", 0), backlog=streams)
    port = listener.getsockname()[1]
    config = uvicorn.Config(app, loop="uvloop", lifespan="off", log_level="error", access_log=False)
    server = uvicorn.Server(config)
    thread = threading.Thread(
        target=lambda: uvloop.run(server.serve(sockets=[listener])), daemon=True
    )
    thread.start()
    clients = multiprocessing.get_context("spawn").Process(
        target=read_streams, args=(port, streams, tokens)
    )
    while not server.started:
        time.sleep(0.01)
    start = time.process_time()
    clients.start()
    clients.join()
    used = time.process_time() - start
    assert clients.exitcode == 0
    server.should_exit = True
    thread.join()
    return used


def read_streams(port: int, streams: int, tokens: int) -> None:
    """Open all streams on raw sockets and read each to its end."""
    selector = selectors.DefaultSelector()
    data = body(tokens)
    head = f"POST {PATH} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    for _ in range(streams):
        sock = socket.create_connection(("127.0.0.1", port))
        sock.sendall(head.encode() + f"content-length: {len(data)}\r\n\r\n".encode() + data)
        selector.register(sock, selectors.EVENT_READ)
    while selector.get_map():
        for key, _ in selector.select(30):
            received = key.fileobj.recv(1 << 16)  # type: ignore[union-attr]
            if not received or b"[DONE]" in received:
                assert received, "the stream was cut"
                selector.unregister(key.fileobj)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=500, help="tokens per stream")
    parser.add_argument("--repeat", type=int, default=3, help="the best of this many runs counts")
    parser.add_argument("--json", help="also write the result to this file")
    args = parser.parse_args()
    total = args.streams * args.tokens
    result: dict[str, Any] = {
        "benchmark": "frontend",
        "not_shown": "an engine's own time; templates and tokenising of long prompts; tools",
        "machine": machine(),
        "streams": args.streams,
        "tokens_per_stream": args.tokens,
    }
    for name, measure in (
        ("engine_only", engine_only),
        ("application", application),
        ("over_sockets", over_sockets),
    ):
        best = min(measure(args.streams, args.tokens) for _ in range(args.repeat))
        result[name + "_us_per_token"] = round(best / total * 1e6, 2)
        print(f"{name:13} {best / total * 1e6:6.2f} µs of CPU per token")
    result["api_us_per_token"] = round(
        result["application_us_per_token"] - result["engine_only_us_per_token"], 2
    )
    report(result, args.json)


if __name__ == "__main__":
    main()
