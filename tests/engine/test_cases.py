"""Bugs that other servers had, replayed on the real engine with a tiny checkpoint."""

import random
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from pageserve.config import CacheArgs, EngineConfig, ModelArgs, SchedulerArgs
from pageserve.engine.core import EngineCore
from pageserve.engine.output_processor import OutputProcessor
from pageserve.llm import LLM
from pageserve.messages import PROMPT_TOO_LONG, AddRequest
from pageserve.sampling_params import SamplingParams

VOCAB = 320
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def ids(n: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, VOCAB) for _ in range(n)]


def make_core(path, **options) -> EngineCore:
    options = {"num_kv_blocks": 64, "max_model_len": 256, **options}
    groups = {cls: {} for cls in (ModelArgs, CacheArgs, SchedulerArgs)}
    for name, value in options.items():
        (group,) = (g for cls, g in groups.items() if name in cls.__dataclass_fields__)
        group[name] = value
    model = ModelArgs(model=str(path), device="cpu", **groups[ModelArgs])
    cache, scheduler = CacheArgs(**groups[CacheArgs]), SchedulerArgs(**groups[SchedulerArgs])
    return EngineCore(EngineConfig(model, cache, scheduler))


def add(core: EngineCore, request_id: str, prompt: list[int], params=GREEDY):
    return core.add(AddRequest(request_id, prompt, params, 0.0))


def drain(core: EngineCore) -> dict[str, list]:
    """Run until idle; return the outputs of each request, checked to end exactly once."""
    outputs: dict[str, list] = {}
    while core.has_work():
        for output in core.step():
            outputs.setdefault(output.request_id, []).append(output)
        core.scheduler.check_integrity()
    for request_id, steps in outputs.items():
        ends = [o.finish_reason for o in steps if o.finish_reason is not None]
        assert len(ends) == 1 and steps[-1].finish_reason is not None, request_id
    check_idle(core)
    return outputs


def check_idle(core: EngineCore) -> None:
    """Nothing runs, waits or holds a block; live, cached and free blocks are told apart."""
    stats = core.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_used_blocks) == (0, 0, 0)
    assert stats.num_free_blocks == core.worker.num_kv_blocks
    assert 0 <= stats.num_cached_blocks <= stats.num_free_blocks
    core.scheduler.check_integrity()


def tokens_of(outputs: list) -> list[int]:
    return [token_id for output in outputs for token_id in output.new_token_ids]


def alone(path, prompt: list[int], params=GREEDY, **options) -> list[int]:
    core = make_core(path, **options)
    add(core, "alone", prompt, params)
    return tokens_of(drain(core)["alone"])


# --- the cache and the pool -----------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 1, "seed": 5}])
def test_preempted_request_continues_as_if_nothing_happened(tiny_checkpoint, depth, sampling):
    """C061: with a penalty that must see the output as output after the recompute."""
    path = tiny_checkpoint("qwen2")
    params = SamplingParams(presence_penalty=1, max_tokens=24, ignore_eos=True, **sampling)
    prompts = {f"r{n}": ids(6 + n, n) for n in range(8)}
    core = make_core(path, block_size=4, num_kv_blocks=14, max_steps_in_flight=depth)
    for request_id, prompt in prompts.items():
        add(core, request_id, prompt, params)
    streams = drain(core)
    assert max(steps[-1].num_preemptions for steps in streams.values()) >= 2
    for request_id, prompt in prompts.items():
        steps = streams[request_id]
        assert len(tokens_of(steps)) == 24 and steps[-1].finish_reason == "length"
        assert all(len(step.new_token_ids) <= 1 for step in steps), "each token goes out once"
        assert tokens_of(steps) == alone(path, prompt, params)


def test_stop_strings_do_not_spoil_the_prefix_cache(tiny_checkpoint):
    """C063: four requests share a prompt's blocks and end by a stop string within a block."""
    llm = LLM(model=str(tiny_checkpoint("llama")), device="cpu", num_kv_blocks=64)
    prompt = ids(40, 1)
    cold = llm.generate([prompt], GREEDY)[0]
    llm.engine.scheduler.reset_prefix_cache()
    warm = []
    for n in range(4):
        longer = prompt[:32] + ids(5 + n, 10 + n)
        text = llm.generate([longer], GREEDY)[0].text
        stop = text[len(text) // 2 : len(text) // 2 + 2]
        warm.append((longer, SamplingParams(temperature=0, max_tokens=12, stop=[stop])))
    llm.engine.scheduler.reset_prefix_cache()
    done = llm.generate([p for p, _ in warm], [params for _, params in warm])
    assert all(c.finish_reason == "stop" and isinstance(c.stop_reason, str) for c in done)
    again = llm.generate([prompt], GREEDY)[0]
    assert (again.token_ids, again.text) == (cold.token_ids, cold.text)
    assert again.num_cached_tokens == 32
    check_idle(llm.engine)


@pytest.mark.parametrize("company", [0, 3])
@pytest.mark.parametrize("chunk", [1, 7, 16, 17, 96, 97, 512])
def test_chunk_size_does_not_change_the_answer(tiny_checkpoint, monkeypatch, chunk, company):
    """C065: all that is allocated and not written is NaN, so whoever reads it shows."""
    path = tiny_checkpoint("qwen2")
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=3)
    prompt = ids(97, 3)
    core = make_core(path)
    add(core, "whole", prompt, params)
    whole = drain(core)["whole"]

    _poison(monkeypatch)
    # Each decoding request takes a token of the budget, so the chunk is what is left.
    core = make_core(path, max_num_batched_tokens=chunk + company)
    for n in range(company):
        add(core, f"decoding {n}", [5 + n], _LONG)
    if company:
        core.step()
    add(core, "chunked", prompt, params)
    chunked = drain(core)["chunked"]
    assert tokens_of(chunked) == tokens_of(whole)
    for step, expected in zip(chunked, whole, strict=True):
        (got,), (want,) = step.new_logprobs, expected.new_logprobs
        assert got.top_token_ids == want.top_token_ids
        assert got.top_logprobs == pytest.approx(want.top_logprobs, abs=1e-4)


_LONG = SamplingParams(temperature=0, max_tokens=130, ignore_eos=True)


def _poison(monkeypatch):
    def poisoned(make):
        def wrapper(*args, **kwargs):
            tensor = make(*args, **kwargs)
            return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

        return wrapper

    for name in ("empty", "empty_like"):
        monkeypatch.setattr(torch, name, poisoned(getattr(torch, name)))
    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned(torch.Tensor.new_empty))


@pytest.mark.parametrize("depth", [1, 2])
def test_blocks_come_back_whenever_requests_are_aborted(tiny_checkpoint, depth):
    """C066: 200 requests, half of them aborted while waiting, in prefill, decoding or at the end;
    C072 as far as the engine goes: the others do not notice."""
    path = tiny_checkpoint("llama")
    rng = random.Random(depth)
    core = make_core(
        path, num_kv_blocks=24, block_size=8, max_num_batched_tokens=24, max_steps_in_flight=depth
    )
    prompts = {f"r{n}": ids(rng.randrange(1, 60), n % 40) for n in range(200)}
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    victims = {r for n, r in enumerate(prompts) if n % 2}
    pending, streams = list(prompts.items()), {}
    aborted = set()
    while pending or core.has_work():
        for request_id, prompt in pending[:3]:
            assert add(core, request_id, prompt, params) == []
        del pending[:3]
        live = sorted(victims & core.scheduler.requests.keys())
        outputs = core.abort([rng.choice(live)]) if live and rng.random() < 0.8 else []
        aborted |= {o.request_id for o in outputs}
        for output in outputs + core.step():
            streams.setdefault(output.request_id, []).append(output)
        core.scheduler.check_integrity()
    check_idle(core)
    assert len(aborted) > 60
    for request_id in prompts:
        ends = [o.finish_reason for o in streams[request_id] if o.finish_reason is not None]
        assert ends == ["abort" if request_id in aborted else "length"]
    for request_id in sorted(prompts.keys() - aborted)[:20]:
        assert tokens_of(streams[request_id]) == alone(path, prompts[request_id], params)
    full = ids(24 * 8, 99)
    assert add(core, "full", full, GREEDY) == []
    (step,) = drain(core)["full"][-1:]
    assert step.finish_reason == "length"


# --- what can never run, and what fails -----------------------------------------------------------


@pytest.mark.parametrize(("num_tokens", "fits"), [(130, False), (128, True), (127, True)])
def test_prompt_larger_than_the_pool(tiny_checkpoint, num_tokens, fits):
    """C068: 8 blocks of 16 tokens; who can never run is told at once and blocks nobody."""
    core = make_core(tiny_checkpoint("llama"), num_kv_blocks=8, max_model_len=512)
    refused = add(core, "A", ids(num_tokens, 1))
    assert bool(refused) is not fits
    add(core, "B", ids(5, 2))
    outputs = drain(core)
    assert len(tokens_of(outputs["B"])) == 12
    if fits:
        # Room for the rest of the pool, and one more token that nothing is computed from.
        assert len(tokens_of(outputs["A"])) == 128 - num_tokens + 1
        assert outputs["A"][-1].finish_reason == "length"
    else:
        assert refused[0].finish_reason == "error"
        assert refused[0].error.startswith(PROMPT_TOO_LONG) and "128" in refused[0].error


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_not_a_number_in_the_weights_ends_requests_and_not_the_engine(
    tiny_checkpoint, tmp_path, prefix_caching
):
    """A token with a corrupt embedding spoils the requests that contain it, and no other: neither
    beside them in a batch nor later in their blocks."""
    sound = tiny_checkpoint("llama", tie_word_embeddings=False)
    broken = shutil.copytree(sound, tmp_path / "broken")
    tensors = load_file(broken / "model.safetensors")
    tensors["model.embed_tokens.weight"][7] = float("nan")
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    healthy = [[i for i in ids(60, n) if i != 7][: 20 + n] for n in range(4)]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logit_bias={7: -100})
    expected = [alone(sound, prompt, params) for prompt in healthy]
    core = make_core(broken, num_kv_blocks=8, enable_prefix_caching=prefix_caching)
    for n in range(4):
        # It shares a block with a prompt that comes later, so what it wrote must be forgotten.
        add(core, f"sick {n}", [*healthy[n][:17], 7, 9], params)
        add(core, f"healthy {n}", healthy[n - 1], params)
        outputs = drain(core)
        assert tokens_of(outputs[f"sick {n}"]) == []
        assert outputs[f"sick {n}"][-1].finish_reason == "error"
        assert outputs[f"sick {n}"][-1].error.startswith("internal_error")
        assert tokens_of(outputs[f"healthy {n}"]) == expected[n - 1]
        add(core, f"after {n}", healthy[n], params)
        assert tokens_of(drain(core)[f"after {n}"]) == expected[n]


# --- sampling -------------------------------------------------------------------------------------


SEEDED = {
    "alone": {},
    "chunked": {"max_num_batched_tokens": 7},
    "two at a time": {"max_num_seqs": 2},
    "preempted": {"block_size": 4, "num_kv_blocks": 16},
    "overlapped": {"max_steps_in_flight": 2},
    "overlapped, preempted": {"max_steps_in_flight": 2, "block_size": 4, "num_kv_blocks": 16},
    "no cache": {"enable_prefix_caching": False},
}


@pytest.mark.parametrize("setting", SEEDED)
def test_same_seed_same_tokens(tiny_checkpoint, setting):
    """Whatever the batch, the chunks or the preemptions; penalties and filters included."""
    path = tiny_checkpoint("llama")
    every = [
        SamplingParams(temperature=1, seed=11, max_tokens=16, ignore_eos=True),
        SamplingParams(temperature=0.8, top_p=0.9, seed=12, max_tokens=16, ignore_eos=True),
        SamplingParams(temperature=1.3, top_k=40, seed=-3, max_tokens=16, ignore_eos=True),
        SamplingParams(
            temperature=1,
            min_p=0.02,
            repetition_penalty=1.2,
            frequency_penalty=0.4,
            seed=2**62,
            max_tokens=16,
            ignore_eos=True,
        ),
    ]
    prompts = [ids(11, n) for n in range(4)]
    expected = [alone(path, p, s) for p, s in zip(prompts, every, strict=True)]
    assert len({tuple(e) for e in expected}) == 4
    core = make_core(path, **SEEDED[setting])
    for n in range(8):
        add(core, f"r{n}", prompts[n % 4], every[n % 4])
    outputs = drain(core)
    assert [tokens_of(outputs[f"r{n}"]) for n in range(8)] == expected * 2
    if "preempted" in setting:
        assert core.stats().preemptions_total > 0


def test_same_seed_same_tokens_from_a_warm_cache(tiny_checkpoint):
    """The draw depends on seed and position, not on where the prompt's blocks come from."""
    path = tiny_checkpoint("llama")
    params = SamplingParams(temperature=1, seed=11, max_tokens=16, ignore_eos=True)
    core = make_core(path)
    prompt, outputs = ids(45, 1), []
    for n in range(3):
        add(core, f"r{n}", prompt, params)
        outputs.append(drain(core)[f"r{n}"])
    assert [steps[0].num_cached_tokens for steps in outputs] == [0, 32, 32]
    assert tokens_of(outputs[0]) == tokens_of(outputs[1]) == tokens_of(outputs[2])


def test_seed_of_the_engine_makes_unseeded_requests_repeatable(tiny_checkpoint):
    path = tiny_checkpoint("llama")
    params = SamplingParams(temperature=1, max_tokens=16, ignore_eos=True)

    def run(seed):
        core = make_core(path, seed=seed)
        for n in range(3):
            add(core, f"r{n}", [5, 6, 7], params)
        outputs = drain(core)
        return [tokens_of(outputs[f"r{n}"]) for n in range(3)]

    first = run(1)
    assert run(1) == first and run(2) != first
    assert len({tuple(tokens) for tokens in first}) == 3, "equal requests differ within a run"
    assert run(None) != run(None)


# --- dtypes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wanted", "used"),
    [("auto", "float32"), ("float32", "float32"), ("bfloat16", "bfloat16")],
)
def test_one_working_dtype(tiny_checkpoint, wanted, used):
    """C096: a bfloat16 checkpoint runs in float32 on the CPU unless it is asked not to."""
    core = make_core(tiny_checkpoint("llama", dtype=torch.bfloat16), dtype=wanted)
    assert core.ready.dtype == used
    dtypes = {p.dtype for p in core.worker.model.parameters()} | {core.worker.runner.kv_cache.dtype}
    assert dtypes == {getattr(torch, used)}
    add(core, "r", ids(20, 1))
    assert len(tokens_of(drain(core)["r"])) == 12


# --- waiting --------------------------------------------------------------------------------------


def test_a_long_queue_is_not_looked_through_in_every_step(tiny_checkpoint, monkeypatch):
    """C119: 2,000 queued behind one seat; the prefix cache is asked once per admission."""
    core = make_core(tiny_checkpoint("llama"), max_num_seqs=1)
    add(core, "running", ids(20, 1), SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
    core.step()
    for n in range(2000):
        add(core, f"r{n}", ids(20, n))
    asked = []
    manager = core.scheduler.kv_cache_manager
    get_computed_blocks = manager.get_computed_blocks
    monkeypatch.setattr(
        manager, "get_computed_blocks", lambda r: asked.append(r) or get_computed_blocks(r)
    )
    for _ in range(30):
        core.step()
    assert asked == []
    assert len(core.abort([f"r{n}" for n in range(1999)])) == 1999
    outputs = drain(core)
    assert len(asked) == 1 and len(tokens_of(outputs["r1999"])) == 12


def test_text_of_a_stream_equals_the_text_of_its_tokens(tiny_checkpoint):
    """C061 for text: pieces released step by step, under preemption, join to the whole."""
    path = tiny_checkpoint("llama")
    llm = LLM(model=str(path), device="cpu", block_size=4, num_kv_blocks=14, max_model_len=64)
    params = SamplingParams(temperature=0, presence_penalty=1, max_tokens=24, ignore_eos=True)
    prompts = [ids(10 + n, n) for n in range(4)]
    done = llm.generate(prompts, params)
    assert llm.engine.stats().preemptions_total >= 2
    for prompt, completion in zip(prompts, done, strict=True):
        tokens = alone(path, prompt, params)
        assert completion.token_ids == tokens
        processor = OutputProcessor(llm.tokenizer, params, prompt)
        core = make_core(path)
        add(core, "r", prompt, params)
        pieces = [t for o in drain(core)["r"] if (t := processor.process(o)) is not None]
        assert completion.text == "".join(t.text for t in pieces)
