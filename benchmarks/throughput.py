"""Hugging Face sequential, static and continuous against pageserve, in one run.

All requests arrive at once and each generates exactly its budget. Sequential runs one `generate`
after the other. Static batching left-pads all prompts into one batch that runs to the longest
budget; its callers get nothing before `generate` returns, so that is its time to first token (the
time its first step took is in the JSON). transformers' own continuous batching runs with the same
page size, step budget and batch, where it runs on the device at all. pageserve streams, with at
most 4, 8, 16 and 24 requests a step: the fuller the steps, the fewer.

In float32 the tokens of all must be equal. In 16 bits near ties fall either way; how many requests
have the tokens of sequential Hugging Face is told, and verify_end_to_end.py asks if that is right.

TPOT is the time per token after the first. What this does not show: an open loop of arrivals, HTTP
(see http_load.py), long prompts, other models than the one. On a GPU all run there.

    python benchmarks/throughput.py [--repeat 3] [--json FILE]
    python benchmarks/throughput.py --model DIR --dtype bfloat16
"""

import argparse
import functools
import gc
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import (
    Job,
    chat_jobs,
    machine,
    memory_bandwidth,
    name_of,
    report,
    synchronise,
)
from plots import bars, figures, line_style, lines
from runs import Run, median_row, run_pageserve
from transformers import (
    AutoModelForCausalLM,
    ContinuousBatchingConfig,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)
from transformers.generation.streamers import BaseStreamer

from pageserve.config import DEMO_MODEL
from pageserve.hub import resolve_model
from pageserve.llm import LLM
from pageserve.model_config import load_model_config
from pageserve.models.gguf import iterate_gguf
from pageserve.worker.worker import choose_device

PAGE = 16  # tokens, of both engines that page
BATCHES = (4, 8, 16, 24)  # max_num_seqs of pageserve's runs; the last is plainly "pageserve"
PATIENCE = 60.0  # seconds without a token after which transformers' continuous batching is stuck


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


def run_sequential(model: PreTrainedModel, jobs: list[Job]) -> Run:
    start = time.perf_counter()
    tokens, ttft, latency = [], [], []
    for job in jobs:
        streamer = _FirstToken()
        ids = torch.tensor([job.prompt_token_ids], device=model.device)
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


def run_static(model: PreTrainedModel, jobs: list[Job], batch_size: int) -> Run:
    start = time.perf_counter()
    tokens, latency, first = [], [], []
    for i in range(0, len(jobs), batch_size):
        batch = jobs[i : i + batch_size]
        width = max(len(j.prompt_token_ids) for j in batch)
        ids = torch.zeros(len(batch), width, dtype=torch.long, device=model.device)
        mask = torch.zeros_like(ids)
        for row, job in enumerate(batch):
            ids[row, width - len(job.prompt_token_ids) :] = torch.tensor(job.prompt_token_ids)
            mask[row, width - len(job.prompt_token_ids) :] = 1

        def note_first(_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            if not first:
                synchronise(scores.device.type)
                first.append(time.perf_counter() - start)
            return scores

        out = model.generate(
            ids,
            attention_mask=mask,
            generation_config=_greedy(max(j.budget for j in batch)),
            logits_processor=[note_first],
        )
        rows = out[:, width:].tolist()
        done = time.perf_counter() - start
        for row, job in zip(rows, batch, strict=True):
            tokens.append(row[: job.budget])
            latency.append(done)
    extra = {"batch_size": batch_size, "first_step_done": first[0]}
    return Run(time.perf_counter() - start, tokens, None, latency, extra)


@torch.inference_mode(False)  # the thread of transformers 5.17 knows no mode
def run_continuous(model: PreTrainedModel, jobs: list[Job], batch_size: int) -> Run:
    """transformers' own continuous batching, with pages and a step budget as in pageserve.

    Its start-up is not counted. Raises RuntimeError if its thread ends, a request fails or no token
    comes for PATIENCE seconds.
    """
    tokens = sum(len(j.prompt_token_ids) + j.budget for j in jobs)
    renamed = hasattr(ContinuousBatchingConfig, "page_size")
    page = "page_size" if renamed else "block_size"
    config = ContinuousBatchingConfig(
        **{page: PAGE},
        num_blocks=tokens // PAGE + 2 * len(jobs),
        max_batch_tokens=512,
        max_requests_per_batch=batch_size,
    )
    with model.continuous_batching_context_manager(
        generation_config=_greedy(max(j.budget for j in jobs)),
        continuous_batching_config=config,
        timeout=5,
        warmup=model.device.type == "cuda",
    ) as manager:
        start = time.perf_counter()
        ids = [
            manager.add_request(j.prompt_token_ids, max_new_tokens=j.budget, record_timestamps=True)
            for j in jobs
        ]
        done: dict[str, Any] = {}
        heard = start
        while len(done) < len(jobs):
            result = manager.get_result(timeout=1)
            now = time.perf_counter()
            if result is None:
                if not manager.is_running():
                    raise RuntimeError("its generation thread ended")
                if now - heard > PATIENCE:
                    raise RuntimeError(f"no token for {PATIENCE:.0f} s")
                continue
            heard = now
            if result.error is not None:
                raise RuntimeError(result.error)
            if result.is_finished():
                done[result.request_id] = result
        seconds = time.perf_counter() - start
    results = [done[i] for i in ids]
    return Run(
        seconds,
        [list(r.generated_tokens) for r in results],
        [r.timestamps[0] - start for r in results],
        [r.timestamps[-1] - start for r in results],
    )


def transformers_model(path: Path, dtype: torch.dtype) -> PreTrainedModel:
    """Return transformers' model of a directory, or its Llama filled with a GGUF file's values."""
    if path.is_dir():
        return AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
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
    for parameter in model.parameters():  # buffers stay: rotary frequencies are not weights
        parameter.data = parameter.data.to(dtype)
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
    parser.add_argument("--model", default=DEMO_MODEL, help="directory, hub id or Llama's .gguf")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--budgets", type=int, nargs=2, default=(2, 32), metavar=("LOW", "HIGH"))
    parser.add_argument("--repeat", type=int, default=3, help="runs of each; the median counts")
    parser.add_argument("--json", help="write the result here, a picture beside it")
    args = parser.parse_args()

    path = resolve_model(args.model, None)
    device = choose_device("auto")
    bandwidth = memory_bandwidth(device)  # before the engine takes the memory
    # Half of a GPU's memory is for the others.
    llm = LLM(model=str(path), dtype=args.dtype, max_model_len=1024, gpu_memory_utilization=0.5)
    reference = transformers_model(path, getattr(torch, args.dtype)).to(device)
    jobs = chat_jobs(llm.tokenizer, args.requests, *args.budgets)
    weight_bytes = sum(p.nbytes for p in reference.parameters())
    ceiling = bandwidth / weight_bytes
    print(
        f"memory {bandwidth / 1e9:,.1f} GB/s; weights {weight_bytes / 1e6:,.0f} MB; so one stream"
    )
    print(f"cannot exceed about {ceiling:,.1f} tokens/s in {args.dtype} on this machine\n")

    longest = [Job(jobs[0].prompt_token_ids, 64)]
    contenders: dict[str, Callable[[list[Job]], Run]] = {
        "hf sequential": lambda jobs: run_sequential(reference, jobs),
        "hf static 24": lambda jobs: run_static(reference, jobs, 24),
        "hf static 8": lambda jobs: run_static(reference, jobs, 8),
        "hf continuous": lambda jobs: run_continuous(reference, jobs, 24),
        "pageserve": lambda jobs: run_pageserve(llm, jobs, max_num_seqs=24),
        "pageserve, no sharing": lambda jobs: run_pageserve(
            llm, jobs, max_num_seqs=24, enable_prefix_caching=False
        ),
    }
    for batch in BATCHES[:-1]:
        contenders[f"pageserve, batch {batch}"] = functools.partial(
            run_pageserve, llm, max_num_seqs=batch
        )
    contenders["single: hf"] = lambda _: run_sequential(reference, longest)
    contenders["single: pageserve"] = lambda _: run_pageserve(llm, longest)
    with torch.inference_mode():
        skipped = warm_up(contenders, jobs[:4])
        runs: dict[str, list[Run]] = {name: [] for name in contenders}
        for _ in range(args.repeat):  # interleaved, so that a slow minute hits all alike
            for name, run in contenders.items():
                gc.collect()
                runs[name].append(run(jobs))

    result = summarise(runs, ceiling)
    _print_table(result["rows"], result["best_static"])
    print("\n" + "\n".join(f"{k:<20} {v:.2f}" for k, v in result["ratios"].items()))
    print(f"of {args.requests} requests, those with sequential Hugging Face's tokens in every run:")
    print("  " + ", ".join(f"{name} {count}" for name, count in result["equal"].items()) + "\n")
    if args.json:
        draw(result, Path(args.json).with_suffix(""))
    report(
        {
            "benchmark": "throughput",
            "not_shown": "an open loop of arrivals; HTTP; long prompts; other models",
            "machine": machine(),
            "model": name_of(args.model),
            "dtype": args.dtype,
            "device": device,
            "requests": args.requests,
            "budgets": list(args.budgets),
            "prompt_tokens": sum(len(j.prompt_token_ids) for j in jobs),
            "output_tokens": sum(j.budget for j in jobs),
            "read_bandwidth_gb_s": bandwidth / 1e9,
            "ceiling_single_tokens_per_s": ceiling,
            "skipped": skipped,
            **result,
        },
        args.json,
    )


def warm_up(contenders: dict[str, Callable[[list[Job]], Run]], jobs: list[Job]) -> dict[str, str]:
    """Run each once for thread pools, allocator and code; drop transformers' continuous batching
    where it does not run on this device, and return why."""
    skipped = {}
    for name, run in list(contenders.items()):
        try:
            run(jobs)
        except (RuntimeError, ValueError, NotImplementedError, ImportError) as error:
            if name != "hf continuous":
                raise
            skipped[name] = f"{type(error).__name__}: {error}".splitlines()[0]
            print(f"skipped {name}: {skipped[name]}")
            del contenders[name]
    return skipped


def summarise(runs: dict[str, list[Run]], ceiling: float) -> dict[str, Any]:
    """Medians of each contender, what they come to against each other, and how many requests have
    the tokens of sequential Hugging Face in every run."""
    rows = {name: median_row([r.row() for r in rs]) for name, rs in runs.items()}
    static = max(("hf static 24", "hf static 8"), key=lambda n: rows[n]["tokens_per_s"])
    expected = runs["hf sequential"][0].tokens
    equal = {
        name: sum(all(r.tokens[i] == e for r in rs) for i, e in enumerate(expected))
        for name, rs in runs.items()
        if not name.startswith("single")
    }
    ours, single = rows["pageserve"], rows["single: pageserve"]
    ratios = {
        "vs_static": ours["tokens_per_s"] / rows[static]["tokens_per_s"],
        "vs_sequential": ours["tokens_per_s"] / rows["hf sequential"]["tokens_per_s"],
        "ttft_p50_vs_static": ours["ttft_p50"] / rows[static]["ttft_p50"],
        "single_vs_hf": single["tokens_per_s"] / rows["single: hf"]["tokens_per_s"],
        "single_vs_ceiling": single["tokens_per_s"] / ceiling,
    }
    if "hf continuous" in rows:
        ratios["vs_continuous"] = ours["tokens_per_s"] / rows["hf continuous"]["tokens_per_s"]
    return {
        "best_static": static,
        "rows": rows,
        "ratios": ratios,
        "equal": equal,
        "tokens_equal": all(
            count == len(expected) for name, count in equal.items() if name.startswith("pageserve")
        ),
    }


def _print_table(rows: dict[str, dict[str, Any]], static: str) -> None:
    print(
        f"{'':<22}    tok/s vs static  TTFT p50     p99  TPOT p50  lat. p99  steps  preempt."
        "  peak blocks"
    )
    for name, r in rows.items():
        ratio = r["tokens_per_s"] / rows[static]["tokens_per_s"]
        tpot = f"{r['tpot_p50']:>8.3f}s" if "tpot_p50" in r else " " * 9
        print(
            f"{name:<22} {r['tokens_per_s']:>8.1f} {ratio:>8.2f}x {r['ttft_p50']:>8.3f}s "
            f"{r['ttft_p99']:>6.3f}s {tpot} {r['latency_p99']:>8.3f}s {r.get('steps', ''):>6} "
            f"{r.get('preemptions', ''):>9} {r.get('peak_blocks', ''):>12}"
        )


def draw(result: dict[str, Any], path: Path) -> None:
    """Throughput of all, and how steps and waiting fall as the batch grows."""
    rows = result["rows"]
    batched = [rows[f"pageserve, batch {b}"] for b in BATCHES[:-1]] + [rows["pageserve"]]
    with figures(path, ["Output tokens/s", "Steps", "Time to first token (s)"]) as panels:
        names = [n for n in rows if not n.startswith("single")]
        bars(
            panels[0],
            [n.replace("pageserve", "page-\nserve").replace(" ", "\n") for n in names],
            {"": [rows[n]["tokens_per_s"] for n in names]},
            number="{:.0f}",
        )
        panels[0].tick_params(axis="x", labelsize=6)
        lines(panels[1], BATCHES, {"pageserve": [r["steps"] for r in batched]})
        for label, key in (("p50", "ttft_p50"), ("p99", "ttft_p99")):
            style = line_style(("p50", "p99").index(label))
            panels[2].plot(BATCHES, [r[key] for r in batched], label=f"pageserve {label}", **style)
        for axes in panels[1:]:
            axes.set(xlabel="max_num_seqs", xticks=BATCHES)
            axes.set_ylim(bottom=0)


if __name__ == "__main__":
    main()
