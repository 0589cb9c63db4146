"""Templates that know no tools, or whose calls have a form that is not known, with what matters of
the real ones: the server describes the tools in its own words, and reads and forces such calls."""

import json

import pytest
from api_harness import HI, error_of
from fakes import byte_tokenizer, scripted
from test_api_tools import CLOSE, HISTORY, OPEN, PING, TOOLS, both, call_text, called, prompt_of
from test_tool_grammar import allows

# Of later versions, whose calls are no list.
MISTRAL_11 = """\
{%- if messages[0]['role'] == 'system' %}
    {{- '[SYSTEM_PROMPT]' + messages[0]['content'] + '[/SYSTEM_PROMPT]' }}
    {%- set messages = messages[1:] %}
{%- endif %}
{%- if tools %}{{- '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{%- endif %}
{%- for message in messages %}
    {%- if message.tool_calls %}
        {%- for call in message.tool_calls %}
            {{- '[TOOL_CALLS]' + call.function.name + '[ARGS]' + call.function.arguments }}
        {%- endfor %}
    {%- else %}{{- '[INST]' + message['content'] + '[/INST]' }}{%- endif %}
{%- endfor %}
"""
MISTRAL_01 = """\
{{ '<s>' }}{% for message in messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
{% endif %}
{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}
{% elif message['role'] == 'assistant' %}{{ message['content'] + '</s>' }}
{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}
{% endfor %}
"""
QWEN3_CODER = """\
{%- if messages[0]['role'] == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0]['content'] }}
    {%- set messages = messages[1:] %}
{%- endif %}
{%- if tools %}
    {{- 'reply in the following format:\\n\\n<tool_call>\\n<function=example_function_name>\\n' }}
    {{- '<parameter=example_parameter_1>\\nvalue_1\\n</parameter>\\n</function>\\n</tool_call>' }}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- for message in messages %}
    {%- if message.role == 'assistant' and message.tool_calls %}
        {{- '\\n<tool_call>\\n<function=' + message.tool_calls[0].function.name + '>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
MODELS = {
    "llama 3": byte_tokenizer(
        added=("<|python_tag|>", "<|eom_id|>"), special=("<|python_tag|>", "<|eom_id|>")
    ),
    "mistral 11": byte_tokenizer(MISTRAL_11, added=("[TOOL_CALLS]",), special=("[TOOL_CALLS]",)),
    "mistral 0.1": byte_tokenizer(MISTRAL_01),
    "qwen3-coder": byte_tokenizer(QWEN3_CODER, added=(OPEN, CLOSE)),
}


@pytest.fixture(params=MODELS)
def make(request, make_api):
    """Return an app of one of the models."""
    return lambda script="ok", **options: make_api(
        tokenizer=MODELS[request.param], script=script, **options
    )


def test_tools_are_described_in_the_servers_words(make):
    prompt = prompt_of(make(), tools=TOOLS)
    shown = "\n".join(json.dumps(t, ensure_ascii=False) for t in TOOLS)
    assert prompt.count("# Tools") == 1 and f"<tools>\n{shown}\n</tools>" in prompt
    assert prompt.index("</tools>") < prompt.rindex("hi")
    for native in ("ipython", "dictionary", "[AVAILABLE_TOOLS]", "<function="):
        assert native not in prompt


def test_past_calls_are_text(make):
    """Also several at once, and under ids that the template would not take."""
    prompt = prompt_of(make(), messages=HISTORY, tools=[PING])
    assert '<tool_call>\n{"name": "f", "arguments": {"x": "é"}}\n</tool_call>' in prompt
    assert "<tool_response>\n4\n</tool_response>" in prompt
    for native in ("[TOOL_CALLS]", "<|python_tag|>", "<function="):
        assert native not in prompt


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_calls_are_read_and_forced(make, choice):
    api = make(scripted(call_text()))
    assert both(api, tools=TOOLS, tool_choice=choice) == (
        {"content": None, "tool_calls": [called()]},
        "tool_calls",
    )
    request, tokenizer = api.engine.requests[-1], api.context.loaded_tokenizer
    text = call_text().removeprefix(OPEN) if request.grammar_trigger_ids else call_text()
    assert allows(request, text, tokenizer)
    assert not allows(request, text.replace("city", "town"), tokenizer)


@pytest.mark.parametrize("choice", ["auto", "none"])
@pytest.mark.parametrize("grammar", ["on", "off"])
def test_tokens_of_other_calls_are_banned(make, choice, grammar):
    """What a model might fall back to would be neither text nor a call."""
    api = make(server={"tool_grammar": grammar})
    api.chat(tools=TOOLS, tool_choice=choice, logit_bias={"5": 1})
    tokenizer = api.context.loaded_tokenizer
    tags = ["<|python_tag|>", "[TOOL_CALLS]", *([OPEN] if choice == "none" else [])]
    banned = {tokenizer.token_id(tag): -100.0 for tag in tags} | {5: 1.0}
    banned.pop(None, None)
    assert api.engine.requests[-1].sampling_params.logit_bias == banned
    api.chat(logit_bias={"5": 1})
    assert api.engine.requests[-1].sampling_params.logit_bias == {5: 1.0}


def test_a_template_that_takes_no_system_message(make_api):
    api = make_api(tokenizer=MODELS["mistral 0.1"])
    prompt = prompt_of(api, tools=[PING])
    assert prompt.startswith("<s>[INST] # Tools\n") and prompt.endswith("\n\nhi [/INST]\n")
    system = [{"role": "system", "content": "Be brief."}, *HI]
    for fields in ({}, {"tools": [PING]}):  # the client's own one stays an error
        error = error_of(api.chat(messages=system, **fields))
        assert (error["code"], error["param"]) == ("invalid_messages", "messages")
        assert "roles must alternate" in error["message"]


def test_a_conversation_that_begins_with_a_refusal(make_api):
    """It may come without content."""
    refusal = {"role": "assistant", "content": None, "refusal": "No."}
    prompt = prompt_of(make_api(), messages=[refusal, *HI], tools=[PING])
    assert prompt.startswith("<|im_start|>system\n# Tools\n")
    error = error_of(
        make_api(tokenizer=MODELS["mistral 0.1"]).chat(messages=[refusal, *HI], tools=[PING])
    )
    assert (error["code"], error["param"]) == ("invalid_messages", "messages")
