"""Two servers are compared on the same work, or not at all."""

import subprocess
import sys
from pathlib import Path

import llama_cpp
import pytest
from common import Job
from fakes import ScriptedEngine, byte_tokenizer, scripted
from load.client import Target

ROOT = Path(__file__).resolve().parents[2]


def engine():
    return ScriptedEngine(byte_tokenizer(), scripted("a" * 99), step_delay=0.001)


def jobs_of(streams, turn):
    return [Job([100 + turn, 100 + i, 5], 4 + i) for i in range(streams)]


def test_both_servers_get_every_round_and_the_warm_up_does_not_count(serve, tmp_path):
    engines = {"one": engine(), "two": engine()}
    servers = {name: Target(serve(e), "tiny") for name, e in engines.items()}
    rows = llama_cpp.compare(servers, jobs_of, [1, 3], rounds=2)
    assert [(r["streams"], r["server"]) for r in rows] == [
        (1, "one"), (1, "two"), (3, "one"), (3, "two"),
    ]  # fmt: skip
    assert all(row[name] > 0 for row in rows for name in llama_cpp.FIGURES)
    llama_cpp.draw(rows, tmp_path / "beside")
    assert (tmp_path / "beside.svg").exists()
    prompts = {n: sorted(r.prompt_token_ids for r in e.requests) for n, e in engines.items()}
    asked = [job.prompt_token_ids for n in (1, 3) for turn in range(3) for job in jobs_of(n, turn)]
    assert prompts["one"] == prompts["two"] == sorted(asked)
    assert all(r.sampling_params.ignore_eos for e in engines.values() for r in e.requests)


def test_unequal_work_is_refused(serve):
    short = ScriptedEngine(byte_tokenizer(), "hi", max_model_len=6)  # ends at its context
    with pytest.raises(
        RuntimeError, match=r"short counted \(3, 3\) tokens in and out, not \(3, 4\)"
    ):
        llama_cpp.measure("short", Target(serve(short), "tiny"), jobs_of(1, 0))
    broken = ScriptedEngine(byte_tokenizer(), "hi", fail_at=1)
    with pytest.raises(RuntimeError, match="broken failed"):
        llama_cpp.measure("broken", Target(serve(broken), "tiny"), jobs_of(1, 0))


def test_medians_leave_out_the_rounds_that_were_disturbed():
    def run(rate, ms):
        spread = {"p50": ms, "p99": 1e9}
        return {"output_tokens_per_s": rate, "ttft_ms": spread, "tpot_ms": spread, "e2e_ms": spread}

    found = llama_cpp.medians([run(100.0, 5.0), run(1.0, 900.0), run(90.0, 6.0)])
    assert found == {"output_tokens_per_s": 90.0, "ttft_ms": 6.0, "tpot_ms": 6.0, "e2e_ms": 6.0}


def test_a_server_that_cannot_start_ends_the_comparison():
    with (
        pytest.raises(RuntimeError, match="exit code 1"),
        llama_cpp.llama_server("/bin/false", Path("model.gguf"), 2),
    ):
        pass


def test_without_a_binary_it_says_how_to_get_one():
    done = subprocess.run(
        [sys.executable, "benchmarks/llama_cpp.py"],
        cwd=ROOT,
        env={"PATH": "/nowhere", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and "--help says how to build it" in done.stderr
