"""Throughput, prefix sharing and attention memory: the logic, on small models and made-up times."""

import argparse
import contextlib
import copy

import attention
import pytest
import structured
import torch
from common import Job, chat_jobs
from prefix import SHARES, draw, prompts_with_common_part, study
from runs import Run, run_pageserve
from throughput import (
    run_continuous,
    run_sequential,
    run_static,
    summarise,
    transformers_model,
    warm_up,
)
from transformers import LlamaForCausalLM

from pageserve.llm import LLM


@pytest.fixture(scope="module")
def llm(tiny_checkpoint):
    return LLM(model=str(tiny_checkpoint("llama")), dtype="float32", max_model_len=128)


def test_row_by_hand():
    run = Run(4.0, [[1, 2, 3], [1]], [1.0, 2.0], [3.0, 2.0], {"steps": 3})
    assert run.row() == {
        "tokens_per_s": 1.0,
        "ttft_p50": 2.0,
        "ttft_p99": 2.0,
        "latency_p99": 3.0,
        "tpot_p50": 1.0,
        "tpot_p99": 1.0,
        "steps": 3,
    }


def test_an_engine_that_does_not_stream_has_no_time_per_token():
    row = Run(4.0, [[1, 2], [1, 2]], None, [3.0, 4.0]).row()
    assert row["ttft_p50"] == row["latency_p99"] == 4.0 and "tpot_p50" not in row


def test_larger_batches_take_fewer_steps_and_the_same_tokens(llm):
    jobs = [Job([1 + i, 2, 3, 4, 5], 6) for i in range(8)]
    runs = [run_pageserve(llm, jobs, max_num_seqs=batch) for batch in (1, 4, 8)]
    steps = [r.row()["steps"] for r in runs]
    assert steps == [48, 12, 6]
    assert runs[0].tokens == runs[1].tokens == runs[2].tokens
    assert llm.engine.scheduler.max_num_seqs == 8
    blocks = [r.row()["peak_blocks"] for r in runs]
    assert blocks == [1, 4, 8]  # a peak is the run's own


def test_prompts_share_exactly_the_given_part():
    for share, same in ((0, 0), (50, 20), (90, 36), (100, 40)):
        jobs = prompts_with_common_part(share, 5, 40, 3, vocab_size=1000)
        assert {len(j.prompt_token_ids) for j in jobs} == {40}
        columns = [
            len(set(column)) for column in zip(*(j.prompt_token_ids for j in jobs), strict=True)
        ]
        assert columns[:same] == [1] * same
        assert same == 40 or columns[same] == 5


def test_sharing_saves_blocks(llm, tmp_path):
    args = argparse.Namespace(requests=4, prompt=64, output=2, repeat=1, dtype="float32")
    rows = study(llm, args)
    assert list(rows) == [str(s) for s in SHARES]
    saved = [row["blocks_saved"] for row in rows.values()]
    assert saved[0] == 0 and saved == sorted(saved) and saved[-1] > 0.3
    assert all(row["no_sharing"]["cached_tokens"] == 0 for row in rows.values())
    # Four blocks of 16 each and one for the output; half of the prompt is two shared blocks.
    assert rows["50"]["no_sharing"]["peak_blocks"] - rows["50"]["sharing"]["peak_blocks"] == 3 * 2
    draw(rows, tmp_path / "prefix")
    assert (tmp_path / "prefix.svg").exists()


def runs(equal=True):
    def run(seconds, tokens=((1, 2),)):
        return Run(seconds, [list(t) for t in tokens], [seconds / 2], [seconds], {"steps": 2})

    ours = run(1.0) if equal else run(1.0, [(1, 3)])
    result = {"hf sequential": [run(4.0)], "hf static 24": [run(3.0)], "hf static 8": [run(2.0)]}
    result |= {"pageserve": [run(1.0), ours], "single: hf": [run(2.0)]}
    return result | {"single: pageserve": [run(1.0)]}


def test_ratios_are_against_the_best_static_batch():
    result = summarise(runs(), ceiling=4.0)
    assert result["best_static"] == "hf static 8"
    assert result["ratios"]["vs_static"] == 2 and result["ratios"]["vs_sequential"] == 4
    assert result["ratios"]["single_vs_ceiling"] == 0.5 and "vs_continuous" not in result["ratios"]


def test_unequal_tokens_in_any_run_are_told():
    unequal = summarise(runs(equal=False), 4.0)
    assert not unequal["tokens_equal"] and unequal["equal"]["pageserve"] == 0
    equal = summarise(runs(), 4.0)
    assert equal["tokens_equal"] and set(equal["equal"].values()) == {1}


def test_only_transformers_continuous_batching_may_be_skipped():
    def fails(jobs):
        raise RuntimeError("not on this device\nmore")

    contenders = {"hf continuous": fails, "pageserve": lambda jobs: None}
    assert warm_up(contenders, []) == {"hf continuous": "RuntimeError: not on this device"}
    assert list(contenders) == ["pageserve"]
    with pytest.raises(RuntimeError):
        warm_up({"pageserve": fails}, [])


def test_the_reference_engines_agree(tiny_checkpoint):
    """Static and continuous batches of transformers give what one request alone gets."""
    model = LlamaForCausalLM.from_pretrained(tiny_checkpoint("llama")).eval()
    jobs = [Job([5, 6, 7], 3), Job([8, 9, 10, 11, 12], 2)]
    with torch.inference_mode():
        alone = run_sequential(model, jobs)
        assert [len(t) for t in alone.tokens] == [3, 2]
        assert run_static(model, jobs, 2).tokens == alone.tokens
        continuous = run_continuous(model, jobs, 2)
    assert continuous.tokens == alone.tokens
    times = zip(continuous.first_token, continuous.latency, strict=True)
    assert all(0 < first <= last <= continuous.seconds for first, last in times)


def test_a_stuck_peer_is_given_up(monkeypatch):
    """Its thread may live on and bring nothing; that may not hold up everything else."""

    class Stuck:
        device = torch.device("cpu")

        def continuous_batching_context_manager(self, **options):
            return contextlib.nullcontext(self)

        def add_request(self, *args, **options):
            return "id"

        def get_result(self, timeout):
            return None

        def is_running(self):
            return True

    monkeypatch.setattr("throughput.PATIENCE", 0.01)
    with pytest.raises(RuntimeError, match="no token for"):
        run_continuous(Stuck(), [Job([1], 1)], 1)


def test_a_directory_and_16_bits_are_taken_too(tiny_checkpoint):
    path = tiny_checkpoint("qwen2")
    model = transformers_model(path, torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert {b.dtype for n, b in model.named_buffers() if "inv_freq" in n} == {torch.float32}


def test_scratch_that_outlives_a_call_is_counted():
    from pageserve.attention.triton import StepPlan
    from pageserve.kernels.paged_decode import Cut, DecodePlan

    tile = attention.TorchBlockwiseBackend(4, 2, 16, 16, torch.float32, tile_tokens=16)
    inputs = (torch.tensor([0, 1]), torch.tensor([5]), torch.tensor([[0]]), torch.empty(0), 1, 5)
    assert attention.kept_bytes(tile, tile.build_metadata(*inputs)) == 2 * 16 * 2 * 16 * 4
    cut = Cut(*torch.zeros(5, 7, dtype=torch.int32), block_n=32)
    plan = StepPlan(None, decode=DecodePlan(cut))
    metadata = attention.AttentionMetadata(*inputs, plan=plan)
    assert attention.kept_bytes(object(), metadata) == 5 * 7 * 4


def test_the_meter_sees_a_temporary():
    def step():
        return torch.ones(1000).add(1).sum()  # two of 4,000 bytes at once

    assert 8000 <= attention.peak_bytes(step, "cpu") < 12000


def test_memory_of_a_gather_grows_and_in_place_does_not():
    args = argparse.Namespace(
        device="cpu", dtype="float32", num_heads=4, num_kv_heads=2, head_dim=16, seconds=0.0
    )
    short, long = (attention.run_memory(n, args) for n in (256, 2048))
    assert short["copied_kv_bytes"] == 2 * 256 * 2 * 16 * 4 <= short["gather_bytes"]
    assert long["gather_bytes"] > 6 * short["gather_bytes"]
    assert long["paged"]["block"]["bytes"] < 1.2 * short["paged"]["block"]["bytes"]
    assert long["gather_bytes"] > 20 * long["paged"]["block"]["bytes"]


def test_streams_are_counted_while_all_of_them_run(tiny_checkpoint, monkeypatch):
    """A plain stream gets a token in every step, whoever joins it, and so do those that join where
    masks are waited for, as they are here: a busy machine would have some of them miss steps."""
    llm = LLM(model=str(tiny_checkpoint("llama")), dtype="float32", max_model_len=128)
    monkeypatch.setattr(llm.engine, "_mask_timeout", lambda: 60.0)
    prompts = [[1 + i, 2, 3] for i in range(5)]
    alone = structured.measure(llm, prompts[:3], num_plain=3, budget=8, grammar=None)
    assert alone["joined_tokens_per_s"] == 0 and alone["plain_tokens_per_step"] == 1
    both = structured.measure(llm, prompts, num_plain=3, budget=8, grammar=structured.GRAMMAR)
    assert both["plain_tokens_per_step"] == 1
    assert both["joined_tokens_per_s"] == pytest.approx(both["plain_tokens_per_s"] * 2 / 3)
    assert not llm.engine.has_work()


def test_prompts_of_a_model_without_a_chat_template_share_their_beginning(llm):
    plain = [job.prompt_token_ids for job in chat_jobs(llm.tokenizer, 2, 1, 1)]
    tokenizer = copy.copy(llm.tokenizer)
    tokenizer.chat_templates = {}
    bare = [job.prompt_token_ids for job in chat_jobs(tokenizer, 2, 1, 1)]
    assert bare != plain
    for first, second in (plain, bare):
        assert first != second and first[:50] == second[:50]


def test_a_loss_is_the_median_of_paired_rounds(tmp_path):
    """A slow minute hits both of a pair, and one disturbed pair does not count."""

    def turn(plain, beside):
        return {"plain": {"plain_tokens_per_s": plain}, "x": {"plain_tokens_per_s": beside}}

    rounds = [turn(100, 80), turn(10, 8), turn(100, 1)]
    assert structured._loss(rounds, "plain", "x") == pytest.approx(0.2)
    names = ("plain_tokens_per_s", "joined_tokens_per_s", "steps_per_s")
    structured.draw({s: dict.fromkeys(names, 1.0) for s in structured.SETTINGS}, tmp_path / "s")
    assert (tmp_path / "s.svg").exists()
