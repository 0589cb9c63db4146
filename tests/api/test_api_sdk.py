"""A real uvicorn, the real openai client, and raw sockets where the SDK hides too much."""

import asyncio
import json
import socket
import threading
import time
from itertools import chain

import openai
import pytest
import uvicorn
from api_harness import CHAT, HI, Api


class Server:
    """An app in a thread of its own; ``api.engine`` may be read from the test's thread."""

    def __init__(self, **options):
        self._options = options
        self._started = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def __enter__(self):
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        assert self._started.wait(10)
        return self

    def __exit__(self, *_):
        self._server.should_exit = True
        self._thread.join(10)
        assert not self._thread.is_alive()

    def _serve(self):
        with asyncio.Runner() as runner:
            self.api = Api(runner, **self._options)
            config = uvicorn.Config(
                self.api.app, lifespan="off", log_level="warning", timeout_graceful_shutdown=1
            )
            self._server = uvicorn.Server(config)
            self._server.install_signal_handlers = lambda: None
            self._started.set()
            runner.run(self._server.serve(sockets=[self._listener]))

    def client(self, **options):
        defaults = {"base_url": self.url + "/v1", "api_key": "key", "max_retries": 0}
        return openai.OpenAI(**{**defaults, **options})

    def post(self, path, body):
        """Send a request on a raw socket and return the socket."""
        data = json.dumps(body).encode()
        sock = socket.create_connection(("127.0.0.1", self.port), timeout=5)
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        sock.sendall(head.encode() + f"content-length: {len(data)}\r\n\r\n".encode() + data)
        return sock

    def wait(self, condition):
        limit = time.monotonic() + 5
        while not condition():
            assert time.monotonic() < limit, "timed out"
            time.sleep(0.002)


@pytest.fixture(scope="module")
def server():
    with Server(script=list("Hello 👧 world".encode()), server={"api_key": ("key",)}) as server:
        yield server


def test_models(server):
    client = server.client()
    assert [m.id for m in client.models.list()] == ["tiny", "org/tiny"]
    assert client.models.retrieve("org/tiny").id == "org/tiny"
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("nope/x")
    assert caught.value.code == "model_not_found"


def test_chat(server):
    completion = server.client().chat.completions.create(
        model="tiny", messages=HI, logprobs=True, top_logprobs=1
    )
    choice = completion.choices[0]
    assert choice.message.content == "Hello 👧 world"
    assert (choice.finish_reason, choice.message.tool_calls) == ("stop", None)
    assert (
        bytes(chain.from_iterable(e.bytes for e in choice.logprobs.content)).decode()
        == "Hello 👧 world"
    )
    assert completion.usage.completion_tokens == 17
    assert completion.system_fingerprint == "fp_0123456789"
    assert completion._request_id


def test_chat_stream(server):
    stream = server.client().chat.completions.create(
        model="tiny", messages=HI, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == "Hello 👧 world"
    assert chunks[-1].usage.completion_tokens == 17


def test_chat_stream_helper(server):
    with server.client().chat.completions.stream(model="tiny", messages=HI) as stream:
        for _ in stream:
            pass
        final = stream.get_final_completion()
    assert final.choices[0].message.content == "Hello 👧 world"
    assert final.choices[0].finish_reason == "stop"


def test_completions(server):
    client = server.client()
    completion = client.completions.create(
        model="tiny", prompt=["a", "b"], max_tokens=50, logprobs=1
    )
    assert [(c.index, c.text) for c in completion.choices] == [
        (0, "Hello 👧 world"),
        (1, "Hello 👧 world"),
    ]
    stream = client.completions.create(model="tiny", prompt=[1, 2], stream=True, max_tokens=50)
    assert "".join(c.choices[0].text for c in stream) == "Hello 👧 world"


@pytest.mark.parametrize(
    ("fields", "kind", "code", "param"),
    [
        ({"temperature": 3}, openai.BadRequestError, "decimal_above_max_value", "temperature"),
        ({"model": "nope"}, openai.NotFoundError, "model_not_found", "model"),
        ({"max_tokens": 5000}, openai.BadRequestError, "integer_above_max_value", "max_tokens"),
    ],
)
def test_errors_become_the_sdks_exceptions(server, fields, kind, code, param):
    with pytest.raises(kind) as caught:
        server.client().chat.completions.create(**{"model": "tiny", "messages": HI, **fields})
    assert (caught.value.code, caught.value.param) == (code, param)
    assert caught.value.type == "invalid_request_error"


def test_wrong_key(server):
    with pytest.raises(openai.AuthenticationError) as caught:
        server.client(api_key="wrong").models.list()
    assert caught.value.code == "invalid_api_key"


def test_error_inside_a_stream_raises(server):
    with Server(script=[65] * 10, fail_at=3) as failing:
        stream = failing.client().chat.completions.create(model="tiny", messages=HI, stream=True)
        with pytest.raises(openai.APIError) as caught:
            list(stream)
    assert (caught.value.code, caught.value.type) == ("internal_error", "server_error")


def test_failed_request_is_not_sent_again():
    with Server(fail_at=0) as failing:
        with pytest.raises(openai.InternalServerError):
            failing.client(max_retries=2).chat.completions.create(model="tiny", messages=HI)
        assert len(failing.api.engine.requests) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_closing_the_socket_aborts(stream):
    with Server(script=[65] * 100_000, step_delay=0.002, max_model_len=200_000) as server:
        engine = server.api.engine
        sock = server.post(CHAT, {"messages": HI, "stream": stream})
        server.wait(lambda: engine.stats.steps_total > 5)
        assert engine.num_live == 1
        sock.close()
        server.wait(lambda: engine.num_live == 0)
        assert len(engine.aborted) == 1
        server.wait(lambda: server.api.context.in_flight == 0)


def test_headers_arrive_while_the_request_waits():
    with Server(server={"sse_keepalive": 0.05}) as server:
        server.api.engine.held = True
        sock = server.post(CHAT, {"messages": HI, "stream": True})
        received = b""
        while b": keep-alive\n\n" not in received:
            received += sock.recv(4096)
        assert received.startswith(b"HTTP/1.1 200 ")
        server.api.engine.held = False
        while b"data: [DONE]\n\n" not in received:
            received += sock.recv(4096)
        # Chunked encoding is closed: the connection can be used again.
        while not received.endswith(b"0\r\n\r\n"):
            received += sock.recv(4096)
        sock.close()


def test_body_larger_than_allowed_is_refused_before_it_is_read():
    with Server(server={"max_body_mib": 0.01}) as server:
        sock = socket.create_connection(("127.0.0.1", server.port), timeout=5)
        head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        sock.sendall(head.encode() + b"content-length: 200000000\r\n\r\n{")
        assert sock.recv(4096).startswith(b"HTTP/1.1 413 ")
        sock.close()


def test_slow_reader_does_not_hold_up_others():
    script = list(b"abcdefgh" * 1000)
    with Server(script=script, max_model_len=10_000) as server:
        slow = server.post(CHAT, {"messages": HI, "stream": True})
        fast = server.client().chat.completions.create(model="tiny", messages=HI, max_tokens=5)
        assert fast.usage.completion_tokens == 5
        received = b""
        while b"[DONE]" not in received[-200:]:
            received += slow.recv(65536)
        slow.close()
        assert received.count(b'"finish_reason":"stop"') == 1


def test_stream_helper_of_three_choices():
    """Conformance 11: the helper raises IndexError if index 1 comes before index 0."""
    with Server(script="Hello world", tokens_per_step=1) as server:
        chat = server.client().chat.completions
        fields = {"model": "tiny", "messages": HI, "n": 3, "temperature": 1, "seed": 3}
        with chat.stream(**fields) as stream:
            for _ in stream:
                pass
            choices = stream.get_final_completion().choices
        assert [c.message.content for c in choices] == ["Hello world"] * 3
        assert [c.finish_reason for c in choices] == ["stop"] * 3


@pytest.mark.parametrize("stream", [False, True])
def test_client_that_leaves_ends_all_choices(stream):
    """Conformance 48: eight sequences, none of which may run on."""
    with Server(script=[65] * 4000, step_delay=0.005) as server:
        body = {"messages": HI, "n": 8, "temperature": 1, "stream": stream}
        sock = server.post(CHAT, body)
        server.wait(lambda: server.api.engine.num_live == 8)
        sock.close()
        server.wait(lambda: server.api.engine.num_live == 0)
        assert len(server.api.engine.aborted) == 8
