"""Grammars through the whole engine: whatever the model wants, the text matches.

Random models know nothing of JSON, and at temperature 2 the embedded one forgets it.
"""

import json
import re

import jsonschema
import msgspec
import pytest
from llguidance import LLMatcher

from pageserve.engine.client import merge
from pageserve.engine.output_processor import OutputProcessor
from pageserve.llm import LLM
from pageserve.messages import AddRequest, RequestOutput
from pageserve.sampling_params import SamplingParams
from pageserve.tokenizer import load_tokenizer

COMPACT = {"whitespace_flexible": False}
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "bb", "ç"]}, "maxItems": 3},
        "next": {"anyOf": [{"type": "null"}, {"type": "boolean"}]},
    },
    "required": ["name", "age", "tags", "next"],
    "additionalProperties": False,
}
REGEX = r"[A-F]{2}-[0-9]{1,3}(\.[0-9]{2})?"
CHOICES = ["yes", "no", "nobody", "是"]
JSON_GRAMMAR = LLMatcher.grammar_from_json_schema(SCHEMA, overrides=COMPACT)
REGEX_GRAMMAR = LLMatcher.grammar_from_regex(REGEX)
CHOICE_GRAMMAR = LLMatcher.grammar_from_lark(
    "start: " + " | ".join(json.dumps(c, ensure_ascii=False) for c in CHOICES)
)
CALL_GRAMMAR = LLMatcher.grammar_from_lark('start: %json {"enum": ["f", "go"]} ";"')


def load(path, depth=2, **options) -> LLM:
    options = {"max_model_len": 256, "num_kv_blocks": 128, "max_num_seqs": 16} | options
    return LLM(model=str(path), dtype="float32", max_steps_in_flight=depth, **options)


def hot(count: int, max_tokens: int = 150) -> list[SamplingParams]:
    return [SamplingParams(temperature=2.0, seed=i, max_tokens=max_tokens) for i in range(count)]


def check(kind: str, text: str) -> None:
    if kind == "json":
        jsonschema.validate(json.loads(text), SCHEMA)
    elif kind == "regex":
        assert re.fullmatch(REGEX, text)
    else:
        assert text in CHOICES


GRAMMARS = {"json": JSON_GRAMMAR, "regex": REGEX_GRAMMAR, "choice": CHOICE_GRAMMAR}


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_random_models(tiny_checkpoint, family):
    """Their heads have rows that the tokenizer has no ids for."""
    llm = load(tiny_checkpoint(family))
    kinds = [*GRAMMARS] * 5
    done = llm.generate(["A cat"] * 15, hot(15), grammars=[GRAMMARS[k] for k in kinds])
    llm.engine.scheduler.check_integrity()
    for kind, completion in zip(kinds, done, strict=True):
        assert completion.finish_reason == "stop", completion.error
        check(kind, completion.text)
    assert len({c.text for c in done}) > 5
    assert llm.engine.stats().grammars_compiled_total == 3


def test_an_allow_list_beside_a_grammar(tiny_checkpoint):
    """Whatever the model wants: tokens of the list only, and text of the grammar only."""
    llm = load(tiny_checkpoint("llama"))
    digits = llm.tokenizer.encode("0123456789", add_special_tokens=False)
    letters = llm.tokenizer.encode("AF-", add_special_tokens=False)
    params = [msgspec.structs.replace(p, allowed_token_ids=digits + letters) for p in hot(8, 12)]
    done = llm.generate(["A"] * 8, params, grammars=[REGEX_GRAMMAR, None] * 4)
    for completion in done:
        assert set(completion.token_ids) - {llm.tokenizer.eos_token_id} <= {*digits, *letters}
    for completion in done[::2]:
        assert re.match("[AF]{2}-[0-9]", completion.text), completion.error


def test_the_embedded_model(demo_gguf):
    llm = load(demo_gguf)
    kinds = [*GRAMMARS, "json"]
    done = llm.generate(["A person:"] * 4, hot(4), grammars=[GRAMMARS[k] for k in kinds])
    for kind, completion in zip(kinds, done, strict=True):
        assert completion.finish_reason == "stop", completion.error
        check(kind, completion.text)


@pytest.mark.parametrize(
    "changes",
    [{"depth": 1}, {"num_kv_blocks": 30, "block_size": 4}, {"max_num_batched_tokens": 5}],
    ids=str,
)
def test_same_tokens_at_any_depth_under_preemption_and_in_chunks(tiny_checkpoint, changes):
    path = tiny_checkpoint("llama")
    grammars = [JSON_GRAMMAR, None, REGEX_GRAMMAR, None, JSON_GRAMMAR, CHOICE_GRAMMAR]
    params, prompts = hot(6, 60), ["The cat sat on the mat", "and"] * 3
    expected = load(path).generate(prompts, params, grammars=grammars)
    llm = load(path, **changes)
    done = llm.generate(prompts, params, grammars=grammars)
    assert [c.token_ids for c in done] == [c.token_ids for c in expected]
    assert [c.finish_reason for c in done] == [c.finish_reason for c in expected]
    assert (llm.engine.stats().preemptions_total > 0) == ("num_kv_blocks" in changes)


def test_plain_rows_do_not_notice(tiny_checkpoint):
    llm = load(tiny_checkpoint("llama"))
    prompts = ["the dog", "and the cat", "a short sentence"]
    params = [
        SamplingParams(temperature=0, max_tokens=30, ignore_eos=True),
        SamplingParams(temperature=1.0, seed=3, max_tokens=30, ignore_eos=True),
        SamplingParams(temperature=1.0, seed=4, top_p=0.8, max_tokens=30, logprobs=2),
    ]
    alone = llm.generate(prompts, params)
    mixed = llm.generate(
        ["A"] * 5 + prompts, [*hot(5), *params], grammars=[JSON_GRAMMAR] * 5 + [None] * 3
    )
    assert [c.token_ids for c in mixed[5:]] == [c.token_ids for c in alone]
    assert [e.logprob for e in mixed[7].logprobs] == pytest.approx(
        [e.logprob for e in alone[2].logprobs], abs=1e-4
    )


def test_choices_of_one_prompt_have_grammars_of_their_own(tiny_checkpoint):
    llm = load(tiny_checkpoint("llama"))
    params = SamplingParams(temperature=2.0, seed=1, max_tokens=150)
    done = llm.generate(["The cat sat on the mat"], params, n=6, grammars=JSON_GRAMMAR)
    assert len({c.text for c in done}) > 3
    for completion in done:
        check("json", completion.text)


def generate(llm: LLM, request: AddRequest) -> tuple[list[int], RequestOutput]:
    outputs = llm.engine.add(request)
    tokens: list[int] = []
    while not outputs or outputs[-1].finish_reason is None:
        outputs = llm.engine.step()
        for output in outputs:
            tokens += output.new_token_ids
        llm.engine.scheduler.check_integrity()
    return tokens, outputs[-1]


def test_calls_behind_a_trigger(tiny_checkpoint):
    """A bias makes the model fond of the token that begins a call."""
    path = tiny_checkpoint("llama")
    tokenizer = load_tokenizer(path)
    trigger, end = (tokenizer.encode(x, False)[0] for x in ("<", "<|endoftext|>"))
    bias = {trigger: 4.5, end: -100.0}  # whose text begins like a call
    params = SamplingParams(
        temperature=1.5, seed=5, max_tokens=120, ignore_eos=True, logit_bias=bias
    )
    prompt = tokenizer.encode("The cat", add_special_tokens=False)
    results = []
    for depth in (1, 2):
        request = AddRequest("r", prompt, params, 0.0)
        request.grammar, request.grammar_trigger_ids = CALL_GRAMMAR, [trigger]
        tokens, final = generate(load(path, depth), request)
        assert final.finish_reason == "length" and len(tokens) == 120
        results.append(tokens)
    assert results[0] == results[1]
    text = tokenizer.decode(results[0], skip_special_tokens=False)
    parts = text.split("<")
    assert len(parts) > 4, "no calls to check"
    assert all(re.match('("f"|"go");', part) for part in parts[1:-1])
    assert any(len(part) > 6 for part in parts[1:]), "text behind a call is free"


@pytest.mark.parametrize("grammar", ["nonsense", LLMatcher.grammar_from_regex("(")])
def test_a_bad_grammar_ends_only_its_request(tiny_checkpoint, grammar):
    llm = load(tiny_checkpoint("llama"))
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    bad, good = llm.generate(["a", "a"], params, grammars=[grammar, None])
    assert bad.finish_reason == "error" and "grammar_error" in (bad.error or "")
    assert good.finish_reason == "length" and len(good.token_ids) == 5


# --- the last token is text -----------------------------------------------------------------------


@pytest.mark.parametrize("logprobs", [None, 0])
def test_the_token_that_ends_a_grammar_is_text(demo_gguf, logprobs):
    tokenizer = load_tokenizer(demo_gguf)
    ids = tokenizer.encode('{"a": 1}', add_special_tokens=False)
    for grammar_ended in (True, False):
        processor = OutputProcessor(tokenizer, SamplingParams(logprobs=logprobs, stop=["zz"]))
        text = processor.process(RequestOutput("r", ids, "stop", grammar_ended=grammar_ended))
        shown = ids if grammar_ended else ids[:-1]
        assert text is not None and text.text == tokenizer.decode(shown, skip_special_tokens=True)
        assert text.num_output_tokens == len(ids)


def test_a_late_reader_learns_that_the_grammar_ended():
    pending = RequestOutput("r", [5])
    merge(pending, RequestOutput("r", [], "stop", grammar_ended=True))
    assert (pending.new_token_ids, pending.grammar_ended) == ([5], True)
