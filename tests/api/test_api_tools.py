"""Tools over HTTP: what is refused, what the prompt shows, what calls look like in both modes."""

import json
import re
from itertools import chain

import openai
import pytest
from api_harness import HI, TOKENIZER, error_of, events_of
from fakes import byte_tokenizer, scripted
from pydantic import BaseModel
from test_api_sdk import Server

OPEN, CLOSE = "<tool_call>", "</tool_call>"
QWEN = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- '<tools>' }}
    {%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- elif not (tools and loop.first and message.role == 'system') %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- (call.function.arguments | tojson) + '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
QWEN_TOKENIZER = byte_tokenizer(QWEN, added=(OPEN, CLOSE))
OPEN_ID, CLOSE_ID = QWEN_TOKENIZER.token_id(OPEN), QWEN_TOKENIZER.token_id(CLOSE)

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city – now",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}
PING = {"type": "function", "function": {"name": "ping"}}
TOOLS = [WEATHER, PING]


def call_text(name="get_weather", arguments='{"city": "Oslo"}'):
    return f'{OPEN}\n{{"name": "{name}", "arguments": {arguments}}}\n{CLOSE}'


TWO = "Let me see. \n" + call_text() + "\n" + call_text("ping", "{}")


@pytest.fixture
def qwen(make_api):
    def make(script=TWO, **options):
        return make_api(tokenizer=QWEN_TOKENIZER, script=script, **options)

    return make


def folded(response):
    """The message and finish reason of a response, streamed or not; ids of calls become numbers."""
    if response.headers["content-type"] == "application/json":
        choice = response.json()["choices"][0]
        message, reason = choice["message"], choice["finish_reason"]
        assert (message.pop("role"), message.pop("refusal")) == ("assistant", None)
        assert message.pop("annotations") == []
    else:
        message, reason = fold_stream(response.text)
    ids = [call["id"] for call in message.get("tool_calls", [])]
    assert len(set(ids)) == len(ids)
    for call in message.get("tool_calls", []):
        assert call.pop("id").startswith("call_") and call.pop("type") == "function"
    return message, reason


def fold_stream(text):
    *chunks, done = events_of(text)
    assert done == "[DONE]"
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0]["role"] == "assistant" and deltas[-1] == {}
    content, calls, reasoning = deltas[0]["content"], [], None
    for delta in deltas[1:-1]:
        assert len(delta) == 1 and all(delta.values()), delta
        if "content" in delta:
            content = (content or "") + delta["content"]
        elif "tool_calls" not in delta:
            reasoning = (reasoning or "") + delta["reasoning_content"]
        else:
            (call,) = delta["tool_calls"]
            if "id" in call:
                assert call["index"] == len(calls)
                assert set(call) == {"index", "id", "type", "function"}
                assert set(call["function"]) == {"name", "arguments"}
                calls.append({**call, "function": dict(call["function"])})
                del calls[-1]["index"]
            else:
                assert call == {
                    "index": len(calls) - 1,
                    "function": {"arguments": call["function"]["arguments"]},
                }
                calls[-1]["function"]["arguments"] += call["function"]["arguments"]
    message = {"content": content}
    if calls:
        message["tool_calls"] = calls
        message["content"] = content or None
    if reasoning is not None:
        message["reasoning_content"] = reasoning
    return message, chunks[-1]["choices"][0]["finish_reason"]


def both(api, **fields):
    """Ask streamed and not, and return the one answer."""
    whole = folded(api.chat(**fields))
    assert folded(api.chat(stream=True, **fields)) == whole
    return whole


def called(name="get_weather", arguments='{"city": "Oslo"}'):
    return {"function": {"name": name, "arguments": arguments}}


# --- requests -------------------------------------------------------------------------------------


def tool(**function):
    return [{"type": "function", "function": {"name": "f", **function}}]


FUNCTION_X = {"type": "function", "function": {"name": "x"}}
BAD = [
    ({"tools": 1}, "invalid_type", "tools"),
    ({"tools": [WEATHER] * 129}, "array_above_max_length", "tools"),
    ({"tools": [WEATHER, WEATHER]}, "invalid_value", "tools[1].function.name"),
    ({"tools": [1]}, "invalid_type", "tools[0]"),
    ({"tools": [{}]}, "missing_required_parameter", "tools[0].type"),
    ({"tools": [{"type": "custom"}]}, "unsupported_value", "tools[0].type"),
    ({"tools": [{"type": "web"}]}, "invalid_value", "tools[0].type"),
    ({"tools": [{"type": "function"}]}, "missing_required_parameter", "tools[0].function"),
    ({"tools": tool(name=None)}, "missing_required_parameter", "tools[0].function.name"),
    ({"tools": tool(name="")}, "string_below_min_length", "tools[0].function.name"),
    ({"tools": tool(name="x" * 65)}, "string_above_max_length", "tools[0].function.name"),
    ({"tools": tool(name="a b")}, "invalid_value", "tools[0].function.name"),
    ({"tools": tool(name=1)}, "invalid_type", "tools[0].function.name"),
    ({"tools": tool(description=1)}, "invalid_type", "tools[0].function.description"),
    ({"tools": tool(parameters="x")}, "invalid_type", "tools[0].function.parameters"),
    (
        {"tools": tool(parameters={"type": "string"})},
        "invalid_json_schema",
        "tools[0].function.parameters",
    ),
    ({"tools": tool(strict=1)}, "invalid_type", "tools[0].function.strict"),
    ({"tool_choice": "auto"}, "invalid_value", "tool_choice"),
    ({"tool_choice": "required"}, "invalid_value", "tool_choice"),
    ({"tool_choice": "required", "tools": []}, "empty_array", "tools"),
    ({"tool_choice": "sometimes"}, "invalid_value", "tool_choice"),
    ({"tool_choice": 1, "tools": TOOLS}, "invalid_type", "tool_choice"),
    ({"tool_choice": {}, "tools": TOOLS}, "missing_required_parameter", "tool_choice.type"),
    ({"tool_choice": {"type": "x"}, "tools": TOOLS}, "invalid_value", "tool_choice.type"),
    ({"tool_choice": {"type": "custom"}, "tools": TOOLS}, "unsupported_value", "tool_choice.type"),
    ({"tool_choice": FUNCTION_X, "tools": TOOLS}, "invalid_value", "tool_choice.function.name"),
    ({"tool_choice": FUNCTION_X}, "invalid_value", "tool_choice"),
    (
        {"tool_choice": {"type": "function"}, "tools": TOOLS},
        "missing_required_parameter",
        "tool_choice.function",
    ),
    ({"parallel_tool_calls": 1}, "invalid_type", "parallel_tool_calls"),
    ({"include_reasoning": 1}, "invalid_type", "include_reasoning"),
]


def allowed(mode="auto", tools=(PING,)):
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": list(tools)}}


BAD += [
    ({"tool_choice": choice, "tools": TOOLS}, code, "tool_choice.allowed_tools" + path)
    for choice, code, path in [
        ({"type": "allowed_tools"}, "missing_required_parameter", ""),
        (allowed(mode="none"), "invalid_value", ".mode"),
        (allowed(tools=[]), "empty_array", ".tools"),
        (allowed(tools=[1]), "invalid_type", ".tools[0]"),
        (allowed(tools=[{"type": "mcp"}]), "unsupported_value", ".tools[0].type"),
        (allowed(tools=[PING, FUNCTION_X]), "invalid_value", ".tools[1].function.name"),
    ]
]


@pytest.mark.parametrize(("fields", "code", "param"), BAD)
def test_refused(api, fields, code, param):
    response = api.chat(**fields)
    error = error_of(response)
    assert (response.status_code, error["code"], error["param"]) == (400, code, param)
    api.check_alive()


@pytest.mark.parametrize("fields", [{}, {"tool_choice": None}, {"tool_choice": "none"}])
def test_an_empty_list_of_tools_is_none(api, fields):
    response = api.chat(tools=[], **fields)
    assert response.status_code == 200
    assert "tool_calls" not in response.json()["choices"][0]["message"]


# --- prompts --------------------------------------------------------------------------------------


def prompt_of(api, **fields):
    response = api.chat(**fields)
    assert response.status_code == 200, response.text
    return api.context.loaded_tokenizer.decode(
        api.engine.requests[-1].prompt_token_ids, skip_special_tokens=False
    )


HISTORY = [
    {"role": "user", "content": "Oslo?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x":"é"}'}},
            {"id": "b", "type": "function", "function": {"name": "g", "arguments": "{oops"}},
        ],
    },
    {"role": "tool", "tool_call_id": "a", "content": "4"},
    {"role": "tool", "tool_call_id": "b", "content": [{"type": "text", "text": "bad"}]},
]
HISTORY_TEXT = (
    "<|im_start|>user\nOslo?<|im_end|>\n<|im_start|>assistant\n{gap}"
    '<tool_call>\n{{"name": "f", "arguments": {{"x": "é"}}}}\n</tool_call>\n'
    '<tool_call>\n{{"name": "g", "arguments": "{{oops"}}\n</tool_call><|im_end|>\n'
    "<|im_start|>user\n<tool_response>\n4\n</tool_response>\n"
    "<tool_response>\nbad\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
)


@pytest.mark.parametrize("choice", ["none", "auto"])
def test_the_models_own_template_shows_the_tools(qwen, choice):
    """With tool_choice none too, which keeps the prefix cache warm between turns."""
    prompt = prompt_of(qwen(), tools=[WEATHER], tool_choice=choice)
    shown = json.dumps(WEATHER, ensure_ascii=False)
    assert prompt.startswith(f"<|im_start|>system\n<tools>\n{shown}\n</tools><|im_end|>\n")


def test_history_in_the_models_own_template(qwen):
    """A bad call of the past is shown as it was and does not make later turns fail."""
    assert prompt_of(qwen(), messages=HISTORY) == HISTORY_TEXT.format(gap="\n")


def test_a_template_without_tools_gets_system_text(make_api):
    api = make_api()
    prompt = prompt_of(api, tools=[WEATHER, PING])
    assert prompt.startswith("<|im_start|>system\n# Tools\n")
    shown = "\n".join(json.dumps(t, ensure_ascii=False) for t in TOOLS)
    assert f"<tools>\n{shown}\n</tools>" in prompt and prompt.count("<|im_start|>system") == 1
    system = {"role": "developer", "content": "Be brief."}
    prompt = prompt_of(api, tools=[PING], messages=[system, *HI])
    assert prompt.startswith("<|im_start|>system\nBe brief.\n\n# Tools\n")
    assert prompt.count("<|im_start|>system") == 1


def test_history_in_a_template_without_tools(make_api):
    api = make_api()
    assert prompt_of(api, messages=HISTORY) == HISTORY_TEXT.format(gap="")
    said = [{**HISTORY[1], "content": "Hm."}]
    assert "assistant\nHm.\n<tool_call>\n{" in prompt_of(api, messages=said)


XML_TAGS = "{{ tools }}<tool_call>\n<function=f>\n"
OTHER_TAGS = "{{ tools }}[TOOL_CALLS]"


@pytest.mark.parametrize("template", [XML_TAGS, OTHER_TAGS])
def test_a_template_that_writes_other_calls_gets_system_text(make_api, template):
    source = template + "{% for m in messages %}{{ m.content }}{% endfor %}"
    prompt = prompt_of(make_api(tokenizer=byte_tokenizer(source)), tools=[PING])
    assert prompt.startswith("None") and "# Tools" in prompt


def test_tokenize_shows_the_same_prompt(qwen):
    api = qwen()
    api.chat(tools=TOOLS)
    response = api.post("/tokenize", {"messages": HI, "tools": TOOLS})
    assert response.json()["tokens"] == api.engine.requests[-1].prompt_token_ids


# --- answers --------------------------------------------------------------------------------------


def test_calls_streamed_as_openai_does(qwen):
    """Each chunk of the contract, in order."""
    script = call_text("f", '{"x": 1}') + call_text("g", "{}")
    response = qwen(script, tokens_per_step=4).chat(stream=True, tools=[*tool(), *tool(name="g")])
    *chunks, done = events_of(response.text)
    assert done == "[DONE]"
    choices = [chunk["choices"][0] for chunk in chunks]
    deltas = [choice["delta"] for choice in choices]
    assert deltas[0] == {"role": "assistant", "content": None}
    first, second = (d["tool_calls"][0]["id"] for d in deltas if "id" in str(d))
    pieces = [d["tool_calls"][0] for d in deltas[1:-1]]
    assert pieces[0] == {
        "index": 0,
        "id": first,
        "type": "function",
        "function": {"name": "f", "arguments": ""},
    }
    place = pieces.index(
        {
            "index": 1,
            "id": second,
            "type": "function",
            "function": {"name": "g", "arguments": ""},
        }
    )
    for index, part in ((0, pieces[1:place]), (1, pieces[place + 1 :])):
        assert part and all(set(p) == {"index", "function"} for p in part)
        assert all(p["index"] == index and set(p["function"]) == {"arguments"} for p in part)
    assert "".join(p["function"]["arguments"] for p in pieces[:place]) == '{"x": 1}'
    assert len(pieces[1:place]) > 1  # as they come, not in one piece
    assert deltas[-1] == {} and choices[-1]["finish_reason"] == "tool_calls"
    assert all(choice["finish_reason"] is None for choice in choices[:-1])


@pytest.mark.parametrize("stream", [False, True])
def test_every_call_of_every_choice_has_an_id_of_its_own(qwen, stream):
    """Also where greedy choices are copies of one sequence."""
    api = qwen()
    response = api.chat(tools=TOOLS, n=3, temperature=0, stream=stream)
    ids = re.findall(r'"id":"(call_[^"]*)"', response.text)
    assert len(ids) == len(set(ids)) == 6 and len(api.engine.requests) == 1
    assert all(re.fullmatch(r"call_[0-9A-Za-z]{24}", i) for i in ids)


def test_copies_of_a_call_begin_alike(qwen):
    response = qwen(call_text()).chat(tools=TOOLS, n=3, temperature=0, stream=True)
    roles = [c["choices"][0]["delta"] for c in events_of(response.text)[:3]]
    assert roles == [{"role": "assistant", "content": None}] * 3


@pytest.mark.parametrize("tokens_per_step", [1, 2, 3, 5, 8, 1000])
@pytest.mark.parametrize("as_bytes", [False, True])
def test_split_anywhere(qwen, tokens_per_step, as_bytes):
    """Tags as single tokens and as ordinary text, many tokens a step: always the same calls."""
    api = qwen(scripted(TWO) if as_bytes else TWO, tokens_per_step=tokens_per_step)
    message, reason = both(api, tools=TOOLS)
    assert message == {
        "content": "Let me see.",
        "tool_calls": [called(), called("ping", "{}")],
    }
    assert reason == "tool_calls"


def test_content_is_null_without_text(qwen):
    message, _ = both(qwen(call_text()), tools=TOOLS)
    assert message == {"content": None, "tool_calls": [called()]}


@pytest.mark.parametrize("fields", [{"tools": TOOLS}, {}])
@pytest.mark.parametrize("script", ["It is 4 °C.\n", "a <tool b", "  "])
def test_no_key_without_a_call(qwen, script, fields):
    """Clients test `tool_calls is not None` and then take the first."""
    assert both(qwen(script), **fields) == ({"content": script}, "stop")


def test_without_tools_a_tag_is_text(qwen):
    assert both(qwen(call_text())) == ({"content": call_text()}, "stop")


def test_special_tags_are_read_too(make_api):
    tokenizer = byte_tokenizer(QWEN, added=(OPEN, CLOSE), special=(OPEN, CLOSE))
    api = make_api(tokenizer=tokenizer, script=TWO)
    message, reason = both(api, tools=TOOLS)
    assert (len(message["tool_calls"]), reason) == (2, "tool_calls")


def test_length_wins_and_shows_the_part(qwen):
    message, reason = both(qwen(call_text()), tools=TOOLS, max_tokens=45)
    arguments = message["tool_calls"][0]["function"]["arguments"]
    assert '{"city": "Oslo"}'.startswith(arguments) and arguments
    assert reason == "length"


def test_usage_counts_the_markup(qwen):
    api = qwen()
    usage = api.chat(tools=TOOLS).json()["usage"]
    assert usage["completion_tokens"] == len(QWEN_TOKENIZER.encode(TWO, False)) + 1
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 0}


def test_stop_strings_see_the_raw_output(qwen):
    """A stop string inside of arguments cuts the call; the stream has begun it by then."""
    fields = {"tools": TOOLS, "stop": ["Oslo"]}
    api = qwen(call_text())
    message, reason = folded(api.chat(**fields))
    assert (message, reason) == ({"content": call_text().split("Oslo")[0]}, "stop")
    message, reason = folded(api.chat(stream=True, **fields))
    assert (message["tool_calls"], reason) == ([called(arguments='{"city": "')], "stop")


def test_logprobs_cover_the_text_only(qwen):
    api = qwen(scripted(TWO + " done"), tokens_per_step=3)
    fields = {"tools": TOOLS, "logprobs": True}
    choice = api.chat(**fields).json()["choices"][0]

    def spelled(entries):
        return bytes(b for entry in entries for b in entry["bytes"]).decode()

    assert choice["message"]["content"] == "Let me see. done"
    assert spelled(choice["logprobs"]["content"]) == "Let me see. done"
    *chunks, _ = events_of(api.chat(stream=True, **fields).text)
    for chunk in chunks:
        part = chunk["choices"][0]
        if "tool_calls" in part["delta"]:
            assert part["logprobs"] is None
        elif part["delta"].get("content"):
            assert spelled(part["logprobs"]["content"]) == part["delta"]["content"]


def test_token_ids_are_complete(qwen):
    expected = [*QWEN_TOKENIZER.encode(TWO, False), QWEN_TOKENIZER.eos_token_id]
    api = qwen()
    fields = {"tools": TOOLS, "return_token_ids": True}
    assert api.chat(**fields).json()["choices"][0]["token_ids"] == expected
    *chunks, _ = events_of(api.chat(stream=True, **fields).text)
    parts = [chunk["choices"][0].get("token_ids", []) for chunk in chunks]
    assert list(chain(*parts)) == expected


# --- tool_choice ----------------------------------------------------------------------------------


def test_none_bans_the_tag(qwen, make_api):
    api = qwen("ok")
    assert both(api, tools=TOOLS, tool_choice="none", logit_bias={"5": 1}) == (
        {"content": "ok"},
        "stop",
    )
    params = api.engine.requests[-1].sampling_params
    assert params.logit_bias == {5: 1.0, OPEN_ID: -100.0}
    api = make_api()
    api.chat(tools=TOOLS, tool_choice="none", bad_words=["x"])
    words = api.engine.requests[-1].sampling_params.bad_words_token_ids
    assert TOKENIZER.encode(OPEN, False) in words and len(words) == 3


def test_auto_bans_nothing(qwen):
    api = qwen()
    api.chat(tools=TOOLS)
    params = api.engine.requests[-1].sampling_params
    assert (params.logit_bias, params.bad_words_token_ids) == (None, None)


@pytest.mark.parametrize("stream", [True, False])
def test_one_call_at_a_time(qwen, stream):
    """parallel_tool_calls=false ends the turn behind the first call, in the engine too."""
    api = qwen(step_delay=0.001)
    response = api.chat(tools=TOOLS, parallel_tool_calls=False, stream=stream)
    message, reason = folded(response)
    assert (message["tool_calls"], reason) == ([called()], "tool_calls")
    assert api.engine.aborted == [api.engine.requests[-1].request_id]
    api.check_alive()
    stops = 'vllm:request_success_total{engine="0",finished_reason="stop",model_name="tiny"}'
    assert api.metrics()[stops] >= 1


# --- clients --------------------------------------------------------------------------------------


class GetWeather(BaseModel):
    """The weather of a city."""

    city: str


@pytest.fixture(scope="module")
def client():
    script = "On it.\n" + call_text("GetWeather") + "\n" + call_text("ping", "{}")
    with Server(tokenizer=QWEN_TOKENIZER, script=script) as server:
        yield server.client()


def test_sdk_create(client):
    tools = [openai.pydantic_function_tool(GetWeather), PING]
    choice = client.chat.completions.create(model="tiny", messages=HI, tools=tools).choices[0]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "On it.")
    first, second = choice.message.tool_calls
    assert (first.function.name, first.function.arguments) == ("GetWeather", '{"city": "Oslo"}')
    assert (second.function.name, second.function.arguments) == ("ping", "{}")
    assert first.id != second.id and first.type == "function"


def test_sdk_stream_helper(client):
    tools = [openai.pydantic_function_tool(GetWeather)]
    with client.chat.completions.stream(model="tiny", messages=HI, tools=tools) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    assert kinds.count("tool_calls.function.arguments.done") == 2
    message = final.choices[0].message
    assert message.tool_calls[0].function.parsed_arguments == GetWeather(city="Oslo")
    assert message.tool_calls[1].function.arguments == "{}"
    assert (message.content, final.choices[0].finish_reason) == ("On it.", "tool_calls")


def test_sdk_plain_stream(client):
    stream = client.chat.completions.create(model="tiny", messages=HI, tools=[PING], stream=True)
    calls = {}
    for chunk in stream:
        for call in chunk.choices[0].delta.tool_calls or []:
            name, arguments = calls.get(call.index, ("", ""))
            function = call.function
            calls[call.index] = (name + (function.name or ""), arguments + function.arguments)
    assert calls == {0: ("GetWeather", '{"city": "Oslo"}'), 1: ("ping", "{}")}
