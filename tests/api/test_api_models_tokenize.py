"""/v1/models, /tokenize and /detokenize."""

import asyncio
import threading

import pytest
from api_harness import CHAT, HI, TOKENIZER, error_of

from pageserve.tokenizer import Tokenizer


def test_models(api):
    body = api.get("/v1/models").json()
    assert body["object"] == "list"
    assert [card["id"] for card in body["data"]] == ["tiny", "org/tiny"]
    for card in body["data"]:
        assert card == {
            "id": card["id"], "object": "model", "created": api.context.created,
            "owned_by": "pageserve", "root": card["id"], "parent": None,
            "max_model_len": 4096, "permission": [],
        }  # fmt: skip


@pytest.mark.parametrize("name", ["org/tiny", "org%2Ftiny", "tiny"])
def test_model_by_name_with_raw_and_quoted_slash(api, name):
    assert api.get(f"/v1/models/{name}").json()["id"] == name.replace("%2F", "/")


@pytest.mark.parametrize("name", ["nope", "..%2f..%2fsecret", "org", "tiny/"])
def test_model_that_is_not_served(api, name):
    response = api.get(f"/v1/models/{name}")
    assert response.status_code == 404
    assert error_of(response)["code"] == "model_not_found"


def test_long_texts_hold_up_nobody(api, monkeypatch):
    """C113: what /tokenize takes may have any length, and all else waits for the same threads."""
    release, encode = threading.Event(), Tokenizer.encode

    def slow(self, text, add_special_tokens):
        if text == "long":
            assert release.wait(10)
        return encode(self, text, add_special_tokens)

    monkeypatch.setattr(Tokenizer, "encode", slow)

    async def run():
        long = [
            asyncio.create_task(api.send("POST", "/tokenize", json={"prompt": "long"}))
            for _ in range(4)
        ]
        await asyncio.sleep(0.1)  # they have the threads
        try:
            async with asyncio.timeout(5):
                answer = await api.send("POST", CHAT, json={"messages": HI})
        finally:
            release.set()
        return answer, await asyncio.gather(*long)

    answer, long = api.run(run())
    assert answer.status_code == 200
    assert [r.json()["count"] for r in long] == [4] * 4


@pytest.mark.parametrize("path", ["/tokenize", "/v1/tokenize"])
def test_tokenize_text(api, path):
    text = "Hello the é是<|im_end|>"
    ids = TOKENIZER.encode(text, add_special_tokens=True)
    body = api.post(path, {"prompt": text}).json()
    assert body == {"count": len(ids), "max_model_len": 4096, "tokens": ids, "token_strs": None}
    assert api.post(path, {"content": text}).json()["tokens"] == ids
    body = api.post(path, {"prompt": text, "return_token_strs": True}).json()
    assert body["token_strs"] == [TOKENIZER.token_text(i) for i in ids]
    body = api.post(path, {"content": "é是", "with_pieces": True}).json()
    assert body["tokens"] == [
        {"id": 0xC3, "piece": [0xC3]},
        {"id": 0xA9, "piece": [0xA9]},
        {"id": 259, "piece": "是"},
    ]


def test_tokenize_messages_as_chat_does(api):
    api.chat()
    body = api.post("/tokenize", {"messages": HI}).json()
    assert body["tokens"] == api.engine.requests[-1].prompt_token_ids
    bare = api.post("/tokenize", {"messages": HI, "add_generation_prompt": False}).json()
    assert bare["count"] < body["count"]


def test_tokenize_has_no_context_limit(make_api):
    api = make_api(max_model_len=16)
    assert api.post("/tokenize", {"prompt": "a" * 100}).json()["count"] == 100


def test_tokenize_refusals(api):
    for body in ({}, {"prompt": "a", "messages": HI}, {"prompt": "a", "content": "b"}):
        assert error_of(api.post("/tokenize", body))["code"] == "invalid_value"
    assert error_of(api.post("/tokenize", {"prompt": 1}))["code"] == "invalid_type"
    response = api.post("/tokenize", {"prompt": "a", "model": "nope"})
    assert response.status_code == 404


@pytest.mark.parametrize("text", ["Hello the é是", "👩‍👩‍👧", "<|im_end|>x", ""])
def test_round_trip_under_all_three_names(api, text):
    tokens = api.post("/tokenize", {"prompt": text}).json()["tokens"]
    assert api.post("/detokenize", {"tokens": tokens}).json() == {
        "prompt": text, "content": text, "text": text
    }  # fmt: skip


def test_detokenize(api):
    body = {"tokens": [72, 263], "skip_special_tokens": True}
    assert api.post("/v1/detokenize", body).json()["text"] == "H"
    assert api.post("/detokenize", {"tokens": [0xC3]}).json()["text"] == "\ufffd"
    for tokens, code in (
        ([TOKENIZER.size], "invalid_value"),
        ([-1], "invalid_value"),
        (["a"], "invalid_type"),
        (None, "missing_required_parameter"),
    ):
        assert error_of(api.post("/detokenize", {"tokens": tokens}))["code"] == code
