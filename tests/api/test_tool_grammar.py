"""What a request with tools allows the model to say, walked through token by token."""

import json

import pytest
from api_harness import HI, TOKENIZER, error_of
from fakes import TEMPLATE, byte_tokenizer
from test_api_tools import (
    CLOSE,
    OPEN,
    OPEN_ID,
    PING,
    QWEN,
    QWEN_TOKENIZER,
    TOOLS,
    allowed,
    call_text,
    called,
    folded,
)

from pageserve.api import json_schema
from pageserve.api.errors import APIError
from pageserve.api.tool_formats import HERMES
from pageserve.api.tool_grammar import tool_grammar
from pageserve.api.tool_protocol import ToolChoice
from pageserve.grammar import GrammarError, compile_grammar, llguidance_tokenizer

SPECIAL = byte_tokenizer(QWEN, added=(OPEN, CLOSE), special=(OPEN, CLOSE))
PING_CHOICE = {"type": "function", "function": {"name": "ping"}}
OSLO, NO_CITY = call_text(), call_text(arguments="{}")
PONG, UNKNOWN = call_text("ping", "{}"), call_text("other", "{}")
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}


@pytest.fixture
def ask(make_api):
    """Send a chat request and return what the engine got."""

    def ask(tokenizer=QWEN_TOKENIZER, server=None, **fields):
        api = make_api(tokenizer=tokenizer, server=server or {}, script="ok")
        response = api.chat(**{"messages": HI, "tools": TOOLS, **fields})
        assert response.status_code == 200, response.text
        return api.engine.requests[-1], response

    return ask


def grammar_of(*functions):
    given = [{"type": "function", "function": function} for function in functions]
    choice = ToolChoice("auto")
    return tool_grammar(QWEN_TOKENIZER, HERMES, given, choice, parallel=True, free=True)


def allows(request, text, tokenizer=QWEN_TOKENIZER):
    """Whether the request's grammar takes the whole text and may end, or must end, there."""
    matcher = compile_grammar(request.grammar, llguidance_tokenizer(tokenizer))
    ids = tokenizer.encode(text, False)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def must_end(request, text, tokenizer=QWEN_TOKENIZER):
    matcher = compile_grammar(request.grammar, llguidance_tokenizer(tokenizer))
    ids = tokenizer.encode(text, False)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_stopped()


def behind_tag(text):
    return text.removeprefix(OPEN)


@pytest.mark.parametrize("tokenizer", [QWEN_TOKENIZER, SPECIAL], ids=["added", "special"])
def test_auto_waits_for_the_tag(ask, tokenizer):
    request, _ = ask(tokenizer)
    assert request.grammar_trigger_ids == [tokenizer.token_id(OPEN)]
    for text in (OSLO, PONG, call_text(arguments='{"city": "</tool_call>"}')[:-12] + CLOSE):
        if "city" in text and text.count(CLOSE) > 1 and tokenizer is SPECIAL:
            continue  # a special token cannot stand in a string
        assert must_end(request, behind_tag(text), tokenizer), text
    for text in (
        NO_CITY,
        UNKNOWN,
        call_text("ping", '{"x": 1}'),
        call_text(arguments='{"city": 1}'),
    ):
        assert not allows(request, behind_tag(text), tokenizer), text
    assert not allows(request, behind_tag(OSLO.replace(CLOSE, "</tool")), tokenizer)


def test_auto_where_the_tag_is_text(ask):
    """Text is free, and calls in it are held to their tools."""
    request, _ = ask(TOKENIZER)
    assert request.grammar_trigger_ids == []
    for text in ("", "Hi <tool 是", OSLO, "Hm.\n" + OSLO + "\n" + PONG + " done <"):
        assert allows(request, text, TOKENIZER), text
    for text in (NO_CITY, UNKNOWN, OSLO + UNKNOWN, OPEN):
        assert not allows(request, text, TOKENIZER), text


def test_auto_without_grammar(ask):
    request, _ = ask(server={"tool_grammar": "off"})
    assert (request.grammar, request.grammar_trigger_ids) == (None, [])
    request, _ = ask(server={"tool_grammar": "off"}, tool_choice="required")
    assert request.grammar is not None


def test_none_has_no_grammar(ask):
    request, _ = ask(tool_choice="none")
    assert request.grammar is None


@pytest.mark.parametrize("tokenizer", [QWEN_TOKENIZER, SPECIAL, TOKENIZER])
def test_required_calls_from_the_start(ask, tokenizer):
    request, _ = ask(tokenizer, tool_choice="required")
    assert request.grammar_trigger_ids == []
    for text in (OSLO, PONG, f"{OSLO}\n{PONG}\n{OSLO}"):
        assert allows(request, text, tokenizer)
    for text in ("", "Hi", "Hi " + OSLO, NO_CITY, UNKNOWN, OSLO + "\n", OSLO + "x"):
        assert not allows(request, text, tokenizer), text


def test_one_call_if_they_may_not_be_parallel(ask):
    request, _ = ask(tool_choice="required", parallel_tool_calls=False)
    assert must_end(request, OSLO) and must_end(request, PONG)


def test_named_calls_once(ask):
    request, _ = ask(tool_choice=PING_CHOICE)
    assert must_end(request, PONG)
    assert not allows(request, OSLO)


def test_allowed_tools_restrict_the_names(ask):
    request, _ = ask(tool_choice=allowed("auto"))
    assert request.grammar_trigger_ids == [OPEN_ID]
    assert allows(request, behind_tag(PONG)) and not allows(request, behind_tag(OSLO))
    request, _ = ask(tool_choice=allowed("required"))
    assert allows(request, PONG) and not allows(request, OSLO)


def test_named_finishes_with_stop(make_api):
    api = make_api(tokenizer=QWEN_TOKENIZER, script=PONG)
    for stream in (False, True):
        response = api.chat(tools=TOOLS, tool_choice=PING_CHOICE, stream=stream)
        assert '"finish_reason":"stop"' in response.text
        assert '"name":"ping"' in response.text
    choice = api.chat(tools=TOOLS, tool_choice="required").json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"


def unenforceable(**more):
    parameters = {"type": "object", "properties": {"x": {"not": {"type": "string"}}}}
    return {"type": "function", "function": {"name": "odd", "parameters": parameters, **more}}


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_a_schema_that_cannot_be_enforced(ask, make_api, choice):
    """Agents send what they like: any object is allowed then, and a header says so."""
    request, response = ask(tools=[PING, unenforceable()], tool_choice=choice)
    text = call_text("odd", '{"x": "y", "z": [1]}')
    assert allows(request, behind_tag(text) if choice == "auto" else text)
    warning = response.headers["x-pageserve-warning"]
    assert warning.startswith("tools[1].function.parameters: ") and "not" in warning
    error = error_of(make_api().chat(tools=[PING, unenforceable(strict=True)], tool_choice=choice))
    assert (error["code"], error["param"]) == (
        "invalid_json_schema",
        "tools[1].function.parameters",
    )
    _, response = ask(tool_choice=choice)
    assert "x-pageserve-warning" not in response.headers


@pytest.mark.parametrize(
    "parameters",
    [
        {"$ref": []},
        {"$ref": {}},
        {"properties": {"x": {"type": "string", "format": {}}}},
        {"anyOf": [{"$ref": "#/anyOf/" + "9" * 5000}]},
        {"properties": {"x": {"enum": ["y" * 2**18]}}},
        {"enum": [list(range(10_000))], "anyOf": [{}] * 5000},
    ],
    ids=["ref", "object", "format", "digits", "bytes", "work"],
)
def test_odd_schemas_are_relaxed_or_refused(ask, make_api, parameters):
    function = {"name": "odd", "parameters": parameters}
    (note,) = grammar_of(function).relaxed
    assert note.startswith("tools[0].function.parameters: ")
    with pytest.raises(APIError) as caught:
        grammar_of({**function, "strict": True})
    assert (caught.value.status, caught.value.code) == (400, "invalid_json_schema")
    if len(str(parameters)) < 100:  # fits into the model's context
        request, response = ask(tools=[{"type": "function", "function": function}])
        assert allows(request, behind_tag(call_text("odd", '{"x": [1]}')))
        assert "tools[0].function.parameters: " in response.headers["x-pageserve-warning"]


def test_schemas_of_all_tools_share_the_limits(monkeypatch):
    long = {"description": "d" * 2**16}
    notes = grammar_of(*({"name": f"f{i}", "parameters": long} for i in range(4))).relaxed
    assert len(notes) == 1 and "tools[3]" in notes[0] and "262144 bytes" in notes[0]
    monkeypatch.setattr(json_schema, "MAX_WORK", 150)
    notes = grammar_of(*({"name": f"f{i}", "parameters": {}} for i in range(9))).relaxed
    assert 0 < len(notes) < 9 and all("too much work" in note for note in notes)


def test_definitions_of_one_tool_do_not_meet_those_of_another(ask):
    def tool(name, kind):
        parameters = {
            "type": "object",
            "properties": {"x": {"$ref": "#/$defs/X"}},
            "required": ["x"],
            "$defs": {"X": {"type": kind}},
        }
        return {"type": "function", "function": {"name": name, "parameters": parameters}}

    request, _ = ask(tools=[tool("i", "integer"), tool("s", "string")], tool_choice="required")
    assert allows(request, call_text("i", '{"x": 1}')) and allows(
        request, call_text("s", '{"x": "1"}')
    )
    assert not allows(request, call_text("i", '{"x": "1"}'))


@pytest.mark.parametrize(
    "parameters", [{}, {"type": "object"}, {"type": "object", "properties": {}}]
)
def test_open_schemas_take_any_object(ask, parameters):
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    request, _ = ask(tools=tools, tool_choice="required")
    assert allows(request, call_text("f", "{}"))
    assert allows(request, call_text("f", '{"x": {"y": []}}'))


# --- a form of the answer beside tools ------------------------------------------------------------

FORM = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
ANSWER = json.dumps({"a": 1})


@pytest.mark.parametrize("tokenizer", [QWEN_TOKENIZER, SPECIAL, TOKENIZER])
@pytest.mark.parametrize("tool_grammar", ["on", "off"])
def test_a_form_or_calls(ask, tokenizer, tool_grammar):
    """The model may call or answer, and both are held to what was asked for."""
    request, _ = ask(tokenizer, {"tool_grammar": tool_grammar}, response_format=FORM)
    assert request.grammar_trigger_ids == []
    assert must_end(request, ANSWER, tokenizer)
    for text in (OSLO, PONG, f"{OSLO}\n{PONG}"):
        assert allows(request, text, tokenizer), text
    for text in ("", "Hi", '{"a": "x"}', ANSWER + OSLO, OSLO + ANSWER, NO_CITY, UNKNOWN):
        assert not allows(request, text, tokenizer), text


@pytest.mark.parametrize(
    "form",
    [
        {"structured_outputs": {"regex": "[0-9]{2}"}},
        {"structured_outputs": {"choice": ["12", "no"]}},
        {"structured_outputs": {"grammar": "start: DIGITS\nDIGITS: /[0-9]{2}/"}},
        {"guided_json": {"const": 12}},
    ],
)
def test_any_form_goes_with_tools(ask, form):
    request, _ = ask(**form)
    assert must_end(request, "12") and allows(request, OSLO)
    assert not allows(request, "1") and not allows(request, NO_CITY)


def test_a_form_and_each_choice_of_tools(ask):
    request, _ = ask(response_format=FORM, tool_choice="none")
    assert must_end(request, ANSWER) and not allows(request, OSLO)
    request, _ = ask(response_format=FORM, tool_choice=allowed("auto"))
    assert must_end(request, ANSWER) and allows(request, PONG) and not allows(request, OSLO)
    for choice in ("required", PING_CHOICE):  # there is no answer that could have a form
        request, _ = ask(response_format=FORM, tool_choice=choice)
        assert allows(request, PONG) and not allows(request, ANSWER)
    request, _ = ask(response_format=FORM, parallel_tool_calls=False)
    assert must_end(request, ANSWER) and must_end(request, OSLO)


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_a_bad_form_beside_tools(make_api, choice):
    bad = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"not": {}}}}
    error = error_of(make_api().chat(tools=TOOLS, tool_choice=choice, response_format=bad))
    assert (error["code"], error["param"]) == ("invalid_json_schema", "response_format")


@pytest.mark.parametrize("stream", [False, True])
def test_answers_in_a_form_and_calls_are_told_apart(make_api, stream):
    """A tag inside of an answer's string is part of it."""
    answer = json.dumps({"a": "<tool_call>{}</tool_call>", "b": " "})
    for script, message in (
        (answer, {"content": answer}),
        (PONG, {"content": None, "tool_calls": [called("ping", "{}")]}),
    ):
        api = make_api(tokenizer=QWEN_TOKENIZER, script=script)
        fields = {"tools": TOOLS, "response_format": {"type": "json_object"}, "stream": stream}
        assert folded(api.chat(**fields)) == (
            message, "tool_calls" if "tool_calls" in message else "stop"
        )  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_cut_off_is_no_answer_in_the_form(make_api, stream):
    """The SDK's stream helper reads what there is of content as JSON, and would fail on a tag."""
    fields = {"response_format": {"type": "json_object"}, "tools": TOOLS, "stream": stream}
    first = {"content": None, "tool_calls": [called("ping", "{}")]}
    for script, num_chars, expected in (
        (PONG, 20, {"content": None}),
        (PONG + "\n" + PONG, len(PONG) + 20, first),
        ('{"a": "<tool', 12, {"content": '{"a": "<tool'}),
        ("<tool", 5, {"content": None}),
    ):
        num_tokens = len(QWEN_TOKENIZER.encode(script[:num_chars], False))
        api = make_api(tokenizer=QWEN_TOKENIZER, script=script)
        message, reason = folded(api.chat(max_tokens=num_tokens, **fields))
        assert ({**message, "content": message["content"] or None}, reason) == (expected, "length")


def test_a_large_form_and_large_tools_are_refused_before_anything_is_sent(make_api, monkeypatch):
    """Each may be fine and both together too much."""
    seen = []

    def compile(text, tokenizer):
        seen.append(text)
        if "either_1" in text:
            raise GrammarError("too many states")
        return compile_grammar(text, tokenizer)

    monkeypatch.setattr("pageserve.api.grammars.compile_grammar", compile)
    api = make_api(tokenizer=QWEN_TOKENIZER)
    error = error_of(api.chat(tools=TOOLS, response_format=FORM))
    assert (error["code"], error["param"]) == ("invalid_json_schema", "tools")
    assert len(seen) == 3 and not api.engine.requests


# --- reasoning ------------------------------------------------------------------------------------

THINK = ("<think>", "</think>")
OPENING = TEMPLATE + "{% if add_generation_prompt %}<think>\n{% endif %}"


@pytest.mark.parametrize(
    "options",
    [{"added": THINK}, {"added": THINK, "special": THINK}, {}],
    ids=["added", "special", "text"],
)
def test_reasoning_is_free_and_the_answer_is_not(ask, options):
    opened = byte_tokenizer(OPENING, **options)
    request, _ = ask(opened, tools=None, response_format=FORM)
    assert request.grammar_trigger_ids == []
    answer = json.dumps({"a": 1})
    for text in (f"so <b>\n</think>\n\n{answer}", f"</think>{answer}"):
        assert must_end(request, text, opened), text
    for text in (answer, "so", "so</think>", "so</think>no"):
        assert not allows(request, text, opened), text
    request, _ = ask(opened, response_format=FORM)
    for text in (f"so\n</think>\n\n{answer}", f"</think>{OSLO}"):
        assert allows(request, text, opened), text
    for text in (answer, OSLO, "so</think>no"):
        assert not allows(request, text, opened), text
    request, _ = ask(opened, tool_choice="required")
    assert allows(request, f"so</think>\n\n{OSLO}", opened)
    assert not allows(request, OSLO, opened)


def test_reasoning_that_the_model_may_begin(ask):
    tokenizer = byte_tokenizer(TEMPLATE, added=THINK)
    request, _ = ask(tokenizer, tools=None, response_format=FORM)
    for text in ('<think>so</think>\n{"a": 1}', '{"a": 1}'):
        assert must_end(request, text, tokenizer), text
    for text in ("<think>so", '<think>so{"a": 1}', 'so</think>{"a": 1}'):
        assert not allows(request, text, tokenizer), text
