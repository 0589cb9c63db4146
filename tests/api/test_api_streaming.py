"""Shape and order of streams, and that a whole reply is the same text."""

import json
import random
from itertools import chain

import pytest
from api_harness import CHAT, CMPL, HI, TOKENIZER, events_of

EMOJI = "a👩‍👩‍👧b é 漢字 🇳🇴."


def chunks_of(response):
    """Chunks of a stream that ended well."""
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    *chunks, done = events_of(response.text)
    assert done == "[DONE]"
    return chunks


def deltas_of(chunks):
    return [c["choices"][0]["delta"] for c in chunks if c["choices"]]


def test_chat_stream_is_role_text_finish_done(api):
    chunks = chunks_of(api.chat(stream=True))
    assert deltas_of(chunks) == [
        {"role": "assistant", "content": "", "refusal": None},
        {"content": "Hello"},
        {"content": " world"},
        {},
    ]
    assert [c["choices"][0]["finish_reason"] for c in chunks] == [None, None, None, "stop"]
    assert chunks[-1]["choices"][0]["stop_reason"] is None
    for chunk in chunks:
        assert set(chunk) == {
            "id", "object", "created", "model", "system_fingerprint", "choices"
        }  # fmt: skip
        assert {"index", "delta", "logprobs", "finish_reason"} <= set(chunk["choices"][0])
        assert chunk["object"] == "chat.completion.chunk"
        assert chunk["system_fingerprint"] == "fp_0123456789"
    assert len({(c["id"], c["created"], c["model"]) for c in chunks}) == 1
    prefix, random_part = chunks[0]["id"].split("-")
    assert (prefix, len(random_part), random_part.isalnum()) == ("chatcmpl", 29, True)


def test_completion_stream_has_no_role_and_ends_with_empty_text(api):
    chunks = chunks_of(api.cmpl(stream=True))
    choices = [c["choices"][0] for c in chunks]
    assert [c["text"] for c in choices] == ["Hello", " world", ""]
    assert [c["finish_reason"] for c in choices] == [None, None, "stop"]
    assert all(c["object"] == "text_completion" for c in chunks)
    assert chunks[0]["id"].startswith("cmpl-")


@pytest.mark.parametrize("path", [CHAT, CMPL])
def test_usage_chunk_only_when_asked_for(api, path):
    body = {"messages": HI} if path == CHAT else {"prompt": "hi"}
    usage = api.post(path, body).json()["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    for options in (None, {}, {"include_usage": False}, {"include_usage": None}):
        extra = {} if options is None else {"stream_options": options}
        chunks = chunks_of(api.post(path, {**body, "stream": True, **extra}))
        assert all("usage" not in c and c["choices"] for c in chunks)
    options = {"include_usage": True}
    chunks = chunks_of(api.post(path, {**body, "stream": True, "stream_options": options}))
    assert [c["usage"] for c in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1]["choices"] == []
    details = {"prompt_tokens_details": {"cached_tokens": 0}}
    assert chunks[-1]["usage"] == usage and details.items() <= usage.items()


def test_continuous_usage_counts_up(api):
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = chunks_of(api.chat(stream=True, stream_options=options))
    assert [c["usage"]["completion_tokens"] for c in chunks] == [1, 1, 2, 3, 3]
    assert chunks[-1]["choices"] == []


def test_cached_tokens_are_told(make_api):
    usage = make_api(num_cached=1).chat().json()["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 1}


@pytest.mark.parametrize("script", [[], [261]])
def test_stream_without_any_text_still_opens_with_the_role(make_api, script):
    api = make_api(script=script)
    assert deltas_of(chunks_of(api.chat(stream=True))) == [
        {"role": "assistant", "content": "", "refusal": None},
        {},
    ]
    assert api.chat().json()["choices"][0]["message"]["content"] == ""


def test_no_event_before_the_first_token(make_api):
    api = make_api(step_delay=0.05)

    async def first_bodies():
        sent = []

        async def receive():
            if not sent:
                sent.append(None)
                return {"type": "http.request", "body": body, "more_body": False}
            await api.engine._loop_task
            return {"type": "http.disconnect"}

        async def send(message):
            sent.append((message, api.engine.stats.steps_total))

        body = json.dumps({"messages": HI, "stream": True}).encode()
        scope = {
            "type": "http", "method": "POST", "path": CHAT, "query_string": b"", "root_path": "",
            "headers": [(b"content-type", b"application/json")],
        }  # fmt: skip
        await api.app(scope, receive, send)
        return sent[1:]

    sent = api.run(first_bodies())
    (start, start_step), *rest = sent
    assert (start["type"], start["status"], start_step) == ("http.response.start", 200, 0)
    assert len(rest) == 4  # role and first text, second text, finish, [DONE]
    assert all(step > 0 for message, step in rest)


@pytest.mark.parametrize("tokens_per_step", [1, 2, 3, 7])
@pytest.mark.parametrize("stop", [[], ["wor"], ["o w", "ld"], ["漢字", "👧"]])
def test_stream_equals_whole_reply_for_every_split(make_api, tokens_per_step, stop):
    data = list(f"Hello world {EMOJI}".encode())
    api = make_api(script=data, tokens_per_step=tokens_per_step)
    for include in (False, True):
        fields = {"stop": stop, "include_stop_str_in_output": include, "max_tokens": 100}
        whole = api.chat(**fields).json()["choices"][0]
        chunks = chunks_of(api.chat(stream=True, **fields))
        deltas = deltas_of(chunks)
        assert "".join(d.get("content", "") for d in deltas) == whole["message"]["content"]
        assert all(d.get("content") != "" for d in deltas[1:])
        assert "\ufffd" not in whole["message"]["content"]
        last = chunks[-1]["choices"][0]
        assert (last["finish_reason"], last["stop_reason"]) == (
            whole["finish_reason"],
            whole["stop_reason"],
        )


def test_random_replies_stream_as_they_are_told_whole(make_api):
    rng = random.Random(0)
    for _ in range(200):
        ids = [rng.choice([*range(256), 256, 257, 258, 259]) for _ in range(rng.randrange(30))]
        api = make_api(script=ids, tokens_per_step=rng.randrange(1, 5))
        stop = [rng.choice(["a", "Hello", " world the", "是", "\ufffd"])]
        fields = {"stop": stop, "max_tokens": 40}
        whole = api.cmpl(**fields).json()["choices"][0]
        choices = [c["choices"][0] for c in chunks_of(api.cmpl(stream=True, **fields))]
        assert "".join(c["text"] for c in choices) == whole["text"]
        assert choices[-1]["finish_reason"] == whole["finish_reason"]


def test_max_tokens_inside_a_character_drops_its_tail_in_both_modes(make_api):
    api = make_api(script=list("ab👧".encode()))
    whole = api.chat(max_tokens=4).json()["choices"][0]
    assert (whole["message"]["content"], whole["finish_reason"]) == ("ab", "length")
    chunks = chunks_of(api.chat(max_tokens=4, stream=True))
    assert "".join(d.get("content", "") for d in deltas_of(chunks)) == "ab"


def test_stop_reasons(make_api):
    api = make_api(script=list(b"abcdef"))
    for fields, finish, reason, text in (
        ({}, "stop", None, "abcdef"),
        ({"max_tokens": 2}, "length", None, "ab"),
        ({"max_completion_tokens": 3}, "length", None, "abc"),
        ({"max_completion_tokens": 3, "max_tokens": 2}, "length", None, "abc"),
        ({"max_tokens": 7}, "stop", None, "abcdef"),  # EOS as the last token allowed
        ({"stop": "cd"}, "stop", "cd", "ab"),
        ({"stop": ["de", "cd"]}, "stop", "cd", "ab"),
        ({"stop": "cd", "include_stop_str_in_output": True}, "stop", "cd", "abcd"),
        ({"stop_token_ids": [99]}, "stop", 99, "ab"),
        ({"stop_token_ids": [99], "include_stop_str_in_output": True}, "stop", 99, "abc"),
        ({"stop": "cd", "min_tokens": 4}, "stop", None, "abcdef"),
        ({"ignore_eos": True, "max_tokens": 9}, "length", None, "abcdef"),
    ):
        choice = api.chat(**fields).json()["choices"][0]
        got = (choice["finish_reason"], choice["stop_reason"], choice["message"]["content"])
        assert got == (finish, reason, text), fields
        assert "tool_calls" not in choice["message"]
        assert "reasoning_content" not in choice["message"]


def test_a_stop_string_ends_the_request_in_the_engine(make_api):
    api = make_api(script=list(b"abcdef" * 100))
    api.chat(stop="cd")
    assert api.engine.num_live == 0 and len(api.engine.aborted) == 1
    assert 'finished_reason="stop"' in "".join(
        name for name, value in api.metrics().items() if "request_success_total" in name and value
    )


def test_several_prompts_answer_in_their_order(make_api):
    api = make_api(script=lambda request: request.prompt_token_ids)
    body = api.cmpl(prompt=["one", "two!", "3"]).json()
    assert [(c["index"], c["text"]) for c in body["choices"]] == [(0, "one"), (1, "two!"), (2, "3")]
    assert body["usage"]["prompt_tokens"] == 8
    assert body["usage"]["completion_tokens"] == 8 + 3
    chunks = chunks_of(
        api.cmpl(prompt=[[97, 98], [99]], stream=True, stream_options={"include_usage": True})
    )
    texts = {0: "", 1: ""}
    finished = set()
    for chunk in chunks[:-1]:
        (choice,) = chunk["choices"]
        assert choice["index"] not in finished
        texts[choice["index"]] += choice["text"]
        if choice["finish_reason"]:
            finished.add(choice["index"])
    assert texts == {0: "ab", 1: "c"} and finished == {0, 1}
    assert chunks[-1]["usage"]["completion_tokens"] == 5
    assert len({c["id"] for c in chunks}) == 1
    api.check_alive()


def test_1024_prompts_are_one_request(make_api):
    api = make_api(script=[], server={"max_queue": 1024})
    body = api.cmpl(prompt=[[1]] * 1024).json()
    assert [c["index"] for c in body["choices"]] == list(range(1024))


def test_token_ids_on_request(api):
    eos = TOKENIZER.eos_token_id
    prompt = TOKENIZER.encode("hi", add_special_tokens=False)
    choice = api.cmpl(return_token_ids=True).json()["choices"][0]
    assert (choice["prompt_token_ids"], choice["token_ids"]) == (prompt, [256, 257, eos])
    body = api.chat(return_token_ids=True).json()
    assert len(body["prompt_token_ids"]) == body["usage"]["prompt_tokens"]
    assert body["choices"][0]["token_ids"] == [256, 257, eos]
    choices = [c["choices"][0] for c in chunks_of(api.cmpl(return_token_ids=True, stream=True))]
    assert list(chain.from_iterable(c["token_ids"] for c in choices)) == [256, 257, eos]
    assert [c.get("prompt_token_ids") for c in choices] == [prompt, None, None]
    chunks = chunks_of(api.chat(return_token_ids=True, stream=True))
    assert [("prompt_token_ids" in c) for c in chunks] == [True, False, False, False]


def test_model_text_cannot_break_the_framing(make_api):
    text = 'a\n\ndata: [DONE]\n\n"\\\u2028\x00b'
    api = make_api(script=list(text.encode()), tokens_per_step=100)
    deltas = deltas_of(chunks_of(api.chat(stream=True)))
    assert deltas[1] == {"content": text}
