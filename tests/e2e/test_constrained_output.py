"""Structured output from the real engine and the embedded model, over HTTP with the SDK."""

import json

import jsonschema
import openai
import pytest
from server_process import ServerProcess

from pageserve.hub import resolve_model
from pageserve.tokenizer import load_tokenizer

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "population": {"type": "integer", "minimum": 0},
        "tags": {"type": "array", "items": {"enum": ["big", "old"]}, "maxItems": 2},
        "mayor": {"anyOf": [{"type": "null"}, {"type": "string", "pattern": "^[A-Z][a-z]{1,9}$"}]},
    },
    "required": ["city", "population", "tags", "mayor"],
    "additionalProperties": False,
}
NUMBERS = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "number"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
MESSAGES = [{"role": "user", "content": "Describe Paris as JSON."}]


@pytest.fixture(scope="module")
def client():
    with ServerProcess("--max-model-len", "512") as server:
        yield openai.OpenAI(base_url=server.url + "/v1", api_key="key", max_retries=0)


def ask(client, schema=None, **fields):
    if schema is not None:
        named = {"name": "s", "schema": schema}
        fields["response_format"] = {"type": "json_schema", "json_schema": named}
    defaults = {"model": "SmolLM2-135M-Instruct", "messages": MESSAGES, "max_tokens": 150}
    return client.chat.completions.create(**{**defaults, **fields})


@pytest.mark.parametrize("temperature", [0, 2])
def test_json_schema(client, temperature):
    """The text validates, ends with stop, and a stream of it is the same text."""
    reply = ask(client, SCHEMA, temperature=temperature, seed=1)
    choice = reply.choices[0]
    assert choice.finish_reason == "stop"
    jsonschema.validate(json.loads(choice.message.content), SCHEMA)
    chunks = list(ask(client, SCHEMA, temperature=temperature, seed=1, stream=True))
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == choice.message.content
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_cut_by_length(client):
    choice = ask(client, SCHEMA, max_tokens=5).choices[0]
    assert choice.finish_reason == "length"
    assert choice.message.content.startswith('{"city":')


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(resolve_model("SmolLM2-135M-Instruct"))


@pytest.mark.parametrize("liked", ["blanks", "digits"])
def test_liked_tokens_end(client, tokenizer, liked):
    """C105, C106: a bias of 100 on all blank or all digit tokens, and the JSON closes."""
    chars = b" \n\t\r" if liked == "blanks" else b"0123456789."
    ids = [
        i for i in range(tokenizer.size) if (tokenizer.token_bytes(i) or b"x").strip(chars) == b""
    ]
    bias = {str(i): 100 for i in ids[:1024]}
    choice = ask(client, NUMBERS, max_tokens=200, logit_bias=bias, temperature=1).choices[0]
    assert choice.finish_reason == "stop"
    jsonschema.validate(json.loads(choice.message.content), NUMBERS)


def test_choice_and_regex(client):
    """Exact texts, also under every liking for the end of the text."""
    choices = ["positive", "neutral", "négatif 是"]
    for seed in range(2):
        fields = {"temperature": 2, "seed": seed}
        reply = ask(client, extra_body={"structured_outputs": {"choice": choices}}, **fields)
        assert reply.choices[0].message.content in choices
        assert reply.choices[0].finish_reason == "stop"
        body = {"guided_regex": r"\d{3}-[a-f]{2}"}
        text = ask(client, extra_body=body, **fields).choices[0].message.content
        assert len(text) == 6 and text[:3].isdigit() and text[3] == "-"


def test_refused_before_anything_runs(client):
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, {"type": "object", "uniqueItems": True}, stream=True)
    assert caught.value.code == "invalid_json_schema"
    assert ask(client, max_tokens=2).choices[0].finish_reason == "length"
