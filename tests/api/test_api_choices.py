"""n, best_of, echo, suffix and prompt log probabilities, over a scripted engine."""

from itertools import chain

import fakes
import pytest
from api_harness import CHAT, CMPL, HI, TOKENIZER, error_of
from fakes import SPECIALS, byte_tokenizer
from test_api_streaming import chunks_of

from pageserve.messages import TokenLogprobs
from pageserve.tokenizer import Tokenizer

DRAW = {"temperature": 1.0}


def by_seed(request):
    """Say the digits of the seed, as often as the last one says."""
    seed = request.sampling_params.seed or 0
    return list(str(seed % 100).encode()) * (1 + seed % 3)


def texts_of(response):
    choices = response.json()["choices"]
    assert [c["index"] for c in choices] == list(range(len(choices)))
    return [c["text"] if "text" in c else c["message"]["content"] for c in choices]


# --- n --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [CHAT, CMPL])
def test_choices_draw_from_the_next_seeds_and_share_the_prompt(make_api, path):
    """Conformance 33, C067: choice i is what a request with seed + i gets; usage counts the prompt
    once; the children name their parent and come right behind it."""
    api = make_api(script=by_seed, num_cached=2)
    body = {"messages": HI} if path == CHAT else {"prompt": "hi"}
    reply = api.post(path, {**body, **DRAW, "n": 4, "seed": 41})
    singles = [api.post(path, {**body, **DRAW, "seed": 41 + i}) for i in range(4)]
    assert texts_of(reply) == [texts_of(single)[0] for single in singles]
    usages = [r.json()["usage"] for r in (reply, *singles)]
    assert len({usage["prompt_tokens"] for usage in usages}) == 1
    assert usages[0]["completion_tokens"] == sum(u["completion_tokens"] for u in usages[1:])
    assert usages[0]["prompt_tokens_details"]["cached_tokens"] == 2
    parent, *children = api.engine.requests[:4]
    assert parent.parent_id is None
    assert {child.parent_id for child in children} == {parent.request_id}
    api.check_alive()


def test_seeds_wrap_and_null_draws(make_api):
    api = make_api()
    api.chat(n=2, seed=2**63 - 1, **DRAW)
    api.chat(n=2, seed=-2, **DRAW)
    api.chat(n=2, **DRAW)
    seeds = [request.sampling_params.seed for request in api.engine.requests]
    assert seeds == [2**63 - 1, 2**63, -2, 2**64 - 1, None, None]


def test_null_and_integral_n(api):
    """C046: null is 1, 1.0 is an integer, 2 are two choices."""
    assert [len(texts_of(api.chat(n=n))) for n in (None, 1.0, 2)] == [1, 1, 2]


@pytest.mark.parametrize("stream", [False, True])
def test_greedy_choices_run_once_and_are_copied(make_api, stream):
    api = make_api(script="Hello world")
    fields = {"n": 3, "temperature": 0, "logprobs": True, "stream": stream}
    if not stream:
        reply = api.chat(**fields)
        assert texts_of(reply) == ["Hello world"] * 3
        assert reply.json()["usage"]["completion_tokens"] == 9  # EOS counts
        choices = reply.json()["choices"]
        assert choices[0]["logprobs"] == choices[2]["logprobs"] is not None
    else:
        chunks = chunks_of(api.chat(**fields, stream_options={"include_usage": True}))
        assert joined(chunks) == ["Hello world"] * 3
        assert chunks[-1]["usage"]["completion_tokens"] == 9
    assert len(api.engine.requests) == 1
    api.check_alive()


def joined(chunks, num_choices=3):
    texts = [""] * num_choices
    for choice in chain.from_iterable(c["choices"] for c in chunks):
        texts[choice["index"]] += (
            choice["text"] if "text" in choice else choice["delta"].get("content", "")
        )
    return texts


@pytest.mark.parametrize("tokens_per_step", [1, 2])
def test_stream_of_several_choices(make_api, tokens_per_step):
    """Conformance 11, C001, C004, C005, C067: all roles first, one finish chunk for each choice and
    nothing behind it, one id, usage at the end only."""
    api = make_api(script=by_seed, tokens_per_step=tokens_per_step)
    fields = {"n": 3, "seed": 40, **DRAW}
    whole = api.chat(**fields)
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = chunks_of(api.chat(**fields, **options))
    assert len({(c["id"], c["created"]) for c in chunks}) == 1
    *chunks, usage = chunks
    assert (usage["choices"], usage["usage"]) == ([], whole.json()["usage"])
    assert all(c["usage"] is None and len(c["choices"]) == 1 for c in chunks)
    choices = [c["choices"][0] for c in chunks]
    assert [c["index"] for c in choices[:3]] == [0, 1, 2]
    roles = [c["delta"].get("role") for c in choices]
    assert roles == ["assistant"] * 3 + [None] * (len(choices) - 3)
    finished = []
    for choice in choices:
        assert choice["index"] not in finished
        if choice["finish_reason"] is not None:
            assert choice["delta"] == {}
            finished.append(choice["index"])
    assert sorted(finished) == [0, 1, 2]
    assert joined(chunks) == texts_of(whole)


@pytest.mark.parametrize("fields", [{"max_tokens": 1}, {}])
def test_role_comes_even_where_no_text_does(make_api, fields):
    """C004: the first token is EOS."""
    api = make_api(script=[])
    chunks = chunks_of(api.chat(n=2, stream=True, **DRAW, **fields))
    deltas = [(c["choices"][0]["index"], c["choices"][0]["delta"].get("role")) for c in chunks]
    assert deltas[:2] == [(0, "assistant"), (1, "assistant")]
    assert sorted(deltas[2:]) == [(0, None), (1, None)]


@pytest.mark.parametrize("stream", [False, True])
def test_one_failure_fails_them_all(make_api, monkeypatch, stream):
    api = make_api(script=by_seed)
    emit = fakes._Run._token

    def fail_third(run, output):
        if run.request.request_id.endswith("-2") and run.num_emitted == 1:
            output.finish_reason, output.error = "error", "NaN in the logits"
        else:
            emit(run, output)

    with monkeypatch.context() as patch:
        patch.setattr(fakes._Run, "_token", fail_third)
        reply = api.chat(n=4, seed=40, stream=stream, **DRAW)
    if stream:
        assert "[DONE]" not in reply.text and '"code":"internal_error"' in reply.text
    else:
        assert error_of(reply)["code"] == "internal_error"
    assert len(api.engine.aborted) >= 2  # those that had not ended by then
    api.check_alive()


def test_list_of_prompts_times_n(make_api):
    """Choices are in the order of prompts, and of seeds within each; every prompt counts once."""
    api = make_api(script=lambda r: [*r.prompt_token_ids, *by_seed(r)], num_cached=1)
    for prompts in (["ab", "c"], [[97, 98], [99]]):
        reply = api.cmpl(prompt=prompts, n=2, seed=10, **DRAW)
        assert texts_of(reply) == ["ab1010", "ab111111", "c1010", "c111111"]
        usage = reply.json()["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (3, 30)
        assert usage["prompt_tokens_details"]["cached_tokens"] == 2
    for prompt in ("ab", ["ab"], [97, 98], [[97, 98]]):
        assert texts_of(api.cmpl(prompt=prompt, seed=10, **DRAW)) == ["ab1010"]


# --- best_of --------------------------------------------------------------------------------------


@pytest.fixture
def ranked(make_api, monkeypatch):
    """Sequences whose tokens are as likely as the seed says: 2 is the best, then 1, 0, 3."""
    likely = {0: -3.0, 1: -2.0, 2: -1.0, 3: -4.0}
    monkeypatch.setattr(
        "fakes._logprobs", lambda token, k: TokenLogprobs(token, likely.get(token - 48, -2.5))
    )
    # The lengths differ: the sum of the log probabilities would rank otherwise.
    return make_api(script=lambda r: [48 + r.sampling_params.seed] * (r.sampling_params.seed + 1))


def test_best_of_ranks_by_the_mean_and_counts_all(ranked):
    """Conformance 34."""
    reply = ranked.cmpl(n=2, best_of=4, seed=0, ignore_eos=True, max_tokens=4, min_tokens=0, **DRAW)
    assert reply.status_code == 200
    texts = texts_of(reply)
    assert texts[0].startswith("222") and texts[1].startswith("11")
    assert all(choice["logprobs"] is None for choice in reply.json()["choices"])
    assert reply.json()["usage"]["completion_tokens"] == 4 * 4
    assert len(ranked.engine.requests) == 4


def test_best_of_returns_log_probabilities_if_asked(ranked):
    reply = ranked.cmpl(best_of=4, seed=0, logprobs=0, **DRAW)
    (choice,) = reply.json()["choices"]
    assert choice["text"] == "222"
    assert choice["logprobs"]["token_logprobs"] == [-1.0, -1.0, -1.0, -2.5]  # and EOS


def test_best_of_greedy_runs_once(api):
    reply = api.cmpl(n=2, best_of=5, temperature=0)
    assert texts_of(reply) == ["Hello world"] * 2
    assert reply.json()["usage"]["completion_tokens"] == 15
    assert len(api.engine.requests) == 1


def test_best_of_that_picks_nothing_may_stream(api):
    assert chunks_of(api.cmpl(n=2, best_of=2, stream=True, **DRAW))


# --- echo -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_tokens", [0, 1, 2])
def test_echo_covers_the_prompt(make_api, max_tokens):
    """Conformance 27, C032, C033: arrays of equal length, null for the first token, offsets that
    index the text, k best and the chosen one."""
    api = make_api(script=[256, 257])
    fields = {"prompt": list(b"abcd"), "echo": True, "logprobs": 3, "max_tokens": max_tokens}
    reply = api.cmpl(**fields)
    (choice,) = reply.json()["choices"]
    assert choice["text"] == "abcd" + "".join(["Hello", " world"][:max_tokens])
    assert choice["finish_reason"] == "length"
    assert reply.json()["usage"]["completion_tokens"] == max_tokens
    assert reply.json()["usage"]["prompt_tokens"] == 4
    arrays = choice["logprobs"]
    assert [len(a) for a in arrays.values()] == [4 + max_tokens] * 4
    assert arrays["token_logprobs"] == [None, *[-0.5] * (3 + max_tokens)]
    assert arrays["top_logprobs"][0] is None and arrays["text_offset"][0] == 0
    names = ("tokens", "top_logprobs", "text_offset")
    columns = zip(*(arrays[name][1:] for name in names), strict=True)
    for token, top, offset in columns:
        assert choice["text"][offset : offset + len(token)] == token
        assert len(top) == 3 and top[token] == -0.5
    chunks = chunks_of(api.cmpl(**fields, stream=True))
    streamed = [c["choices"][0] for c in chunks]
    assert streamed[0]["text"] == "abcd"
    assert "".join(c["text"] for c in streamed) == choice["text"]
    for name, values in arrays.items():
        parts = [c["logprobs"][name] for c in streamed if c["logprobs"]]
        assert list(chain.from_iterable(parts)) == values
    api.check_alive()


def test_echo_without_log_probabilities(api):
    reply = api.cmpl(prompt=["é是", "b"], echo=True, n=2, max_tokens=1, **DRAW)
    assert texts_of(reply) == ["é是Hello"] * 2 + ["bHello"] * 2
    assert api.engine.requests[-1].sampling_params.prompt_logprobs is None
    special = TOKENIZER.encode(SPECIALS[0], add_special_tokens=False)
    assert texts_of(api.cmpl(prompt=special, echo=True, max_tokens=0)) == [SPECIALS[0]]


def test_echo_in_a_stream_begins_every_choice(make_api):
    """Also where another choice has a token before the one that is scored with the prompt."""
    api = make_api(script=lambda r: list("é".encode()) if r.parent_id is None else [65, 66])
    chunks = chunks_of(api.cmpl(prompt="xy", echo=True, logprobs=1, n=3, stream=True, **DRAW))
    for index in range(3):
        first = next(c for c in (x["choices"][0] for x in chunks) if c["index"] == index)
        assert (first["text"], first["logprobs"]["tokens"]) == ("xy", ["x", "y"])
        assert first["logprobs"]["token_logprobs"] == [None, -0.5]
    assert joined(chunks) == ["xyé", "xyAB", "xyAB"]
    scored = [r.sampling_params.prompt_logprobs for r in api.engine.requests]
    assert scored == [1, None, None]


def test_echo_of_a_full_context(make_api):
    """C033: P = L is fine where no token is wanted, P = L + 1 is not."""
    api = make_api(max_model_len=8)
    assert api.cmpl(prompt="a" * 8, echo=True, max_tokens=0).status_code == 200
    for fields in ({"prompt": "a" * 9, "max_tokens": 0}, {"prompt": "a" * 8, "max_tokens": 1}):
        assert error_of(api.cmpl(echo=True, **fields))["code"] == "context_length_exceeded"
    assert error_of(api.chat(max_tokens=0))["code"] == "integer_below_min_value"
    small = make_api(max_model_len=64, num_kv_blocks=1)
    assert small.cmpl(prompt="a" * 16, echo=True, max_tokens=0).status_code == 200
    assert small.cmpl(prompt="a" * 17, echo=True, max_tokens=0).status_code == 400


def test_scoring_counts_its_prompt(make_api):
    api = make_api()
    api.cmpl(prompt="abcd", echo=True, max_tokens=0)
    api.cmpl(prompt="abcd", n=3, **DRAW)
    metrics = api.metrics()
    assert metrics['vllm:prompt_tokens_total{engine="0",model_name="tiny"}'] == 8
    assert metrics['vllm:request_params_n_sum{engine="0",model_name="tiny"}'] == 4


# --- prompt log probabilities and names of tokens -------------------------------------------------


def test_prompt_logprobs_in_the_shape_of_vllm(api):
    expected = [
        None,
        {
            "98": {"logprob": -0.5, "rank": 2, "decoded_token": "b"},
            "0": {"logprob": -0.25, "rank": 1, "decoded_token": "\0"},
        },
    ]
    reply = api.cmpl(prompt=["ab", "cb"], prompt_logprobs=1).json()
    assert [c["prompt_logprobs"] for c in reply["choices"]] == [expected] * 2
    assert reply["choices"][0]["text"] == "Hello world"
    reply = api.chat(prompt_logprobs=0, n=2, **DRAW).json()
    assert reply["prompt_logprobs"][0] is None
    assert len(reply["prompt_logprobs"]) == reply["usage"]["prompt_tokens"]
    assert all(len(entry) == 1 for entry in reply["prompt_logprobs"][1:])
    assert "prompt_logprobs" not in reply["choices"][0]
    assert "prompt_logprobs" not in api.chat().json()


def test_echo_and_prompt_logprobs_keep_their_own_counts(api):
    reply = api.cmpl(prompt="ab", echo=True, logprobs=0, prompt_logprobs=2, max_tokens=1).json()
    (choice,) = reply["choices"]
    assert [len(top) for top in choice["logprobs"]["top_logprobs"][1:]] == [1, 1]
    assert len(choice["prompt_logprobs"][1]) == 2


def test_tokens_named_by_their_ids(api):
    fields = {"return_tokens_as_token_ids": True}
    entries = api.chat(logprobs=True, top_logprobs=1, **fields).json()["choices"][0]["logprobs"]
    assert [e["token"] for e in entries["content"]] == ["token_id:256", "token_id:257"]
    assert entries["content"][0]["bytes"] == list(b"Hello")
    assert entries["content"][0]["top_logprobs"][0]["token"] == "token_id:0"
    arrays = api.cmpl(logprobs=0, **fields).json()["choices"][0]["logprobs"]
    assert arrays["tokens"] == ["token_id:256", "token_id:257", "token_id:263"]
    assert arrays["top_logprobs"][0] == {"token_id:256": -0.5}
    assert arrays["text_offset"] == [0, 5, 11]


def test_prompt_text(api):
    text = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert api.chat(return_prompt_text=True).json()["prompt_text"] == text
    chunks = chunks_of(api.chat(return_prompt_text=True, stream=True))
    assert [c.get("prompt_text") for c in chunks] == [text, *[None] * (len(chunks) - 1)]
    assert "prompt_text" not in api.chat().json()


# --- suffix ---------------------------------------------------------------------------------------


def fim_tokenizer() -> Tokenizer:
    tokenizer = byte_tokenizer()
    names = ["<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"]
    tokenizer._backend.add_tokens(names)
    return Tokenizer(tokenizer._backend, tokenizer.special_tokens_map, tokenizer.chat_templates)


def test_suffix_is_put_between_the_models_markers(make_api):
    tokenizer = fim_tokenizer()
    api = make_api(tokenizer=tokenizer)
    assert texts_of(api.cmpl(prompt="def f(", suffix="return 1")) == ["Hello world"]
    sent = tokenizer.decode(api.engine.requests[-1].prompt_token_ids, skip_special_tokens=False)
    assert sent == "<|fim_prefix|>def f(<|fim_suffix|>return 1<|fim_middle|>"
    api.cmpl(prompt="def f(", suffix="")
    assert len(api.engine.requests[-1].prompt_token_ids) == 6
