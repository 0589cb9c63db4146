"""Hugging Face sequential and static batching against pageserve, in one run, float32.

All requests arrive at once and each generates exactly its budget. Sequential runs one `generate`
after the other. Static batching left-pads all prompts into one batch that runs to the longest
budget; its callers get nothing before `generate` returns, so that is its time to first token (the
time its first step took is printed as well). pageserve streams.

What this does not show: an open loop of arrivals, HTTP (see serving.py), long prompts, a GPU.

    python benchmarks/throughput.py [--repeat 3] [--json FILE]
"""

import argparse
import gc
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from common import Job, chat_jobs, machine, percentile, read_bandwidth, report
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers.generation.streamers import BaseStreamer

from pageserve.config import DEMO_MODEL
from pageserve.hub import resolve_model
from pageserve.llm import LLM
from pageserve.model_config import load_model_config
from pageserve.models.gguf import iterate_gguf
from pageserve.sampling_params import SamplingParams


@dataclass
class Run:
    """Times in seconds from the common arrival, one entry per request."""

    seconds: float
    tokens: list[list[int]]
    ttft: list[float]
    latency: list[float]
    extra: dict[str, Any] = field(default_factory=dict)

    def row(self) -> dict[str, Any]:
        return {
            "tokens_per_s": sum(map(len, self.tokens)) / self.seconds,
            "ttft_p50": percentile(self.ttft, 50),
            "ttft_p99": percentile(self.ttft, 99),
            "latency_p99": percentile(self.latency, 99),
            **self.extra,
        }


class _FirstToken(BaseStreamer):
    """Notes when the second `put` (the first generated token) comes."""

    def __init__(self) -> None:
        self.puts = 0
        self.time = 0.0

    def put(self, value: torch.Tensor) -> None:
        self.puts += 1
        if self.puts == 2:
            self.time = time.perf_counter()

    def end(self) -> None:
        pass


def run_sequential(model: LlamaForCausalLM, jobs: list[Job]) -> Run:
    start = time.perf_counter()
    tokens, ttft, latency = [], [], []
    for job in jobs:
        streamer = _FirstToken()
        ids = torch.tensor([job.prompt_token_ids])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),  # else it hides prompt tokens equal to the pad
            generation_config=_greedy(job.budget),
            streamer=streamer,
        )
        tokens.append(out[0, ids.shape[1] :].tolist())
        ttft.append(streamer.time - start)
        latency.append(time.perf_counter() - start)
    return Run(time.perf_counter() - start, tokens, ttft, latency)


def run_static(model: LlamaForCausalLM, jobs: list[Job], batch_size: int) -> Run:
    start = time.perf_counter()
    tokens, ttft, latency, first = [], [], [], []
    for i in range(0, len(jobs), batch_size):
        batch = jobs[i : i + batch_size]
        width = max(len(j.prompt_token_ids) for j in batch)
        ids = torch.zeros(len(batch), width, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, job in enumerate(batch):
            ids[row, width - len(job.prompt_token_ids) :] = torch.tensor(job.prompt_token_ids)
            mask[row, width - len(job.prompt_token_ids) :] = 1

        def note_first(_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            if not first:
                first.append(time.perf_counter() - start)
            return scores

        out = model.generate(
            ids,
            attention_mask=mask,
            generation_config=_greedy(max(j.budget for j in batch)),
            logits_processor=[note_first],
        )
        done = time.perf_counter() - start
        for row, job in enumerate(batch):
            tokens.append(out[row, width : width + job.budget].tolist())
            ttft.append(done)
            latency.append(done)
    extra = {"batch_size": batch_size, "first_step_done": first[0]}
    return Run(time.perf_counter() - start, tokens, ttft, latency, extra)


def run_pageserve(llm: LLM, jobs: list[Job]) -> Run:
    llm.engine.scheduler.reset_prefix_cache()
    before = llm.engine.stats()
    params = [SamplingParams(temperature=0, max_tokens=j.budget, ignore_eos=True) for j in jobs]
    start = time.perf_counter()
    done = llm.generate([j.prompt_token_ids for j in jobs], params)
    seconds = time.perf_counter() - start
    after = llm.engine.stats()
    extra = {
        "steps": after.steps_total - before.steps_total,
        "preemptions": after.preemptions_total - before.preemptions_total,
        "peak_blocks": after.peak_used_blocks,
        "cached_tokens": sum(c.num_cached_tokens for c in done),
    }
    return Run(
        seconds,
        [c.token_ids for c in done],
        [c.first_token_time for c in done],
        [c.finish_time for c in done],
        extra,
    )


def transformers_model(path: Path) -> LlamaForCausalLM:
    """Fill transformers' Llama with the float32 values of a GGUF file."""
    config = load_model_config(path)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            max_position_embeddings=config.max_position_embeddings,
            rms_norm_eps=config.rms_norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope.theta},
            tie_word_embeddings=config.tie_word_embeddings,
            eos_token_id=None,  # every request generates its whole budget
        )
    )
    weights = {"model." + n.removeprefix("model."): t for n, t in iterate_gguf(path, config)}
    left = model.load_state_dict(weights, strict=False)
    assert not left.unexpected_keys and left.missing_keys in ([], ["lm_head.weight"]), left
    return model.eval()


def _greedy(budget: int) -> GenerationConfig:
    return GenerationConfig(
        max_new_tokens=budget,
        do_sample=False,
        repetition_penalty=1.0,
        eos_token_id=None,
        pad_token_id=0,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--budgets", type=int, nargs=2, default=(2, 32), metavar=("LOW", "HIGH"))
    parser.add_argument("--repeat", type=int, default=3, help="runs of each; the median counts")
    parser.add_argument("--json", help="also write the result to this file")
    args = parser.parse_args()

    path = resolve_model(DEMO_MODEL, None)
    sharing = LLM(model=str(path), dtype="float32", max_model_len=1024)
    plain = LLM(model=str(path), dtype="float32", max_model_len=1024, enable_prefix_caching=False)
    reference = transformers_model(path)
    jobs = chat_jobs(sharing.tokenizer, args.requests, *args.budgets)
    weight_bytes = sum(p.numel() * p.element_size() for p in reference.parameters())
    bandwidth = read_bandwidth()
    ceiling = bandwidth / weight_bytes
    print(f"memory read {bandwidth / 1e9:.1f} GB/s; weights {weight_bytes / 1e6:.0f} MB; so one")
    print(f"stream cannot exceed about {ceiling:.1f} tokens/s in float32 on this machine\n")

    longest = [Job(jobs[0].prompt_token_ids, 64)]
    runs: dict[str, list[Run]] = {}
    with torch.inference_mode():
        contenders = {
            "hf sequential": lambda: run_sequential(reference, jobs),
            "hf static 24": lambda: run_static(reference, jobs, 24),
            "hf static 8": lambda: run_static(reference, jobs, 8),
            "pageserve": lambda: run_pageserve(sharing, jobs),
            "pageserve, no sharing": lambda: run_pageserve(plain, jobs),
            "single: hf": lambda: run_sequential(reference, longest),
            "single: pageserve": lambda: run_pageserve(sharing, longest),
        }
        for run in contenders.values():
            run()  # warm up: thread pools, allocator, code
        for _ in range(args.repeat):  # interleaved, so that a slow minute hits all alike
            for name, run in contenders.items():
                gc.collect()
                runs.setdefault(name, []).append(run())

    rows = {name: _median(r) for name, r in runs.items()}
    static = max(("hf static 24", "hf static 8"), key=lambda n: rows[n]["tokens_per_s"])
    _print_table(rows, static)
    equal = [
        runs["hf sequential"][0].tokens == r.tokens
        for n in runs
        if n in ("pageserve", "pageserve, no sharing")
        for r in runs[n]
    ]
    ratios = {
        "vs_static": rows["pageserve"]["tokens_per_s"] / rows[static]["tokens_per_s"],
        "vs_sequential": rows["pageserve"]["tokens_per_s"] / rows["hf sequential"]["tokens_per_s"],
        "ttft_p50_vs_static": rows["pageserve"]["ttft_p50"] / rows[static]["ttft_p50"],
        "single_vs_hf": rows["single: pageserve"]["tokens_per_s"]
        / rows["single: hf"]["tokens_per_s"],
        "single_vs_ceiling": rows["single: pageserve"]["tokens_per_s"] / ceiling,
    }
    print("\n" + "\n".join(f"{k:<20} {v:.2f}" for k, v in ratios.items()))
    print(f"tokens equal to Hugging Face sequential in every run: {all(equal)}\n")
    report(
        {
            "benchmark": "throughput",
            "machine": machine(),
            "requests": args.requests,
            "budgets": list(args.budgets),
            "prompt_tokens": sum(len(j.prompt_token_ids) for j in jobs),
            "output_tokens": sum(j.budget for j in jobs),
            "read_bandwidth_gb_s": bandwidth / 1e9,
            "ceiling_single_tokens_per_s": ceiling,
            "best_static": static,
            "rows": rows,
            "ratios": ratios,
            "tokens_equal": all(equal),
        },
        args.json,
    )


def _median(runs: list[Run]) -> dict[str, Any]:
    rows = [r.row() for r in runs]
    return {k: statistics.median(row[k] for row in rows) for k in rows[0]}


def _print_table(rows: dict[str, dict[str, Any]], static: str) -> None:
    print(f"{'':<22}    tok/s vs static  TTFT p50     p99  lat. p99  steps")
    for name, r in rows.items():
        ratio = r["tokens_per_s"] / rows[static]["tokens_per_s"]
        print(
            f"{name:<22} {r['tokens_per_s']:>8.1f} {ratio:>8.2f}x {r['ttft_p50']:>8.3f}s "
            f"{r['ttft_p99']:>6.3f}s {r['latency_p99']:>8.3f}s  {r.get('steps', '')}"
        )


if __name__ == "__main__":
    main()
