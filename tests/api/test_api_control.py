"""Looking at requests and ending them, and the routes for operators and tools."""

import asyncio
import json
import time

import pytest
from api_harness import CHAT, CMPL, HI, error_of, events_of

from pageserve.api.errors import deadline_exceeded

KEYS = [
    {"name": "root", "key": "root", "admin": True},
    {"name": "a", "key": "a"},
    {"name": "b", "key": "b"},
]


@pytest.fixture
def make_keyed(make_api, tmp_path):
    def make(**options):
        path = tmp_path / "keys.json"
        path.write_text(json.dumps({"keys": KEYS}))
        server = {"api_keys_file": str(path), **options.pop("server", {})}
        return make_api(server=server, **options)

    return make


def bearer(secret, **more):
    return {"authorization": f"Bearer {secret}", **more}


async def begin(api, path=CHAT, key="a", request_id="mine", **fields):
    """Start a request and wait until the engine has it."""
    number = len(api.engine.requests)
    body = {"messages": HI} if path == CHAT else {"prompt": "hi"}
    headers = {**bearer(key), "x-request-id": request_id}
    task = asyncio.create_task(api.send("POST", path, json=body | fields, headers=headers))
    async with asyncio.timeout(5):
        while len(api.engine.requests) == number:
            await asyncio.sleep(0)
    return task


# --- cancel and list ------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("by", ["reply id", "request id"])
@pytest.mark.parametrize("key", ["a", "root"])
def test_cancel(make_keyed, stream, by, key):
    api = make_keyed()

    async def scenario():
        api.engine.held = True
        task = await begin(api, stream=stream)
        reply_id = api.engine.requests[0].request_id.rpartition("-")[0]
        name = reply_id if by == "reply id" else "mine"
        answers = [
            await api.send("POST", f"/v1/requests/{name}/cancel", headers=bearer(k))
            for k in ("b", key, key)
        ]
        return name, answers, await task

    name, (foreign, cancelled, again), response = api.run(scenario())
    for answer in (foreign, again):  # of another key, and finished: as if it never was
        assert answer.status_code == 404 and error_of(answer)["code"] == "request_not_found"
    assert (cancelled.status_code, cancelled.json()) == (200, {"id": name, "cancelled": True})
    if stream:
        assert response.status_code == 200 and "[DONE]" not in response.text
        error = events_of(response.text)[-1]["error"]
    else:
        assert response.status_code == 499
        error = error_of(response)
    assert (error["type"], error["code"]) == ("api_error", "request_cancelled")
    assert len(api.engine.aborted) == 1 and not api.context.generations


def test_one_cancel_ends_all_sequences_and_all_requests_of_the_id(make_keyed):
    api = make_keyed()

    async def scenario():
        api.engine.held = True
        tasks = [await begin(api, CMPL, prompt=["a", "b", "c"]), await begin(api)]
        answer = await api.send("POST", "/v1/requests/mine/cancel", headers=bearer("a"))
        return answer, await asyncio.gather(*tasks)

    answer, responses = api.run(scenario())
    assert answer.status_code == 200
    assert [r.status_code for r in responses] == [499, 499]
    assert len(api.engine.aborted) == 4


@pytest.mark.parametrize("name", ["nothing", "a%2Fb", "", "../x"])
def test_unknown_id(api, name):
    response = api.post(f"/v1/requests/{name}/cancel")
    assert response.status_code == 404
    assert error_of(response)["code"] in ("request_not_found", "unknown_url")


def test_list_shows_states_and_needs_an_admin_key(make_keyed):
    api = make_keyed(max_num_seqs=1, script=list(b"abcdef"), num_cached=1)

    async def scenario():
        api.engine.held = True
        tasks = [await begin(api, request_id="first", stream=True)]
        tasks.append(await begin(api, key="b", request_id="second"))
        api.engine._step()
        await asyncio.sleep(0.01)
        listed = await api.send("GET", "/v1/requests", headers=bearer("root"))
        refused = await api.send("GET", "/v1/requests", headers=bearer("a"))
        api.engine.held = False
        await asyncio.gather(*tasks)
        return listed, refused

    listed, refused = api.run(scenario())
    assert refused.status_code == 403
    error = error_of(refused)
    assert (error["type"], error["code"]) == ("permission_error", "insufficient_permissions")
    body = listed.json()
    first, second = body["data"]
    assert body["object"] == "list"
    assert first["request_id"] == "first" and first["id"].startswith("chatcmpl-")
    assert (first["state"], first["generated_tokens"], first["cached_tokens"]) == ("decode", 1, 1)
    assert (second["state"], second["generated_tokens"], second["key"]) == ("waiting", 0, "b")
    assert second["prompt_tokens"] == first["prompt_tokens"] > 0 <= second["age_s"] < 60
    assert api.get("/v1/requests", headers=bearer("root")).json()["data"] == []


@pytest.mark.parametrize("fields", [{"max_tokens": 3}, {"max_tokens": 0, "echo": True}])
def test_what_has_ended_is_not_listed(api, fields):
    """A reply that its client is slow to take is nothing that runs, or waits to."""
    body = json.dumps({"prompt": ["hi", "ho"], **fields}).encode()
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def scenario():
        taken = asyncio.Event()

        async def receive():
            if not messages:
                await taken.wait()
            return messages.pop()

        async def send(message):
            await taken.wait()

        scope = {
            "type": "http", "method": "POST", "path": CMPL, "raw_path": CMPL.encode(),
            "query_string": b"", "headers": [(b"content-type", b"application/json")],
            "client": None, "server": None, "scheme": "http", "http_version": "1.1",
        }  # fmt: skip
        serving = asyncio.create_task(api.app(scope, receive, send))
        while not api.engine.requests or api.engine.num_live:
            await asyncio.sleep(0.01)
            assert not serving.done()
        await asyncio.sleep(0.01)
        assert api.context.generations
        listed = await api.send("GET", "/v1/requests")
        taken.set()
        messages.append({"type": "http.disconnect"})
        await serving
        return listed

    assert api.run(scenario()).json()["data"] == []


def test_engine_that_does_not_answer(api, monkeypatch):
    monkeypatch.setattr("pageserve.api.context.QUESTION_TIMEOUT", 0.01)
    api.engine.deaf = True
    for response in (api.get("/v1/requests"), api.post("/reset_prefix_cache")):
        assert response.status_code == 503 and "retry-after" in response.headers
        assert error_of(response)["code"] == "server_is_overloaded"


# --- operators' routes ----------------------------------------------------------------------------


def test_server_info_hides_secrets(make_keyed):
    api = make_keyed(server={"api_key": ("sk-flag",)})
    assert api.get("/server_info", headers=bearer("a")).status_code == 403
    assert api.get("/server_info", headers=bearer("sk-flag")).status_code == 403
    response = api.get("/server_info", headers=bearer("root"))
    info = response.json()
    assert "sk-flag" not in response.text and info["config"]["server"]["api_key"] == 1
    assert info["models"] == ["tiny", "org/tiny"]
    assert info["engine"]["device"] == "cpu" and info["memory"]["num_kv_blocks"] == 1024
    assert info["config"]["scheduler"]["scheduling_policy"] == "fcfs"
    assert [key["name"] for key in info["keys"]] == ["key-1", "root", "a", "b"]
    assert info["defaults"]["temperature"] is None
    assert "/" not in info["config"]["server"]["api_keys_file"], "no folders of the host"


def test_load_counts_what_waits(make_api):
    api = make_api(max_num_seqs=1)
    idle = {"running": 0, "waiting": 0, "waiting_tokens": 0, "kv_usage": 0.0, "server_load": 0}
    assert api.get("/load").json() == idle

    async def scenario():
        api.engine.held = True
        tasks = [await begin(api, CMPL, prompt="x" * 10) for _ in range(2)]
        api.engine._step()
        await asyncio.sleep(0.01)
        busy = await api.send("GET", "/load")
        api.engine.held = False
        await asyncio.gather(*tasks)
        return busy.json()

    busy = api.run(scenario())
    assert (busy["running"], busy["waiting"], busy["waiting_tokens"]) == (1, 1, 10)
    assert busy["server_load"] == 2 and 0 < busy["kv_usage"] < 1


def test_tokenizer_info(api):
    info = api.get("/tokenizer_info").json()
    assert info["eos_token"] == "<|im_end|>" and info["pad_token"] is None
    assert info["chat_template"] == api.context.tokenizer.chat_template
    assert info["model_max_length"] == 4096
    assert "/" not in json.dumps({k: v for k, v in info.items() if k != "chat_template"})


def test_apply_template(api):
    response = api.post("/apply-template", {"messages": HI, "zzz": 1})
    prompt = response.json()["prompt"]
    assert prompt == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert response.headers["x-pageserve-ignored"] == "zzz"
    bare = api.post("/apply-template", {"messages": HI, "add_generation_prompt": False}).json()
    assert prompt.startswith(bare["prompt"]) and bare["prompt"] != prompt
    response = api.post("/apply-template", {})
    assert error_of(response)["param"] == "messages" and response.status_code == 400
    assert api.post("/apply-template", {"messages": HI, "model": "x"}).status_code == 404


def test_reset_prefix_cache(make_keyed):
    api = make_keyed()
    assert api.post("/reset_prefix_cache", headers=bearer("a")).status_code == 403
    assert api.engine.num_resets == 0
    response = api.post("/reset_prefix_cache", headers=bearer("root"))
    assert (response.status_code, response.json()) == (200, {"num_blocks": 7})
    assert api.engine.num_resets == 1


# --- limits ---------------------------------------------------------------------------------------


def test_any_model(make_api):
    api = make_api(server={"any_model": True})
    assert api.chat(model="gpt-4o").json()["model"] == "tiny"
    assert api.chat(model="org/tiny").json()["model"] == "org/tiny"


def test_max_stop(make_api):
    stops = [chr(0x4E00 + i) for i in range(17)]
    api = make_api()
    assert api.chat(stop=stops[:16]).status_code == 200
    response = api.chat(stop=stops)
    assert error_of(response)["code"] == "array_above_max_length"
    assert error_of(response)["param"] == "stop" and response.status_code == 400
    assert make_api(server={"max_stop": 17}).chat(stop=stops).status_code == 200


@pytest.mark.parametrize(("num_prompt", "max_tokens", "status"), [
    (40, 24, 200), (40, 25, 400), (40, None, 200), (63, 1, 200), (63, 2, 400), (64, 1, 400),
])  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_strict_context(make_api, num_prompt, max_tokens, status, stream):
    api = make_api(server={"strict_context": True}, max_model_len=64)
    response = api.cmpl(prompt="x" * num_prompt, max_tokens=max_tokens, stream=stream)
    assert response.status_code == status
    if status == 400:
        error = error_of(response)
        assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
        assert "This model's maximum context length is 64 tokens" in error["message"]
        assert str(num_prompt) in error["message"]
    assert make_api(max_model_len=64).cmpl(prompt="x" * 40, max_tokens=30).status_code == 200


def test_queued_tokens(make_api):
    api = make_api(server={"max_queued_tokens": 20}, max_num_seqs=1)
    assert api.cmpl(prompt="x" * 100).status_code == 200  # nothing waits: it runs at once

    async def scenario():
        api.engine.held = True
        tasks = [await begin(api, CMPL, prompt="x" * 5) for _ in range(4)]
        refused = await api.send("POST", CMPL, json={"prompt": "x"})
        api.engine.held = False
        return refused, await asyncio.gather(*tasks)

    refused, responses = api.run(scenario())
    assert refused.status_code == 503 and "retry-after" in refused.headers
    assert error_of(refused)["code"] == "server_is_overloaded"
    assert [r.status_code for r in responses] == [200] * 4


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("deaf", [False, True])
def test_queue_timeout(make_api, monkeypatch, stream, deaf):
    monkeypatch.setattr("pageserve.api.generation.QUESTION_TIMEOUT", 0.05)
    api = make_api(server={"queue_timeout": 0.05})

    async def scenario():
        api.engine.held, api.engine.deaf = True, deaf
        api.engine.busy_since = -1e9  # long ago: it hangs
        return await (await begin(api, stream=stream))

    response = api.run(scenario())
    assert response.status_code == (200 if stream else 504)
    error = events_of(response.text)[-1]["error"] if stream else error_of(response)
    assert (error["type"], error["code"]) == ("timeout_error", "deadline_exceeded")
    if not stream:
        assert response.headers["x-should-retry"] == "false"
    assert len(api.engine.aborted) == 1
    (name,) = (n for n in api.metrics() if n.startswith("pageserve:deadline_exceeded_total"))
    assert api.metrics()[name] == 1


@pytest.mark.parametrize("state", ["prefill", "decode"])
def test_queue_timeout_leaves_running_requests_alone(make_api, state):
    api = make_api(server={"queue_timeout": 0.02}, script=list(b"abcdef"))

    async def scenario():
        api.engine.held = True
        task = await begin(api)
        if state == "decode":
            api.engine._step()
        for run in api.engine._running.values():
            run.steps = 1  # it runs, and perhaps has no token yet
        await asyncio.sleep(0.05)
        api.engine.held = False
        return await task

    assert api.run(scenario()).status_code == 200


@pytest.mark.parametrize("state", ["unknown", "busy"])
@pytest.mark.parametrize("then", ["runs", "waits"])
def test_queue_timeout_asks_again(make_api, monkeypatch, state, then):
    """An engine in a long step answers late, and one that has not read a request yet does not know
    it: neither says that the request does not run."""
    monkeypatch.setattr("pageserve.api.generation.QUESTION_TIMEOUT", 0.01)
    api = make_api(server={"queue_timeout": 0.02}, script=list(b"abcdef"))
    engine, asked, ask = api.engine, [], api.engine.get_progress

    async def get_progress(request_ids):
        asked.append(request_ids)
        if len(asked) > 3:
            engine.deaf = False
            if then == "runs":
                engine._running[request_ids[0]].steps = 1
        return [] if state == "unknown" and len(asked) <= 3 else await ask(request_ids)

    async def scenario():
        engine.get_progress = get_progress
        engine.held, engine.deaf, engine.busy_since = True, state == "busy", time.monotonic()
        task = await begin(api)
        while len(asked) < 4:
            assert not engine.aborted
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.05)
        engine.held = False
        return await task

    assert api.run(scenario()).status_code == (200 if then == "runs" else 504)
    assert len(asked) == 4


def test_default_deadline(make_api):
    api = make_api(server={"default_deadline": 0.05})

    async def scenario(**fields):
        api.engine.held = True
        return await (await begin(api, **fields))

    assert api.run(scenario()).status_code == 504
    api.engine.held = False
    assert api.chat(deadline_ms=60_000).status_code == 200


def test_a_deadline_behind_the_end_counts_nothing(make_api):
    api = make_api()
    begun = []

    async def scenario():
        class Noted(set):
            def add(self, generation):
                begun.append(generation)
                super().add(generation)

        api.context.generations = Noted()
        return await api.send("POST", CHAT, json={"messages": HI})

    assert api.run(scenario()).status_code == 200
    begun[0].abort(deadline_exceeded())  # as the timer of a stream that is being read slowly
    (name,) = (n for n in api.metrics() if n.startswith("pageserve:deadline_exceeded_total"))
    assert api.metrics()[name] == 0


# --- timings --------------------------------------------------------------------------------------

FIELDS = {"queue_ms", "prefill_ms", "ttft_ms", "decode_ms", "tokens_per_second", "cached_tokens"}


@pytest.mark.parametrize("by", ["flag", "header"])
def test_timings(make_api, by):
    api = make_api(server={"timings": by == "flag"}, num_cached=1, script=list(b"abc"))
    headers = {"x-timings": "1"} if by == "header" else {}
    body = api.post(CHAT, {"messages": HI}, headers=headers).json()
    assert set(body["timings"]) == FIELDS and body["timings"]["cached_tokens"] == 1
    assert body["timings"]["ttft_ms"] >= body["timings"]["queue_ms"] >= 0
    prompts = {"prompt": ["a", "b"], "stream": True}
    chunks = events_of(api.post(CMPL, prompts, headers=headers).text)[:-1]
    with_timings = [c for c in chunks if "timings" in c]
    assert with_timings == [chunks[-1]] and set(chunks[-1]["timings"]) == FIELDS
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


def test_no_rate_without_output(make_api):
    api = make_api(server={"timings": True})
    for fields in ({"n": 3, "echo": True, "max_tokens": 0}, {"n": 2, "max_tokens": 1}):
        body = api.cmpl(**fields).json()
        assert body["timings"]["tokens_per_second"] is None


def test_no_timings_unless_asked_for(api):
    assert "timings" not in api.chat().json()
    assert "timings" not in api.chat(stream=True).text


# --- progress -------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [CHAT, CMPL])
def test_return_progress(make_api, monkeypatch, path):
    monkeypatch.setattr("pageserve.api.progress.INTERVAL", 0.005)
    api = make_api(num_cached=1)

    async def scenario():
        api.engine.held = True
        task = await begin(api, path, stream=True, return_progress=True)
        await asyncio.sleep(0.05)  # told once: nothing changes
        (run,) = api.engine._running.values()
        run.steps = 1  # runs, and its prompt is computed
        await asyncio.sleep(0.05)
        api.engine.held = False
        return await task

    events = events_of(api.run(scenario()).text)
    assert events.pop() == "[DONE]"
    reports = [e for e in events if "prompt_progress" in e]
    assert reports == events[: len(reports)] and all(e["choices"] == [] for e in reports)
    total = len(api.engine.requests[0].prompt_token_ids)
    told = [e["prompt_progress"] for e in reports]
    assert [p["queue_position"] for p in told] == [1, 0]
    assert [p["processed"] for p in told] == [0, total]
    assert all(p["total"] == total and p["cached"] == 1 and p["time_ms"] >= 0 for p in told)
    assert {e["object"] for e in events} == {events[-1]["object"]}


def test_progress_counts_a_prompt_once(make_api, monkeypatch):
    monkeypatch.setattr("pageserve.api.progress.INTERVAL", 0.005)
    api = make_api()

    async def scenario():
        api.engine.held = True
        fields = {"prompt": ["x" * 10, "y" * 10], "n": 2, "stream": True}
        task = await begin(api, CMPL, **fields, return_progress=True)
        for run in list(api.engine._running.values())[:2]:  # those of the first prompt
            run.steps = 1
        await asyncio.sleep(0.05)
        api.engine.held = False
        return await task

    events = events_of(api.run(scenario()).text)[:-1]
    told = [e["prompt_progress"] for e in events if "prompt_progress" in e]
    assert told[0]["total"] == 20 and told[0]["processed"] == 10


def test_progress_needs_a_stream_and_is_not_sent_unasked(make_api, monkeypatch):
    monkeypatch.setattr("pageserve.api.progress.INTERVAL", 0.001)
    api = make_api(step_delay=0.02)
    response = api.chat(return_progress=True)
    assert (response.status_code, error_of(response)["param"]) == (400, "return_progress")
    assert "prompt_progress" not in api.chat(stream=True).text


def test_progress_ends_with_the_stream(make_api, monkeypatch):
    monkeypatch.setattr("pageserve.api.progress.INTERVAL", 0.001)
    api = make_api(fail_at=0, step_delay=0.02)
    events = events_of(api.chat(stream=True, return_progress=True).text)
    assert "error" in events[-1]

    async def settle():
        await asyncio.sleep(0.01)
        return [t for t in asyncio.all_tasks() if "report_progress" in repr(t)]

    assert api.run(settle()) == []


def test_truncation_to_nothing_names_its_own_field(api):
    response = api.cmpl(truncate_prompt_tokens=0)
    assert response.status_code == 400
    assert error_of(response)["param"] == "truncate_prompt_tokens"
