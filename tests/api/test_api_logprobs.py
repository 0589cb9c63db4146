"""Both shapes of log probabilities, streamed and whole."""

import threading
from itertools import chain

import pytest
from test_api_streaming import chunks_of

from pageserve.api import replies

WORDS = [256, 257]  # "Hello", " world"
EOS = "<|im_end|>"


def test_chat_entries_are_the_tokens_of_the_content(make_api):
    for text in ("a👧é是漢", "plain"):
        api = make_api(script=list(text.encode()))
        choice = api.chat(logprobs=True, top_logprobs=2).json()["choices"][0]
        entries = choice["logprobs"]["content"]
        assert choice["logprobs"]["refusal"] is None
        assert bytes(chain.from_iterable(e["bytes"] for e in entries)).decode() == text
        assert len(entries) == len(text.encode())  # no entry for EOS
        for entry in entries:
            values = [top["logprob"] for top in entry["top_logprobs"]]
            assert len(values) == 2 and values == sorted(values, reverse=True)
            assert set(entry) == {"token", "bytes", "logprob", "top_logprobs"}


@pytest.mark.parametrize("stream", [False, True])
def test_entries_are_spelled_off_the_event_loop(make_api, monkeypatch, stream):
    """C113: twenty alternatives to each of a thousand tokens and more take seconds. (Those of a
    stream's output come a few at a time, but an echoed prompt's all at once.)"""
    threads = []

    def watch(owner, name):
        original = getattr(owner, name)

        def wrapper(*args):
            threads.append(threading.get_ident())
            return original(*args)

        monkeypatch.setattr(owner, name, wrapper)

    watch(replies, "whole_reply")
    watch(replies.Reply, "echoed_logprobs")
    api = make_api()
    assert api.cmpl(prompt="ab", n=2, echo=True, logprobs=2, stream=stream).status_code == 200
    if not stream:
        assert api.chat(logprobs=True, top_logprobs=2).status_code == 200
    assert len(threads) >= 2 and threading.get_ident() not in threads


def test_token_text_is_not_the_vocabulary_spelling(make_api):
    entries = make_api(script=[259, 258]).chat(logprobs=True).json()["choices"][0]["logprobs"]
    assert [(e["token"], e["bytes"]) for e in entries["content"]] == [
        ("是", [230, 152, 175]),
        (" the", list(b" the")),
    ]


def test_partial_characters_are_escaped_with_their_true_bytes(make_api):
    entries = make_api(script=list("é".encode())).chat(logprobs=True).json()["choices"][0]
    assert [(e["token"], e["bytes"]) for e in entries["logprobs"]["content"]] == [
        ("\\xc3", [0xC3]),
        ("\\xa9", [0xA9]),
    ]


def test_alternatives_asked_for(make_api):
    api = make_api(script=WORDS)
    assert api.chat().json()["choices"][0]["logprobs"] is None
    assert api.chat(logprobs=False).json()["choices"][0]["logprobs"] is None
    for k in (0, 1, 20):
        fields = {"logprobs": True, "top_logprobs": k} if k else {"logprobs": True}
        entries = api.chat(**fields).json()["choices"][0]["logprobs"]["content"]
        assert [len(e["top_logprobs"]) for e in entries] == [k, k]


def test_completion_arrays(make_api):
    api = make_api(script=WORDS)
    assert api.cmpl().json()["choices"][0]["logprobs"] is None
    for k, size in ((0, 1), (1, 2), (5, 5)):
        logprobs = api.cmpl(logprobs=k).json()["choices"][0]["logprobs"]
        assert logprobs["tokens"] == ["Hello", " world", EOS]
        assert logprobs["token_logprobs"] == [-0.5, -0.5, -0.5]
        assert logprobs["text_offset"] == [0, 5, 11]
        assert [len(top) for top in logprobs["top_logprobs"]] == [size, size, size]
        pairs = zip(logprobs["top_logprobs"], logprobs["tokens"], strict=True)
        assert [top[token] for top, token in pairs] == [-0.5, -0.5, -0.5]


def test_offsets_index_the_text_and_keys_of_partial_characters_differ(make_api):
    text = "a👧é是x"
    choice = make_api(script=list(text.encode())).cmpl(logprobs=0).json()["choices"][0]
    logprobs = choice["logprobs"]
    assert choice["text"] == text
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        if not token.startswith("bytes:") and token != EOS:
            assert text[offset : offset + len(token)] == token
    assert logprobs["tokens"][1:5] == [f"bytes:\\x{byte:02x}" for byte in "👧".encode()]
    assert logprobs["text_offset"] == [0, 1, 1, 1, 1, 2, 2, 3, 3, 3, 4, 5]


@pytest.mark.parametrize("script", [[256, 257], [], [256, 0xF0, 0x9F]], ids=["eos", "alone", "cut"])
@pytest.mark.parametrize("fields", [{}, {"echo": True}, {"max_tokens": 1, "echo": True}])
def test_a_completion_scores_every_token(make_api, script, fields):
    """Who asks for an echo and one token more takes the last entry away: lm-eval does."""
    api = make_api(script=script)
    whole = api.cmpl(logprobs=1, **fields).json()
    choice, usage = whole["choices"][0], whole["usage"]
    num_echoed = usage["prompt_tokens"] if "echo" in fields else 0
    arrays = choice["logprobs"]
    for values in arrays.values():
        assert len(values) == num_echoed + usage["completion_tokens"]
    assert all(offset <= len(choice["text"]) for offset in arrays["text_offset"])
    choices = [c["choices"][0] for c in chunks_of(api.cmpl(stream=True, logprobs=1, **fields))]
    for name, values in arrays.items():
        parts = [c["logprobs"][name] for c in choices if c["logprobs"]]
        assert list(chain.from_iterable(parts)) == values


def test_a_chat_scores_its_end_with_token_ids(make_api):
    api = make_api(script=WORDS)
    fields = {"logprobs": True, "return_token_ids": True}
    choice = api.chat(**fields).json()["choices"][0]
    entries = choice["logprobs"]["content"]
    assert [e["token"] for e in entries] == ["Hello", " world", EOS]
    assert len(entries) == len(choice["token_ids"])
    choices = [c["choices"][0] for c in chunks_of(api.chat(stream=True, **fields))]
    assert [e for c in choices if c["logprobs"] for e in c["logprobs"]["content"]] == entries


@pytest.mark.parametrize("tokens_per_step", [1, 3])
def test_streamed_entries_are_those_of_the_whole_reply(make_api, tokens_per_step):
    api = make_api(script=list("a👧é stop 是".encode()), tokens_per_step=tokens_per_step)
    fields = {"logprobs": True, "top_logprobs": 1, "stop": "stop"}
    whole = api.chat(**fields).json()["choices"][0]
    choices = [c["choices"][0] for c in chunks_of(api.chat(stream=True, **fields))]
    streamed = [e for c in choices if c["logprobs"] for e in c["logprobs"]["content"]]
    assert streamed == whole["logprobs"]["content"]
    assert bytes(chain.from_iterable(e["bytes"] for e in streamed)).decode() == "a👧é "
    fields = {"logprobs": 1, "stop": "stop"}
    whole = api.cmpl(**fields).json()["choices"][0]["logprobs"]
    choices = [c["choices"][0] for c in chunks_of(api.cmpl(stream=True, **fields))]
    for name, values in whole.items():
        parts = [c["logprobs"][name] for c in choices if c["logprobs"]]
        assert list(chain.from_iterable(parts)) == values


def test_minus_infinity_is_a_number(make_api, monkeypatch):
    from pageserve.messages import TokenLogprobs

    monkeypatch.setattr(
        "fakes._logprobs", lambda t, k: TokenLogprobs(t, float("-inf"), [1], [float("-inf")])
    )
    api = make_api(script=WORDS)
    entry = api.chat(logprobs=True, top_logprobs=1).json()["choices"][0]["logprobs"]["content"][0]
    assert entry["logprob"] == entry["top_logprobs"][0]["logprob"] == -9999.0
    logprobs = api.cmpl(logprobs=1).json()["choices"][0]["logprobs"]
    assert logprobs["token_logprobs"] == [-9999.0] * 3
