"""The crown: one set of prompts, greedy, float32, and the tokens of Hugging Face `generate`.

Nothing that the engine may do differently may change a token: block size, batch size, chunking,
prefix sharing, forced preemption, overlap, backend, company in the batch.
"""

import functools
import random
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from pageserve.llm import LLM
from pageserve.sampling_params import SamplingParams
from pageserve.tokenizer import load_tokenizer

NEW_TOKENS = 12


@functools.cache
def prompts_of(vocab_size: int) -> tuple[tuple[int, ...], ...]:
    """Ten prompts: lengths on and around block edges, several with a common beginning."""
    rng = random.Random(1)

    def ids(n):
        return tuple(rng.randrange(3, vocab_size) for _ in range(n))

    shared = ids(32)
    lengths = (1, 5, 16, 31, 33, 70)
    return (*map(ids, lengths), shared, shared + ids(7), shared + ids(16), shared + ids(41))


@functools.cache
def reference(path: str) -> list[list[int]]:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None  # which None in the config below would not override
    # Rows of the head that no token has are never sampled here; Hugging Face has to be told.
    padded = list(range(_vocab(path), model.config.vocab_size))
    config = GenerationConfig(
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        repetition_penalty=1.0,
        eos_token_id=None,
        pad_token_id=0,
        suppress_tokens=padded or None,
    )
    out = []
    for prompt in prompts_of(_vocab(path)):
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            out.append(model.generate(ids, generation_config=config)[0, len(prompt) :].tolist())
    return out


def engine_tokens(path, prompts, **options):
    options = {"max_model_len": 128, "num_kv_blocks": 64, "dtype": "float32", **options}
    llm = LLM(model=str(path), device="cpu", **options)
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    done = llm.generate([list(p) for p in prompts], params)
    llm.engine.scheduler.check_integrity()
    assert all(c.finish_reason == "length" for c in done)
    stats = llm.engine.stats()
    assert stats.num_used_blocks == 0 and stats.num_running == 0 and stats.num_waiting == 0
    return [c.token_ids for c in done], stats


@pytest.mark.parametrize("family", ["llama", "qwen2", "mistral", "qwen3"])
def test_equals_hugging_face(tiny_checkpoint, family):
    path = tiny_checkpoint(family)
    expected = reference(str(path))
    prompts = prompts_of(_vocab(path))
    assert engine_tokens(path, prompts)[0] == expected
    for prompt, want in zip(prompts, expected, strict=True):
        assert engine_tokens(path, [prompt])[0] == [want]


# Holds the longest request, and few others: blocks run out while several decode.
SMALL_POOL = {"block_size": 3, "num_kv_blocks": 34}

VARIANTS = {
    **{f"block size {n}": {"block_size": n, "num_kv_blocks": 1024 // n} for n in (1, 3, 7, 32)},
    **{f"batch {n}": {"max_num_seqs": n} for n in (1, 2, 4, 16)},
    **{f"chunk {n}": {"max_num_batched_tokens": n} for n in (4, 7, 16, 17, 97)},
    "no prefix cache": {"enable_prefix_caching": False},
    "overlap": {"max_steps_in_flight": 2},
    "overlap, chunk 7": {"max_steps_in_flight": 2, "max_num_batched_tokens": 7},
    "preemption": {**SMALL_POOL},
    "preemption, no cache": {**SMALL_POOL, "enable_prefix_caching": False},
    "preemption, overlap": {**SMALL_POOL, "max_steps_in_flight": 2},
    "small pool, overlap, chunk 7": {
        **SMALL_POOL,
        "max_steps_in_flight": 2,
        "max_num_batched_tokens": 7,
    },
    "priority": {"scheduling_policy": "priority", "num_kv_blocks": 8},
    "memory-aware": {"scheduling_policy": "memory-aware", "num_kv_blocks": 8},
    "shortest-prompt": {"scheduling_policy": "shortest-prompt", "max_num_seqs": 3},
}


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_no_setting_changes_a_token(tiny_checkpoint, family, variant):
    path = tiny_checkpoint(family)
    tokens, stats = engine_tokens(path, prompts_of(_vocab(path)), **VARIANTS[variant])
    assert tokens == reference(str(path))
    if "preemption" in variant:
        assert stats.preemptions_total > 0, "the pool was not small enough to test anything"


def test_prefix_hits_do_not_change_a_token(tiny_checkpoint):
    """C054: each prompt three times, full hits included; the second answers come from the cache."""
    path = tiny_checkpoint("qwen2")
    expected = reference(str(path))
    prompts = [list(p) for p in prompts_of(_vocab(path))]
    llm = LLM(model=str(path), device="cpu", max_model_len=128, num_kv_blocks=128)
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    for round_ in range(3):
        done = llm.generate(prompts, params)
        assert [c.token_ids for c in done] == expected
        for prompt, c in zip(prompts, done, strict=True):
            assert c.num_cached_tokens < len(prompt)
            if round_ and len(prompt) > 16:
                assert c.num_cached_tokens >= (len(prompt) - 1) // 16 * 16


def test_embedded_model_equals_hugging_face(demo_llama_dir, demo_qwen2_dir):
    """Real text on the real weights, as Llama and copied into Qwen2 with zero biases."""
    expected = reference(str(demo_llama_dir))
    prompts = prompts_of(_vocab(demo_llama_dir))
    for path in (demo_llama_dir, demo_qwen2_dir):
        options = {"num_kv_blocks": 24, "max_num_batched_tokens": 48}
        tokens, _ = engine_tokens(path, prompts, **options)
        assert tokens == expected


def _vocab(path):
    """Ids that the tokenizer has: others the engine refuses in prompts, and never samples."""
    return load_tokenizer(Path(path)).size
