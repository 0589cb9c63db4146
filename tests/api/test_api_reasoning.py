"""Reasoning models over HTTP: the <think> block, where it may begin, and where it goes."""

import pytest
from api_harness import events_of
from fakes import TEMPLATE, byte_tokenizer, scripted
from test_api_tools import CLOSE, OPEN, QWEN, both, call_text, called, folded, tool

from pageserve.api.reasoning import ReasoningParser

THINKS = byte_tokenizer(TEMPLATE, added=("<think>", "</think>"))
OPENS = byte_tokenizer(TEMPLATE + "{% if add_generation_prompt %}<think>\n{% endif %}")
OFF = byte_tokenizer(
    TEMPLATE + "{% if enable_thinking is defined and not enable_thinking %}"
    "<think>\n\n</think>\n\n{% endif %}"
)
BOTH = byte_tokenizer(QWEN, added=("<think>", "</think>", OPEN, CLOSE))


@pytest.fixture
def thinker(make_api):
    def make(script, tokenizer=THINKS, **options):
        return make_api(tokenizer=tokenizer, script=script, **options)

    return make


@pytest.mark.parametrize("tokens_per_step", [1, 2, 3, 5, 8, 1000])
@pytest.mark.parametrize("as_bytes", [False, True])
@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("<think>\nHm, a < b.\n</think>\n\nYes.\n", ("Hm, a < b.", "Yes.\n")),
        ("\n<think>a</think>b <think>c</think>", ("a", "b <think>c</think>")),
        ("<think>\n\n</think>\n\nYes.", (None, "Yes.")),
        ("Yes. <think>a</think>", (None, "Yes. <think>a</think>")),
        ("<thin", (None, "<thin")),
        (" \n", (None, " \n")),
        (" " * 100 + "<think>", (None, " " * 100 + "<think>")),
    ],
)
def test_splits(thinker, script, message, as_bytes, tokens_per_step):
    script = scripted(script) if as_bytes else script
    got, reason = both(thinker(script, tokens_per_step=tokens_per_step))
    assert (got.get("reasoning_content"), got["content"], reason) == (*message, "stop")
    assert set(got) <= {"content", "reasoning_content"}


def test_a_prompt_that_opens_the_block(thinker):
    api = thinker("so\n</think>\nYes.", OPENS)
    assert both(api) == ({"reasoning_content": "so", "content": "Yes."}, "stop")


def test_thinking_switched_off_by_the_template(thinker):
    api = thinker("<think>Yes.", OFF)
    got, _ = both(api, chat_template_kwargs={"enable_thinking": False})
    assert got == {"content": "<think>Yes."}
    got, _ = folded(api.chat())
    assert got == {"reasoning_content": "Yes.", "content": None}


def test_cut_inside_of_the_block(thinker):
    """Everything is reasoning, and there is no answer."""
    api = thinker("<think>one two three", OPENS)
    message, reason = folded(api.chat(max_tokens=12))
    assert (message["content"], reason) == (None, "length")
    assert message["reasoning_content"].startswith("<think>one")


def test_tokens_are_counted(thinker):
    def usage(api, **fields):
        response = api.chat(**fields)
        return response.json()["usage"]

    api = thinker("<think>abc</think>\n\nYes.")
    counted = usage(api)["completion_tokens_details"]["reasoning_tokens"]
    assert (
        counted
        == usage(api, include_reasoning=False)["completion_tokens_details"]["reasoning_tokens"]
    )
    assert counted == 5
    assert usage(thinker("Yes."))["completion_tokens_details"]["reasoning_tokens"] == 0
    fields = {"stream": True, "stream_options": {"include_usage": True}}
    last = events_of(thinker("<think>abc").chat(**fields).text)[-2]
    assert last["usage"]["completion_tokens_details"]["reasoning_tokens"] == 5  # EOS as well


def test_reasoning_that_nobody_wants(thinker):
    api = thinker("<think>abc</think>\n\nYes.")
    assert both(api, include_reasoning=False) == ({"content": "Yes."}, "stop")


def test_logprobs_cover_the_answer(thinker):
    api = thinker("<think>a是</think>\n\nYes 是.")
    entries = api.chat(logprobs=True).json()["choices"][0]["logprobs"]["content"]
    assert bytes(b for entry in entries for b in entry["bytes"]).decode() == "Yes 是."


def test_the_field_has_two_names(thinker):
    api = thinker("<think>a</think>b", server={"reasoning_field": "reasoning"})
    message = api.chat().json()["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == ("a", "b")
    deltas = [e["choices"][0]["delta"] for e in events_of(api.chat(stream=True).text)[:-1]]
    assert {"reasoning": "a"} in deltas and {"content": "b"} in deltas


def test_switched_off(thinker):
    api = thinker("<think>a</think>b", server={"reasoning_field": "none"})
    assert both(api) == ({"content": "<think>a</think>b"}, "stop")


def test_models_that_do_not_think_keep_their_text(api, make_api):
    assert both(make_api(script=scripted("<think>a</think>b"))) == (
        {"content": "<think>a</think>b"},
        "stop",
    )


@pytest.mark.parametrize("tokens_per_step", [1, 3, 1000])
def test_thinking_then_calling(thinker, tokens_per_step):
    """A tag inside of the block is reasoning, not a call."""
    script = f"<think>Use {OPEN}?</think>\n\nOk.\n" + call_text()
    api = thinker(script, BOTH, tokens_per_step=tokens_per_step)
    message, reason = both(api, tools=tool())
    assert message == {
        "reasoning_content": f"Use {OPEN}?",
        "content": "Ok.",
        "tool_calls": [called()],
    }
    assert reason == "tool_calls"


def test_a_long_indent_is_read_once():
    """White space that never ends in a block is passed on, not kept and looked at again."""
    parser = ReasoningParser(opened=False)
    assert "".join(parser.feed(" ")[1] for _ in range(1000)) == " " * 1000
