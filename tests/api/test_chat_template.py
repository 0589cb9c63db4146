"""Messages to prompts: equality with transformers, OpenAI's message shapes, refusals."""

import json
import re
import threading
import time

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from pageserve.api import template, template_process
from pageserve.api.chat import render_chat
from pageserve.api.template import TemplateError
from pageserve.tokenizer import Tokenizer

CHATML = (
    "{%- for message in messages %}\n"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}\n"
    "{%- endfor %}\n"
    "{%- if add_generation_prompt %}\n"
    "    {{- '<|im_start|>assistant\\n' }}\n"
    "{%- endif %}\n"
)
TOOLS = """\
{%- if tools %}
    {{- '<tools>' }}
    {%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
    {{- '</tools>' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- 'user:' }}{%- endif %}
        {{- '<r>' + message.content + '</r>' }}
        {%- continue %}
    {%- endif %}
    {{- message.role + ':' + message.content }}
    {%- for call in message.tool_calls or [] %}
        {{- '<c>' + call.function.name + ' ' + (call.function.arguments | tojson) + '</c>' }}
    {%- endfor %}
    {%- if message.reasoning_content is defined %}
        {{- '[' + message.reasoning_content + ']' }}
    {%- endif %}
    {%- if message.name is defined %}{{- '@' + message.name }}{%- endif %}
{%- endfor %}
"""
USER = {"role": "user", "content": "hi"}


def tokenizer_of(template: str | None = CHATML, **named: str) -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    specials = ["<s>", "<|im_start|>", "<|im_end|>"]
    backend.add_special_tokens([AddedToken(t, special=True) for t in specials])
    templates = named if template is None else {"default": template} | named
    return Tokenizer(backend, {"bos_token": "<s>", "eos_token": "<|im_end|>"}, templates)


def render(template: str, messages: list, **options: object) -> str:
    return render_chat(tokenizer_of(template), messages, **options)


# --- equality with transformers -------------------------------------------------------------------

CONVERSATIONS = [
    [USER],
    [
        {"role": "system", "content": "Be <b> & \"é\" 'x'."},
        USER,
        {"role": "assistant", "content": "yo"},
    ],
    [
        USER,
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {
                    "id": "1",
                    "type": "function",
                    "function": {"name": "f", "arguments": {"é": ["<", 1]}},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "1", "content": "4"},
        {"role": "tool", "tool_call_id": "2", "content": "5"},
    ],
]
GENERATION = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content }}{{ eos_token }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}\n"
    "{% endfor %}\n  {# trimmed #}\n   {% set ns = namespace(x=1) %}\n{{ ns.x }}{{ 'a' | trim }}"
)
FUNCTION = {"type": "function", "function": {"name": "f<T>", "parameters": {"type": "object"}}}


@pytest.mark.parametrize("template", [CHATML, TOOLS, GENERATION])
@pytest.mark.parametrize("messages", CONVERSATIONS)
@pytest.mark.parametrize("tools", [None, [FUNCTION]])
@pytest.mark.parametrize("generate", [True, False])
def test_equals_transformers(template, messages, tools, generate):
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    expected, _ = utils.render_jinja_template(
        [messages],
        tools=tools,
        chat_template=template,
        add_generation_prompt=generate,
        bos_token="<s>",
        eos_token="<|im_end|>",
    )
    assert render(template, messages, tools=tools, add_generation_prompt=generate) == expected[0]


@pytest.mark.parametrize("content", ["Sure: ", "Sure:\n\n", "", " <|im_end|> x"])
@pytest.mark.parametrize(
    "template", [CHATML, CHATML.replace("message['content']", "message['content'] | trim")]
)
def test_continuing_the_final_message_equals_transformers(template, content):
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    messages = [USER, {"role": "assistant", "content": content}]
    expected, _ = utils.render_jinja_template(
        [messages], chat_template=template, continue_final_message=True
    )
    options = {"add_generation_prompt": False, "continue_final_message": True}
    assert render(template, messages, **options) == expected[0]


def test_continuation_is_cut_behind_the_text():
    messages = [USER, {"role": "assistant", "content": "Sure: "}]
    prompt = render(CHATML, messages, add_generation_prompt=False, continue_final_message=True)
    assert prompt == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nSure: "


# --- messages -------------------------------------------------------------------------------------


def test_message_shapes():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    refusal = [{"type": "refusal", "refusal": "no"}]
    assert render("{% for m in messages %}{{ m }}{% endfor %}", [{"role": "user", "content": "x"}])
    assert render(TOOLS, [{"role": "developer", "content": parts}]) == "system:a\nb"
    assert render(TOOLS, [{"role": "user", "content": "x", "name": "bob"}]) == "user:x"
    assert render(TOOLS, [{"role": "assistant", "content": refusal}]) == "assistant:no"
    assert (
        render(TOOLS, [{"role": "assistant", "content": "a", "reasoning": "r"}]) == "assistant:a[r]"
    )
    assert (
        render(TOOLS, [{"role": "tool", "content": parts, "tool_call_id": "1"}])
        == "user:<r>a\nb</r>"
    )
    with pytest.raises(TemplateError) as caught:
        render(TOOLS, [USER, {"role": "user", "content": [{"type": "image_url", "image_url": {}}]}])
    assert caught.value.param == "messages[1].content[0].type"


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ('{"b":1,  "a":"é<"}', '{"b": 1, "a": "é<"}'),
        ("not json", '"not json"'),
        ("[1]", '"[1]"'),
        ("", '""'),
        (r'{"a": "\ud800"}', json.dumps(r'{"a": "\ud800"}')),
        (r'{"\udc00": 1}', json.dumps(r'{"\udc00": 1}')),
        (r'{"a": "\ud83d\ude00"}', '{"a": "😀"}'),
        ('{"a": 1e400}', json.dumps('{"a": 1e400}')),
        ('{"a": 123456789012345678901234567890}',) * 2,
        ("[" * 100_000, '"' + "[" * 100_000 + '"'),
    ],
)
def test_tool_call_arguments(arguments, shown):
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    assert render(TOOLS, [USER, message]) == f"user:hiassistant:<c>f {shown}</c>"
    assert call["function"]["arguments"] == arguments, "the request is left as it was"


def test_variables():
    assert render(
        "{{ enable_thinking }}", [USER], chat_template_kwargs={"enable_thinking": False}
    ) == ("False")
    assert render("{{ documents[0].t }}", [USER], documents=[{"t": "d"}]) == "d"
    assert re.fullmatch(r"\d{4}", render("{{ strftime_now('%Y') }}", [USER]))
    assert render("{{ bos_token }}{{ eos_token }}", [USER]) == "<s><|im_end|>"
    assert render("{{ tools is none }}", [USER], tools=[]) == "True"


def test_template_by_name():
    tokenizer = tokenizer_of("plain", tool_use="with tools")
    assert render_chat(tokenizer, [USER]) == "plain"
    assert render_chat(tokenizer, [USER], tools=[FUNCTION]) == "with tools"
    assert render_chat(tokenizer, [USER], chat_template="mine") == "mine"


# --- refusals -------------------------------------------------------------------------------------


def test_no_template():
    with pytest.raises(TemplateError, match="no chat template") as caught:
        render_chat(tokenizer_of(None), [USER])
    assert "--chat-template" in str(caught.value)
    assert render_chat(tokenizer_of(None), [USER], chat_template="given") == "given"


@pytest.mark.parametrize(
    "name",
    ["messages", "tools", "add_generation_prompt", "chat_template", "continue_final_message"],
)
def test_variables_that_the_server_owns(name):
    with pytest.raises(TemplateError, match=name) as caught:
        render(CHATML, [USER], chat_template_kwargs={name: 1, "fine": 2})
    assert caught.value.param == "chat_template_kwargs"


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[7].content + 'x' }}", "no element 7"),
        ("{{ 1 / 0 }}", "zero"),
        ("{% if %}", "Expected"),
        ("{{ messages[0].content + 1 }}", "str"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ ('{0.__class__.__mro__}' | attr('format'))(messages) }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{% for i in range(10 ** 9) %}x{% endfor %}", "[Rr]ange"),
    ],
)
def test_template_failures_are_the_clients_error(template, words):
    with pytest.raises(TemplateError, match=words) as caught:
        render(template, [USER])
    assert "Traceback" not in str(caught.value)


def test_continuation_needs_an_assistant_message():
    options = {"continue_final_message": True, "add_generation_prompt": False}
    message = {"role": "assistant", "content": "x"}
    for messages, changes in (
        ([USER], {}),
        ([], {}),
        ([USER, message], {"add_generation_prompt": True}),
    ):
        with pytest.raises(TemplateError) as caught:
            render(CHATML, messages, **options | changes)
        assert caught.value.param == "continue_final_message"
    with pytest.raises(TemplateError, match="final message"):
        render("nothing of it", [USER, message], **options)


def test_rendering_stops_at_the_time_limit(monkeypatch):
    monkeypatch.setattr(template, "RENDER_LIMIT", 0.1)
    loops = "{% for i in range(9999) %}{% for j in range(9999) %}x{% endfor %}{% endfor %}"
    begin = time.monotonic()
    with pytest.raises(TemplateError, match="took more than"):
        render(loops, [USER])
    assert time.monotonic() - begin < 2


# --- templates of requests ------------------------------------------------------------------------


def apart(chat_template, messages=(USER,), **options):
    return render_chat(tokenizer_of(), list(messages), chat_template=chat_template, **options)


def test_a_template_of_the_request_sees_what_the_models_would():
    source = TOOLS + "{{ bos_token }}|{{ mood }}|{{ documents[0].a }}|{{ add_generation_prompt }}"
    options = {
        "tools": [FUNCTION],
        "documents": [{"a": "\u00e9"}],
        "chat_template_kwargs": {"mood": "glad", "n": 10**60},
    }
    messages = [{"role": "user", "content": 'h\ud800i \U0001f44b \\ "'}]  # marked, see PLAIN_MARK
    assert apart(source, messages, **options) == render(source, messages, **options)


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{{ 10 ** (10 ** 10) }}",
        "{{ 'a' * 10 ** 11 }}",
        "{{ '%0*d' % (10 ** 11, 1) }}",
        "{% set n = namespace(x='a') %}{% for i in range(40) %}{% set n.x = n.x ~ n.x %}"
        "{% endfor %}{{ n.x }}",
        "{{ " + "(" * 20_000 + "1" + ")" * 20_000 + " }}",
    ],
    ids=["loops", "power", "repeat", "format", "doubling", "nesting"],
)
def test_a_template_of_the_request_is_bounded(monkeypatch, template):
    """Whatever it does ends in time and memory, and other threads run meanwhile."""
    monkeypatch.setattr(template_process, "RENDER_LIMIT", 2.0)
    pauses, ended = [], threading.Event()

    def beat():
        last = time.monotonic()
        while not ended.wait(0.01):
            pauses.append(time.monotonic() - last)
            last = time.monotonic()

    thread = threading.Thread(target=beat)
    thread.start()
    begin = time.monotonic()
    try:
        with pytest.raises(TemplateError, match="emplate") as caught:
            apart(template)
    finally:
        ended.set()
        thread.join()
    assert time.monotonic() - begin < 20
    assert max(pauses) < 2
    assert "Traceback" not in str(caught.value)


def test_failures_of_a_template_of_the_request():
    for source, param, words in (
        ("{{ raise_exception('roles must alternate') }}", "messages", "roles must alternate"),
        ("{% if %}", "chat_template", "Expected"),
        ("{{ ''.__class__.__mro__ }}", "messages", "unsafe"),
        ("{% for i in range(900) %}{{ 'x' * 20000 }}{% endfor %}", "chat_template", "characters"),
    ):
        with pytest.raises(TemplateError, match=words) as caught:
            apart(source)
        assert caught.value.param == param
