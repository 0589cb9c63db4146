"""What good requests become: sampling parameters, prompts, and fields without effect."""

import json
import logging

import msgspec
import pytest
from api_harness import CHAT, HI, TOKENIZER, error_of

from pageserve.api.protocol import ChatCompletionRequest
from pageserve.sampling_params import GenerationDefaults, SamplingParams

EVERY_OPTIONAL_FIELD = {
    *ChatCompletionRequest.model_fields, *ChatCompletionRequest.neutral, "store", "metadata",
    "service_tier", "verbosity", "prediction",
} - {"messages"}  # fmt: skip


def params_of(api, **fields) -> SamplingParams:
    response = api.chat(**fields)
    assert response.status_code == 200, response.text
    return api.engine.requests[-1].sampling_params


def test_null_means_not_given(api):
    bare = params_of(api)
    nulls = dict.fromkeys(EVERY_OPTIONAL_FIELD)
    response = api.chat(**nulls)
    assert response.status_code == 200
    assert "x-pageserve-ignored" not in response.headers
    assert api.engine.requests[-1].sampling_params == bare


def test_neutral_values_of_features_that_are_not_built(api):
    response = api.chat(
        n=1,
        tools=[],
        tool_choice="none",
        response_format={"type": "text"},
        modalities=["text"],
        echo=False,
        use_beam_search=False,
        length_penalty=1.0,
        parallel_tool_calls=True,
        store=False,
        metadata={"a": "b"},
        user="u",
    )
    assert response.status_code == 200
    assert "x-pageserve-ignored" not in response.headers
    response = api.cmpl(n=1, best_of=1, echo=False, suffix=None)
    assert response.status_code == 200


def test_defaults_are_those_of_openai(api):
    params = params_of(api)
    expected = SamplingParams(max_tokens=4096 - len(api.engine.requests[-1].prompt_token_ids))
    assert params == expected
    api.cmpl()
    assert api.engine.requests[-1].sampling_params.max_tokens == 16


def test_model_defaults_lie_under_the_request(make_api):
    defaults = GenerationDefaults(temperature=0.7, top_p=0.8, top_k=20, repetition_penalty=1.05)
    api = make_api(defaults=defaults)
    params = params_of(api, top_p=0.9, min_p=0.1)
    assert (params.temperature, params.top_p, params.top_k) == (0.7, 0.9, 20)
    assert (params.min_p, params.repetition_penalty) == (0.1, 1.05)
    params = params_of(api, temperature=0, top_k=0, repetition_penalty=1.0)
    assert (params.temperature, params.top_k, params.repetition_penalty) == (0, 0, 1.0)


def test_fields_reach_the_engine(api):
    fields = {
        "temperature": 0.5,
        "top_p": 0,
        "top_k": 10**9,
        "min_p": 1,
        "repetition_penalty": 1.5,
        "frequency_penalty": -2,
        "presence_penalty": 2,
        "logit_bias": {"5": -100, "7": 0.5},
        "allowed_token_ids": [1, 2],
        "seed": -7,
        "max_tokens": 9,
        "min_tokens": 3,
        "ignore_eos": True,
        "stop_token_ids": [4],
        "stop": "x",
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
    }
    got = msgspec.structs.asdict(params_of(api, **fields))
    expected = {**fields, "logit_bias": {5: -100.0, 7: 0.5}, "stop": ["x"]}
    assert {name: got[name] for name in expected} == expected
    assert params_of(api, logprobs=True, top_logprobs=3).logprobs == 3
    assert params_of(api, logprobs=True).logprobs == 0


def test_numbers_are_read_strictly_but_integral_floats_are_integers(api):
    params = params_of(api, max_tokens=3.0, seed=5.0, top_k=2.0, temperature=1, n=1.0)
    assert (params.max_tokens, params.seed, params.top_k) == (3, 5, 2)


def test_any_top_k_crosses_to_the_engine(api):
    assert params_of(api, top_k=10**30).top_k == params_of(api, top_k=2**31).top_k == 2**31 - 1


def test_seed_minus_one_is_random(api):
    assert params_of(api, seed=-1).seed is None
    assert params_of(api, seed=0).seed == 0


def test_bad_words_ban_both_spellings(api):
    params = params_of(api, bad_words=["Hello", "the"])
    assert params.bad_words_token_ids == [
        TOKENIZER.encode(text, add_special_tokens=False)
        for text in ("Hello", " Hello", "the", " the")
    ]


def test_limits_fit_the_context(make_api):
    api = make_api(max_model_len=64, script=[65] * 100)
    api.cmpl(prompt=[1] * 40, max_tokens=30, min_tokens=30)
    params = api.engine.requests[-1].sampling_params
    assert (params.max_tokens, params.min_tokens) == (24, 24)
    assert api.cmpl(prompt=[1] * 60, max_tokens=64).json()["usage"]["total_tokens"] == 64


def test_newer_name_of_the_limit_wins(api):
    for fields, expected in (
        ({"max_tokens": 3}, 3),
        ({"max_completion_tokens": 3}, 3),
        ({"max_tokens": 3, "max_completion_tokens": 3}, 3),
        ({"max_tokens": 9, "max_completion_tokens": 3}, 3),
        ({"max_tokens": 2, "max_completion_tokens": 3}, 3),
    ):
        assert params_of(api, **fields).max_tokens == expected


def test_prompt_shapes_mean_the_same(api):
    ids = TOKENIZER.encode("hello", add_special_tokens=True)
    for prompt in ("hello", ["hello"], ids, [ids]):
        assert api.cmpl(prompt=prompt).status_code == 200
        assert api.engine.requests[-1].prompt_token_ids == ids


def test_truncation_keeps_the_side_asked_for(make_api):
    api = make_api(max_model_len=64)
    ids = list(range(100))
    for fields, kept in (
        ({"truncate_prompt_tokens": 10}, ids[-10:]),
        ({"truncate_prompt_tokens": 10, "truncation_side": "right"}, ids[:10]),
        ({"truncate_prompt_tokens": -1}, ids[-63:]),
    ):
        assert api.cmpl(prompt=ids, **fields).status_code == 200
        assert api.engine.requests[-1].prompt_token_ids == kept
    assert api.cmpl(prompt=[1, 2], truncate_prompt_tokens=10).status_code == 200
    error = error_of(api.cmpl(prompt=ids, truncate_prompt_tokens=64))
    assert error["code"] == "context_length_exceeded"
    assert error_of(api.cmpl(prompt=ids, truncate_prompt_tokens=0))["code"] == "invalid_value"


def test_priority_and_salt_travel_with_the_request(make_api):
    api = make_api(policy="priority")
    api.chat(priority=-3, cache_salt="tenant")
    request = api.engine.requests[-1]
    assert (request.priority, request.cache_salt) == (-3, "tenant")


def test_chat_prompt_is_the_rendered_template(api):
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "not json"}}
        ]},
        {"role": "tool", "tool_call_id": "call_1", "content": ""},
        {"role": "user", "content": "", "name": "bob"},
    ]  # fmt: skip
    assert api.chat(messages=messages).status_code == 200
    prompt = TOKENIZER.decode(api.engine.requests[-1].prompt_token_ids, skip_special_tokens=False)
    assert prompt == (
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\na\nb<|im_end|>\n"
        '<|im_start|>assistant\n<tool_call>\n{"name": "f", "arguments": "not json"}\n</tool_call>'
        "<|im_end|>\n<|im_start|>user\n<tool_response>\n\n</tool_response><|im_end|>\n"
        "<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\n"
    )


def test_continuing_the_last_message(api):
    messages = [*HI, {"role": "assistant", "content": "I think"}]
    fields = {"add_generation_prompt": False, "continue_final_message": True}
    assert api.chat(messages=messages, **fields).status_code == 200
    prompt = TOKENIZER.decode(api.engine.requests[-1].prompt_token_ids, skip_special_tokens=False)
    assert prompt.endswith("<|im_start|>assistant\nI think")


def test_template_arguments_reach_the_template(make_api):
    from fakes import byte_tokenizer

    template = "{{ enable_thinking }}|{{ reasoning_effort }}|{{ messages[0].content }}"
    tokenizer = byte_tokenizer(template)
    api = make_api(tokenizer=tokenizer)
    api.chat(chat_template_kwargs={"enable_thinking": False}, reasoning_effort="low")
    prompt = TOKENIZER.decode(api.engine.requests[-1].prompt_token_ids, skip_special_tokens=False)
    assert prompt == "False|low|hi"


def test_templates_of_requests_are_rendered_if_trusted(make_api):
    """C121: each route that renders takes one, and refuses it without the flag."""
    template = "{% for m in messages %}[{{ m.content }}]{% endfor %}{{ mood }}"
    fields = {"messages": HI, "chat_template": template, "chat_template_kwargs": {"mood": "!"}}
    for path in (CHAT, "/tokenize", "/apply-template"):
        error = error_of(make_api().post(path, fields))
        assert (error["code"], error["param"]) == ("unsupported_parameter", "chat_template")
        assert "--trust-request-template" in error["message"]
    api = make_api(server={"trust_request_template": True})
    assert api.chat(**fields).status_code == 200
    prompt = TOKENIZER.decode(api.engine.requests[-1].prompt_token_ids, skip_special_tokens=False)
    assert prompt == "[hi]!"
    assert api.post("/apply-template", fields).json()["prompt"] == "[hi]!"
    assert api.post("/tokenize", fields).json()["count"] == 5
    error = error_of(api.chat(chat_template="{% if %}"))
    assert (error["code"], error["param"]) == ("invalid_value", "chat_template")
    error = error_of(api.chat(chat_template="{{ raise_exception('no') }}"))
    assert (error["code"], error["param"]) == ("invalid_messages", "messages")
    half = error_of(api.chat(chat_template="{{ raise_exception('a\\ud800') }}"))
    assert half["code"] == "invalid_messages" and "a?" in half["message"]
    body = {"messages": HI, "chat_template": "{{ 'a\\udc00' }}"}
    assert api.post("/apply-template", body).json()["prompt"] == "a?"
    api.check_alive()


def test_a_template_of_the_request_shows_tools_if_it_can(make_api):
    api = make_api(server={"trust_request_template": True})
    tools = [{"type": "function", "function": {"name": "f"}}]
    for template, expected in (
        ("{{ tools[0].function.name }} <tool_call> {{ messages[0].content }}", "f <tool_call> hi"),
        ("{{ messages[0].role }}", "system"),  # which says what the template does not
    ):
        body = {"messages": HI, "tools": tools, "chat_template": template}
        assert api.post("/apply-template", body).json()["prompt"] == expected


def test_unknown_fields_are_listed_and_warned_of_once(api, caplog):
    with caplog.at_level(logging.WARNING, "pageserve.api"):
        first = api.chat(zzz=1, verbosity="low", best_of=3, metadata={})
        api.chat(zzz=2)
    assert first.status_code == 200
    assert first.headers["x-pageserve-ignored"] == "zzz,verbosity,best_of"
    assert sum("zzz" in record.message for record in caplog.records) == 1
    assert api.chat(stream=True, zzz=1).headers["x-pageserve-ignored"] == "zzz"


def test_names_from_the_client_cannot_break_the_header(api):
    names = {"a\r\nset-cookie: x": 1, "é": 1, "x" * 500: 1, "": 1}
    header = api.chat(**names).headers["x-pageserve-ignored"]
    assert header == ",".join(["a??set-cookie??x", "?", "x" * 64, ""])
    many = {f"field{i}": 1 for i in range(50)}
    assert len(api.chat(**many).headers["x-pageserve-ignored"].split(",")) == 20


def test_tools_are_unknown_to_completions(api):
    response = api.cmpl(tools=[{}], top_logprobs=3, messages=HI)
    assert response.headers["x-pageserve-ignored"] == "tools,top_logprobs,messages"


def test_strict_params_refuse_unknown_fields(make_api):
    api = make_api(server={"strict_params": True})
    error = error_of(api.chat(zzz=1))
    assert (error["code"], error["param"]) == ("unknown_parameter", "zzz")
    assert api.chat(store=True, metadata={}, service_tier="auto", tools=[]).status_code == 200


def test_engine_ids_are_the_servers_own(api):
    headers = {"x-request-id": "mine"}
    for _ in range(2):
        response = api.post(CHAT, {"messages": HI, "request_id": "mine"}, headers=headers)
        assert response.headers["x-request-id"] == "mine"
    first, second = (request.request_id for request in api.engine.requests)
    assert first != second and "mine" not in first


@pytest.mark.parametrize("char", ["\x00", "\u2028", "😀", "\\ud83d\\ude00"])
def test_any_text_is_a_prompt(api, char):
    body = json.dumps({"prompt": "X"}).replace(
        "X", char if "\\" in char else json.dumps(char)[1:-1]
    )
    response = api.post(
        "/v1/completions", content=body.encode(), headers={"content-type": "application/json"}
    )
    assert response.status_code == 200


@pytest.mark.parametrize("role", ["user", "system", "tool"])
@pytest.mark.parametrize("key", ["tool_calls", "refusal", "reasoning", "reasoning_content"])
def test_members_of_another_role_mean_nothing(api, role, key):
    """They are not checked there, so the template must not see them: false was a 500."""
    message = {"role": role, "content": "hi", "tool_call_id": "x"}
    expected = api.chat(messages=[message], max_tokens=2).json()["usage"]["prompt_tokens"]
    for value in (False, 7, [1], {"a": 1}):
        reply = api.chat(messages=[{**message, key: value}], max_tokens=2)
        assert reply.status_code == 200, reply.text
        assert reply.json()["usage"]["prompt_tokens"] == expected


@pytest.mark.parametrize(("wrong", "named"), [
    (True, "true"), (1.0, "1.0"), (1.5, "1.5"), ("1", "'1'"), ([1], "an array"),
])  # fmt: skip
@pytest.mark.parametrize("where", [1, 2000])
def test_what_is_no_token_id_is_named(api, wrong, named, where):
    ids = [65] * 2100
    ids[where] = wrong
    for prompt, param in ((ids, "prompt"), ([[65], ids], "prompt[1]")):
        error = error_of(api.cmpl(prompt=prompt))
        assert (error["code"], error["param"]) == ("invalid_type", param)
        assert error["message"] == f"a prompt has {named} where a token id belongs"


@pytest.mark.parametrize("wrong", [-1, TOKENIZER.size, 2**32, 2**63, -(2**63)])
@pytest.mark.parametrize("echo", [False, True])  # in the event loop, and in a thread
def test_a_token_id_that_does_not_exist_is_named(api, wrong, echo):
    ids = [TOKENIZER.size - 1] * 2100
    assert api.cmpl(prompt=ids, echo=echo, max_tokens=1).status_code == 200
    ids[2000] = wrong
    error = error_of(api.cmpl(prompt=ids, echo=echo))
    assert (error["code"], error["param"]) == ("invalid_value", "prompt")
    ends = f"ids run from 0 to {TOKENIZER.size - 1}"
    assert error["message"] == f"prompt has token id {wrong}; {ends}"
