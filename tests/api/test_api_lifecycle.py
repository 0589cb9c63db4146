"""Loading, queueing, deadlines, leaving clients, failing engines and draining."""

import asyncio
import json
import logging
import time

import pytest
from api_harness import CHAT, CMPL, HI, error_of, events_of

from pageserve.api import completions


class Client:
    """One ASGI request whose messages the test sees as they come and that can hang up."""

    def __init__(self, api, path=CHAT, reads=True, **fields):
        body = {"messages": HI} if path == CHAT else {"prompt": "hi"}
        self._body = json.dumps({**body, **fields}).encode()
        self._hang_up = asyncio.Event()
        self._reads = asyncio.Event()
        if reads:
            self._reads.set()
        self.messages = []
        self.news = asyncio.Event()
        headers = [(b"content-type", b"application/json"), (b"x-request-id", b"req-1")]
        scope = {
            "type": "http", "method": "POST", "path": path, "query_string": b"", "root_path": "",
            "headers": headers,
        }  # fmt: skip
        self.task = asyncio.create_task(api.app(scope, self._receive, self._send))

    async def _receive(self):
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._hang_up.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message):
        await self._reads.wait()
        self.messages.append(message)
        self.news.set()

    def hang_up(self):
        self._hang_up.set()

    @property
    def status(self):
        return self.messages[0]["status"] if self.messages else None

    @property
    def headers(self):
        return {k.decode(): v.decode() for k, v in self.messages[0]["headers"]}

    @property
    def text(self):
        return b"".join(m["body"] for m in self.messages[1:]).decode()

    async def until(self, condition):
        while not condition():
            self.news.clear()
            await asyncio.wait_for(self.news.wait(), 5)


async def until(condition):
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.001)


# --- loading and health ---------------------------------------------------------------------------


def test_everything_but_probes_is_503_while_loading(make_api):
    api = make_api(loaded=False, server={"api_key": ("k",)})
    for method, path in (("GET", "/v1/models"), ("POST", CHAT), ("POST", CMPL), ("GET", "/health")):
        response = api.run(api.send(method, path))
        assert response.status_code == 503
        error = error_of(response)
        assert (error["type"], error["code"]) == ("service_unavailable_error", "model_loading")
        assert 1 <= int(response.headers["retry-after"]) <= 60
    response = api.get("/ready")
    body = response.json()
    assert response.status_code == 503 and body["error"]["code"] == "model_loading"
    assert body["status"] == "loading"
    assert body["progress"] == {"phase": "reading weights", "done": 1, "total": 4}
    assert api.get("/live").status_code == api.get("/version").status_code == 200
    assert api.get("/metrics").status_code == 200
    # A wrong path stays one, and a wrong key stays unknown.
    assert api.get("/nope").status_code == 401
    assert api.get("/nope", headers={"x-api-key": "k"}).status_code == 404


def test_ready_once_engine_and_tokenizer_are_there(make_api):
    from api_harness import TOKENIZER

    api = make_api(loaded=False)
    api.run(api.engine.start())
    assert api.get("/health").status_code == 503  # no tokenizer yet
    api.context.tokenizer = TOKENIZER
    assert api.get("/health").json() == {"status": "ok"}
    assert api.get("/ready").json() == {"status": "ready"}
    api.check_alive()


def test_dead_engine(api):
    api.engine.die("out of memory in /secret/path")
    for path in ("/health", "/live", "/v1/models"):
        response = api.get(path)
        assert (response.status_code, error_of(response)["code"]) == (503, "engine_dead")
        assert "secret" not in response.text
    assert api.get("/ready").json()["status"] == "dead"
    assert api.chat().status_code == 503


def test_stalled_engine_fails_liveness_and_an_idle_one_does_not(make_api):
    api = make_api(server={"stall_timeout": 1.0})
    assert api.get("/live").status_code == 200
    api.engine.busy_since = time.monotonic() - 2
    for path in ("/live", "/health"):
        assert api.get(path).status_code == 503
    api.engine.busy_since = time.monotonic()
    assert api.get("/live").status_code == 200


# --- queue ----------------------------------------------------------------------------------------


def test_full_queue_is_a_503(make_api):
    api = make_api(max_num_seqs=1, server={"max_queue": 2})

    async def scenario():
        api.engine.held = True
        clients = [Client(api, stream=True) for _ in range(5)]
        await until(lambda: sum(c.status is not None for c in clients) == 5)
        api.engine.held = False
        await asyncio.gather(*(c.task for c in clients))
        return clients

    clients = api.run(scenario())
    assert sorted(c.status for c in clients) == [200, 200, 200, 503, 503]
    for client in clients:
        if client.status == 503:
            error = json.loads(client.text)["error"]
            assert error["code"] == "server_is_overloaded"
            assert error["type"] == "service_unavailable_error"
            assert 1 <= int(client.headers["retry-after"]) <= 60
        else:
            assert client.text.endswith("data: [DONE]\n\n")
    assert 'reason="queue_full"' in str(api.metrics())
    api.check_alive()


def test_a_burst_that_the_engine_can_run_is_not_refused(make_api):
    api = make_api(max_num_seqs=8, server={"max_queue": 1})

    async def scenario():
        clients = [Client(api) for _ in range(9)]
        await asyncio.gather(*(c.task for c in clients))
        return clients

    assert [c.status for c in api.run(scenario())] == [200] * 9


@pytest.mark.parametrize(
    ("fields", "param"), [({"n": 4}, "n"), ({"prompt": ["a"] * 4}, "prompt"), ({"n": 3}, None)]
)
def test_a_request_that_never_fits_in_is_no_503(make_api, fields, param):
    api = make_api(max_num_seqs=1, server={"max_queue": 2})
    response = api.post(CMPL, {"prompt": "a", **fields})
    assert response.status_code == (200 if param is None else 400)
    if param is not None:
        error = error_of(response)
        assert (error["code"], error["param"]) == ("invalid_value", param)
        assert "4 sequences" in error["message"] and "at most 3" in error["message"]


# --- deadlines ------------------------------------------------------------------------------------


@pytest.mark.parametrize("header", [False, True])
def test_deadline_ends_a_whole_reply_with_504(make_api, header):
    api = make_api(step_delay=0.02, script=[65] * 1000)
    options = {"headers": {"x-request-timeout-ms": "300"}} if header else {}
    fields = {} if header else {"deadline_ms": 300}  # it begins on a busy machine
    response = api.post(CMPL, {"prompt": "hi", "max_tokens": 1000, **fields}, **options)
    error = error_of(response)
    assert (response.status_code, error["type"]) == (504, "timeout_error")
    assert error["code"] == "deadline_exceeded"
    assert response.headers["x-should-retry"] == "false"
    assert api.engine.num_live == 0 and len(api.engine.aborted) == 1


def test_deadline_ends_a_stream_with_an_error_frame(make_api):
    api = make_api(step_delay=0.02, script=[65] * 1000)
    events = events_of(api.chat(stream=True, deadline_ms=500).text)  # it begins on a busy machine
    assert events[-1]["error"]["code"] == "deadline_exceeded"
    assert "[DONE]" not in events
    assert api.engine.num_live == 0


def test_bad_deadline_header(api):
    response = api.post(CHAT, {"messages": HI}, headers={"x-request-timeout-ms": "soon"})
    assert (response.status_code, error_of(response)["code"]) == (400, "invalid_value")


# --- clients that leave ---------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("when", ["queued", "running"])
@pytest.mark.parametrize("path", [CHAT, CMPL])
def test_leaving_aborts_at_once(make_api, caplog, stream, when, path):
    api = make_api(step_delay=0.005, script=[65] * 10_000)
    prompts = {"prompt": ["a", "b", "c"], "max_tokens": 1000} if path == CMPL else {}

    async def scenario():
        api.engine.held = when == "queued"
        client = Client(api, path, stream=stream, **prompts)
        await until(lambda: api.engine.num_live == (3 if prompts else 1))
        if when == "running":
            await until(lambda: api.engine.stats.steps_total > 5)
        client.hang_up()
        await asyncio.wait_for(client.task, 1)
        return client

    with caplog.at_level(logging.INFO, "pageserve.api"):
        api.run(scenario())
    assert api.engine.num_live == 0
    assert len(api.engine.aborted) == (3 if prompts else 1)
    assert "req-1" in caplog.text and "client_disconnect" in caplog.text
    metrics = api.metrics()
    assert metrics['pageserve:client_disconnects_total{engine="0",model_name="tiny"}'] == 1
    aborted = 'vllm:request_success_total{engine="0",finished_reason="abort",model_name="tiny"}'
    assert metrics[aborted] == len(api.engine.aborted)
    api.engine.script = [65]
    api.engine.held = False
    api.check_alive()


def test_client_that_does_not_read_counts_as_gone(make_api, monkeypatch):
    monkeypatch.setattr("pageserve.api.replies.READ_TIMEOUT", 0.1)
    monkeypatch.setattr("pageserve.api.replies.WATCH_INTERVAL", 0.02)
    api = make_api(script=[65] * 10_000, server={"sse_keepalive": 0.0})

    async def scenario():
        client = Client(api, stream=True)
        await client.until(lambda: len(client.messages) > 5)
        client._reads.clear()
        await asyncio.wait_for(client.task, 2)

    api.run(scenario())
    assert api.engine.num_live == 0
    api.engine.script = [65]
    api.check_alive()


# --- keep-alive -----------------------------------------------------------------------------------


def test_comments_while_a_stream_waits(make_api):
    api = make_api(server={"sse_keepalive": 0.02})

    async def scenario():
        api.engine.held = True
        client = Client(api, stream=True)
        await client.until(lambda: client.text.count(": keep-alive\n\n") == 3)
        assert client.text == ": keep-alive\n\n" * 3
        api.engine.held = False
        await client.task
        return client

    text = api.run(scenario()).text
    assert events_of(text)[-1] == "[DONE]"
    assert events_of(text)[0]["choices"][0]["delta"]["role"] == "assistant"


def test_no_comment_after_the_end(make_api):
    api = make_api(server={"sse_keepalive": 0.02})

    async def scenario():
        api.engine.held = True
        client = Client(api, stream=True)
        await client.until(lambda: client.text)
        time.sleep(0.03)  # the loop finds the end of the answer and the silence at once
        api.engine.die()
        await client.task
        return client

    for _ in range(5):
        client = api.run(scenario())
        assert client.messages[-1]["more_body"] is False
        assert "engine_dead" in client.text.rsplit("data: ", 1)[1]
        api.engine.dead = None


def test_no_comments_when_off_or_busy(make_api):
    for keepalive, delay in ((0.0, 0.05), (0.2, 0.02)):
        api = make_api(server={"sse_keepalive": keepalive}, step_delay=delay, script=[65] * 6)
        assert ": keep-alive" not in api.chat(stream=True).text


# --- engines that fail ----------------------------------------------------------------------------


@pytest.mark.parametrize("path", [CHAT, CMPL])
def test_failure_inside_a_stream_is_one_error_frame_and_no_done(make_api, path):
    api = make_api(fail_at=3, script=[65] * 10)
    body = {"messages": HI} if path == CHAT else {"prompt": "hi"}
    *chunks, last = events_of(api.post(path, {**body, "stream": True}).text)
    assert last == {
        "error": {
            "message": "the engine failed on this request",
            "type": "server_error",
            "param": None,
            "code": "internal_error",
        }
    }
    assert chunks and all(c["choices"][0]["finish_reason"] is None for c in chunks)
    assert api.engine.num_live == 0
    api.engine.fail_at = None
    api.check_alive()


def test_failure_of_one_request_leaves_others_alone(make_api):
    api = make_api(fail_at=3, script=lambda request: [65] * len(request.prompt_token_ids))

    async def scenario():
        clients = [Client(api, CMPL, prompt=p, stream=True) for p in ("aa", "aaaaaa", "a")]
        await asyncio.gather(*(c.task for c in clients))
        return [c.text for c in clients]

    good, bad, also_good = api.run(scenario())
    assert good.endswith("data: [DONE]\n\n") and also_good.endswith("data: [DONE]\n\n")
    assert "internal_error" in bad and "[DONE]" not in bad


def test_one_failing_prompt_fails_its_request(make_api):
    api = make_api(fail_at=3, script=lambda request: [65] * len(request.prompt_token_ids))
    response = api.cmpl(prompt=["a" * 100, "aaaaaa", "a"])
    assert (response.status_code, error_of(response)["code"]) == (500, "internal_error")
    assert api.engine.num_live == 0


@pytest.mark.parametrize("stream", [False, True])
def test_death_of_the_engine_ends_every_request(make_api, stream):
    api = make_api(step_delay=0.001, script=[65] * 10_000)

    async def scenario():
        clients = [Client(api, stream=stream) for _ in range(3)]
        await until(lambda: api.engine.stats.steps_total > 5)
        api.engine.die()
        await asyncio.wait_for(asyncio.gather(*(c.task for c in clients)), 2)
        return clients

    for client in api.run(scenario()):
        if stream:
            assert client.status == 200
            assert events_of(client.text)[-1]["error"]["code"] == "engine_dead"
            assert "[DONE]" not in client.text
        else:
            assert client.status == 503
            assert json.loads(client.text)["error"]["code"] == "engine_dead"


def test_what_came_before_the_engine_died_reaches_a_client_that_lags(make_api):
    api = make_api(script=[65] * 10_000, step_delay=0.001)

    async def scenario():
        client = Client(api, CMPL, stream=True, max_tokens=4000)
        await client.until(lambda: len(client.messages) > 5)
        client._reads.clear()
        (run,) = api.engine._running.values()
        num_sent = client.text.count("A")
        await until(lambda: run.num_emitted > num_sent + 20)
        api.engine.die()
        client._reads.set()
        await client.task
        return client.text, run.num_emitted

    text, num_emitted = api.run(scenario())
    *events, last = events_of(text)
    assert sum(len(e["choices"][0]["text"]) for e in events) == num_emitted
    assert last["error"]["code"] == "engine_dead"


def test_bug_inside_a_stream_is_an_error_frame(api, monkeypatch, caplog):
    def crash(*_):
        raise RuntimeError("secret detail")

    monkeypatch.setattr("pageserve.api.replies.ChunkEncoder.encode", crash)
    response = api.chat(stream=True)
    (last,) = events_of(response.text)
    assert last["error"]["code"] == "internal_error"
    assert "secret" not in response.text and "secret detail" in caplog.text
    monkeypatch.undo()
    api.check_alive()


# --- drain ----------------------------------------------------------------------------------------


def test_a_request_is_submitted_before_the_next_one_is_parsed(api, monkeypatch):
    """Else the engine has nothing to do until the last of a burst is parsed."""
    done, read = [], completions.read_generation

    async def noted(*args):
        done.append("parse")
        return await read(*args)

    monkeypatch.setattr(completions, "read_generation", noted)
    submit = api.engine.submit
    monkeypatch.setattr(
        api.engine, "submit", lambda *args: (done.append("submit"), submit(*args))[1]
    )

    async def burst():
        body = {"prompt": [65, 66], "max_tokens": 1}
        return await asyncio.gather(
            *(api.send("POST", CMPL, json=body | {"stream": i % 2 == 0}) for i in range(6))
        )

    assert {response.status_code for response in api.run(burst())} == {200}
    assert done == ["parse", "submit"] * 6


def test_bug_in_one_of_several_sequences_ends_their_request(api, monkeypatch):
    def broken(*_):
        raise RuntimeError("a bug")

    with monkeypatch.context() as patch:
        patch.setattr("pageserve.api.generation.OutputProcessor", broken)
        for stream in (False, True):
            response = api.cmpl(prompt=["a", "b"], stream=stream)
            assert (response.status_code, error_of(response)["code"]) == (500, "internal_error")
    api.check_alive()


def test_drain_lets_running_requests_finish(make_api):
    api = make_api(step_delay=0.005, script=[65] * 20)

    async def scenario():
        streaming, whole = Client(api, stream=True), Client(api)
        await until(lambda: api.engine.num_live == 2)
        api.context.begin_drain()
        for path in ("/health", "/ready"):
            assert (await api.send("GET", path)).status_code == 503
        assert (await api.send("GET", "/live")).status_code == 200
        refused = await api.send("POST", CHAT, json={"messages": HI})
        assert await api.context.wait_idle(5)
        assert streaming.task.done() and whole.task.done()
        return streaming, whole, refused

    streaming, whole, refused = api.run(scenario())
    assert streaming.text.endswith("data: [DONE]\n\n")
    assert whole.status == 200
    assert (refused.status_code, error_of(refused)["code"]) == (503, "server_draining")
    assert "retry-after" in refused.headers


@pytest.mark.parametrize("timeout", [0, 0.05])
def test_requests_beyond_the_drain_time_get_an_error_frame(make_api, timeout):
    api = make_api(step_delay=0.005, script=[65] * 10_000, max_num_seqs=2)

    async def scenario():
        clients = [Client(api, stream=True) for _ in range(3)] + [Client(api)]
        await until(lambda: api.engine.num_live == 4)
        api.context.begin_drain()
        assert not await api.context.wait_idle(timeout)
        await asyncio.wait_for(asyncio.gather(*(c.task for c in clients)), 1)
        return clients

    *streams, whole = api.run(scenario())
    for client in streams:
        events = events_of(client.text)
        assert events[-1]["error"]["code"] == "server_draining" and "[DONE]" not in events
    assert whole.status == 503
    assert json.loads(whole.text)["error"]["code"] == "server_draining"
    assert api.engine.num_live == 0 and api.context.in_flight == 0


def test_idle_server_drains_at_once(api):
    api.context.begin_drain()
    assert api.run(api.context.wait_idle(0))


# --- the event loop stays free --------------------------------------------------------------------


def test_tokenising_does_not_stop_the_loop(make_api):
    api = make_api(max_model_len=300_000, num_kv_blocks=30_000, script=[65])

    async def scenario():
        gaps = []

        async def heartbeat():
            loop = asyncio.get_running_loop()
            last = loop.time()
            while True:
                await asyncio.sleep(0.001)
                gaps.append(loop.time() - last)
                last = loop.time()

        beating = asyncio.create_task(heartbeat())
        bodies = [{"prompt": "a b " * 12_500}] * 4 + [{"prompt": "Hello" * 400_000}]
        answers = await asyncio.gather(*(api.send("POST", CMPL, json=b) for b in bodies))
        beating.cancel()
        return [a.status_code for a in answers], max(gaps), len(gaps)

    # The last text is tokenised in full for most of a second before it turns out to be too long.
    statuses, longest, beats = api.run(scenario())
    assert statuses == [200] * 4 + [400]
    assert longest < 0.5 and beats > 100
