"""The engine on the Triton kernels: the tokens of the PyTorch path, step kinds and draws alike.

On a GPU the steps are CUDA graph replays; without one the same steps run under the interpreter.
"""

import random

import pytest
import torch
from llguidance import LLMatcher

from pageserve.llm import LLM
from pageserve.messages import AddRequest
from pageserve.sampling_params import SamplingParams

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []


def run(path, prompts, params, n=1, grammars=None, **options):
    options = {
        "max_model_len": 64,
        "num_kv_blocks": 64,
        "block_size": 4,
        "max_num_seqs": 8,
        "device": DEVICE,
        **options,
    }
    llm = LLM(model=str(path), dtype="float32", **options)
    done = llm.generate(prompts, params, n, grammars)
    llm.engine.scheduler.check_integrity()
    return [c.token_ids for c in done]


def some_prompts(vocab=200):
    rng = random.Random(3)
    shared = [rng.randrange(3, vocab) for _ in range(12)]
    own = [[rng.randrange(3, vocab) for _ in range(n)] for n in (1, 5, 9)]
    return [*own, shared, shared + own[1]]


GREEDY = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
VARIANTS = {
    "plain": {},
    "overlap": {"max_steps_in_flight": 2},
    "chunks": {"max_num_batched_tokens": 6, "max_steps_in_flight": 2},
    "preemption": {"num_kv_blocks": 7, "max_steps_in_flight": 2},
    "two seats": {"max_num_seqs": 2},
}


@pytest.mark.parametrize(
    ("family", "variant"),
    [("llama", "plain"), ("qwen3", "plain"), *(("qwen2", v) for v in VARIANTS)],
)
def test_tokens_equal_the_torch_path(tiny_checkpoint, family, variant):
    path, prompts = tiny_checkpoint(family, head_dim=16), some_prompts()
    expected = run(path, prompts, GREEDY, device="cpu", attention_backend="torch_blockwise")
    tokens = run(path, prompts, GREEDY, attention_backend="triton", **VARIANTS[variant])
    assert tokens == expected


def test_steps_beyond_the_graphs(tiny_checkpoint, monkeypatch):
    """Large steps are padded to whole tiles and launched kernel by kernel."""
    pytest.importorskip("triton")
    from pageserve.worker import cuda_graphs

    monkeypatch.setattr(cuda_graphs, "MAX_MIXED_TOKENS", 4)
    monkeypatch.setattr(cuda_graphs, "TILE", 8)
    path, prompts = tiny_checkpoint("llama", head_dim=16), some_prompts()
    expected = run(path, prompts, GREEDY, device="cpu", attention_backend="torch_blockwise")
    assert run(path, prompts, GREEDY, attention_backend="triton") == expected


def test_long_chunks_through_the_library(tiny_checkpoint, monkeypatch):
    """Fresh prompts, later chunks and prompts with a cached prefix, in steps with other rows."""
    pytest.importorskip("triton")
    from pageserve.attention import triton
    from pageserve.worker import cuda_graphs

    monkeypatch.setattr(cuda_graphs, "MAX_MIXED_TOKENS", 4)
    monkeypatch.setattr(cuda_graphs, "TILE", 8)
    monkeypatch.setattr(triton, "LONG_QUERY", 3)
    monkeypatch.setattr(triton, "SQUARE", 8)
    monkeypatch.setattr(triton.TritonBackend, "library_costs", {8: 0.1})
    rows, attend = [], triton._attend_square

    def noted(query, kv_cache, row, *rest):
        rows.append(row)
        attend(query, kv_cache, row, *rest)

    monkeypatch.setattr(triton, "_attend_square", noted)
    path, prompts = tiny_checkpoint("qwen2", head_dim=16), some_prompts()
    expected = run(path, prompts, GREEDY, device="cpu", attention_backend="torch_blockwise")
    options = {"attention_backend": "triton", "max_num_batched_tokens": 9}
    assert run(path, prompts, GREEDY, max_steps_in_flight=2, **options) == expected
    assert {row.seq_len > row.num_tokens for row in rows} == {False, True}
    assert any(row.start > 0 for row in rows)


def test_rows_with_a_common_prefix_equal_the_torch_path(tiny_checkpoint, monkeypatch):
    """A group of rows that has much in common beside one that has not; greedy rows, drawing ones
    and rows with log probabilities."""
    pytest.importorskip("triton")
    from pageserve.kernels import paged_decode
    from pageserve.worker import cuda_graphs, request_states

    monkeypatch.setattr(paged_decode, "MAX_WIDTH", 16)  # groups of four rows
    monkeypatch.setattr(cuda_graphs, "CASCADE_BYTES", 1)
    monkeypatch.setattr(cuda_graphs, "CASCADE_SHARE", 0.1)
    monkeypatch.setattr(request_states, "COMMON_TOKENS", 32)
    keys, key_for = set(), cuda_graphs.CUDAGraphRunner.key_for

    def noted(self, step):
        keys.add(key := key_for(self, step))
        return key

    monkeypatch.setattr(cuda_graphs.CUDAGraphRunner, "key_for", noted)
    rng = random.Random(5)
    first, second = ([rng.randrange(3, 200) for _ in range(44)] for _ in range(2))
    prompts = [[7], [*second, 5]]
    prompts += [first + [rng.randrange(3, 200) for _ in range(1 + i % 3)] for i in range(9)]
    common = {"max_tokens": 3, "ignore_eos": True}
    path, greedy = tiny_checkpoint("qwen2", head_dim=16), SamplingParams(temperature=0, **common)
    drawing = SamplingParams(temperature=1.0, seed=7, **common)
    logprobs = SamplingParams(temperature=0, logprobs=2, **common)
    options = {"num_kv_blocks": 128, "max_num_seqs": 12}
    for params in (greedy, drawing, logprobs):
        cpu = {"device": "cpu", "attention_backend": "torch_blockwise"}
        expected = run(path, prompts, params, **cpu, **options)
        triton = {"attention_backend": "triton", "max_steps_in_flight": 2}
        assert run(path, prompts, params, **triton, **options) == expected
    assert {key.ending.value for key in keys if key.cascade} == {"greedy", "draw", "logits"}


def test_draws_and_special_rows_equal_the_torch_path(tiny_checkpoint):
    """Greedy, drawing, filtered, penalised and logprob rows in one batch: the graph's sampler, the
    eager one and the PyTorch one agree on every token."""
    path, prompts = tiny_checkpoint("llama", head_dim=16), some_prompts()
    common = {"max_tokens": 4, "ignore_eos": True}
    drawing = [
        SamplingParams(temperature=0, **common),
        SamplingParams(temperature=1.0, seed=5, **common),
        SamplingParams(temperature=0.8, seed=6, top_k=7, **common),
        SamplingParams(temperature=1.2, seed=2**63 - 1, top_p=0.7, **common),
        SamplingParams(temperature=1.0, seed=-3, min_p=0.05, **common),
    ]
    penalised = [
        SamplingParams(temperature=0, repetition_penalty=1.5, **common),
        SamplingParams(temperature=0.9, seed=9, repetition_penalty=0.5, top_k=40, **common),
        SamplingParams(temperature=1.1, seed=3, repetition_penalty=1.2, top_p=0.9, **common),
        *drawing[:2],
    ]
    brief = {**common, "max_tokens": 2}  # what they leave behind must fit the steps after them
    special = [
        SamplingParams(temperature=1.0, seed=1, presence_penalty=1.0, **brief),
        SamplingParams(temperature=0, logprobs=3, **brief),
        *penalised[:3],
    ]
    for params in (drawing, penalised, special):
        cpu = {"device": "cpu", "attention_backend": "torch_blockwise"}
        expected = run(path, prompts, params, **cpu)
        tokens = run(path, prompts, params, attention_backend="triton", max_steps_in_flight=2)
        assert tokens == expected


@pytest.mark.parametrize("depth", [1, 2])
def test_choices_and_scored_prompts_equal_the_torch_path(tiny_checkpoint, depth):
    """Forks enter the graphs' tables and their copied blocks are read; steps that score a prompt
    are not for the graphs, while the rows beside them go on."""
    path, prompts = tiny_checkpoint("qwen2", head_dim=16), some_prompts()
    common = {"temperature": 1.0, "seed": 7, "max_tokens": 4, "ignore_eos": True}
    drawing, scoring = SamplingParams(**common), SamplingParams(**common, prompt_logprobs=2)
    params = [drawing, scoring, drawing, drawing, scoring]
    cpu = {"device": "cpu", "attention_backend": "torch_blockwise"}
    expected = run(path, prompts, params, n=3, **cpu)
    triton = {"attention_backend": "triton", "max_steps_in_flight": depth}
    assert run(path, prompts, params, n=3, max_num_batched_tokens=10, **triton) == expected
    scores = [
        LLM(
            model=str(path), dtype="float32", max_model_len=64, num_kv_blocks=64, **options
        ).generate(prompts, SamplingParams(max_tokens=0, prompt_logprobs=2))
        for options in (cpu, {"device": DEVICE, **triton})
    ]
    for ours, theirs in zip(*scores, strict=True):
        for a, b in zip(ours.prompt_logprobs, theirs.prompt_logprobs, strict=True):
            assert (a.token_id, a.top_token_ids, a.rank) == (b.token_id, b.top_token_ids, b.rank)
            assert a.logprob == pytest.approx(b.logprob, abs=1e-3)
            assert a.top_logprobs == pytest.approx(b.top_logprobs, abs=1e-3)


def test_rows_under_a_grammar_beside_others(tiny_checkpoint):
    """Masks come along with the graphs, or meet the sampler where a row wants that; the other
    rows of the step get the tokens they get alone."""
    path, prompts = tiny_checkpoint("llama", head_dim=16), some_prompts()
    common = {"max_tokens": 4, "ignore_eos": True}
    greedy = [SamplingParams(temperature=0, **common)] * 5
    drawing = [SamplingParams(temperature=1.5, seed=i, **common) for i in range(5)]
    special = [*drawing[:4], SamplingParams(temperature=0, logprobs=2, **common)]
    number, words = (LLMatcher.grammar_from_regex(r) for r in ("[0-9]+", "[a-z ]+"))
    grammars = [number, None, words, None, words]
    for params in (greedy, drawing, special):
        cpu = {"device": "cpu", "attention_backend": "torch_blockwise"}
        free = run(path, prompts, params, **cpu)
        expected = run(path, prompts, params, grammars=grammars, **cpu)
        options = {"attention_backend": "triton", "max_steps_in_flight": 2}
        tokens = run(path, prompts, params, grammars=grammars, **options)
        assert tokens == expected
        assert [tokens[i] == free[i] for i in range(5)] == [False, True, False, True, False]


def test_dropped_tokens_are_not_penalised(tiny_checkpoint):
    """A token in flight when a grammar comes into force is dropped, and was never seen."""
    path, prompt = tiny_checkpoint("llama", head_dim=16), some_prompts()[2]
    params = SamplingParams(
        temperature=1.5, seed=4, repetition_penalty=1.3, max_tokens=8, ignore_eos=True
    )
    trigger = run(path, [prompt], params, attention_backend="triton")[0][2]
    results = []
    for depth in (1, 2):
        llm = LLM(
            model=str(path), dtype="float32", device=DEVICE, attention_backend="triton",
            max_model_len=64, num_kv_blocks=64, block_size=4, max_num_seqs=2,
            max_steps_in_flight=depth,
        )  # fmt: skip
        request = AddRequest("r", prompt, params, 0.0)
        request.grammar = LLMatcher.grammar_from_regex("[0-9]+")
        request.grammar_trigger_ids = [trigger]
        outputs, tokens = llm.engine.add(request), []
        while not outputs or outputs[-1].finish_reason is None:
            outputs = llm.engine.step()
            tokens += [t for output in outputs for t in output.new_token_ids]
        words = llm.engine.worker.runner.graphs._sampling.seen[0].tolist()
        seen = {32 * w + i for w, word in enumerate(words) for i in range(32) if word >> i & 1}
        assert seen == {*prompt, *tokens}
        results.append(tokens)
    assert results[0] == results[1]
    assert len(set(results[0][3:])) > 1, "a grammar that came into force"
