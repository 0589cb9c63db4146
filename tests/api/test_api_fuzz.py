"""Whatever the body is: a valid answer or a valid error object, and a server that lives on."""

import asyncio
import json

import pytest
from api_harness import CHAT, CMPL, Api, error_of, events_of
from hypothesis import given, settings
from hypothesis import strategies as st

text = st.text(max_size=20)
numbers = st.one_of(
    st.integers(-(2**70), 2**70),
    st.sampled_from([0, 1, -1, 2, 20, 21, 0.0, 0.5, 1.0, 1.5, 2.0, 1e-9, 1e300]),
)
anything = st.recursive(
    st.one_of(st.none(), st.booleans(), numbers, text),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(text, inner, max_size=3)
    ),
    max_leaves=6,
)  # fmt: skip
parts = st.fixed_dictionaries({"type": st.sampled_from(["text", "image_url"]), "text": text})
messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "system", "assistant", "tool", "function", "x"])},
        optional={
            "content": st.one_of(text, st.lists(st.one_of(parts, anything), max_size=2), anything),
            "name": anything,
            "tool_call_id": text,
            "tool_calls": anything,
        },
    ),
    max_size=3,
)
prompts = st.one_of(
    text,
    st.lists(text, max_size=3),
    st.lists(st.integers(-2, 300), max_size=4),
    st.lists(st.lists(st.integers(0, 270), max_size=3), max_size=3),
    anything,
)
# fmt: off
NUMERIC = [
    "max_tokens", "max_completion_tokens", "n", "temperature", "top_p", "top_k", "min_p", "seed",
    "repetition_penalty", "frequency_penalty", "presence_penalty", "min_tokens", "top_logprobs",
    "truncate_prompt_tokens", "priority", "best_of",
]
FLAGS = [
    "stream", "logprobs", "ignore_eos", "include_stop_str_in_output", "skip_special_tokens",
    "return_token_ids", "add_generation_prompt", "continue_final_message", "add_special_tokens",
    "echo",
]
OTHER = [
    "model", "stop", "stream_options", "logit_bias", "stop_token_ids", "allowed_token_ids",
    "bad_words", "user", "tools", "tool_choice", "response_format", "cache_salt", "documents",
    "chat_template_kwargs", "modalities", "suffix", "zzz",
]
# fmt: on
VALUES = {
    **{name: st.one_of(numbers, anything) for name in NUMERIC},
    **{name: st.one_of(st.booleans(), anything) for name in FLAGS},
    **dict.fromkeys(OTHER, anything),
    "stop": st.one_of(text, st.lists(text, max_size=4), anything),
    "stream_options": st.fixed_dictionaries({"include_usage": st.booleans()}),
    "logit_bias": st.dictionaries(st.integers(-1, 300).map(str), numbers, max_size=3),
    "stop_token_ids": st.lists(st.integers(-1, 300), max_size=3),
}
# Many fields at once are nearly always refused for the first: a few at a time go deeper.
some_fields = st.lists(st.sampled_from(sorted(VALUES)), max_size=4, unique=True).flatmap(
    lambda names: st.fixed_dictionaries({name: VALUES[name] for name in names})
)


@pytest.fixture(scope="module")
def shared_api():
    with asyncio.Runner() as runner:
        yield Api(runner, max_model_len=128)


def check_answer(response):
    if response.status_code != 200:
        assert response.status_code in (400, 404), response.text
        error_of(response)
    elif response.headers["content-type"].startswith("text/event-stream"):
        *chunks, last = events_of(response.text)
        assert last == "[DONE]"
        assert any(c["choices"] and c["choices"][0]["finish_reason"] for c in chunks)
    else:
        body = response.json()
        assert body["choices"] and all(c["finish_reason"] for c in body["choices"])
        assert body["usage"]["total_tokens"] > 0


@settings(max_examples=200, deadline=None)
@given(chat=st.booleans(), what=st.one_of(messages, anything), prompt=prompts, body=some_fields)
def test_any_body_gets_a_valid_answer(shared_api, chat, what, prompt, body):
    path, main = (CHAT, {"messages": what}) if chat else (CMPL, {"prompt": prompt})
    check_answer(shared_api.post(path, {**main, **body}))
    shared_api.check_alive()


@settings(max_examples=100, deadline=None)
@given(body=st.one_of(st.binary(max_size=50), anything.map(lambda v: json.dumps(v).encode())))
def test_any_bytes_get_a_valid_answer(shared_api, body):
    headers = {"content-type": "application/json"}
    for path in (CHAT, CMPL, "/tokenize", "/detokenize"):
        response = shared_api.post(path, content=body, headers=headers)
        assert response.status_code == 400
        error_of(response)
    shared_api.check_alive()
