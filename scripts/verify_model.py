"""Logits of pageserve's model against transformers', at every position of every prompt.

Each prompt runs twice over the paged pool: whole, all prompts in one flat batch; and in pieces,
chunks of the prompts side by side and the last tokens one by one, which are other kernels.

Differences are given in units of the logits' scale, their standard deviation over the vocabulary.
float32 must agree to 1e-4 (of 1 or of the scale, whichever is more) with the same best token
everywhere, against a reference whose matrix products and sums are float64: with logits around 30,
transformers' own float32 is already 1e-4 away from that. 16-bit arithmetic is compared with float32
on the same rounded weights, is held to the tolerances below and may not be worse than
transformers in the same type by more than half.

    python scripts/verify_model.py --model DIR_OR_HUB_ID_OR_FILE.gguf [--dtype float32 bfloat16]

Exits with 1 if anything is out of tolerance.
"""

import argparse
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from verification import (
    Prompt,
    add_common_flags,
    compute_in,
    finish,
    free_memory,
    load_reference,
    make_prompts,
    print_table,
    reference_logits,
)

from pageserve.config import CacheArgs, EngineConfig, ModelArgs, SchedulerArgs
from pageserve.hub import resolve_model
from pageserve.messages import NewRequestData, ScheduledRow, SchedulerOutput
from pageserve.model_config import load_model_config
from pageserve.sampling_params import SamplingParams
from pageserve.tokenizer import load_tokenizer
from pageserve.utils import cdiv
from pageserve.worker.input_batch import InputBatch
from pageserve.worker.worker import Worker, choose_device

LONGEST = 1024  # tokens of a prompt
BLOCK_SIZE = 16
CHUNK = 33  # tokens, so that no chunk but the first begins with a block
NUM_DECODES = 8  # tokens at the end of each prompt that run one by one


@dataclass(frozen=True)
class Tolerance:
    """What may differ from the reference, over all positions of all prompts."""

    max_diff: float  # largest difference of a logit, in scales
    mean_diff: float  # mean difference of a logit, in scales
    kl: float  # mean KL divergence from the reference, nats
    top1: float  # least share of positions with the reference's best token, near ties aside
    near_tie: float  # two best tokens closer than this, in nats, may change places


TOLERANCES = {
    "float32": Tolerance(max_diff=1e-4, mean_diff=1e-4, kl=1e-6, top1=1.0, near_tie=1e-4),
    "bfloat16": Tolerance(max_diff=1.0, mean_diff=0.08, kl=1e-2, top1=0.95, near_tie=0.05),
    "float16": Tolerance(max_diff=0.15, mean_diff=0.01, kl=2e-4, top1=0.99, near_tie=0.01),
}
OVER_TRANSFORMERS = 1.5  # how many times the mean difference of transformers in the same type


# --- running the model ----------------------------------------------------------------------------


class PagedModel:
    """pageserve's model on its worker's pool, asked for the logits of all positions."""

    def __init__(self, model: str, prompts: list[Prompt], dtype: str, device: str) -> None:
        blocks = sum(cdiv(len(p.ids), BLOCK_SIZE) for p in prompts)
        self.worker = Worker(
            EngineConfig(
                ModelArgs(
                    model=model,
                    dtype=dtype,
                    device=device,
                    max_model_len=max(len(p.ids) for p in prompts),
                ),
                CacheArgs(block_size=BLOCK_SIZE, num_kv_blocks=2 * blocks),
                # No graphs: they return sampled tokens, and logits are wanted here.
                SchedulerArgs(max_num_seqs=len(prompts), enforce_eager=device == "cuda"),
            )
        )
        self.prompts = prompts
        self._free = list(range(2 * blocks))
        self._steps = 0

    def whole(self) -> list[torch.Tensor]:
        """Run all prompts as one flat batch; returns logits [num_tokens, vocab_size] of each."""
        return self._run([[len(p.ids)] for p in self.prompts])

    def in_pieces(self) -> list[torch.Tensor]:
        """Run chunks of all prompts side by side, then the last tokens one by one."""
        return self._run([_pieces(len(p.ids)) for p in self.prompts])

    @torch.inference_mode()
    def _run(self, pieces: list[list[int]]) -> list[torch.Tensor]:
        """Run ``pieces[i]`` tokens of prompt i in consecutive steps, on blocks not used before.
        The prompts end together, so that short ones decode while long ones are still in chunks."""
        params = SamplingParams(temperature=0)
        new = []
        for slot, prompt in enumerate(self.prompts):
            blocks = [self._free.pop() for _ in range(cdiv(len(prompt.ids), BLOCK_SIZE))]
            new.append(NewRequestData(slot, prompt.ids, len(prompt.ids), blocks, params, 0))
        num_steps = max(map(len, pieces))
        done = [0] * len(pieces)
        parts: list[list[torch.Tensor]] = [[] for _ in pieces]
        for step in range(num_steps):
            rows = []
            for slot, own in enumerate(pieces):
                turn = step - (num_steps - len(own))
                if turn >= 0:
                    rows.append(ScheduledRow(slot, done[slot], own[turn], False))
                    done[slot] += own[turn]
            logits = self._step(SchedulerOutput(self._steps, new if step == 0 else [], [], rows))
            for row, part in zip(rows, logits, strict=True):
                parts[row.slot].append(part)
        return [torch.cat(x) for x in parts]

    def _step(self, step: SchedulerOutput) -> list[torch.Tensor]:
        """Run a step as the model runner does, but for sampling; returns each row's logits."""
        runner = self.worker.runner
        runner.states.apply(step, runner.kv_cache)
        self._steps += 1
        hidden = runner.forward(InputBatch.build(step.rows, runner.states))
        logits = runner.model.compute_logits(hidden).float().cpu()
        return list(logits.split([row.num_scheduled_tokens for row in step.rows]))


def _pieces(length: int) -> list[int]:
    """Chunks of CHUNK tokens, then single ones."""
    single = min(NUM_DECODES, length - 1)
    chunks, rest = divmod(length - single, CHUNK)
    return [CHUNK] * chunks + [rest] * (rest > 0) + [1] * single


# --- comparing ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Comparison:
    """Logits against the reference's, over some positions."""

    positions: int
    max_diff: float  # in scales, as the next
    mean_diff: float
    kl: float  # mean over positions, nats
    same_top1: int  # positions at which the best token is the same
    near_ties: int  # others at which the reference's two candidates are closer than the bound
    scale: float  # mean standard deviation of the reference's logits over the vocabulary
    is_finite: bool

    @classmethod
    def of(
        cls, logits: torch.Tensor, reference: torch.Tensor, near_tie: float, least_scale: float
    ) -> "Comparison":
        """Compare logits [num_tokens, vocab_size] of one prompt."""
        difference = (logits - reference).abs()
        best, chosen = reference.argmax(-1, keepdim=True), logits.argmax(-1, keepdim=True)
        lead = (reference.gather(-1, best) - reference.gather(-1, chosen)).squeeze(-1)
        same = (best == chosen).squeeze(-1)
        log_p, log_q = reference.double().log_softmax(-1), logits.double().log_softmax(-1)
        scale = max(least_scale, reference.std(-1).mean().item())
        return cls(
            positions=len(reference),
            max_diff=difference.max().item() / scale,
            mean_diff=difference.mean().item() / scale,
            kl=(log_p.exp() * (log_p - log_q)).sum(-1).mean().item(),
            same_top1=int(same.sum()),
            near_ties=int((~same & (lead < near_tie)).sum()),
            scale=scale,
            is_finite=bool(difference.isfinite().all()),
        )

    @classmethod
    def pool(cls, parts: list["Comparison"]) -> "Comparison":
        """Return all positions of ``parts`` as one."""
        total = sum(c.positions for c in parts)

        def mean(name: str) -> float:
            return sum(getattr(c, name) * c.positions for c in parts) / total

        return cls(
            positions=total,
            max_diff=max(c.max_diff for c in parts),
            mean_diff=mean("mean_diff"),
            kl=mean("kl"),
            same_top1=sum(c.same_top1 for c in parts),
            near_ties=sum(c.near_ties for c in parts),
            scale=mean("scale"),
            is_finite=all(c.is_finite for c in parts),
        )


def failures(c: Comparison, tolerance: Tolerance, theirs: Comparison | None) -> list[str]:
    """Return what is out of tolerance, in words; ``theirs`` is transformers in the same type."""
    if not c.is_finite:
        return ["logits are not finite"]
    agreed = (c.same_top1 + c.near_ties) / c.positions
    found = [
        ("max diff", c.max_diff, tolerance.max_diff),
        ("mean diff", c.mean_diff, tolerance.mean_diff),
        ("KL", c.kl, tolerance.kl),
        ("share of other best tokens", 1 - agreed, 1 - tolerance.top1),
    ]
    if theirs is not None:
        limit = OVER_TRANSFORMERS * theirs.mean_diff
        found.append(("mean diff beside transformers'", c.mean_diff, limit))
    return [f"{name} {v:.2e} > {limit:.2e}" for name, v, limit in found if v > limit]


def verify(
    model: str, reference: str, prompts: list[Prompt], dtype: str, device: str
) -> dict[str, Any]:
    """Compare in one precision, print the table and return the result."""
    start = time.perf_counter()
    tolerance, half = TOLERANCES[dtype], dtype != "float32"
    logits = reference_runs(resolve_model(reference), prompts, dtype, device)
    expected = logits.pop("reference")
    paged = PagedModel(model, prompts, dtype, device)
    backend = paged.worker.config.model.attention_backend
    logits |= {"whole": paged.whole(), "in pieces": paged.in_pieces()}
    del paged
    free_memory()
    rows, pooled = [], {}
    for way, found in logits.items():
        parts = [
            Comparison.of(x.to(device), r.to(device), tolerance.near_tie, 0.0 if half else 1.0)
            for x, r in zip(found, expected, strict=True)
        ]
        pooled[way] = Comparison.pool(parts)
        names = [p.name for p in prompts] if way != "transformers" else []
        rows += [_row(way, name, c) for name, c in zip(names, parts, strict=False)]
    theirs = pooled.get("transformers")
    failed = {w: failures(c, tolerance, theirs) for w, c in pooled.items() if w != "transformers"}
    print(f"\n{dtype} on {device}, {backend} attention; differences in scales of the logits\n")
    print_table(rows)
    verdicts = {w: "; ".join(failed[w]) or "ok" if w in failed else "" for w in pooled}
    print_table([_row(way, "all", c) | {"verdict": verdicts[way]} for way, c in pooled.items()])
    return {
        "dtype": dtype,
        "backend": backend,
        "tolerance": asdict(tolerance),
        "passed": not any(failed.values()),
        "failed": failed,
        "seconds": round(time.perf_counter() - start, 1),
        "all": {way: asdict(c) for way, c in pooled.items()},
        "prompts": rows,
    }


def reference_runs(
    path: Path, prompts: list[Prompt], dtype: str, device: str
) -> dict[str, list[torch.Tensor]]:
    """Return each prompt's logits by the ``reference``, and, in 16 bits, by ``transformers``
    computing in the same type."""
    own = getattr(torch, dtype)
    exact = torch.float64 if dtype == "float32" else torch.float32
    model = load_reference(path, own, exact, device)
    logits = {"reference": [reference_logits(model, p) for p in prompts]}
    if dtype != "float32":
        compute_in(model, own)
        logits["transformers"] = [reference_logits(model, p) for p in prompts]
    del model
    free_memory()
    return logits


def _row(way: str, prompt: str, c: Comparison) -> dict[str, Any]:
    return {
        "way": way,
        "prompt": prompt,
        "tokens": c.positions,
        "max diff": c.max_diff,
        "mean diff": c.mean_diff,
        "KL": c.kl,
        "same best": c.same_top1,
        "near ties": c.near_ties,
    }


# --- the command ----------------------------------------------------------------------------------


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_common_flags(parser)
    args = parser.parse_args(argv)
    device = choose_device(args.device)
    path = resolve_model(args.model)
    context = load_model_config(path).max_position_embeddings
    prompts = make_prompts(load_tokenizer(path), min(LONGEST, context))
    reference = args.reference or args.model
    runs = [verify(args.model, reference, prompts, d, device) for d in args.dtype]
    return finish("verify_model", args, device, runs)


if __name__ == "__main__":
    sys.exit(main())
