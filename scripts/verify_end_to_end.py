"""Greedy tokens of the whole engine against Hugging Face `generate`, in everything it may vary.

Batch size, chunked prefill, block size, prefix cache, overlap, forced preemption and, on a GPU,
CUDA graphs and the attention backend: none of these may change a token. Each variant is a fresh
engine, and shows that it did what it is for (a pool too small must have preempted).

Where two tokens are nearly equally likely, another order of the same additions may prefer the
other one, and everything behind it differs. So tokens count as equal up to the first position where
the reference's two best are closer than a bound, in log probability; a departure anywhere
else fails. In 16 bits the bound is 0.05, or what transformers in the same type departs by along
the same texts, with half of that on top, whichever is more: how sure a model must be for rounding
not to matter differs between models. `repetition_penalty=1.0` is pinned in the reference: see
verification.py.

In 16 bits fewer variants run by default, on shorter answers: those that compute in other shapes or
with other kernels. What only the scheduler decides is the same in every type, and float32 shows it.

    python scripts/verify_end_to_end.py --model DIR_OR_HUB_ID_OR_FILE.gguf [--dtype bfloat16]

Exits with 1 if a variant fails.
"""

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from verification import (
    Greedy,
    Prompt,
    add_common_flags,
    compute_in,
    finish,
    free_memory,
    load_reference,
    make_prompts,
    preferences,
    print_table,
    reference_greedy,
    widest_departure,
)

from pageserve.hub import resolve_model
from pageserve.llm import LLM, Completion
from pageserve.messages import SchedulerStats
from pageserve.model_config import load_model_config
from pageserve.sampling_params import SamplingParams
from pageserve.tokenizer import load_tokenizer
from pageserve.utils import cdiv
from pageserve.worker.worker import choose_device

LONGEST = 512  # tokens of a prompt
BOUNDS = {"float32": 1e-3, "bfloat16": 0.05, "float16": 0.05}
ALLOWANCE = 1.5  # of what transformers departs by in 16 bits
MAX_TOKENS = {"float32": 32, "bfloat16": 16, "float16": 16}
IN_16_BITS = (
    "plain",
    "one at a time",
    "chunks of 61",
    "prefix cache hits",
    "no CUDA graphs",
    "torch_blockwise",
)


@dataclass(frozen=True)
class Run:
    """What an engine answered, and its counters."""

    completions: list[Completion]
    stats: SchedulerStats


@dataclass(frozen=True)
class Variant:
    """Options of the engine, how often it is asked, and what proves that they had an effect."""

    options: dict[str, Any] = field(default_factory=dict)
    rounds: int = 1
    evidence: Callable[[Run], bool] = lambda run: True


def _cached(run: Run) -> int:
    return sum(c.num_cached_tokens for c in run.completions)


def make_variants(prompts: list[Prompt], max_tokens: int, device: str) -> dict[str, Variant]:
    """Return the variants of a device by name."""
    total = sum(len(p.ids) for p in prompts)

    def chunked(size: int) -> Variant:
        options = {"max_num_batched_tokens": size}
        return Variant(options, evidence=lambda run: run.stats.steps_total > total // size)

    def small_pool(block_size: int, **options: Any) -> Variant:
        """The longest request fits with few blocks to spare, and alone it has them all."""
        need = max(cdiv(len(p.ids) + max_tokens, block_size) for p in prompts)
        options |= {"block_size": block_size, "num_kv_blocks": need + need // 5 + 2}
        return Variant(options, evidence=lambda run: run.stats.preemptions_total > 0)

    variants = {
        "plain": Variant(),
        "one at a time": Variant({"max_num_seqs": 1}),
        "batches of 3": Variant({"max_num_seqs": 3}),
        "chunks of 16": chunked(16),
        "chunks of 61": chunked(61),
        "block size 1": Variant({"block_size": 1}),
        "block size 7": Variant({"block_size": 7}),
        "block size 32": Variant({"block_size": 32}),
        "prefix cache off": Variant(
            {"enable_prefix_caching": False}, 2, lambda run: _cached(run) == 0
        ),
        "prefix cache hits": Variant({}, 2, lambda run: _cached(run) > total // 2),
        "synchronous": Variant({"max_steps_in_flight": 1}),
        "overlap": Variant({"max_steps_in_flight": 2}),
        "preemption": small_pool(4),
        "preemption, no cache": small_pool(4, enable_prefix_caching=False),
        "preemption, overlap, chunks": small_pool(
            4, max_steps_in_flight=2, max_num_batched_tokens=61
        ),
    }
    if device == "cuda":
        variants |= {
            "no CUDA graphs": Variant({"enforce_eager": True}),
            "torch_blockwise": Variant({"attention_backend": "torch_blockwise"}),
        }
    return variants


# --- running and comparing ------------------------------------------------------------------------


def run_variant(
    variant: Variant, model: str, dtype: str, device: str, prompts: list[Prompt], max_tokens: int
) -> Run:
    """Answer all prompts with a fresh engine and return the last round's completions."""
    tokens = [len(p.ids) + max_tokens for p in prompts]
    block_size = variant.options.get("block_size", 16)
    options = {
        "max_model_len": max(tokens),
        "num_kv_blocks": 2 * sum(cdiv(n, block_size) for n in tokens),
        "max_num_seqs": len(prompts),
        "max_num_batched_tokens": 256,
        **variant.options,
    }
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    with LLM(model=model, dtype=dtype, device=device, **options) as llm:
        for _ in range(variant.rounds):
            done = llm.generate([p.ids for p in prompts], params)
        llm.engine.scheduler.check_integrity()
        return Run(done, llm.engine.stats())


@dataclass(frozen=True)
class Departure:
    """Where a prompt's tokens first differ from the reference's."""

    prompt: str
    position: int
    margin: float  # between the reference's two best tokens there, in log probability


def departures(prompts: list[Prompt], run: Run, reference: list[Greedy]) -> list[Departure]:
    """Return the first departure of each prompt whose tokens are not the reference's; a prompt
    that ended too early departs with an infinite margin."""
    found = []
    for prompt, done, wanted in zip(prompts, run.completions, reference, strict=True):
        if done.token_ids == wanted.token_ids:
            continue
        pairs = zip(done.token_ids, wanted.token_ids, strict=False)
        first = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        if first is None:
            found.append(Departure(prompt.name, len(done.token_ids), float("inf")))
        else:
            found.append(Departure(prompt.name, first, wanted.margins[first]))
    return found


def judge(variant: Variant, run: Run, found: list[Departure], bound: float) -> list[str]:
    """Return what is wrong with a variant, in words."""
    wrong = [
        f"{d.prompt} departs at token {d.position} where the reference is {d.margin:.3g} sure"
        for d in found
        if d.margin >= bound
    ]
    if not variant.evidence(run):
        wrong.append("did not do what it is to test")
    return wrong


def verify(args: argparse.Namespace, dtype: str, device: str) -> dict[str, Any]:
    """Run every variant in one precision, print the table and return the result."""
    path = resolve_model(args.model)
    tokenizer = load_tokenizer(path)
    context = load_model_config(path).max_position_embeddings
    max_tokens = args.max_tokens or MAX_TOKENS[dtype]
    prompts = make_prompts(tokenizer, min(LONGEST, context - max_tokens))
    start = time.perf_counter()
    own = getattr(torch, dtype)
    source = resolve_model(args.reference or args.model)
    theirs = load_reference(source, own, torch.float32, device)
    reference = [reference_greedy(theirs, p, max_tokens, tokenizer.size) for p in prompts]
    theirs_widest = 0.0
    if own is not torch.float32:
        texts = list(zip(prompts, reference, strict=True))
        exact = [preferences(theirs, *text) for text in texts]
        compute_in(theirs, own)
        pairs = zip(texts, exact, strict=True)
        theirs_widest = max(widest_departure(preferences(theirs, *t), e) for t, e in pairs)
    del theirs
    free_memory()
    reference_seconds = time.perf_counter() - start
    bound = args.bound
    if bound is None:
        bound = max(BOUNDS[dtype], ALLOWANCE * theirs_widest)
    variants = make_variants(prompts, max_tokens, device)
    print(f"\n{dtype} on {device}: {len(prompts)} prompts, {max_tokens} tokens each;")
    print(f"near tie: the reference's two best within {bound:.3g} in log probability", flush=True)
    if theirs_widest:
        print(f"(transformers in {dtype} departs where they are {theirs_widest:.3g} apart)")
    print(f"reference: {reference_seconds:.1f} s\n", flush=True)
    rows = []
    for name in args.only or [v for v in variants if dtype == "float32" or v in IN_16_BITS]:
        begin = time.perf_counter()
        run = run_variant(variants[name], args.model, dtype, device, prompts, max_tokens)
        free_memory()
        found = departures(prompts, run, reference)
        wrong = judge(variants[name], run, found, bound)
        row = {
            "variant": name,
            "equal": len(prompts) - len(found),
            "near ties": sum(d.margin < bound for d in found),
            "widest": max((d.margin for d in found), default=0.0),
            "steps": run.stats.steps_total,
            "cached": _cached(run),
            "preemptions": run.stats.preemptions_total,
            "seconds": round(time.perf_counter() - begin, 1),
            "verdict": "; ".join(wrong) or "ok",
        }
        print(f"  {name}: {row['verdict']}", flush=True)
        rows.append(row)
    print()
    print_table(rows)
    return {
        "dtype": dtype,
        "prompts": len(prompts),
        "max_tokens": max_tokens,
        "bound": bound,
        "transformers_widest": theirs_widest,
        "passed": all(row["verdict"] == "ok" for row in rows),
        "reference_seconds": round(reference_seconds, 1),
        "seconds": round(time.perf_counter() - start, 1),
        "rows": rows,
    }


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_common_flags(parser)
    parser.add_argument(
        "--max-tokens", type=int, metavar="N", help=f"of an answer (default: {MAX_TOKENS})"
    )
    parser.add_argument(
        "--bound", type=float, metavar="X", help=f"of a near tie (default: {BOUNDS})"
    )
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", help="these variants (default in 16 bits: a few)"
    )
    args = parser.parse_args(argv)
    device = choose_device(args.device)
    names = list(make_variants([Prompt("", [0])], 1, device))
    if unknown := set(args.only or ()) - set(names):
        parser.error(f"no variant {sorted(unknown)[0]!r}; there are {', '.join(names)}")
    if device != "cuda":
        print("no GPU: CUDA graphs and the triton backend are not among the variants")
    runs = [verify(args, dtype, device) for dtype in args.dtype]
    return finish("verify_end_to_end", args, device, runs)


if __name__ == "__main__":
    sys.exit(main())
