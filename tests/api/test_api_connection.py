"""Real sockets: bytes that are no HTTP, slow headers, TLS, and log lines as JSON."""

import asyncio
import contextlib
import functools
import json
import logging
import re
import ssl
import subprocess

import pytest
import uvicorn
from api_harness import CMPL, events_of
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from pageserve.api import connection
from pageserve.api.logs import JsonFormatter
from pageserve.api.server import uvicorn_config
from pageserve.config import ConfigError, ServerArgs


@pytest.fixture
def serve(make_api):
    """Run ``scenario(open)`` beside a uvicorn on a free port; ``open()`` connects to it."""

    def serve(scenario, context=None, engine=None, **server):
        api = make_api(server=server, **(engine or {}))
        config = uvicorn_config(api.app, api.context.config)
        config.port = 0

        async def run():
            http = uvicorn.Server(config)
            http.install_signal_handlers = lambda: None
            serving = asyncio.create_task(http._serve())
            while not http.started:
                await asyncio.sleep(0.001)
            port = http.servers[0].sockets[0].getsockname()[1]
            try:
                return await scenario(
                    lambda: asyncio.open_connection("127.0.0.1", port, ssl=context)
                )
            finally:
                http.should_exit = True
                await serving

        return api.run(run())

    return serve


def post(path, **fields):
    data = json.dumps(fields).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    return f"{head}connection: close\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data


def unchunked(body):
    """The body that a chunked one carries, which must end as it should."""
    parts = []
    while True:
        size, _, body = body.partition(b"\r\n")
        parts.append(body[: int(size, 16)])
        assert body[len(parts[-1]) :][:2] == b"\r\n"
        body = body[len(parts[-1]) + 2 :]
        if not parts[-1]:
            assert not body
            return b"".join(parts).decode()


async def answer(open_connection, data):
    reader, writer = await open_connection()
    writer.write(data)
    response = await reader.read()
    writer.close()
    head, _, body = response.partition(b"\r\n\r\n")
    return head, body


@pytest.mark.parametrize("data", [
    b"nonsense\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"POST / HTTP/1.1\r\ncontent-length: x\r\n\r\n", b"GET /\x00 HTTP/1.1\r\n\r\n",
])  # fmt: skip
def test_no_http_is_answered_by_an_error_object(serve, data):
    head, body = serve(lambda open_connection: answer(open_connection, data))
    assert head.startswith(b"HTTP/1.1 400 ") and b"content-type: application/json" in head
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["code"] == "invalid_http"


def test_endless_headers_are_cut_off(serve):
    data = b"GET /health HTTP/1.1\r\n" + b"x: " + b"y" * 70_000 + b"\r\n" + b"z: 1\r\n\r\n"
    head, body = serve(lambda open_connection: answer(open_connection, data))
    assert head.startswith(b"HTTP/1.1 431 ")
    assert json.loads(body)["error"]["code"] == "request_too_large"


@pytest.mark.parametrize("start", [b"GET /", b"GET / HTTP/1.1\r\nx", b"GET / HTTP/1.1\r\nx: y"])
def test_a_line_that_never_ends_is_cut_off(serve, start):
    async def scenario(open_connection):
        reader, writer = await open_connection()
        writer.write(start)
        for _ in range(40):  # of which each comes alone
            writer.write(b"y" * 4096)
            await asyncio.sleep(0.002)
            if reader._buffer:
                break
        response = await asyncio.wait_for(reader.read(), 10)
        writer.close()
        return response

    assert serve(scenario).startswith(b"HTTP/1.1 431 ")


def test_large_bodies_are_no_headers(serve):
    body = json.dumps({"messages": [{"role": "user", "content": "x"}], "zzz": "y" * 10**6})
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
    )
    both = f"{head}\r\n{body}{head}connection: close\r\n\r\n{body}"
    _, answers = serve(lambda open_connection: answer(open_connection, both.encode()))
    assert answers.count(b"HTTP/1.1 200 ") == 1 and b"chat.completion" in answers


@pytest.mark.parametrize("data", [b"", b"GET /health HTTP/1.1\r\nx: y"])
def test_headers_that_never_come_end_the_connection(serve, monkeypatch, data):
    monkeypatch.setattr(connection, "HEADER_TIMEOUT", 0.05)
    assert serve(lambda open_connection: answer(open_connection, data)) == (b"", b"")


BODY = json.dumps({"messages": [{"role": "user", "content": "x"}], "max_tokens": 4}).encode()
HEAD = (
    b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    b"content-length: %d\r\n\r\n" % len(BODY)
)


@pytest.mark.parametrize("drip", [False, True])
def test_bodies_that_never_come_end_the_connection(serve, monkeypatch, drip):
    """No 400 and no 408: a client that is slow is not told that it was wrong, or to try again."""
    monkeypatch.setattr(connection, "BODY_TIMEOUT", 0.1)

    async def scenario(open_connection):
        reader, writer = await open_connection()
        writer.write(HEAD + BODY[:3])
        response = b""
        with contextlib.suppress(ConnectionError):  # a byte that comes too late is met by a reset
            while drip and not reader.at_eof():
                writer.write(b" ")
                await writer.drain()
                await asyncio.sleep(0.01)
            response = await asyncio.wait_for(reader.read(), 10)
        writer.close()
        return response

    assert serve(scenario) == b""


def test_slow_bodies_that_come_in_time(serve, monkeypatch):
    """Time begins anew with each body."""
    monkeypatch.setattr(connection, "BODY_TIMEOUT", 1.0)

    async def scenario(open_connection):
        reader, writer = await open_connection()
        for _ in range(3):
            writer.write(HEAD + BODY[:5])
            await asyncio.sleep(0.4)
            writer.write(BODY[5:])
            await asyncio.sleep(0)
        await asyncio.sleep(1.2)
        received = b""
        while received.count(b"HTTP/1.1 200 ") < 3 and not reader.at_eof():
            received += await asyncio.wait_for(reader.read(65536), 10)
        writer.close()
        return received

    assert serve(scenario).count(b'"chat.completion"') == 3


def test_good_request_on_the_same_path(serve):
    data = b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
    head, body = serve(lambda open_connection: answer(open_connection, data))
    assert head.startswith(b"HTTP/1.1 200 ") and json.loads(body) == {"status": "ok"}


# --- TLS ------------------------------------------------------------------------------------------


def test_https(serve, tmp_path):
    certificate, key = tmp_path / "c.pem", tmp_path / "k.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256",
         "-nodes", "-keyout", key, "-out", certificate, "-days", "1", "-subj", "/CN=localhost",
         "-addext", "subjectAltName=IP:127.0.0.1"],
        check=True, capture_output=True,
    )  # fmt: skip
    context = ssl.create_default_context(cafile=str(certificate))
    data = b"GET /version HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
    flags = {"ssl_certfile": str(certificate), "ssl_keyfile": str(key)}
    head, body = serve(lambda o: answer(o, data), context, **flags)
    assert head.startswith(b"HTTP/1.1 200 ") and "version" in json.loads(body)


def test_unusable_certificates_are_named(make_api, tmp_path):
    app = make_api().app
    (tmp_path / "empty.pem").write_text("")
    for flags, words in (
        ({"ssl_certfile": str(tmp_path / "none.pem")}, "none.pem"),
        ({"ssl_certfile": str(tmp_path / "empty.pem")}, "empty.pem"),
        ({"ssl_keyfile": "k"}, "--ssl-certfile"),
    ):
        with pytest.raises(ConfigError, match=words):
            uvicorn_config(app, ServerArgs(**flags))


# --- logs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("fields", "name"), [({}, "r-7"), ({"request_id": "mine"}, "mine")])
def test_every_line_of_a_request_is_json_with_its_id(make_api, monkeypatch, fields, name):
    lines = []

    class Keep(logging.Handler):
        def emit(self, record):
            lines.append(self.format(record))

    handler = Keep()
    handler.setFormatter(JsonFormatter())
    logger = logging.getLogger("pageserve")
    logger.addHandler(handler)
    monkeypatch.setattr(logger, "level", logging.INFO)
    logging.getLogger("pageserve.access").manager._clear_cache()
    try:
        api = make_api(server={"log_format": "json"}, fail_at=1, error='broken "thing"\nx')
        body = {"prompt": "hi", "zzz": 1, **fields}
        response = api.post("/v1/completions", body, headers={"x-request-id": "r-7"})
        assert response.headers["x-request-id"] == "r-7"
    finally:
        logger.removeHandler(handler)
    parsed = [json.loads(line) for line in lines]
    assert len(parsed) == 3  # the unknown field, the failure, the answer
    assert {line["request_id"] for line in parsed} == {name}
    assert all(set(line) >= {"time", "level", "logger", "message"} for line in parsed)
    last = parsed[-1]
    assert (last["method"], last["path"], last["status"]) == ("POST", "/v1/completions", 500)
    assert last["key"] == "anonymous" and last["milliseconds"] >= 0


def test_exceptions_stay_on_their_line():
    try:
        raise ValueError("why")
    except ValueError as error:
        record = logging.LogRecord("n", 40, "", 0, "bad", (), (ValueError, error, None))
    line = JsonFormatter().format(record)
    assert "\n" not in line and "why" in json.loads(line)["exception"]


# --- streams --------------------------------------------------------------------------------------


def text_of(events):
    assert events.pop() == "[DONE]"
    return [choice["text"] for event in events for choice in event["choices"] if choice["text"]]


@pytest.mark.parametrize("n", [1, 3])
def test_tokens_are_written_one_by_one_around_asgi(serve, monkeypatch, n):
    """Each is an event at once, and none of them is an ASGI message."""
    sent = []
    send = RequestResponseCycle.send

    async def note(cycle, message):
        sent.append(message)
        await send(cycle, message)

    monkeypatch.setattr(RequestResponseCycle, "send", note)
    request = post(CMPL, prompt="hi", stream=True, n=n, temperature=1, max_tokens=50)
    scenario = functools.partial(answer, data=request)
    head, body = serve(scenario, engine={"script": [65] * 100, "step_delay": 0.001})
    assert b"transfer-encoding: chunked" in head
    assert text_of(events_of(unchunked(body))) == ["A"] * 50 * n
    assert [m["type"] for m in sent] == ["http.response.start", "http.response.body"]
    assert sent[-1]["body"] == b"data: [DONE]\n\n"


def test_a_reader_that_lags_gets_all_in_larger_events(serve):
    """What it has not read does not pile up in the server: tokens are merged instead."""
    total = 40_000

    async def scenario(open_connection):
        reader, writer = await open_connection()
        writer.write(post(CMPL, prompt="hi", stream=True, max_tokens=total))
        await reader.readuntil(b"\r\n\r\n")
        get = b"GET /metrics HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
        metrics = b""
        async with asyncio.timeout(60):  # the reader's own buffer is full long before the end
            while not re.search(rb"\nvllm:num_requests_running{.*} 0", metrics):
                await asyncio.sleep(0.05)
                metrics = (await answer(open_connection, get))[1]
        body = await reader.read()
        writer.close()
        return body

    engine = {"script": [65] * total, "max_model_len": 50_000, "num_kv_blocks": 5_000}
    texts = text_of(events_of(unchunked(serve(scenario, engine=engine))))
    assert "".join(texts) == "A" * total
    assert len(texts) < total / 2 and max(map(len, texts)) > total / 4


def test_a_client_that_reads_nothing_over_a_socket_counts_as_gone(serve, monkeypatch, caplog):
    monkeypatch.setattr("pageserve.api.replies.READ_TIMEOUT", 0.2)
    monkeypatch.setattr("pageserve.api.replies.WATCH_INTERVAL", 0.05)

    async def scenario(open_connection):
        reader, writer = await open_connection()
        writer.write(post(CMPL, prompt="hi", stream=True, max_tokens=100_000))
        await reader.readuntil(b"\r\n\r\n")
        async with asyncio.timeout(20):
            while "client_disconnect" not in caplog.text:
                await asyncio.sleep(0.05)
        writer.close()

    engine = {"script": [65] * 200_000, "max_model_len": 200_000, "num_kv_blocks": 20_000}
    with caplog.at_level(logging.INFO, "pageserve.api"):
        serve(scenario, engine=engine, sse_keepalive=0.0)
