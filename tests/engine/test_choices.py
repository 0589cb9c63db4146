"""Several choices to one prompt, and log probabilities of prompts, on the real engine."""

import functools
import itertools
import random

import pytest
import torch
from transformers import AutoModelForCausalLM

from pageserve.llm import LLM
from pageserve.messages import AddRequest
from pageserve.sampling_params import ParameterError, SamplingParams, for_choice

VOCAB = 320  # ids of the tiny tokenizer; the model's head has more rows


def ids(n: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, VOCAB) for _ in range(n)]


def make_llm(path, **options) -> LLM:
    options = {"max_model_len": 256, "num_kv_blocks": 64, "dtype": "float32", **options}
    return LLM(model=str(path), device="cpu", **options)


@functools.cache
def reference_model(path: str):
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def reference_scores(path, prompt: list[int]) -> torch.Tensor:
    """Log probabilities [len(prompt) - 1, VOCAB] behind each token of the prompt but the last."""
    with torch.inference_mode():
        logits = reference_model(str(path))(torch.tensor([prompt])).logits[0, :-1, :VOCAB]
    return logits.log_softmax(-1)


def check_scores(path, prompt: list[int], entries: list, k: int) -> None:
    """One entry per prompt token but the first, each equal to the reference's."""
    assert [entry.token_id for entry in entries] == prompt[1:]
    expected = reference_scores(path, prompt)
    for row, entry in zip(expected, entries, strict=True):
        assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=1e-3)
        assert entry.rank == int((row > row[entry.token_id]).sum()) + 1
        values, best = row.topk(k)
        assert entry.top_token_ids == best.tolist()
        assert entry.top_logprobs == pytest.approx(values.tolist(), abs=1e-3)


# --- prompt log probabilities ---------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 7}, {"block_size": 3}])
@pytest.mark.parametrize("max_tokens", [0, 1, 4])
def test_prompt_scores_equal_a_reference_forward_pass(tiny_checkpoint, options, max_tokens) -> None:
    """Conformance 28, C032, C033: also where the prompt comes in chunks beside other requests."""
    path = tiny_checkpoint("qwen2")
    llm = make_llm(path, **options)
    prompts = [ids(n, n) for n in (1, 2, 16, 33, 60)]
    scoring = SamplingParams(temperature=0, max_tokens=max_tokens, prompt_logprobs=3)
    plain = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    done = llm.generate([*prompts, ids(20, 0)], [scoring] * len(prompts) + [plain])
    for prompt, completion in zip(prompts, done, strict=False):
        check_scores(path, prompt, completion.prompt_logprobs, 3)
        assert len(completion.token_ids) == max_tokens and completion.finish_reason == "length"
    assert done[-1].prompt_logprobs == [] and len(done[-1].token_ids) == 9


def test_warm_prefix_cache_does_not_hide_prompt_scores(tiny_checkpoint) -> None:
    """Conformance 30: cached blocks have no logits."""
    path = tiny_checkpoint("llama")
    llm = make_llm(path)
    prompt = ids(48, 1)
    plain = SamplingParams(temperature=0, max_tokens=2)
    llm.generate([prompt], plain)
    for _ in range(2):
        scored = llm.generate([prompt], SamplingParams(max_tokens=1, prompt_logprobs=0))[0]
        check_scores(path, prompt, scored.prompt_logprobs, 0)
        assert scored.num_cached_tokens == 0
    assert llm.generate([[*prompt, 5]], plain)[0].num_cached_tokens == 48


def test_prompt_scores_survive_preemption(tiny_checkpoint) -> None:
    path = tiny_checkpoint("qwen2")
    llm = make_llm(path, block_size=4, num_kv_blocks=11, max_num_batched_tokens=2, max_model_len=43)
    first = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    scoring = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=2)
    prompts = [ids(12, 1), ids(18, 2)]
    done = llm.generate(prompts, [first, scoring])
    assert llm.engine.stats().preemptions_total > 0
    check_scores(path, prompts[1], done[1].prompt_logprobs, 2)


def test_logits_of_a_long_prompt_come_in_slices(tiny_checkpoint, monkeypatch) -> None:
    """C117: peak memory does not depend on the length of the prompt."""
    path = tiny_checkpoint("llama")
    llm = make_llm(path)
    sizes = []
    runner = llm.engine.worker.runner
    compute = runner.model.compute_logits

    def record(hidden):
        sizes.append(len(hidden))
        return compute(hidden)

    monkeypatch.setattr(runner.model, "compute_logits", record)
    monkeypatch.setattr("pageserve.worker.prompt_logprobs.MAX_LOGITS", 5 * VOCAB)
    prompts = [ids(100, n) for n in range(4)]
    done = llm.generate(prompts, SamplingParams(max_tokens=1, prompt_logprobs=5))
    assert max(sizes) == 5 and sum(sizes) == 4 * 100
    for prompt, completion in zip(prompts, done, strict=True):
        check_scores(path, prompt, completion.prompt_logprobs, 5)


def test_full_context_can_be_scored(tiny_checkpoint) -> None:
    """C033: a prompt as long as the context has no room for a token and needs none."""
    path = tiny_checkpoint("llama")
    llm = make_llm(path, max_model_len=64)
    prompt = ids(64, 3)
    done = llm.generate([prompt], SamplingParams(max_tokens=0, prompt_logprobs=1))[0]
    check_scores(path, prompt, done.prompt_logprobs, 1)
    assert (done.text, done.token_ids, done.finish_reason) == ("", [], "length")


def test_loglikelihoods_rank_as_the_references(tiny_checkpoint) -> None:
    """Conformance 29: 50 items as lm-eval scores them: a context and its four continuations, the
    sum of the continuation's log probabilities and whether it is what greedy decoding gives."""
    path = tiny_checkpoint("qwen2")
    llm = make_llm(path, num_kv_blocks=256)
    rng = random.Random(0)
    items = [
        (context, [ids(rng.randrange(1, 5), 10 * n + i) for i in range(4)])
        for n in range(50)
        for context in [ids(rng.randrange(2, 12), n)]
    ]
    greedy = llm.generate(
        [context for context, _ in items],
        SamplingParams(temperature=0, max_tokens=2, ignore_eos=True),
    )
    for (_, endings), completion in zip(items, greedy, strict=True):
        endings[0] = completion.token_ids  # one that greedy decoding gives
    prompts = [(context, ending) for context, endings in items for ending in endings]
    scoring = SamplingParams(temperature=0, max_tokens=0, prompt_logprobs=1)
    done = llm.generate([context + ending for context, ending in prompts], scoring)
    sums, wanted = [], []
    for (context, ending), completion in zip(prompts, done, strict=True):
        entries = completion.prompt_logprobs[len(context) - 1 :]
        sums.append(sum(entry.logprob for entry in entries))
        rows = reference_scores(path, context + ending)[len(context) - 1 :]
        wanted.append(float(rows.gather(1, torch.tensor(ending)[:, None]).sum()))
        is_greedy = all(entry.top_token_ids[0] == entry.token_id for entry in entries)
        assert is_greedy == (rows.argmax(-1).tolist() == ending)
    assert sums == pytest.approx(wanted, abs=1e-3)
    for i in range(0, len(sums), 4):
        assert _ranking(sums[i : i + 4]) == _ranking(wanted[i : i + 4])


def _ranking(values: list[float]) -> list[int]:
    return sorted(range(len(values)), key=values.__getitem__)


# --- n > 1 ----------------------------------------------------------------------------------------

DRAWING = SamplingParams(temperature=1.0, seed=2**63 - 2, max_tokens=12, ignore_eos=True)


@pytest.mark.parametrize(
    "options",
    [
        {"max_steps_in_flight": 1},
        {"max_steps_in_flight": 2},
        {"max_num_batched_tokens": 8},
        {"enable_prefix_caching": False},
        {"max_num_seqs": 2},
        {"num_kv_blocks": 14, "max_model_len": 56},
    ],
)
def test_choices_equal_single_requests_with_the_next_seeds(tiny_checkpoint, options) -> None:
    """Conformance 33, C067: choice i draws as a request of its own with seed + i would."""
    path = tiny_checkpoint("qwen2")
    prompt = ids(18, 1)
    alone = make_llm(path, block_size=4)
    seeds = [for_choice(DRAWING, i) for i in range(4)]
    assert [p.seed for p in seeds] == [2**63 - 2, 2**63 - 1, 2**63, 2**63 + 1]
    expected = []
    for p in seeds:
        alone.engine.add(AddRequest(f"seed-{p.seed}", prompt, p, 0.0))
        expected.append([t for o in _drain(alone) for t in o.new_token_ids])
    assert len(set(map(tuple, expected))) == 4
    llm = make_llm(path, block_size=4, **options)
    done = llm.generate([prompt, ids(9, 2)], DRAWING, n=4)
    assert [c.token_ids for c in done[:4]] == expected
    assert [c.prompt_token_ids for c in done[4:]] == [ids(9, 2)] * 4
    assert len({c.token_ids[0] for c in done}) > 1  # the first tokens are draws of their own, too


def _drain(llm: LLM) -> list:
    outputs = []
    while llm.engine.has_work():
        outputs += llm.engine.step()
        llm.engine.scheduler.check_integrity()
    return outputs


def test_choices_share_the_blocks_of_the_prompt(tiny_checkpoint) -> None:
    """One prefill: the prompt's tokens are computed once and its full blocks are held once."""
    llm = make_llm(tiny_checkpoint("llama"), block_size=4, max_num_batched_tokens=16)
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=4, ignore_eos=True)
    llm.generate([ids(43, 1)], params, n=8)
    stats = llm.engine.stats()
    assert stats.peak_used_blocks <= 10 + 8 * 2  # 43 tokens: 10 full blocks
    assert stats.num_used_blocks == stats.num_shared_blocks == 0


def test_prompt_is_scored_with_the_first_choice(tiny_checkpoint) -> None:
    path = tiny_checkpoint("llama")
    llm = make_llm(path, max_num_batched_tokens=16)
    prompt = ids(40, 1)
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=3, prompt_logprobs=1)
    done = llm.generate([prompt], params, n=3)
    check_scores(path, prompt, done[0].prompt_logprobs, 1)
    assert [len(c.prompt_logprobs) for c in done[1:]] == [0, 0]


@pytest.mark.parametrize("token_id", [-1, 10**6])
def test_prompts_of_ids_that_the_model_lacks_are_refused(tiny_checkpoint, token_id) -> None:
    """On a GPU a look-up of such an id would be the end of the process."""
    llm = make_llm(tiny_checkpoint("llama"))
    params = SamplingParams(temperature=0, max_tokens=4)
    with pytest.raises(ParameterError, match=f"prompt has token id {token_id}; ids run from 0 to"):
        llm.generate([ids(5, 1), [1, token_id]], params)
    assert not llm.engine.has_work()
    assert len(llm.generate([ids(5, 1)], params)[0].token_ids) == 4


@pytest.mark.parametrize("where", ["step", "execute"])
def test_a_call_that_was_cut_short_leaves_nothing_behind(
    tiny_checkpoint, monkeypatch, where
) -> None:
    path = tiny_checkpoint("llama")
    params = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)
    with make_llm(path) as llm:
        (expected,) = llm.generate([ids(40, 1)], params)
    with make_llm(path) as llm:
        owner = llm.engine if where == "step" else llm.engine.worker
        run, calls = getattr(owner, where), itertools.count()

        def interrupted(*arguments):
            if next(calls) == 0:
                raise KeyboardInterrupt
            return run(*arguments)

        monkeypatch.setattr(owner, where, interrupted)
        with pytest.raises(KeyboardInterrupt):  # its blocks count as computed, and are not
            llm.generate([ids(40, 1), ids(30, 3)], params, n=2)
        assert not llm.engine.has_work()
        (again,) = llm.generate([ids(40, 1)], params)
        assert again.token_ids == expected.token_ids
        llm.engine.scheduler.check_integrity()
