"""CPU time of the API process: per streamed token, and per prompt of token ids that comes in.

The clients (raw sockets) and a scripted engine are processes of their own and are not counted;
everything in the API process is: reading and decoding the engine's messages, one for each step with
one token of every stream, all Python, uvicorn, the kernel's work for its sockets, and setting the
requests up. The engine makes a step when all clients have the last one, about as fast as a GPU does
with a model of 0.5B, so that each token is an event, which the clients count.

    bare write     nothing but one write of an event for each stream and step
    engine link    the engine's messages read and handed to sinks that drop them
    over sockets   a server as `python server.py` runs it, nothing subtracted: what counts
    set-up         the part of it that requests of one token cost, spread over --tokens
    intake         32 requests with prompts of --prompt token ids that arrive together, from their
                   connections to what the engine is sent

What this does not show: an engine's own time, templates and tokenising of long prompts, tools.

    python benchmarks/frontend.py --streams 64 --tokens 500 [--json FILE]
"""

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import random
import selectors
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from multiprocessing.synchronize import Semaphore
from pathlib import Path
from typing import Any

import msgspec
import uvicorn
import uvloop
import zmq

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "benchmarks")]

from fakes import byte_tokenizer  # noqa: E402

from pageserve.api.app import build_app  # noqa: E402
from pageserve.api.context import ServingContext  # noqa: E402
from pageserve.api.server import settle_garbage_collector, uvicorn_config  # noqa: E402
from pageserve.config import EngineConfig, ServerArgs  # noqa: E402
from pageserve.engine import process  # noqa: E402
from pageserve.engine.client import OutputSink  # noqa: E402
from pageserve.engine.process import ProcessClient  # noqa: E402
from pageserve.messages import (  # noqa: E402
    AddRequest,
    EngineReady,
    EngineRequest,
    RequestOutput,
    SchedulerStats,
    Shutdown,
    StepOutputs,
    StepStats,
)
from pageserve.sampling_params import SamplingParams  # noqa: E402

SPAWN = multiprocessing.get_context("spawn")
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


# --- the engine: a process ------------------------------------------------------------------------


def scripted_engine(
    start_at: int,
    delay: float,
    taken: Semaphore,
    config: EngineConfig,
    requests_at: str,
    outputs_at: str,
) -> None:
    """Wait for ``start_at`` requests and ``delay`` seconds, then give a token to each of them, and
    one whenever ``taken`` is released; again and again, until told to leave."""
    context = zmq.Context()
    requests, outputs = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    requests.bind(requests_at)
    outputs.connect(outputs_at)
    encoder, decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(EngineRequest)
    tokenizer = byte_tokenizer()
    eos = [tokenizer.eos_token_id]
    outputs.send(
        encoder.encode(
            EngineReady(
                8192, tokenizer.size, eos, 16, 10**6, 1024, 8192, "bfloat16", "cuda", "triton", "fp"
            )
        )
    )
    while True:
        left: dict[str, int] = {}
        while len(left) < start_at:
            message = decoder.decode(requests.recv())
            if isinstance(message, Shutdown):
                return
            if isinstance(message, AddRequest):
                left[message.request_id] = message.sampling_params.max_tokens or 1
        time.sleep(delay)
        step = 0
        while left:
            at, step = time.monotonic(), step + 1
            released = []
            for request_id in list(left):
                left[request_id] -= 1
                last = not left[request_id]
                if last:
                    del left[request_id]
                released.append(
                    RequestOutput(request_id, [97], "length" if last else None, scheduled_time=at)
                )
            stats = SchedulerStats(steps_total=step, num_running=len(left))
            outputs.send(encoder.encode(StepOutputs(released, stats, StepStats(len(released)))))
            taken.acquire()


class NotingClient(ProcessClient):
    """Notes the CPU time by which the latest request was sent."""

    submitted_at = 0.0

    def submit(self, request: AddRequest, sink: OutputSink) -> None:
        super().submit(request, sink)
        self.submitted_at = time.process_time()


@contextlib.asynccontextmanager
async def engine_client(
    start_at: int, taken: Semaphore, delay: float = 0.0
) -> AsyncIterator[NotingClient]:
    process.run_engine = partial(scripted_engine, start_at, delay, taken)
    client = NotingClient(EngineConfig())
    await client.start()
    while client.ready is None:
        assert client.dead is None, client.dead
        await asyncio.sleep(0.01)
    try:
        yield client
    finally:
        await client.stop()


# --- the clients: a process -----------------------------------------------------------------------


def read_streams(port: int, requests: list[bytes], counted: Any, taken: Semaphore) -> None:
    """Send each request on a socket of its own and read all to their ends; release ``taken`` when
    each has one event more, and put the number of events into ``counted``."""
    selector = selectors.DefaultSelector()
    for request in requests:
        sock = socket.create_connection(("127.0.0.1", port))
        sock.sendall(request)
        selector.register(sock, selectors.EVENT_READ)
    events = 0
    while selector.get_map():
        for key, _ in selector.select(30):
            received = key.fileobj.recv(1 << 16)  # type: ignore[union-attr]
            before = events // len(requests)
            events += received.count(b'"content":"a') + received.count(b'"text":"a')
            if events // len(requests) > before:
                taken.release()
            if not received or b"[DONE]" in received:
                assert received, "the stream was cut"
                selector.unregister(key.fileobj)
                key.fileobj.close()  # type: ignore[union-attr]
    counted.put(events)


def http(path: str, fields: dict[str, Any]) -> bytes:
    data = json.dumps({**fields, "stream": True}).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    return head.encode() + f"content-length: {len(data)}\r\n\r\n".encode() + data


def chats(streams: int, tokens: int) -> list[bytes]:
    message = {"role": "user", "content": "Say a, again and again."}
    return [http(CHAT, {"messages": [message], "max_tokens": tokens})] * streams


def completions(count: int, num_prompt: int) -> list[bytes]:
    """Requests of one token whose prompts are ``num_prompt`` random ids."""
    rng = random.Random(0)
    ids = range(byte_tokenizer().size)
    return [
        http(COMPLETIONS, {"prompt": rng.choices(ids, k=num_prompt), "max_tokens": 1})
        for _ in range(count)
    ]


# --- one figure each ------------------------------------------------------------------------------


async def bare_write(streams: int, tokens: int) -> float:
    """CPU seconds of writing an event to each of ``streams`` sockets, ``tokens`` times."""
    event = b'114\r\ndata: {"id":"%b","content":"a"}\n\n\r\n' % (b"x" * 240)
    transports: list[asyncio.Transport] = []

    class Protocol(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            transports.append(transport)  # type: ignore[arg-type]

    loop = asyncio.get_running_loop()
    server = await loop.create_server(Protocol, "127.0.0.1", 0)
    counted, taken = SPAWN.Queue(), SPAWN.Semaphore(0)
    reader = SPAWN.Process(
        target=read_streams,
        args=(server.sockets[0].getsockname()[1], [b"x"] * streams, counted, taken),
    )
    reader.start()
    while len(transports) < streams:
        await asyncio.sleep(0.01)
    start = time.process_time()
    for _ in range(tokens):
        for transport in transports:
            transport.write(event)
        await asyncio.sleep(0.001)
    used = time.process_time() - start
    for transport in transports:
        transport.write(b"[DONE]")
    assert await loop.run_in_executor(None, counted.get) == streams * tokens
    server.close()
    return used


async def engine_link(streams: int, tokens: int) -> float:
    """CPU seconds to read the engine's messages and drop what is in them."""
    taken = SPAWN.Semaphore(0)
    async with engine_client(streams, taken) as client:
        ended, last = asyncio.Event(), str(streams - 1)

        def sink(output: RequestOutput) -> None:
            if output.request_id == last:
                taken.release()
                if output.finish_reason is not None:
                    ended.set()

        params = SamplingParams(max_tokens=tokens)
        start = time.process_time()
        for i in range(streams):
            client.submit(AddRequest(str(i), [1], params, 0.0), sink)
        await ended.wait()
        return time.process_time() - start


async def over_sockets(requests: list[bytes], delay: float = 0.0) -> tuple[float, float, int]:
    """CPU seconds of a server that answers these requests: for all of it, and until the engine has
    the last one. And how many events its clients got."""
    taken = SPAWN.Semaphore(0)
    async with engine_client(len(requests), taken, delay) as client:
        args = ServerArgs()
        context = ServingContext(client, args, ("bench",), tokenizer=byte_tokenizer())
        server = uvicorn.Server(uvicorn_config(build_app(context), args))
        listener = socket.create_server(("127.0.0.1", 0), backlog=len(requests))
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        while not server.started:
            await asyncio.sleep(0.01)
        counted = SPAWN.Queue()
        child = SPAWN.Process(
            target=read_streams, args=(listener.getsockname()[1], requests, counted, taken)
        )
        child.start()
        start = time.process_time()
        events = await asyncio.get_running_loop().run_in_executor(None, counted.get)
        used = time.process_time() - start
        server.should_exit = True
        await serving
        return used, client.submitted_at - start, events


def main() -> None:
    from common import machine, report  # imports torch, which the processes above do not need

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=500, help="tokens per stream")
    parser.add_argument("--prompt", type=int, default=2100, help="token ids of an intake prompt")
    parser.add_argument("--repeat", type=int, default=3, help="the best of this many runs counts")
    parser.add_argument("--json", help="also write the result to this file")
    args = parser.parse_args()
    result: dict[str, Any] = {
        "benchmark": "frontend",
        "not_shown": "an engine's own time; templates and tokenising of long prompts; tools",
        "machine": machine(),
        "streams": args.streams,
        "tokens_per_stream": args.tokens,
        "prompt_tokens": args.prompt,
    }

    def best(measure: Callable[[], Awaitable[float]]) -> float:
        return min(uvloop.run(measure()) for _ in range(args.repeat)) * 1e6

    async def served(requests: list[bytes], tokens: int) -> float:
        used, _, events = await over_sockets(requests)
        assert events == tokens
        return used / tokens

    async def taken_in(requests: list[bytes]) -> float:
        _, used, _ = await over_sockets(requests, delay=0.5)  # no step comes in between
        return used / len(requests)

    def show(name: str, value: float, of: str) -> None:
        result[f"{name.replace(' ', '_')}_us_per_{of}"] = round(value, 2)
        print(f"{name:13} {value:7.2f} µs of CPU per {of}")

    settle_garbage_collector()
    total = args.streams * args.tokens
    sizes = args.streams, args.tokens
    show("bare write", best(lambda: bare_write(*sizes)) / total, "token")
    show("engine link", best(lambda: engine_link(*sizes)) / total, "token")
    show("over sockets", best(lambda: served(chats(*sizes), total)), "token")
    setup = best(lambda: served(chats(args.streams, 1), args.streams)) / args.tokens
    show("set-up", setup, "token")
    show("intake", best(lambda: taken_in(completions(32, args.prompt))), "request")
    report(result, args.json)


if __name__ == "__main__":
    main()
