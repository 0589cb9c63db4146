"""Every failure on every route is the one error object with the right words."""

import json
import socket

import pytest
from api_harness import CHAT, CMPL, HI, TOKENIZER, error_of

INVALID = "invalid_request_error"

# body fields beside messages → (code, param)
CHAT_CASES = [
    ({"temperature": "0.7"}, "invalid_type", "temperature"),
    ({"temperature": "NaN"}, "invalid_type", "temperature"),
    ({"temperature": True}, "invalid_type", "temperature"),
    ({"temperature": 2.01}, "decimal_above_max_value", "temperature"),
    ({"temperature": 999999}, "decimal_above_max_value", "temperature"),
    ({"temperature": -0.1}, "decimal_below_min_value", "temperature"),
    ({"top_p": 1.0001}, "decimal_above_max_value", "top_p"),
    ({"top_p": -1}, "decimal_below_min_value", "top_p"),
    ({"top_k": -2}, "integer_below_min_value", "top_k"),
    ({"top_k": 1.5}, "invalid_type", "top_k"),
    ({"min_p": 1.1}, "decimal_above_max_value", "min_p"),
    ({"repetition_penalty": 0}, "decimal_below_min_value", "repetition_penalty"),
    ({"repetition_penalty": -1}, "decimal_below_min_value", "repetition_penalty"),
    ({"repetition_penalty": 1e-9}, "decimal_below_min_value", "repetition_penalty"),
    ({"presence_penalty": 2.1}, "decimal_above_max_value", "presence_penalty"),
    ({"presence_penalty": -2.1}, "decimal_below_min_value", "presence_penalty"),
    ({"frequency_penalty": "inf"}, "invalid_type", "frequency_penalty"),
    ({"max_tokens": True}, "invalid_type", "max_tokens"),
    ({"max_tokens": 0}, "integer_below_min_value", "max_tokens"),
    ({"max_tokens": 4097}, "integer_above_max_value", "max_tokens"),
    ({"max_completion_tokens": 0}, "integer_below_min_value", "max_completion_tokens"),
    ({"max_completion_tokens": 4097}, "integer_above_max_value", "max_completion_tokens"),
    ({"min_tokens": 5, "max_tokens": 4}, "integer_above_max_value", "min_tokens"),
    ({"n": 0}, "integer_below_min_value", "n"),
    ({"n": -1}, "integer_below_min_value", "n"),
    ({"n": True}, "invalid_type", "n"),
    ({"n": "2"}, "invalid_type", "n"),
    ({"n": 5_000_000}, "integer_above_max_value", "n"),
    ({"n": 129}, "integer_above_max_value", "n"),
    ({"seed": 2**63}, "integer_above_max_value", "seed"),
    ({"seed": -(2**63) - 2**20}, "integer_below_min_value", "seed"),
    ({"logprobs": 1}, "invalid_type", "logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "integer_above_max_value", "top_logprobs"),
    ({"logprobs": True, "top_logprobs": -1}, "integer_below_min_value", "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 10**9}, "integer_above_max_value", "top_logprobs"),
    ({"top_logprobs": 2}, "invalid_value", "top_logprobs"),
    ({"stop": ""}, "string_below_min_length", "stop"),
    ({"stop": ["a", ""]}, "string_below_min_length", "stop[1]"),
    ({"stop": ["a"] * 17}, "array_above_max_length", "stop"),
    ({"stop": ["a"] * 100_000}, "array_above_max_length", "stop"),
    ({"stop": "a" * 5_000_000}, "string_above_max_length", "stop"),
    ({"stop": [1]}, "invalid_type", "stop[0]"),
    ({"stop": 1}, "invalid_type", "stop"),
    ({"stream": "yes"}, "invalid_type", "stream"),
    ({"stream_options": {"include_usage": True}}, "invalid_value", "stream_options"),
    ({"stream": True, "stream_options": []}, "invalid_type", "stream_options"),
    (
        {"stream": True, "stream_options": {"include_usage": 1}},
        "invalid_type",
        "stream_options.include_usage",
    ),
    (
        {"stream": True, "stream_options": {"continuous_usage_stats": True}},
        "invalid_value",
        "stream_options.continuous_usage_stats",
    ),
    ({"logit_bias": {"abc": 1}}, "invalid_type", "logit_bias"),
    ({"logit_bias": {"1.5": 1}}, "invalid_type", "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "invalid_value", "logit_bias"),
    ({"logit_bias": {"1": 1, str(TOKENIZER.size): 1}}, "invalid_value", "logit_bias"),
    ({"logit_bias": {"99999999": 1}}, "invalid_value", "logit_bias"),
    ({"logit_bias": {"1": 101}}, "decimal_above_max_value", "logit_bias"),
    ({"logit_bias": {"1": -101}}, "decimal_below_min_value", "logit_bias"),
    ({"logit_bias": {"1": None}}, "invalid_type", "logit_bias"),
    ({"logit_bias": {"1": "5"}}, "invalid_type", "logit_bias"),
    ({"logit_bias": []}, "invalid_type", "logit_bias"),
    ({"logit_bias": {str(i): 0 for i in range(10**5)}}, "array_above_max_length", "logit_bias"),
    ({"stop_token_ids": [1, TOKENIZER.size]}, "invalid_value", "stop_token_ids"),
    ({"stop_token_ids": [0] * 65}, "array_above_max_length", "stop_token_ids"),
    ({"allowed_token_ids": []}, "empty_array", "allowed_token_ids"),
    ({"allowed_token_ids": [-1]}, "invalid_value", "allowed_token_ids"),
    ({"bad_words": [""]}, "string_below_min_length", "bad_words[0]"),
    ({"bad_words": ["a"] * 65}, "array_above_max_length", "bad_words"),
    ({"truncate_prompt_tokens": -2}, "integer_below_min_value", "truncate_prompt_tokens"),
    ({"truncation_side": "middle"}, "invalid_value", "truncation_side"),
    ({"cache_salt": ""}, "invalid_value", "cache_salt"),
    ({"cache_salt": "a/b"}, "invalid_value", "cache_salt"),
    ({"cache_salt": "a" * 129}, "invalid_value", "cache_salt"),
    ({"priority": 1}, "unsupported_parameter", "priority"),
    ({"priority": 2**63}, "integer_above_max_value", "priority"),
    ({"deadline_ms": 0}, "integer_below_min_value", "deadline_ms"),
    ({"user": "u" * 513}, "string_above_max_length", "user"),
    ({"reasoning_effort": "huge"}, "invalid_value", "reasoning_effort"),
    ({"response_format": {"type": "xml"}}, "invalid_value", "response_format.type"),
    ({"response_format": {}}, "missing_required_parameter", "response_format.type"),
    ({"response_format": "text"}, "invalid_type", "response_format"),
    ({"functions": []}, "unsupported_parameter", "functions"),
    ({"function_call": "auto"}, "unsupported_parameter", "function_call"),
    ({"audio": {}}, "unsupported_parameter", "audio"),
    ({"web_search_options": {}}, "unsupported_parameter", "web_search_options"),
    ({"modalities": ["text", "audio"]}, "unsupported_value", "modalities"),
    ({"echo": True}, "unsupported_parameter", "echo"),
    ({"prompt_logprobs": 21}, "integer_above_max_value", "prompt_logprobs"),
    ({"prompt_logprobs": True}, "invalid_type", "prompt_logprobs"),
    ({"prompt_logprobs": 0, "stream": True}, "invalid_value", "prompt_logprobs"),
    ({"use_beam_search": True}, "unsupported_parameter", "use_beam_search"),
    ({"length_penalty": 2}, "unsupported_parameter", "length_penalty"),
    ({"chat_template": "x"}, "unsupported_parameter", "chat_template"),
    ({"chat_template_kwargs": {"messages": []}}, "invalid_value", "chat_template_kwargs.messages"),
    ({"chat_template_kwargs": {"tools": []}}, "invalid_value", "chat_template_kwargs.tools"),
    (
        {"chat_template_kwargs": {"add_generation_prompt": False}},
        "invalid_value",
        "chat_template_kwargs.add_generation_prompt",
    ),
    (
        {"chat_template_kwargs": {"chat_template": "x"}},
        "invalid_value",
        "chat_template_kwargs.chat_template",
    ),
    ({"continue_final_message": True}, "invalid_value", "continue_final_message"),
    (
        {"continue_final_message": True, "add_generation_prompt": False},
        "invalid_value",
        "continue_final_message",
    ),
]


@pytest.mark.parametrize(("fields", "code", "param"), CHAT_CASES)
def test_bad_chat_field(api, fields, code, param):
    response = api.chat(**fields)
    error = error_of(response)
    assert (response.status_code, error["type"]) == (400, INVALID)
    assert (error["code"], error["param"]) == (code, param)
    api.check_alive()


MESSAGE_CASES = [
    ({}, "missing_required_parameter", "messages"),
    ({"messages": None}, "missing_required_parameter", "messages"),
    ({"messages": []}, "empty_array", "messages"),
    ({"messages": "hi"}, "invalid_type", "messages"),
    ({"messages": HI * 4097}, "array_above_max_length", "messages"),
    ({"messages": [1] * 10_000}, "array_above_max_length", "messages"),
    ({"messages": [1] * 4000}, "invalid_type", "messages[0]"),
    ({"messages": [*HI, {"content": "x"}]}, "missing_required_parameter", "messages[1].role"),
    ({"messages": [{"role": "user"}]}, "missing_required_parameter", "messages[0].content"),
    (
        {"messages": [*HI, *HI, {"role": "user", "content": 1}]},
        "invalid_type",
        "messages[2].content",
    ),
    ({"messages": [{"role": "user", "content": []}]}, "empty_array", "messages[0].content"),
    ({"messages": [{"role": "robot", "content": ""}]}, "invalid_value", "messages[0].role"),
    ({"messages": [{"role": "function", "content": ""}]}, "unsupported_value", "messages[0].role"),
    ({"messages": [{"role": "assistant"}]}, "invalid_value", "messages[0]"),
    (
        {"messages": [{"role": "tool", "content": "x"}]},
        "missing_required_parameter",
        "messages[0].tool_call_id",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        "missing_required_parameter",
        "messages[0].content[0].text",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "refusal", "refusal": "no"}]}]},
        "unsupported_value",
        "messages[0].content[0].type",
    ),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"id": "a", "function": {}}]}]},
        "missing_required_parameter",
        "messages[0].tool_calls[0].function.name",
    ),
]


@pytest.mark.parametrize(("body", "code", "param"), MESSAGE_CASES)
def test_bad_messages(api, body, code, param):
    response = api.post(CHAT, body)
    error = error_of(response)
    assert (response.status_code, error["code"], error["param"]) == (400, code, param)
    api.check_alive()


@pytest.mark.parametrize("kind", ["image_url", "audio_url", "input_audio", "file", "video"])
@pytest.mark.parametrize("url", ["http://127.0.0.1:{}/x", "file:///etc/hosts", "data:,x"])
def test_content_that_is_not_text_is_refused_and_never_fetched(api, kind, url):
    """C120: nobody calls at the address, so there is no redirect to follow either."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        part = {"type": kind, kind: {"url": url.format(listener.getsockname()[1])}}
        response = api.chat(messages=[{"role": "user", "content": [part]}])
        with pytest.raises(BlockingIOError):
            listener.accept()
    error = error_of(response)
    assert (response.status_code, error["code"]) == (400, "unsupported_value")
    assert error["param"] == "messages[0].content[0].type"
    assert kind in error["message"]


SIZE = TOKENIZER.size
PROMPT_CASES = [
    ({}, "missing_required_parameter", "prompt"),
    ({"prompt": None}, "missing_required_parameter", "prompt"),
    ({"prompt": ""}, "string_below_min_length", "prompt"),
    ({"prompt": [""]}, "string_below_min_length", "prompt[0]"),
    ({"prompt": ["a", ""]}, "string_below_min_length", "prompt[1]"),
    ({"prompt": []}, "empty_array", "prompt"),
    ({"prompt": [[]]}, "empty_array", "prompt[0]"),
    ({"prompt": [1, "a"]}, "invalid_type", "prompt"),
    ({"prompt": ["a", 1]}, "invalid_type", "prompt[1]"),
    ({"prompt": ["a", [1]]}, "invalid_type", "prompt[1]"),
    ({"prompt": [True]}, "invalid_type", "prompt"),
    ({"prompt": [1.5]}, "invalid_type", "prompt"),
    ({"prompt": {}}, "invalid_type", "prompt"),
    ({"prompt": 5}, "invalid_type", "prompt"),
    ({"prompt": [1, 2, SIZE]}, "invalid_value", "prompt"),
    ({"prompt": [1, -1]}, "invalid_value", "prompt"),
    ({"prompt": [2**63]}, "invalid_value", "prompt"),
    ({"prompt": [[1], [SIZE]]}, "invalid_value", "prompt"),
    ({"prompt": [[1]] * 100_000}, "array_above_max_length", "prompt"),
    ({"prompt": "a", "logprobs": True}, "invalid_type", "logprobs"),
    ({"prompt": "a", "logprobs": 21}, "integer_above_max_value", "logprobs"),
    ({"prompt": "a", "max_tokens": 0}, "integer_below_min_value", "max_tokens"),
    ({"prompt": "a", "suffix": "x"}, "unsupported_parameter", "suffix"),
    ({"prompt": [1], "suffix": "x"}, "invalid_value", "suffix"),
    ({"prompt": "a", "suffix": "x", "echo": True}, "invalid_value", "suffix"),
    ({"prompt": "a", "suffix": "x", "truncate_prompt_tokens": 1}, "invalid_value", "suffix"),
    ({"prompt": "a", "best_of": 0}, "integer_below_min_value", "best_of"),
    ({"prompt": "a", "best_of": 21}, "integer_above_max_value", "best_of"),
    ({"prompt": "a", "best_of": 10**6}, "integer_above_max_value", "best_of"),
    ({"prompt": "a", "best_of": 2, "n": 3}, "integer_below_min_value", "best_of"),
    ({"prompt": "a", "best_of": 3, "stream": True}, "invalid_value", "best_of"),
    ({"prompt": ["a"] * 9, "n": 128}, "invalid_value", "n"),
    ({"prompt": ["a"] * 103, "n": 2, "best_of": 10}, "invalid_value", "n"),
    ({"prompt": "a", "echo": 1}, "invalid_type", "echo"),
    ({"prompt": "a", "max_tokens": -1, "echo": True}, "integer_below_min_value", "max_tokens"),
]


@pytest.mark.parametrize(("body", "code", "param"), PROMPT_CASES)
def test_bad_completion(api, body, code, param):
    response = api.post(CMPL, body)
    error = error_of(response)
    assert (response.status_code, error["code"], error["param"]) == (400, code, param)
    api.check_alive()


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'"x"',
        b"null",
        b"{} trailing",
        b"\xff\xfe",
        b'{"prompt":"\\ud800"}',
        b'{"prompt":"a","temperature":NaN}',
        b'{"prompt":"a","temperature":Infinity}',
        b'{"prompt":"a","top_p":-Infinity}',
        b'{"prompt":"a","temperature":1e999}',
        b'{"prompt":' + b"[" * 200 + b"]" * 200 + b"}",
        b'{"prompt":' + b"[" * 100_000 + b"}",
    ],
)
def test_body_that_is_no_strict_json_object(api, body):
    response = api.post(CMPL, content=body, headers={"content-type": "application/json"})
    error = error_of(response)
    assert (response.status_code, error["code"], error["param"]) == (400, "invalid_json", None)
    api.check_alive()


def test_nesting_of_128_levels_is_accepted(api):
    # The body and its field are two levels, so 126 arrays reach the limit and 127 pass it.
    fine = {"prompt": "a", "x": json.loads("[" * 127 + "]" * 127)}
    assert api.post(CMPL, fine).status_code == 200
    deep = {"prompt": "a", "x": json.loads("[" * 128 + "]" * 128)}
    assert error_of(api.post(CMPL, deep))["code"] == "invalid_json"


def test_last_of_two_equal_keys_wins(api):
    body = b'{"prompt":"a","max_tokens":1,"max_tokens":2}'
    response = api.post(CMPL, content=body, headers={"content-type": "application/json"})
    assert response.json()["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize(
    "content_type",
    [None, "text/plain", "application/x-www-form-urlencoded", "application/json; charset=latin-1"],
)
def test_other_content_types_are_refused(api, content_type):
    headers = {} if content_type is None else {"content-type": content_type}
    response = api.post(CMPL, content=b'{"prompt":"a"}', headers=headers)
    assert response.status_code == 415
    assert error_of(response)["code"] == "unsupported_media_type"


@pytest.mark.parametrize(
    "content_type", ["Application/JSON", 'application/json; Charset="UTF-8"', "application/json;"]
)
def test_content_type_is_read_as_http_says(api, content_type):
    response = api.post(CMPL, content=b'{"prompt":"a"}', headers={"content-type": content_type})
    assert response.status_code == 200


def test_body_too_large_with_and_without_length(make_api):
    api = make_api(server={"max_body_mib": 0.001})
    body = json.dumps({"prompt": "a" * 2000}).encode()

    async def pieces():
        for i in range(0, len(body), 100):
            yield body[i : i + 100]

    headers = {"content-type": "application/json"}
    for response in (
        api.post(CMPL, content=body, headers=headers),
        api.post(CMPL, content=pieces(), headers=headers),
    ):
        assert response.status_code == 413
        assert error_of(response)["code"] == "request_too_large"
    api.check_alive()


@pytest.mark.parametrize(
    "fields",
    [
        {"documents": [{}] * 140_000},
        {"documents": [[]] * 140_000},
        {"allowed_token_ids": [1] * 1_100_000},
        {"chat_template_kwargs": {str(i): 1 for i in range(1_100_000)}},
        {"chat_template_kwargs": {"a": ['"],[{"'] * 1_100_000}},
        {f"x{i}": 1 for i in range(1_100)},
    ],
    ids=["objects", "arrays", "numbers", "members", "strings", "fields"],
)
def test_bodies_of_too_many_values_are_refused_unread(api, fields):
    """C113: few bytes are many values, which all other streams would wait for."""
    response = api.post(CHAT, {"messages": HI, **fields})
    assert response.status_code == 413
    assert error_of(response)["code"] == "request_too_large"


def test_text_may_look_like_many_values(api):
    """Tables and code, quotes and backslashes in them."""
    for text in ("{[" * 100_000, ",\n" * 1_100_000, '{"a": "\\", [{,"\\"' * 70_000):
        response = api.post(CHAT, {"messages": [{"role": "user", "content": text}]})
        assert error_of(response)["code"] == "context_length_exceeded"


def test_wrong_path_and_method(api):
    response = api.get("/v1/nothing")
    assert response.status_code == 404
    error = error_of(response)
    assert (error["type"], error["code"], error["param"]) == (INVALID, "unknown_url", None)
    for path in (CHAT + "/", "/V1/models", "//v1/models"):
        assert error_of(api.get(path))["code"] == "unknown_url"
    response = api.get(CHAT)
    assert (response.status_code, response.headers["allow"]) == (405, "POST")
    assert error_of(response)["code"] == "method_not_allowed"
    response = api.post("/health", {})
    assert (response.status_code, response.headers["allow"]) == (405, "GET, HEAD")


def test_bug_in_a_handler_is_a_500_without_details(api, monkeypatch):
    def crash(*_, **__):
        raise KeyError("/secret/path.py")

    monkeypatch.setattr("pageserve.api.chat_completions.render_chat", crash)
    response = api.chat()
    assert response.status_code == 500
    error = error_of(response)
    assert (error["type"], error["code"]) == ("server_error", "internal_error")
    assert response.headers["x-should-retry"] == "false"
    assert "x-request-id" in response.headers
    monkeypatch.undo()
    api.check_alive()


def test_failing_template_blames_the_messages(make_api):
    from fakes import byte_tokenizer

    api = make_api(tokenizer=byte_tokenizer("{{ raise_exception('roles must alternate') }}"))
    response = api.chat()
    error = error_of(response)
    assert (response.status_code, error["code"], error["param"]) == (
        400,
        "invalid_messages",
        "messages",
    )
    assert "roles must alternate" in error["message"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("num_prompt", [63, 64, 65, 10_000])
def test_prompt_against_a_context_of_64(make_api, num_prompt, stream):
    api = make_api(max_model_len=64, script=[65] * 100)
    response = api.cmpl(prompt=[1] * num_prompt, max_tokens=5, stream=stream)
    if num_prompt < 64:
        assert response.status_code == 200
        assert '"finish_reason":"length"' in response.text
        assert api.engine.requests[-1].sampling_params.max_tokens == 1
        return
    error = error_of(response)
    assert (response.status_code, error["code"]) == (400, "context_length_exceeded")
    assert error["param"] == "prompt"
    assert "This model's maximum context length is 64 tokens" in error["message"]  # for LiteLLM
    assert "prompt is too long" in error["message"]  # for LangChain
    assert str(num_prompt) in error["message"] and "-" not in error["message"]
    assert (error["prompt_tokens"], error["max_model_len"]) == (num_prompt, 64)
    assert not api.engine.requests


def test_prompt_that_can_never_fit_the_pool_is_refused_before_the_stream_begins(make_api):
    api = make_api(max_model_len=4096, num_kv_blocks=4)  # of 16 tokens
    assert api.cmpl(prompt=[1] * 64, stream=True).status_code == 200
    response = api.cmpl(prompt=[1] * 65, stream=True)
    assert error_of(response)["code"] == "context_length_exceeded"
    assert "prompt is too long" in error_of(response)["message"]
    api.cmpl(prompt=[1] * 40, max_tokens=30)
    assert api.engine.requests[-1].sampling_params.max_tokens == 25


def test_absurd_text_is_refused_without_tokenising_it(make_api, monkeypatch):
    api = make_api(max_model_len=64)

    def encode(*_, **__):
        raise AssertionError("tokenised")

    monkeypatch.setattr("pageserve.tokenizer.Tokenizer.encode", encode)
    text = "a" * 2_000_000
    for response, param in (
        (api.cmpl(prompt=text), "prompt"),
        (api.chat(messages=[{"role": "user", "content": text}]), "messages"),
    ):
        error = error_of(response)
        assert (error["code"], error["param"]) == ("context_length_exceeded", param)


def test_engine_refusal_is_a_400_and_engine_failure_a_500(make_api):
    api = make_api(fail_at=0, error="prompt_too_long: the prompt needs 9 blocks of 4")
    response = api.cmpl()
    error = error_of(response)
    assert (response.status_code, error["code"]) == (400, "context_length_exceeded")
    assert "9 blocks" in error["message"]
    api = make_api(fail_at=1)
    response = api.cmpl()
    error = error_of(response)
    assert (response.status_code, error["code"]) == (500, "internal_error")
    assert "NaN" not in error["message"]
    assert response.headers["x-should-retry"] == "false"


@pytest.mark.parametrize(
    "name", ["../../secret", "/", "a\x00b", "x" * 1_000_000, "TINY", "tiny ", "org%2Ftiny"]
)
def test_unknown_model(api, monkeypatch, name):
    def no_open(*_, **__):
        raise AssertionError("a file was opened")

    monkeypatch.setattr("builtins.open", no_open)
    response = api.chat(model=name)
    monkeypatch.undo()
    assert response.status_code == 404
    error = error_of(response)
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert "\x00" not in error["message"]


@pytest.mark.parametrize("name", ["tiny", "org/tiny", "", None])
def test_known_model(api, name):
    response = api.chat(model=name)
    assert response.status_code == 200
    assert response.json()["model"] == (name or "tiny")


def test_first_error_in_the_order_of_checks(api):
    # field types before the model, the model before conflicts, conflicts before the template
    body = {"messages": [], "model": "nope", "top_logprobs": 1, "n": 0}
    assert error_of(api.post(CHAT, body))["param"] == "n"
    assert error_of(api.post(CHAT, {**body, "n": 1}))["param"] == "messages"
    assert error_of(api.chat(model="nope", top_logprobs=1))["code"] == "model_not_found"
    assert error_of(api.chat(top_logprobs=1, truncate_prompt_tokens=0))["param"] == "top_logprobs"
