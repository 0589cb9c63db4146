"""The verification commands pass what is right, and fail what is wrong, on tiny models."""

import json
import shutil

import pytest
import torch
import verify_end_to_end
import verify_model
from helpers import edit_json
from safetensors.torch import load_file, save_file
from verification import Greedy, Prompt, compute_in, load_reference, reference_greedy
from verify_end_to_end import Departure, Run, Variant, departures, judge
from verify_model import TOLERANCES, Comparison, failures

from pageserve.llm import Completion
from pageserve.messages import SchedulerStats

FEW = ["plain", "chunks of 61", "prefix cache hits", "preemption, overlap, chunks"]


@pytest.fixture(scope="module")
def wrong_weight(tiny_checkpoint, tmp_path_factory):
    """One bias of one layer is off: the kind of fault that still produces text."""
    path = tmp_path_factory.mktemp("wrong") / "model"
    shutil.copytree(tiny_checkpoint("qwen2"), path)
    weights = load_file(path / "model.safetensors")
    weights["model.layers.1.self_attn.v_proj.bias"] *= 0.9
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path


def run(command, model, tmp_path, *flags):
    file = tmp_path / "result.json"
    code = command.main(["--model", str(model), "--device", "cpu", "--json", str(file), *flags])
    return code, json.loads(file.read_text())


# --- verify_model ---------------------------------------------------------------------------------


def test_right_logits_pass(tiny_checkpoint, tmp_path, capsys):
    dtypes = ("float32", "bfloat16", "float16")
    code, result = run(verify_model, tiny_checkpoint("qwen2"), tmp_path, "--dtype", *dtypes)
    assert code == 0 and result["passed"]
    assert [r["dtype"] for r in result["runs"]] == list(dtypes)
    for found in result["runs"]:
        assert {row["way"] for row in found["prompts"]} == {"whole", "in pieces"}
        assert found["all"]["whole"]["max_diff"] > 0
    assert {"commit", "torch", "transformers", "cpu"} <= result["machine"].keys()
    assert "/" not in result["model"]  # a name, not a folder of this machine
    assert "random 200" in capsys.readouterr().out


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_wrong_weight_fails_the_logits(tiny_checkpoint, wrong_weight, tmp_path, dtype):
    flags = ["--reference", str(tiny_checkpoint("qwen2")), "--dtype", dtype]
    code, result = run(verify_model, wrong_weight, tmp_path, *flags)
    assert code == 1 and not result["passed"]
    assert any("diff" in reason for reason in result["runs"][0]["failed"]["whole"])


def test_pieces_cover_every_prompt_length():
    for length in (1, 2, 9, 33, 41, 42, 200):
        pieces = verify_model._pieces(length)
        assert sum(pieces) == length and min(pieces) > 0 and max(pieces) <= verify_model.CHUNK


def test_another_best_token_counts_unless_it_is_a_near_tie():
    reference = torch.tensor([[1.0, 0.0, 0.99], [1.0, 0.0, 0.5]])
    swapped = torch.tensor([[0.99, 0.0, 1.0], [0.5, 0.0, 1.0]])
    c = Comparison.of(swapped, reference, near_tie=0.05, least_scale=1.0)
    assert (c.positions, c.same_top1, c.near_ties) == (2, 0, 1)
    assert c.max_diff == 0.5 and c.kl > 0
    assert any("best tokens" in reason for reason in failures(c, TOLERANCES["float16"], None))


def test_equal_logits_are_within_every_tolerance():
    logits = torch.randn(5, 9)
    for tolerance in TOLERANCES.values():
        c = Comparison.of(logits, logits, tolerance.near_tie, 1.0)
        assert failures(c, tolerance, theirs=c) == []


def test_what_is_not_finite_fails():
    """NaN is larger than no tolerance."""
    reference = torch.randn(2, 4)
    c = Comparison.of(reference.clone().fill_(torch.nan), reference, 0.05, 1.0)
    assert failures(Comparison.pool([c]), TOLERANCES["bfloat16"], None)


def test_worse_than_transformers_fails():
    reference = torch.randn(8, 50, generator=torch.Generator().manual_seed(0))
    ours, theirs = (
        Comparison.of(reference * factor, reference, 0.05, 0.0) for factor in (1.02, 1.01)
    )
    tolerance = TOLERANCES["bfloat16"]
    assert failures(ours, tolerance, None) == []
    assert any("transformers" in reason for reason in failures(ours, tolerance, theirs))


# --- verify_end_to_end ----------------------------------------------------------------------------


def test_right_tokens_pass(tiny_checkpoint, tmp_path):
    flags = ["--max-tokens", "12", "--only", *FEW]
    code, result = run(verify_end_to_end, tiny_checkpoint("llama"), tmp_path, *flags)
    assert code == 0
    rows = {row["variant"]: row for row in result["runs"][0]["rows"]}
    assert list(rows) == FEW
    assert all(row["equal"] + row["near ties"] == 13 for row in rows.values())
    assert rows["prefix cache hits"]["cached"] > rows["plain"]["cached"]
    assert rows["preemption, overlap, chunks"]["preemptions"] > 0


def test_bfloat16_tokens_pass_by_the_rule(tiny_checkpoint, tmp_path):
    """By default a few variants of shorter answers; the GPU's are not among them here."""
    flags = ["--dtype", "bfloat16", "--bound", "0.3"]
    code, result = run(verify_end_to_end, tiny_checkpoint("llama"), tmp_path, *flags)
    (found,) = result["runs"]
    assert code == 0 and found["bound"] == 0.3 and found["max_tokens"] == 16
    assert [row["variant"] for row in found["rows"]] == list(verify_end_to_end.IN_16_BITS[:4])


def test_the_variants_of_16_bits_are_known():
    variants = verify_end_to_end.make_variants([Prompt("p", [0] * 20)], 8, "cuda")
    assert set(verify_end_to_end.IN_16_BITS) < variants.keys()


def test_a_wrong_weight_fails_the_tokens(tiny_checkpoint, wrong_weight, tmp_path):
    flags = ["--reference", str(tiny_checkpoint("qwen2")), "--max-tokens", "12", "--only", "plain"]
    code, result = run(verify_end_to_end, wrong_weight, tmp_path, *flags)
    assert code == 1 and "departs" in result["runs"][0]["rows"][0]["verdict"]


def test_an_unknown_variant_is_refused(tiny_checkpoint, capsys):
    with pytest.raises(SystemExit):
        verify_end_to_end.main(["--model", str(tiny_checkpoint("llama")), "--only", "nothing"])
    assert "plain" in capsys.readouterr().err


def answered(*answers, **stats):
    return Run([Completion([], token_ids=a) for a in answers], SchedulerStats(**stats))


def test_only_the_first_difference_counts():
    """Behind a near tie everything differs, and none of that says anything."""
    reference = [Greedy([1, 2, 3, 4], [2.0, 0.01, 5.0, 5.0])]
    found = departures([Prompt("p", [0])], answered([1, 9, 9, 9]), reference)
    assert found == [Departure("p", 1, 0.01)]
    assert judge(Variant(), answered(), found, bound=0.05) == []
    assert judge(Variant(), answered(), found, bound=0.005)


def test_a_sure_token_may_not_differ():
    reference = [Greedy([1, 2, 3], [2.0, 2.0, 0.0])]
    found = departures([Prompt("p", [0])], answered([1, 9, 3]), reference)
    assert judge(Variant(), answered(), found, bound=0.05)


@pytest.mark.parametrize("tokens", [[], [1, 2]])
def test_too_few_tokens_fail(tokens):
    reference = [Greedy([1, 2, 3], [0.0, 0.0, 0.0])]
    found = departures([Prompt("p", [0])], answered(tokens), reference)
    assert judge(Variant(), answered(), found, bound=1e9)


def test_a_variant_must_do_what_it_is_for():
    variants = verify_end_to_end.make_variants([Prompt("p", [0] * 20)], 8, "cuda")
    assert {"no CUDA graphs", "torch_blockwise"} <= variants.keys()
    preempting = variants["preemption"]
    assert judge(preempting, answered([1]), [], 0.05) == ["did not do what it is to test"]
    assert judge(preempting, answered([1], preemptions_total=1), [], 0.05) == []
    assert judge(variants["prefix cache hits"], answered([1]), [], 0.05)
    assert judge(variants["chunks of 16"], answered([1], steps_total=1), [], 0.05)


def test_the_reference_ignores_the_models_repetition_penalty(tiny_checkpoint, tmp_path):
    """Qwen2.5 ships 1.05 to 1.1, which `generate` applies to greedy decoding too."""
    path = tmp_path / "model"
    shutil.copytree(tiny_checkpoint("qwen2"), path)
    model = load_reference(path, torch.float32, torch.float32, "cpu")
    prompt = Prompt("p", [5, 6, 7, 5, 6, 7, 5, 6])
    plain = reference_greedy(model, prompt, 16, tokenizer_size=320)
    edit_json(path / "generation_config.json", repetition_penalty=1.9, eos_token_id=list(range(50)))
    penalised = load_reference(path, torch.float32, torch.float32, "cpu")
    assert penalised.generation_config.repetition_penalty == 1.9
    assert reference_greedy(penalised, prompt, 16, tokenizer_size=320) == plain
    assert len(plain.token_ids) == 16 and min(plain.margins) > 0


def test_a_reference_that_computes_in_another_type_is_the_one_loaded_for_it(tiny_checkpoint):
    path, half = tiny_checkpoint("llama"), torch.bfloat16
    changed = load_reference(path, half, torch.float32, "cpu")
    compute_in(changed, half)
    loaded = load_reference(path, half, half, "cpu")
    ids = torch.arange(3, 40)[None]
    with torch.inference_mode():
        assert torch.equal(changed(ids).logits, loaded(ids).logits)
