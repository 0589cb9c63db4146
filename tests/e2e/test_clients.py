"""Clients that people use, as the README shows them, against a real server: `pytest -m clients`.

They come with ``pip install -e '.[dev,clients]'``; nothing here asks a model hub.
"""

import asyncio
import json
import math

import pytest
import torch
import transformers
from pydantic import BaseModel, ConfigDict, Field
from readme import blocks, run_block
from server_process import ServerProcess

pytestmark = pytest.mark.clients

QUESTION = "What is the capital of France?"
MESSAGES = [{"role": "user", "content": QUESTION}]
TOO_LONG = [{"role": "user", "content": "word " * 2000}]
MODEL = "SmolLM2-135M-Instruct"


class Weather(BaseModel):
    """The weather of a city, now."""

    model_config = ConfigDict(extra="forbid")
    city: str = Field(max_length=12)


@pytest.fixture(scope="module", autouse=True)
def offline(tmp_path_factory):
    """Nothing is fetched, and nothing is left behind in the user's caches."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
        patch.setenv("HF_HOME", str(tmp_path_factory.mktemp("hf")))
        yield


@pytest.fixture(scope="module")
def server():
    with ServerProcess("--max-model-len", "512", "--max-num-seqs", "8") as process:
        yield process


# --- LangChain ------------------------------------------------------------------------------------


@pytest.fixture
def langchain(server):
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(
        base_url=server.url + "/v1",
        api_key="unused",
        model=MODEL,
        temperature=0,
        max_tokens=64,
        max_retries=0,
    )


def test_langchain_recipe(server):
    (code,) = blocks("python", "langchain_openai")
    lines = run_block("python", code, server).splitlines()
    assert "Paris" in lines[0]
    assert "'name': 'Weather'" in lines[-2] and "'type': 'tool_call'" in lines[-2]
    assert lines[-1].startswith("city=")


def test_langchain_streams_what_it_is_told(langchain):
    reply = langchain.invoke(QUESTION)
    assert "Paris" in reply.content
    assert reply.response_metadata["finish_reason"] == "stop"
    used = reply.usage_metadata
    assert used["total_tokens"] == used["input_tokens"] + used["output_tokens"]
    chunks = list(langchain.stream(QUESTION, stream_usage=True))
    assert "".join(chunk.content for chunk in chunks) == reply.content
    assert (
        sum(c.usage_metadata["output_tokens"] for c in chunks if c.usage_metadata)
        == (used["output_tokens"])
    )
    replies = asyncio.run(langchain.abatch([QUESTION] * 3))
    assert [r.content for r in replies] == [reply.content] * 3


def test_langchain_reads_log_probabilities(langchain):
    reply = langchain.bind(logprobs=True, top_logprobs=2).invoke(QUESTION)
    entries = reply.response_metadata["logprobs"]["content"]
    assert "".join(entry["token"] for entry in entries) == reply.content


@pytest.mark.parametrize("choice", ["required", "Weather"])
def test_langchain_binds_tools(langchain, choice):
    bound = langchain.bind_tools([Weather], tool_choice=choice, parallel_tool_calls=False)
    reply = bound.invoke("How is the weather in Oslo?")
    (call,) = reply.tool_calls
    assert call["name"] == "Weather"
    Weather.model_validate(call["args"])
    whole = None
    for chunk in bound.stream("How is the weather in Oslo?"):
        whole = chunk if whole is None else whole + chunk
    assert [(c["name"], c["args"]) for c in whole.tool_calls] == [(call["name"], call["args"])]


def test_langchain_goes_on_after_a_tool_ran(langchain):
    from langchain_core.messages import HumanMessage, ToolMessage

    bound = langchain.bind_tools([Weather], tool_choice="required", parallel_tool_calls=False)
    question = HumanMessage("How is the weather in Oslo?")
    call = bound.invoke([question])
    result = ToolMessage("Rain, 7 degrees.", tool_call_id=call.tool_calls[0]["id"])
    assert langchain.bind_tools([Weather]).invoke([question, call, result]).content


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_langchain_structured_output(langchain, method):
    chain = langchain.with_structured_output(Weather, method=method)
    assert isinstance(chain.invoke("How is the weather in Oslo?"), Weather)


def test_langchain_json_mode(langchain):
    chain = langchain.with_structured_output(None, method="json_mode", include_raw=True)
    raw = chain.invoke("Write a JSON object with the key city.")["raw"]
    assert raw.content.startswith("{")


def test_langchain_knows_an_overflow(langchain):
    from langchain_core.exceptions import ContextOverflowError

    with pytest.raises(ContextOverflowError):
        langchain.invoke(TOO_LONG)


# --- LiteLLM --------------------------------------------------------------------------------------


def litellm_options(server, provider="openai"):
    return {
        "model": f"{provider}/{MODEL}",
        "api_base": server.url + "/v1",
        "api_key": "unused",
        "temperature": 0,
        "max_tokens": 64,
        "max_retries": 0,
    }


def test_litellm_recipe(server):
    (code,) = blocks("python", "litellm")
    lines = run_block("python", code, server).splitlines()
    assert "Paris" in lines[0]
    assert "population" in lines[-1] and "city" in lines[-1]


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
def test_litellm_streams_what_it_is_told(server, provider):
    import litellm

    options = litellm_options(server, provider)
    reply = litellm.completion(messages=MESSAGES, **options)
    text = reply.choices[0].message.content
    assert "Paris" in text and reply.choices[0].finish_reason == "stop"
    stream = litellm.completion(
        messages=MESSAGES, stream=True, stream_options={"include_usage": True}, **options
    )
    chunks = list(stream)
    whole = litellm.stream_chunk_builder(chunks, messages=MESSAGES)
    assert whole.choices[0].message.content == text
    assert whole.choices[0].finish_reason == "stop"
    assert whole.usage.completion_tokens == reply.usage.completion_tokens


def test_litellm_tools(server):
    import litellm

    function = {"name": "Weather", "parameters": Weather.model_json_schema()}
    options = {
        **litellm_options(server),
        "messages": [{"role": "user", "content": "How is the weather in Oslo?"}],
        "tools": [{"type": "function", "function": function}],
        "tool_choice": {"type": "function", "function": {"name": "Weather"}},
    }
    reply = litellm.completion(**options)
    (call,) = reply.choices[0].message.tool_calls
    Weather.model_validate_json(call.function.arguments)
    whole = litellm.stream_chunk_builder(list(litellm.completion(stream=True, **options)))
    (streamed,) = whole.choices[0].message.tool_calls
    assert streamed.function.model_dump() == call.function.model_dump()


def test_litellm_completes_text_and_formats(server):
    import litellm

    options = litellm_options(server, "text-completion-openai")
    reply = litellm.text_completion(prompt="The capital of France is", logprobs=1, **options)
    assert "Paris" in reply.choices[0].text
    assert len(reply.choices[0].logprobs.tokens) == reply.usage.completion_tokens
    reply = litellm.completion(
        messages=MESSAGES, response_format=Weather, **litellm_options(server)
    )
    Weather.model_validate_json(reply.choices[0].message.content)


def test_litellm_knows_the_errors(server):
    import litellm

    options = litellm_options(server)
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(messages=TOO_LONG, **options)
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(messages=MESSAGES, **{**options, "model": "openai/other"})
    with pytest.raises(litellm.BadRequestError):
        litellm.completion(messages=MESSAGES, **{**options, "temperature": -1})


# --- lm-eval --------------------------------------------------------------------------------------


def lm_eval(recipe, server, folder):
    """Run a recipe of the README; return its results and the samples of each task."""
    run_block("bash", recipe, server, "--log_samples", "--output_path", str(folder))
    (file,) = folder.rglob("results_*.json")
    samples = {}
    for log in folder.rglob("samples_*.jsonl"):
        task = log.name.removeprefix("samples_").rsplit("_", 1)[0]
        samples[task] = [json.loads(line) for line in log.read_text().splitlines()]
    return json.loads(file.read_text())["results"], samples


class Reference:
    """Log probabilities by transformers, on the same weights in float32."""

    def __init__(self, folder):
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        self.model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def encode(self, text):
        return self.tokenizer(text, add_special_tokens=False).input_ids

    @torch.inference_mode()
    def score(self, ids, begin):
        """Return the sum over the tokens from ``begin`` on, and whether each is the likeliest."""
        scores = self.model(torch.tensor([ids])).logits[0, begin - 1 : -1].log_softmax(-1)
        tokens = torch.tensor(ids[begin:])
        chosen = scores.gather(1, tokens[:, None]).sum().item()
        return chosen, bool((scores.argmax(-1) == tokens).all())

    @torch.inference_mode()
    def ends(self, ids):
        """Whether the model's next token would be EOS."""
        next_id = self.model(torch.tensor([ids])).logits[0, -1].argmax().item()
        return next_id == self.tokenizer.eos_token_id


def test_lm_eval_log_probabilities_are_those_of_transformers(server, demo_llama_dir, tmp_path):
    recipe = blocks("bash", "local-completions")[0]
    results, samples = lm_eval(recipe, server, tmp_path)
    reference = Reference(demo_llama_dir)
    right, ends = 0, 0
    for sample in samples["capitals"]:
        choices = []
        for arguments, response in zip(
            sample["arguments"].values(), sample["filtered_resps"], strict=True
        ):
            context, continuation = arguments["arg_0"], arguments["arg_1"]
            ids = reference.encode(context + continuation)
            score, greedy = reference.score(ids, len(reference.encode(context)))
            assert float(response[0]) == pytest.approx(score, abs=1e-3)
            assert response[1] == str(greedy)
            choices.append(score)
            ends += reference.ends(ids)
        right += choices.index(max(choices)) == int(sample["target"])
    assert ends, "no text after which the model stops"
    assert results["capitals"]["acc,none"] == pytest.approx(right / len(samples["capitals"]))
    num_bytes = total = 0.0
    for sample in samples["capitals_rolling"]:
        text = sample["target"]
        ids = [reference.tokenizer.bos_token_id, *reference.encode(text)]
        total += reference.score(ids, 1)[0]
        num_bytes += len(text.encode())
    perplexity = results["capitals_rolling"]["byte_perplexity,none"]
    assert perplexity == pytest.approx(math.exp(-total / num_bytes), rel=1e-3)


def test_lm_eval_chat(server, tmp_path):
    import openai

    recipe = blocks("bash", "local-chat-completions")[0]
    results, samples = lm_eval(recipe, server, tmp_path)
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="unused", max_retries=0)
    for sample in samples["capitals_chat"]:
        reply = client.chat.completions.create(
            model="",
            messages=[{"role": "user", "content": sample["doc"]["question"]}],
            max_tokens=12,
            temperature=0,
        )
        assert sample["resps"][0][0] == reply.choices[0].message.content
    assert results["capitals_chat"]["exact_match,city"] > 0
