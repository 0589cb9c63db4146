"""Tools in the forms of Llama 3 and Mistral, with templates that have what matters of the real
ones: what their prompts show, what is read as a call, what the grammars allow."""

import json
import re

import pytest
from api_harness import HI, error_of, events_of
from fakes import TEMPLATE, byte_tokenizer, scripted
from hypothesis import given
from hypothesis import strategies as st
from test_api_tools import (
    HISTORY,
    PING,
    QWEN,
    TOOLS,
    allowed,
    both,
    call_text,
    called,
    folded,
    prompt_of,
)
from test_tool_grammar import PING_CHOICE, allows, must_end, unenforceable

from pageserve.api.tool_formats import HERMES, LLAMA_3, MISTRAL, tool_format
from pageserve.api.tool_grammar import tool_grammar
from pageserve.api.tool_parser import CallDelta, ToolParser
from pageserve.api.tool_protocol import ToolChoice
from pageserve.grammar import compile_grammar, llguidance_tokenizer

LLAMA_TEMPLATE = """\
{{- '<|begin_of_text|>' }}
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}{%- set system_message = '' %}{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' }}
{%- if tools is not none %}{{- 'Environment: ipython\\n' }}{%- endif %}
{{- system_message + '<|eot_id|>' }}
{%- if tools is not none %}
    {%- if messages | length == 0 %}{{- raise_exception('there is no user message') }}{%- endif %}
    {{- '<|start_header_id|>user<|end_header_id|>\\n\\n' }}
    {{- 'Respond in the format {"name": function name, "parameters": dictionary}.\\n\\n' }}
    {%- for t in tools %}{{- t | tojson(indent=4) + '\\n\\n' }}{%- endfor %}
    {{- messages[0]['content'] | trim + '<|eot_id|>' }}
    {%- set messages = messages[1:] %}
{%- endif %}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls | length == 1 %}
            {{- raise_exception('This model only supports single tool-calls at once!') }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
        {{- '{"name": "' + call.name + '", ' }}
        {{- '"parameters": ' }}
        {{- call.arguments | tojson + '}<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' }}
        {{- message.content | tojson + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
MISTRAL_TEMPLATE = """\
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}{%- set loop_messages = messages %}{%- endif %}
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- set asked = loop_messages | selectattr('role', 'equalto', 'user') | list %}
{%- for message in loop_messages | rejectattr('role', 'equalto', 'tool')
        | selectattr('tool_calls', 'undefined') %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('conversation roles must alternate user/assistant/...') }}
    {%- endif %}
{%- endfor %}
{{- '<s>' }}
{%- for message in loop_messages %}
    {%- if message['role'] == 'user' %}
        {%- if tools is not none and message == asked[-1] %}
            {{- '[AVAILABLE_TOOLS][' }}
            {%- for tool in tools %}
                {{- (tool | tojson) + ('' if loop.last else ', ') }}
            {%- endfor %}
            {{- '][/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {%- if loop.last and system_message is defined %}
            {{- '[INST]' + system_message + '\\n\\n' + message['content'] + '[/INST]' }}
        {%- else %}{{- '[INST]' + message['content'] + '[/INST]' }}{%- endif %}
    {%- elif message.tool_calls is defined %}
        {{- '[TOOL_CALLS][' }}
        {%- for call in message.tool_calls %}
            {%- if not call.id is defined or call.id | length != 9 %}
                {{- raise_exception('Tool call IDs should be alphanumeric of length 9!') }}
            {%- endif %}
            {{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' }}
            {{- '' if loop.last else ', ' }}
        {%- endfor %}
        {{- ']</s>' }}
    {%- elif message['role'] == 'assistant' %}{{- message['content'] + '</s>' }}
    {%- elif message['role'] == 'tool' %}
        {%- if not message.tool_call_id is defined or message.tool_call_id | length != 9 %}
            {{- raise_exception('Tool call IDs should be alphanumeric of length 9!') }}
        {%- endif %}
        {{- '[TOOL_RESULTS]{"content": ' + message.content + ', "call_id": "' }}
        {{- message.tool_call_id + '"}[/TOOL_RESULTS]' }}
    {%- endif %}
{%- endfor %}
"""
TAG, CALLS = LLAMA_3.open, MISTRAL.open
TOKENIZERS = {
    LLAMA_3: byte_tokenizer(LLAMA_TEMPLATE, added=(TAG, "<|eom_id|>"), special=(TAG, "<|eom_id|>")),
    MISTRAL: byte_tokenizer(MISTRAL_TEMPLATE, added=(CALLS,), special=(CALLS,)),
}
LLAMA_TOKENIZER, MISTRAL_TOKENIZER = TOKENIZERS.values()
FORMS = pytest.mark.parametrize("form", TOKENIZERS, ids=lambda form: form.name)
OSLO = ("get_weather", '{"city": "Oslo"}')
PONG = ("ping", "{}")


def written(form, *calls):
    """Calls as a model of the form writes them."""
    key = "parameters" if form is LLAMA_3 else "arguments"
    objects = [f'{{"name": "{name}", "{key}": {arguments}}}' for name, arguments in calls]
    return "; ".join(objects) if form is LLAMA_3 else f"{CALLS}[{', '.join(objects)}]"


@pytest.fixture
def ask(make_api):
    """Send a chat request to a model of a form and return what the engine got."""

    def ask(form, server=None, **fields):
        api = make_api(tokenizer=TOKENIZERS[form], server=server or {}, script="ok")
        response = api.chat(**{"messages": HI, "tools": TOOLS, **fields})
        assert response.status_code == 200, response.text
        return api.engine.requests[-1]

    return ask


def takes(form, request, text, check=allows):
    """Whether the request's grammar takes a text of the model, from where it is in force."""
    for trigger_id in request.grammar_trigger_ids:
        assert trigger_id == TOKENIZERS[form].token_id(form.open)
        assert text.startswith(form.open)
        text = text.removeprefix(form.open)
    return check(request, text, TOKENIZERS[form])


# --- templates ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "form"),
    [
        (LLAMA_TEMPLATE, LLAMA_3),
        (MISTRAL_TEMPLATE, MISTRAL),
        (MISTRAL_TEMPLATE.replace(CALLS + "[", CALLS + " ["), MISTRAL),
        (QWEN, HERMES),
        (TEMPLATE, None),
        (LLAMA_TEMPLATE.replace("tools", "stools"), None),
        (LLAMA_TEMPLATE.replace('"parameters"', "<function="), None),
        (MISTRAL_TEMPLATE.replace(CALLS + "[", CALLS), None),
        (MISTRAL_TEMPLATE + "[ARGS]", None),
        (QWEN + "<function=f>", None),
        ("{{ tools", None),
    ],
)
def test_a_template_tells_its_form(template, form):
    assert tool_format(template) is form


@pytest.mark.parametrize("choice", ["none", "auto"])
@FORMS
def test_the_template_shows_the_tools(make_api, form, choice):
    api = make_api(tokenizer=TOKENIZERS[form])
    prompt = prompt_of(api, tools=TOOLS, tool_choice=choice)
    assert "# Tools" not in prompt and prompt.count("get_weather") == 1
    if form is LLAMA_3:
        shown = "\n\n".join(json.dumps(t, indent=4, ensure_ascii=False) for t in TOOLS)
        assert f"dictionary}}.\n\n{shown}\n\nhi<|eot_id|>" in prompt
    else:
        shown = json.dumps(TOOLS, ensure_ascii=False)
        assert prompt == f"<s>[AVAILABLE_TOOLS]{shown}[/AVAILABLE_TOOLS][INST]hi[/INST]"
    assert api.post("/tokenize", {"messages": HI, "tools": TOOLS}).json()["tokens"] == (
        api.engine.requests[-1].prompt_token_ids
    )


LLAMA_HISTORY = (
    "Oslo?<|eot_id|>{assistant}"
    '{{"name": "f", "parameters": {{"x": "é"}}}}<|eot_id|>{ipython}"4"<|eot_id|>{assistant}'
    '{{"name": "g", "parameters": "{{oops"}}<|eot_id|>{ipython}"bad"<|eot_id|>{assistant}'
).format(
    assistant="<|start_header_id|>assistant<|end_header_id|>\n\n",
    ipython="<|start_header_id|>ipython<|end_header_id|>\n\n",
)


def test_calls_of_one_message_follow_each_other_in_llamas_prompt(make_api):
    """Its template shows one at a time: results come right behind their calls, whatever the order
    they came in."""
    api = make_api(tokenizer=LLAMA_TOKENIZER)
    asked, calls, first, second = HISTORY
    for results in ((first, second), (second, first)):
        prompt = prompt_of(api, messages=[asked, calls, *results], tools=TOOLS)
        assert prompt.endswith(LLAMA_HISTORY) and "# Tools" not in prompt
    twice = [*HISTORY, calls, second, first]
    assert prompt_of(api, messages=twice).count('"4"<|eot_id|>') == 2
    assert prompt_of(api, messages=[asked, calls, second]).count("ipython") == 1


def test_mistrals_prompt_has_ids_of_nine_characters(make_api):
    """The same for the same call, so that the next turn begins with the same tokens."""
    api = make_api(tokenizer=MISTRAL_TOKENIZER)
    prompt = prompt_of(api, messages=HISTORY, tools=TOOLS)
    (first, second), results = (
        re.findall(rf'"{key}": "([a-z0-9]{{9}})"', prompt) for key in ("id", "call_id")
    )
    assert results == [first, second] and first != second
    assert prompt.endswith(
        f'[TOOL_CALLS][{{"name": "f", "arguments": {{"x": "é"}}, "id": "{first}"}}, '
        f'{{"name": "g", "arguments": "{{oops", "id": "{second}"}}]</s>'
        f'[TOOL_RESULTS]{{"content": 4, "call_id": "{first}"}}[/TOOL_RESULTS]'
        f'[TOOL_RESULTS]{{"content": bad, "call_id": "{second}"}}[/TOOL_RESULTS]'
    )
    assert prompt_of(api, messages=HISTORY, tools=TOOLS) == prompt
    own = json.loads(json.dumps(HISTORY).replace('"a"', '"A1b2C3d4E"'))
    assert prompt_of(api, messages=own).count("A1b2C3d4E") == 2


def test_ids_of_any_kind(make_api):
    """Some servers give their calls none; only a result's id has a meaning, and a type."""
    api = make_api(tokenizer=MISTRAL_TOKENIZER)
    empty = json.loads(json.dumps(HISTORY).replace('"a"', '""'))
    call_id, other = re.findall('"id": "([a-z0-9]{9})"', prompt_of(api, messages=empty))
    assert call_id != other
    assert f'4, "call_id": "{call_id}"' in prompt_of(api, messages=empty)
    for value in (5, "a"):
        prompt = prompt_of(api, messages=[{**HI[0], "tool_call_id": value}])
        assert prompt == "<s>[INST]hi[/INST]"


def test_ids_that_are_no_text_to_escape(make_api):
    """Special tokens that a client spells in an id are marked before it is shortened."""
    api = make_api(tokenizer=MISTRAL_TOKENIZER, server={"escape_special_in_content": True})
    messages = json.loads(json.dumps(HISTORY).replace('"a"', f'"{CALLS}"'))
    assert prompt_of(api, messages=messages).count(CALLS) == 1


def test_the_name_of_a_past_call_comes_first(make_api):
    """Clients write the members in any order, and templates show the object as it is."""
    call = {"id": "a", "type": "function", "function": {"arguments": "{}", "name": "f"}}
    messages = [HISTORY[0], {"role": "assistant", "content": None, "tool_calls": [call]}]
    prompt = prompt_of(make_api(tokenizer=MISTRAL_TOKENIZER), messages=messages)
    assert '[{"name": "f", "arguments": {}, "id"' in prompt


def test_an_empty_list_of_calls_is_none(make_api):
    messages = [*HI, {"role": "assistant", "content": "yo", "tool_calls": []}, *HI]
    for form, text in ((LLAMA_3, "\n\nyo<|eot_id|>"), (MISTRAL, "[/INST]yo</s>")):
        assert text in prompt_of(make_api(tokenizer=TOKENIZERS[form]), messages=messages)


def test_where_the_template_refuses_the_servers_words_take_over(make_api):
    """The prompt asks for calls in the server's form then, so these are read, held and banned."""
    api = make_api(tokenizer=LLAMA_TOKENIZER, script=call_text())
    system = [{"role": "system", "content": "Be brief."}]
    prompt = prompt_of(api, messages=system, tools=TOOLS)
    assert "Be brief.\n\n# Tools" in prompt and "ipython" not in prompt
    assert both(api, messages=system, tools=TOOLS) == (
        {"content": None, "tool_calls": [called()]},
        "tool_calls",
    )
    request = api.engine.requests[-1]
    assert allows(request, call_text(), LLAMA_TOKENIZER)
    assert request.sampling_params.logit_bias == {LLAMA_TOKENIZER.token_id(TAG): -100.0}


@pytest.mark.parametrize("before", [[], [{"role": "system", "content": "Be brief."}]])
def test_a_greeting_does_not_become_the_words_of_llamas_user(make_api, before):
    """Its template shows the tools in the first message, as the user's whoever said it, and leaves
    out the calls of that."""
    api = make_api(tokenizer=LLAMA_TOKENIZER)
    greeting = {"role": "assistant", "content": "How can I help?"}
    past_call = '<tool_call>\n{"name": "f", "arguments": {"x": "é"}}'
    for first, shown in ((greeting, "How can I help?<|eot_id|>"), (HISTORY[1], past_call)):
        prompt = prompt_of(api, messages=[*before, first, *HI], tools=TOOLS)
        assert "assistant<|end_header_id|>\n\n" + shown in prompt
        assert "# Tools" in prompt and "dictionary}." not in prompt
    assert "# Tools" not in prompt_of(api, messages=[*before, *HI, greeting, *HI], tools=TOOLS)


def test_what_no_words_can_help_stays_an_error(make_api):
    api = make_api(tokenizer=MISTRAL_TOKENIZER)
    for fields in ({}, {"tools": TOOLS}):
        error = error_of(api.chat(messages=[*HI, *HI], **fields))
        assert (error["code"], error["param"]) == ("invalid_messages", "messages")
        assert "must alternate" in error["message"]


def test_a_template_of_the_request_tells_the_form(make_api):
    api = make_api(script=written(LLAMA_3, OSLO), server={"trust_request_template": True})
    fields = {"tools": TOOLS, "chat_template": LLAMA_TEMPLATE}
    assert both(api, **fields)[0]["tool_calls"] == [called()]


def test_a_template_for_tools_beside_one_for_none(make_api):
    """Without tools it is the other that renders, to which past calls are unknown."""
    tokenizer = byte_tokenizer(TEMPLATE)
    tokenizer.chat_templates["tool_use"] = LLAMA_TEMPLATE
    api = make_api(tokenizer=tokenizer, script=written(LLAMA_3, OSLO))
    prompt = prompt_of(api, messages=HISTORY)
    assert '<tool_call>\n{"name": "f", "arguments": {"x": "é"}}\n</tool_call>' in prompt
    assert "<|im_start|>user\n<tool_response>\n4\n</tool_response>" in prompt
    assert prompt_of(api, messages=HISTORY, tools=TOOLS).endswith(LLAMA_HISTORY)
    assert both(api, tools=TOOLS)[0]["tool_calls"] == [called()]


# --- answers --------------------------------------------------------------------------------------

ANSWERS = [
    (LLAMA_3, written(LLAMA_3, OSLO), None, [OSLO]),
    (LLAMA_3, written(LLAMA_3, OSLO, PONG), None, [OSLO, PONG]),
    (LLAMA_3, "\n" + written(LLAMA_3, OSLO) + "\n" + written(LLAMA_3, PONG), None, [OSLO, PONG]),
    (LLAMA_3, TAG + written(LLAMA_3, OSLO), None, [OSLO]),
    (LLAMA_3, "So. " + TAG + written(LLAMA_3, PONG), "So.", [PONG]),
    (LLAMA_3, '{"type": "function", ' + written(LLAMA_3, PONG)[1:], None, [PONG]),
    (LLAMA_3, ' {"name": "Oslo", "parameters": {}}', None, []),
    (LLAMA_3, '{"city": "Oslo"}', None, []),
    (LLAMA_3, "It is 4 °C.", None, []),
    (LLAMA_3, "", None, []),
    (MISTRAL, written(MISTRAL, OSLO), None, [OSLO]),
    (MISTRAL, written(MISTRAL, OSLO, PONG), None, [OSLO, PONG]),
    (MISTRAL, CALLS + " " + written(MISTRAL, PONG).removeprefix(CALLS), None, [PONG]),
    (MISTRAL, "So. " + written(MISTRAL, PONG), "So.", [PONG]),
    (MISTRAL, f"[{written(LLAMA_3, PONG)}]", None, []),
]


@pytest.mark.parametrize("tokens_per_step", [1, 3, 1000])
@pytest.mark.parametrize("as_bytes", [False, True])
@pytest.mark.parametrize(("form", "text", "content", "calls"), ANSWERS)
def test_answers_streamed_and_not(make_api, form, text, content, calls, as_bytes, tokens_per_step):
    tokenizer = TOKENIZERS[form]
    script = scripted(text) if as_bytes else text
    api = make_api(tokenizer=tokenizer, script=script, tokens_per_step=tokens_per_step)
    message, reason = both(api, tools=TOOLS)
    expected = {"content": content if calls else text}
    if calls:
        expected["tool_calls"] = [called(*call) for call in calls]
    assert (message, reason) == (expected, "tool_calls" if calls else "stop")
    assert both(api)[0]["content"] == (text if as_bytes else text.replace(form.open, ""))


@FORMS
def test_arguments_come_as_they_are_written(make_api, form):
    api = make_api(tokenizer=TOKENIZERS[form], script=written(form, OSLO, PONG))
    *chunks, _ = events_of(api.chat(tools=TOOLS, stream=True).text)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": None}
    pieces = [d["tool_calls"][0]["function"]["arguments"] for d in deltas[1:-1]]
    assert len(pieces) > 10 and "".join(pieces) == OSLO[1] + PONG[1]
    ids = [d["tool_calls"][0]["id"] for d in deltas[1:-1] if "id" in d["tool_calls"][0]]
    assert len(ids) == 2 and all(re.fullmatch("call_[0-9A-Za-z]{24}", i) for i in ids)


@FORMS
def test_length_wins_and_shows_the_part(make_api, form):
    script = written(form, OSLO)
    num_tokens = len(TOKENIZERS[form].encode(script[: script.index("Oslo") + 2], False))
    api = make_api(tokenizer=TOKENIZERS[form], script=script)
    assert both(api, tools=TOOLS, max_tokens=num_tokens) == (
        {"content": None, "tool_calls": [called(arguments='{"city": "Os')]},
        "length",
    )


@FORMS
def test_stop_strings_see_the_raw_output(make_api, form):
    api = make_api(tokenizer=TOKENIZERS[form], script=written(form, OSLO))
    fields = {"tools": TOOLS, "stop": ["Oslo"]}
    assert folded(api.chat(**fields)) == (
        {"content": written(form, OSLO).split("Oslo")[0]},
        "stop",
    )
    message, reason = folded(api.chat(stream=True, **fields))
    assert (message["tool_calls"], reason) == ([called(arguments='{"city": "')], "stop")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("form", "text", "content"),
    [
        (LLAMA_3, written(LLAMA_3, OSLO), ""),
        (LLAMA_3, "So. " + TAG + written(LLAMA_3, PONG), "So."),
        (LLAMA_3, '{"name": "Oslo"}', '{"name": "Oslo"}'),
        (MISTRAL, "So. " + written(MISTRAL, PONG) + " Done", "So. Done"),
    ],
)
def test_logprobs_cover_the_text_only(make_api, form, text, content, stream):
    api = make_api(tokenizer=TOKENIZERS[form], script=scripted(text), tokens_per_step=3)
    response = api.chat(tools=TOOLS, logprobs=True, stream=stream)
    replies = events_of(response.text)[:-1] if stream else [response.json()]
    given = [reply["choices"][0]["logprobs"] for reply in replies]
    entries = [entry for part in given if part for entry in part["content"]]
    assert bytes(b for entry in entries for b in entry["bytes"]).decode() == content


@FORMS
def test_none_bans_the_opening(make_api, form):
    """A call that Llama writes without it is text then."""
    text = written(LLAMA_3, OSLO)
    api = make_api(tokenizer=TOKENIZERS[form], script=text)
    assert both(api, tools=TOOLS, tool_choice="none") == ({"content": text}, "stop")
    request = api.engine.requests[-1]
    banned = {TOKENIZERS[form].token_id(form.open): -100.0}
    assert (request.sampling_params.logit_bias, request.grammar) == (banned, None)
    api.chat(tools=TOOLS)
    assert api.engine.requests[-1].sampling_params.logit_bias is None


@FORMS
def test_one_call_at_a_time(make_api, form):
    api = make_api(tokenizer=TOKENIZERS[form], script=written(form, OSLO, PONG), step_delay=0.001)
    for stream in (True, False):
        message, reason = folded(api.chat(tools=TOOLS, parallel_tool_calls=False, stream=stream))
        assert (message["tool_calls"], reason) == ([called()], "tool_calls")
        assert api.engine.aborted[-1] == api.engine.requests[-1].request_id


@FORMS
def test_named_finishes_with_stop(make_api, form):
    api = make_api(tokenizer=TOKENIZERS[form], script=written(form, PONG))
    message = {"content": None, "tool_calls": [called(*PONG)]}
    assert both(api, tools=TOOLS, tool_choice=PING_CHOICE) == (message, "stop")
    assert both(api, tools=TOOLS, tool_choice="required") == (message, "tool_calls")


def test_llama_calls_no_tool_that_is_not_allowed(make_api):
    text = written(LLAMA_3, OSLO)
    api = make_api(tokenizer=LLAMA_TOKENIZER, script=text)
    assert both(api, tools=TOOLS, tool_choice=allowed("auto")) == ({"content": text}, "stop")


# --- grammars -------------------------------------------------------------------------------------

WRONG = [
    ("get_weather", "{}"),
    ("get_weather", '{"city": 1}'),
    ("ping", '{"x": 1}'),
]


@FORMS
def test_calls_begun_freely_are_held(ask, form):
    request = ask(form)
    for calls in ([OSLO], [PONG], [OSLO, PONG, OSLO]):
        assert takes(form, request, written(form, *calls)), calls
    for wrong in WRONG:
        assert not takes(form, request, written(form, wrong)), wrong
        assert not takes(form, request, written(form, PONG, wrong)), wrong
    assert not takes(form, request, written(form, PONG) + "x")
    request = ask(form, parallel_tool_calls=False)
    assert takes(form, request, written(form, PONG), must_end)
    request = ask(form, tool_choice=allowed("auto"))
    assert takes(form, request, written(form, PONG))
    request = ask(form, {"tool_grammar": "off"})
    assert (request.grammar, request.grammar_trigger_ids) == (None, [])


def test_mistral_may_give_calls_ids(ask):
    request = ask(MISTRAL)
    text = written(MISTRAL, OSLO)
    assert request.grammar_trigger_ids == [MISTRAL_TOKENIZER.token_id(CALLS)]
    assert takes(MISTRAL, request, text.replace("[{", " [{"))
    assert takes(MISTRAL, request, text.replace("}}", '}, "id": "abcDEF123"}'))
    assert not takes(MISTRAL, request, text.replace("}}", '}, "id": "abc"}'))
    assert not takes(MISTRAL, request, written(MISTRAL, ("other", "{}")))


def test_llama_may_answer_anything_but_a_bad_call(ask):
    request = ask(LLAMA_3)
    oslo, other = written(LLAMA_3, OSLO), written(LLAMA_3, ("other", "{}"))
    assert request.grammar_trigger_ids == []
    for text in (
        "", "Hi {是", " \n", '{"a": 1}', "[" + oslo + "]", "see " + written(LLAMA_3, WRONG[0]),
        '{"name": "Bob"}', '{"name": "ping", "x": 1}', '{"name": "ping", "parameters": 1}', other,
        "\n" + oslo, TAG + oslo, "So.\n" + TAG + oslo, '{"name": "pin', '{"name": "pinging"}',
        '{\n  "name" : "get_weather",\n  "parameters": {"city": "Oslo"}\n}',
        '{"type": "function", ' + oslo[1:], oslo.replace("parameters", "arguments"),
    ):  # fmt: skip
        assert takes(LLAMA_3, request, text), text
    bad = written(LLAMA_3, WRONG[0])
    for text in (
        bad, " " + bad, TAG + bad, TAG + other, "So. " + TAG + bad, TAG + "print(1)",
        '{"name": "get_weather"}', bad.replace("parameters", "arguments"), oslo + " done",
        '{"type": "function", ' + bad[1:], bad.replace(": ", ":"), bad.replace(", ", "\t,\n\n"),
    ):  # fmt: skip
        assert not takes(LLAMA_3, request, text), text
    request = ask(LLAMA_3, tool_choice=allowed("auto"))
    assert takes(LLAMA_3, request, bad)  # which is text, as it is of no tool allowed


@FORMS
def test_required_calls_from_the_start(ask, form):
    for fields in ({}, {"response_format": {"type": "json_object"}}):
        request = ask(form, tool_choice="required", **fields)
        assert request.grammar_trigger_ids == []
        for calls in ([OSLO], [PONG], [OSLO, PONG, OSLO]):
            assert takes(form, request, written(form, *calls)), calls
        for text in ("", "Hi", "{}", written(form, OSLO) + "x", written(form, ("other", "{}"))):
            assert not takes(form, request, text), text
        for wrong in WRONG:
            assert not takes(form, request, written(form, PONG, wrong)), wrong
    assert takes(LLAMA_3, ask(LLAMA_3, tool_choice="required"), TAG + written(LLAMA_3, OSLO))
    request = ask(form, tool_choice="required", parallel_tool_calls=False)
    assert takes(form, request, written(form, OSLO), must_end)
    request = ask(form, tool_choice=PING_CHOICE)
    assert takes(form, request, written(form, PONG), must_end)
    assert not takes(form, request, written(form, OSLO))


@FORMS
def test_schemas_with_definitions(ask, form):
    parameters = {
        "type": "object",
        "properties": {"x": {"$ref": "#/$defs/X"}, "again": {"$ref": "#"}},
        "required": ["x"],
        "$defs": {"X": {"type": "integer"}},
    }
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}, PING]
    for fields in ({}, {"tool_choice": "required"}, {"response_format": {"type": "json_object"}}):
        request = ask(form, tools=tools, **fields)
        assert takes(form, request, written(form, ("f", '{"x": 1, "again": {"x": 2}}'), PONG))
        if "response_format" not in fields or form is MISTRAL:  # a bad call is any object
            assert not takes(form, request, written(form, ("f", '{"x": 1, "again": {}}')))


@FORMS
def test_a_schema_that_cannot_be_enforced(make_api, form):
    api = make_api(tokenizer=TOKENIZERS[form])
    response = api.chat(tools=[PING, unenforceable()])
    assert response.headers["x-pageserve-warning"].startswith("tools[1].function.parameters: ")
    request = api.engine.requests[-1]
    assert takes(form, request, written(form, ("odd", '{"x": "y", "z": [1]}')))
    error = error_of(api.chat(tools=[PING, unenforceable(strict=True)]))
    assert error["param"] == "tools[1].function.parameters"


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
RESPONSE_FORMAT = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}


@FORMS
def test_a_form_of_the_answer_or_calls(make_api, ask, form):
    request = ask(form, response_format=RESPONSE_FORMAT)
    assert request.grammar_trigger_ids == []
    for text in ('{"a": 1}', written(form, OSLO), written(form, OSLO, PONG)):
        assert takes(form, request, text), text
    for text in ("", "Hi", '{"a": "x"}', '{"name": "ping"}', *(written(form, w) for w in WRONG)):
        assert not takes(form, request, text), text
    quoting = json.dumps({"a": 1, "b": form.open + "{}"})
    for script, message in (
        ('{"a": 1}', {"content": '{"a": 1}'}),
        (scripted(quoting), {"content": quoting}),
        (written(form, PONG), {"content": None, "tool_calls": [called(*PONG)]}),
    ):
        api = make_api(tokenizer=TOKENIZERS[form], script=script)
        assert both(api, tools=TOOLS, response_format=RESPONSE_FORMAT)[0] == message


@pytest.mark.parametrize(
    "form", [{"structured_outputs": {"regex": "[0-9]{2}"}}, {"guided_json": {"const": 12}}]
)
def test_any_form_goes_with_llamas_calls(ask, form):
    request = ask(LLAMA_3, **form)
    assert takes(LLAMA_3, request, "12", must_end)
    assert takes(LLAMA_3, request, written(LLAMA_3, OSLO))
    assert not takes(LLAMA_3, request, written(LLAMA_3, WRONG[0]))


def test_objects_of_a_regex_leave_llama_its_token(ask):
    """Nothing is read twice, so what may be such an answer cannot turn out to be a call."""
    request = ask(LLAMA_3, structured_outputs={"regex": r'\{"a": [0-9]\}'})
    assert takes(LLAMA_3, request, '{"a": 1}', must_end)
    assert takes(LLAMA_3, request, TAG + written(LLAMA_3, OSLO))
    assert not takes(LLAMA_3, request, written(LLAMA_3, OSLO))


def test_llamas_calls_behind_reasoning(make_api):
    """They are held where the answer begins, not the output."""
    opening = "{% if add_generation_prompt %}<think>\n{% endif %}"
    tokenizer = byte_tokenizer(LLAMA_TEMPLATE + opening, added=(TAG,), special=(TAG,))
    text = "so {\n</think>\n\n" + written(LLAMA_3, OSLO)
    api = make_api(tokenizer=tokenizer, script=text)
    message, reason = both(api, tools=TOOLS)
    assert (message["tool_calls"], reason) == ([called()], "tool_calls")
    assert message["reasoning_content"] == "so {"
    request = api.engine.requests[-1]
    assert allows(request, text, tokenizer) and allows(request, "so</think>Hi", tokenizer)
    assert not allows(request, text.replace("city", "town"), tokenizer)


def test_llamas_calls_behind_reasoning_that_may_be_left_out(make_api):
    """A block cannot pass for the beginning of an answer, with anything behind it."""
    tokenizer = byte_tokenizer(LLAMA_TEMPLATE + "{# <think> #}", added=(TAG,), special=(TAG,))
    api = make_api(tokenizer=tokenizer)
    api.chat(tools=TOOLS)
    request = api.engine.requests[-1]
    for text in ("Hi", "Hi <think>", CALL, *(f"<think>so</think>\n\n{x}" for x in ("Hi", CALL))):
        assert allows(request, text, tokenizer), text
    bad = written(LLAMA_3, WRONG[0])
    for text in (bad, "<think>so</think>" + bad, "\n <think>so</think>\n" + bad):
        assert not allows(request, text, tokenizer), text


FREE = tool_grammar(
    LLAMA_TOKENIZER, LLAMA_3, TOOLS, ToolChoice("auto"), parallel=True, free=True
).source
CALL = written(LLAMA_3, OSLO)


@given(st.data())
def test_what_is_read_as_llamas_call_has_been_held_as_one(data):
    """Whatever text the grammar lets through, the parser finds no call with other arguments in it
    than the tools take."""
    text = CALL
    for _ in range(data.draw(st.integers(0, 3))):
        place, length = data.draw(st.integers(0, len(text))), data.draw(st.integers(0, 6))
        new = data.draw(
            st.sampled_from(["", " ", "\n", '"', "{", "}", ",", ":", "\\", "x", *PARTS])
        )
        text = text[:place] + new + text[place + length :]
    grammar = json.dumps({"grammars": [{"lark_grammar": FREE}]})
    matcher = compile_grammar(grammar, llguidance_tokenizer(LLAMA_TOKENIZER))
    ids = LLAMA_TOKENIZER.encode(text, False)
    if matcher.try_consume_tokens(ids) < len(ids) or not matcher.is_accepting():
        return
    parser = ToolParser(LLAMA_3, ("get_weather", "ping"))
    calls = {}
    for piece in parser.feed(text) + parser.finish(cut=False):
        if isinstance(piece, CallDelta):
            name, arguments = calls.get(piece.index, (piece.name, ""))
            calls[piece.index] = (name, arguments + piece.arguments)
    assert not parser.broken
    for name, arguments in calls.values():
        parsed = json.loads(arguments)
        assert parsed == {} if name == "ping" else list(parsed) == ["city"]


PARTS = [TAG, '"type": "function", ', '"parameters"', '"arguments"', '{"name": "ping"', "; " + CALL]
