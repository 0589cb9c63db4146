"""Whatever the body is: a valid answer or a valid error object, and a server that lives on.

Against the scripted engine and against the real one with a tiny model, whose blocks must all come
back. HYPOTHESIS_PROFILE=nightly looks at ten times as many bodies, and at new ones each time.
"""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
from api_harness import CHAT, CMPL, HI, Api, error_of, events_of
from hypothesis import given, settings
from hypothesis import strategies as st

from pageserve.api.app import build_app
from pageserve.api.context import ServingContext
from pageserve.config import CacheArgs, EngineConfig, ModelArgs, ServerArgs
from pageserve.engine.process import ProcessClient
from pageserve.tokenizer import load_tokenizer

PROFILE = settings.default.max_examples  # 100, or 1,000 in the nightly one
NIGHTLY = PROFILE >= 1000
pytestmark = pytest.mark.timeout(3600 if NIGHTLY else 300)

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
    "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "min_p", "seed",
    "repetition_penalty", "frequency_penalty", "presence_penalty", "min_tokens", "top_logprobs",
    "truncate_prompt_tokens", "priority", "deadline_ms",
]
FLAGS = [
    "stream", "logprobs", "ignore_eos", "include_stop_str_in_output", "skip_special_tokens",
    "return_token_ids", "return_tokens_as_token_ids", "return_prompt_text", "return_progress",
    "add_generation_prompt", "continue_final_message", "add_special_tokens", "echo",
    "parallel_tool_calls", "include_reasoning",
]
OTHER = [
    "documents", "chat_template_kwargs", "zzz",
]
# fmt: on


def but_mostly(
    usual: st.SearchStrategy[Any], other: st.SearchStrategy[Any] = anything
) -> st.SearchStrategy[Any]:
    """Values of the right shape, and one time in eight any other."""
    # Not one_of(): it leaves out strategies that it has already.
    return st.sampled_from(range(8)).flatmap(lambda i: usual if i else other)


def sometimes(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """An object with any of these members."""
    return but_mostly(st.fixed_dictionaries({}, optional=fields))


small = st.integers(-1, 3)
plausible = st.sampled_from([0, 1, 2, 7, 0.0, 0.5, 1.0, 1e-9])
words = st.sampled_from(["a", "b", "f", "g", "a", "b", "", "a b", "é", "x" * 65])
types = st.sampled_from(["object", "array", "string", "integer", "number", "boolean", "null"])
counts = st.integers(0, 3)
schemas = st.recursive(
    st.one_of(st.booleans(), st.fixed_dictionaries({"type": types}), anything),
    lambda inner: st.fixed_dictionaries(
        {},
        optional={
            "type": but_mostly(st.one_of(types, st.lists(types, max_size=2))),
            **dict.fromkeys(["minLength", "maxLength", "minItems", "maxItems"], but_mostly(counts)),
            **dict.fromkeys(["minimum", "maximum", "exclusiveMinimum"], but_mostly(small)),
            "properties": but_mostly(st.dictionaries(words, inner, max_size=2)),
            "required": but_mostly(st.lists(words, max_size=2)),
            "items": inner,
            "prefixItems": st.lists(inner, max_size=2),
            "additionalProperties": st.one_of(st.booleans(), inner),
            "enum": st.lists(anything, max_size=2),
            "const": anything,
            "anyOf": st.lists(inner, max_size=2),
            "allOf": st.lists(inner, max_size=2),
            "not": inner,
            "$ref": but_mostly(st.sampled_from(["#", "#/properties/a", "#/x", "http://x"])),
            "pattern": but_mostly(st.sampled_from(["a+", "^a$", "([", "(a|b)*", ""])),
            "format": but_mostly(st.sampled_from(["date", "uuid", "x"])),
        },
    ),
    max_leaves=4,
)
regexes = st.one_of(st.sampled_from(["[a-z]{1,3}", "(a+)+$", "(["]), text)
grammars = st.sampled_from(['root ::= "a"', "start: /a/", "start: start", "", "x"])
choices = st.lists(words, max_size=3)
functions = but_mostly(
    st.fixed_dictionaries(
        {"name": words},
        optional={"description": text, "parameters": schemas, "strict": st.booleans()},
    )
)
tools = st.lists(
    but_mostly(st.fixed_dictionaries({"type": st.just("function"), "function": functions})),
    max_size=2,
)
named = but_mostly(
    st.fixed_dictionaries(
        {"type": st.just("function"), "function": st.fixed_dictionaries({"name": words})}
    )
)
CONSTRAINTS = {
    "json": schemas,
    "regex": regexes,
    "choice": choices,
    "grammar": grammars,
    "json_object": st.booleans(),
}
JSON_OPTIONS = {
    "whitespace_pattern": st.sampled_from([" ?", "x", "(["]),
    "disable_any_whitespace": st.booleans(),
    "disable_additional_properties": st.booleans(),
}
VALUES: dict[str, st.SearchStrategy[Any]] = {
    **{name: but_mostly(plausible, st.one_of(numbers, anything)) for name in NUMERIC},
    **{name: but_mostly(st.booleans()) for name in FLAGS},
    **dict.fromkeys(OTHER, anything),
    "model": but_mostly(st.sampled_from(["tiny", "", None])),
    "user": but_mostly(text),
    "cache_salt": but_mostly(st.sampled_from(["a", "b", "é"])),
    "modalities": but_mostly(st.just(["text"])),
    "reasoning_effort": but_mostly(st.sampled_from(["none", "low", "max"])),
    "n": but_mostly(st.integers(0, 5)),
    "best_of": but_mostly(st.integers(0, 6)),
    "logprobs": but_mostly(st.one_of(st.booleans(), st.integers(-1, 21))),
    "prompt_logprobs": but_mostly(st.integers(-1, 21)),
    "suffix": but_mostly(text),
    "stop": but_mostly(st.one_of(text, st.lists(text, max_size=4))),
    "stream_options": sometimes(
        include_usage=st.booleans(), continuous_usage_stats=st.booleans()
    ),
    "logit_bias": st.dictionaries(st.integers(-1, 300).map(str), numbers, max_size=3),
    "stop_token_ids": st.lists(st.integers(-1, 300), max_size=3),
    "allowed_token_ids": but_mostly(st.lists(st.integers(-1, 300), max_size=3)),
    "bad_words": but_mostly(st.lists(text, max_size=3)),
    "tools": but_mostly(tools),
    "tool_choice": st.one_of(
        st.sampled_from(["none", "auto", "required", "x"]),
        named,
        sometimes(
            type=st.just("allowed_tools"),
            allowed_tools=sometimes(
                mode=st.sampled_from(["auto", "required"]), tools=st.lists(named, max_size=2)
            ),
        ),
    ),
    "response_format": st.one_of(
        sometimes(type=st.sampled_from(["text", "json_object", "x"]), schema=schemas),
        st.fixed_dictionaries(
            {
                "type": st.just("json_schema"),
                "json_schema": but_mostly(
                    st.fixed_dictionaries(
                        {"name": words, "schema": schemas}, optional={"strict": st.booleans()}
                    )
                ),
            }
        ),
    ),
    "structured_outputs": st.one_of(
        *(
            st.fixed_dictionaries({kind: but_mostly(value)}, optional=JSON_OPTIONS)
            for kind, value in CONSTRAINTS.items()
        ),
        sometimes(**CONSTRAINTS),
    ),
    "guided_json": but_mostly(schemas),
    "guided_regex": but_mostly(regexes),
    "guided_choice": but_mostly(choices),
    "guided_grammar": but_mostly(grammars),
}  # fmt: skip
# Many fields at once are nearly always refused for the first: a few at a time go deeper.
some_fields = st.lists(st.sampled_from(sorted(VALUES)), max_size=4, unique=True).flatmap(
    lambda names: st.fixed_dictionaries({name: VALUES[name] for name in names})
)
good = st.sampled_from(
    [
        (CHAT, {"messages": HI}),
        (CHAT, {"messages": HI, "tools": [{"type": "function", "function": {"name": "f"}}]}),
        (CMPL, {"prompt": "hi"}),
        (CMPL, {"prompt": ["a", "bc"]}),
        (CMPL, {"prompt": [5, 6, 7], "echo": True}),
    ]
)
bodies = but_mostly(
    good,
    st.one_of(
        st.one_of(messages, anything).map(lambda m: (CHAT, {"messages": m})),
        prompts.map(lambda p: (CMPL, {"prompt": p})),
    ),
)


@pytest.fixture(scope="module")
def scripted() -> Iterator[Api]:
    with asyncio.Runner() as runner:
        yield Api(runner, max_model_len=128)


class RealApi(Api):
    """The app over an engine process with a tiny model of random weights."""

    def __init__(self, runner: asyncio.Runner, path: Any) -> None:
        self.runner = runner
        config = EngineConfig(
            ModelArgs(model=str(path), device="cpu", max_model_len=64, seed=0),
            CacheArgs(num_kv_blocks=32, block_size=4),
        )
        self.engine = ProcessClient(config)  # type: ignore[assignment]
        self.context = ServingContext(
            client=self.engine,
            config=ServerArgs(),
            model_names=("tiny",),
            engine_config=config,
            tokenizer=load_tokenizer(path),
        )
        self.app = build_app(self.context)
        self.text: str | None = None
        runner.run(self._start())

    async def _start(self) -> None:
        await self.engine.start()
        while self.engine.ready is None:
            assert self.engine.dead is None, self.engine.dead
            await asyncio.sleep(0.01)

    def check_alive(self) -> None:
        """A plain greedy request says what it always says, and nothing holds a block."""
        response = self.cmpl(prompt="a", max_tokens=4, temperature=0, ignore_eos=True)
        assert response.status_code == 200, response.text
        text = response.json()["choices"][0]["text"]
        self.text = text if self.text is None else self.text
        assert text == self.text
        assert not self.context.generations and self.context.in_flight == 0
        load = self.context.load
        assert (load.live, load.pending, load.pending_tokens) == (0, 0, 0)
        self.run(self._until_idle())

    async def _until_idle(self) -> None:
        while self.engine.busy_since is not None or self.engine.stats.num_used_blocks:
            await asyncio.sleep(0.001)
        assert self.engine.dead is None
        assert self.engine.stats.num_running == self.engine.stats.num_waiting == 0
        assert self.engine.stats.num_free_blocks == 32


@pytest.fixture(scope="module")
def real(tiny_checkpoint: Any) -> Iterator[Api]:
    with asyncio.Runner() as runner:
        api = RealApi(runner, tiny_checkpoint("llama"))
        yield api
        runner.run(api.engine.stop())


# Two of these together may leave no token at all, which ends a request as an internal error.
MASKS = {
    "allowed_token_ids", "logit_bias", "bad_words", "min_tokens", "tool_choice", "response_format",
    "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar",
}  # fmt: skip


def check_answer(response, fields):
    masked = len(MASKS & fields.keys()) > 1
    if response.status_code != 200:
        # A body may bring a deadline of a millisecond.
        expected = [400, 404] + [504] * ("deadline_ms" in fields) + [500] * masked
        assert response.status_code in expected, response.text
        error_of(response)
    elif response.headers["content-type"].startswith("text/event-stream"):
        *chunks, last = events_of(response.text)
        if last != "[DONE]":
            assert set(last["error"]) == {"message", "type", "param", "code"}
            code = last["error"]["code"]
            assert code == "deadline_exceeded" or (masked and code == "internal_error"), last
            return
        finished = [c["choices"][0]["finish_reason"] for c in chunks if c["choices"]]
        assert any(finished) and set(finished) <= {None, "stop", "length", "tool_calls"}
    else:
        body = response.json()
        assert body["choices"] and all(c["finish_reason"] for c in body["choices"])
        assert body["usage"]["total_tokens"] > 0


def ask(api, path, main, fields):
    check_answer(api.post(path, {**main, **fields}), fields)
    api.check_alive()


@settings(max_examples=2 * PROFILE, deadline=None)
@given(body=bodies, fields=some_fields)
def test_any_body_gets_a_valid_answer(scripted, body, fields):
    ask(scripted, *body, fields)


@settings(max_examples=2 * PROFILE if NIGHTLY else 60, deadline=None)
@given(body=bodies, fields=some_fields)
def test_any_body_gets_a_valid_answer_of_the_real_engine(real, body, fields):
    ask(real, *body, fields)


@settings(max_examples=PROFILE, deadline=None)
@given(body=st.one_of(st.binary(max_size=50), anything.map(lambda v: json.dumps(v).encode())))
def test_any_bytes_get_a_valid_answer(scripted, body):
    headers = {"content-type": "application/json"}
    for path in (CHAT, CMPL, "/tokenize", "/detokenize"):
        response = scripted.post(path, content=body, headers=headers)
        if response.status_code != 200:
            assert response.status_code == 400
            error_of(response)
        else:  # {"tokens": []} is found now and then
            assert path.endswith("tokenize") and isinstance(json.loads(body), dict)
    scripted.check_alive()
