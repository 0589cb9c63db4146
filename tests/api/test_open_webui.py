"""What Open WebUI 0.12.4 sends, recorded before a real server and replayed here.

The bodies are whole but for the texts of prompts and the descriptions of its own tools, which are
in ``tests/clients/open_webui_tools.jsonl`` behind one of a user's.
"""

import json
from pathlib import Path

import pytest
from api_harness import CHAT, TOKENIZER, error_of, events_of
from test_api_tools import OPEN_ID, QWEN_TOKENIZER, call_text, fold_stream

TOOLS_FILE = Path(__file__).parents[1] / "clients" / "open_webui_tools.jsonl"
TOOLS = [json.loads(line) for line in TOOLS_FILE.read_text().splitlines()]
HEADERS = {
    "content-type": "application/json",
    "authorization": "Bearer unused",
    "accept": "*/*",
    "accept-encoding": "gzip, deflate, br",
    "user-agent": "Python/3.11 aiohttp/3.14.5",
    # with ENABLE_FORWARD_USER_INFO_HEADERS
    "x-openwebui-auth-type": "jwt",
    "x-openwebui-user-name": "B%C3%B3b",
    "x-openwebui-user-id": "7383643f-930e-4c87-befd-e75fcc1d54f4",
    "x-openwebui-user-email": "bob@example.org",
    "x-openwebui-user-role": "user",
}
QUESTION = {"role": "user", "content": "What is the weather in Oslo?"}
TASK = [{"role": "user", "content": "### Task:\nGenerate a concise title."}]
USAGE = {"stream": True, "stream_options": {"include_usage": True}}
OLLAMA = {
    "mirostat": 0, "mirostat_eta": 0.1, "mirostat_tau": 5, "repeat_last_n": 64, "tfs_z": 1,
    "repeat_penalty": 1.1, "use_mmap": True, "use_mlock": True, "think": True, "format": "json",
    "num_keep": 24, "num_ctx": 2048, "num_batch": 512, "num_thread": 2, "num_gpu": 0,
    "keep_alive": "5m",
}  # fmt: skip
# What the page sends once every setting was clicked from "Default" to "Custom" and left like that.
SETTINGS = {
    "seed": 0, "temperature": 0.8, "reasoning_effort": "medium", "logit_bias": "",
    "max_tokens": 128, "top_k": 40, "top_p": 0.9, "min_p": 0, "frequency_penalty": 1.1,
    "presence_penalty": 0, **OLLAMA,
}  # fmt: skip


@pytest.fixture
def qwen(make_api):
    return lambda script: make_api(
        tokenizer=QWEN_TOKENIZER, script=script, max_model_len=32768, num_kv_blocks=2048
    )


def ask(api, **body):
    response = api.post(CHAT, {"model": "tiny", **body}, headers=HEADERS)
    assert response.status_code == 200, response.text
    assert "x-pageserve-warning" not in response.headers
    return response


def text_of(response):
    """The text of a stream as the page puts it together."""
    *chunks, done = events_of(response.text)
    assert done == "[DONE]"
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    return "".join(delta.get("content") or "" for delta in deltas)


def prompt_of(api):
    return TOKENIZER.decode(api.engine.requests[-1].prompt_token_ids, skip_special_tokens=False)


def test_models_and_the_check_of_a_connection(make_api):
    """A wrong key is shown to the admin as it came."""
    api = make_api(server={"api_key": ("right",)})
    headers = {**HEADERS, "authorization": "Bearer right"}
    models = api.get("/v1/models", headers=headers).json()["data"]
    assert [model["id"] for model in models] == ["tiny", "org/tiny"]
    assert not any("name" in model for model in models)  # it would be shown in place of the id
    assert error_of(api.get("/v1/models", headers=HEADERS))["code"] == "invalid_api_key"


def test_tasks(api):
    """Titles, tags, follow-ups and search queries; an emoji."""
    for limit in ({"max_tokens": 1000}, {}, {"max_tokens": 4}):
        response = ask(api, messages=TASK, stream=False, **limit)
        assert "x-pageserve-ignored" not in response.headers
        assert response.json()["choices"][0]["message"]["content"] == "Hello world"


def test_every_setting_of_the_page(api):
    response = ask(api, messages=[QUESTION], **USAGE, **SETTINGS)
    assert text_of(response) == "Hello world"
    assert response.headers["x-pageserve-ignored"].split(",") == list(OLLAMA)
    usage = events_of(response.text)[-2]
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == 3
    params = api.engine.requests[-1].sampling_params
    assert (params.seed, params.temperature, params.top_k, params.top_p) == (0, 0.8, 40, 0.9)
    assert (params.max_tokens, params.frequency_penalty, params.logit_bias) == (128, 1.1, None)


def test_settings_that_were_emptied_are_not_given(api):
    response = ask(api, messages=[QUESTION], stream=True, logit_bias="", reasoning_effort="")
    assert text_of(response) == "Hello world"
    assert "x-pageserve-ignored" not in response.headers
    emptied = api.engine.requests[-1].sampling_params
    ask(api, messages=[QUESTION], stream=True)
    assert api.engine.requests[-1].sampling_params == emptied


def test_a_chat_with_all_tools(qwen):
    """Each message of the page brings them; each schema is enforced as it is."""
    api = qwen("Let me see.\n" + call_text())
    assert len(TOOLS) == 29
    response = ask(api, messages=[QUESTION], tools=TOOLS, **USAGE)
    assert "x-pageserve-ignored" not in response.headers
    assert api.engine.requests[-1].grammar_trigger_ids == [OPEN_ID]
    *frames, usage, done, end = response.text.split("\n\n")
    assert '"choices":[]' in usage
    message, reason = fold_stream("\n\n".join([*frames, done, end]))
    assert (message["content"], reason) == ("Let me see.", "tool_calls")
    (call,) = message["tool_calls"]
    assert call["function"] == {"name": "get_weather", "arguments": '{"city": "Oslo"}'}

    api = qwen("It is sunny.")
    said = {"role": "assistant", "content": "Let me see.", "tool_calls": [call]}
    said["reasoning_content"] = "I should look."  # only with the provider set to llama.cpp
    result = {"role": "tool", "tool_call_id": call["id"], "content": "sunny in Oslo"}
    response = ask(api, messages=[QUESTION, said, result], tools=TOOLS, **USAGE)
    assert text_of(response) == "It is sunny."
    assert "<tool_response>\nsunny in Oslo\n</tool_response>" in prompt_of(api)


def test_continue_response(api):
    """With the connection's provider set to llama.cpp; otherwise the model begins a new answer."""
    messages = [QUESTION, {"role": "assistant", "content": "It is"}]
    fields = {"continue_final_message": True, "add_generation_prompt": False}
    response = ask(api, messages=messages, **USAGE, **fields)
    assert prompt_of(api).endswith("<|im_start|>assistant\nIt is")
    assert text_of(response) == "Hello world"
    ask(api, messages=messages, **USAGE)
    assert prompt_of(api).endswith("<|im_end|>\n<|im_start|>assistant\n")


def test_a_stream_that_fails_says_so_in_a_frame(make_api):
    response = ask(make_api(fail_at=1), messages=[QUESTION], **USAGE)
    error = events_of(response.text)[-1]["error"]
    assert error["message"] == "the engine failed on this request"
