"""What the two verification commands share: prompts, the reference, the table and the result.

The reference is transformers, one prompt at a time, with eager attention. For a 16-bit run its
weights are rounded to that type and its arithmetic stays float32: both sides then hold the same
numbers, and what differs is arithmetic alone.
"""

import argparse
import gc
import importlib.metadata
import random
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))
from common import QUESTIONS, SYSTEM, machine, name_of, report

from pageserve import __version__
from pageserve.config import DEMO_MODEL
from pageserve.tokenizer import Tokenizer

TEXTS = {
    "one word": "Hello",
    "fact": "The capital of France is",
    "numbers": "1, 1, 2, 3, 5, 8, 13, 21,",
    "code": 'def fibonacci(n: int) -> int:\n    """Return the n-th number."""\n    if n < 2:\n',
    "unicode": "Zürich, Київ, 東京, नई दिल्ली 🙂🚀: these are",
    **{f"shared {i}": f"{SYSTEM}\n\n{QUESTIONS[i]}\n\n" for i in range(4)},
}
RANDOM_LENGTHS = (16, 17, 75, 200)  # on and behind the edge of a block of 16, and many blocks


@dataclass(frozen=True)
class Prompt:
    """A named prompt of token ids."""

    name: str
    ids: list[int]


def make_prompts(tokenizer: Tokenizer, longest: int) -> list[Prompt]:
    """Text of several kinds, four prompts that share a beginning, and random ids; none of more
    than ``longest`` tokens."""
    rng = random.Random(0)
    ids = {n: tokenizer.encode(text, add_special_tokens=True) for n, text in TEXTS.items()}
    for n in RANDOM_LENGTHS:
        ids[f"random {n}"] = [rng.randrange(tokenizer.size) for _ in range(n)]
    return [Prompt(name, x[:longest]) for name, x in ids.items()]


# --- the reference --------------------------------------------------------------------------------


def load_reference(
    path: Path, dtype: torch.dtype, compute_dtype: torch.dtype, device: str
) -> PreTrainedModel:
    """Return transformers' model of a directory or .gguf file, which holds weights rounded to
    ``dtype`` and computes in ``compute_dtype``."""
    options = {"dtype": torch.float32, "attn_implementation": "eager"}
    if path.suffix == ".gguf":
        model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, **options)
    else:
        model = AutoModelForCausalLM.from_pretrained(path, **options)
    for parameter in model.parameters():  # buffers stay: rotary frequencies are not weights
        parameter.data = parameter.data.to(dtype).to(device, compute_dtype)
    return model.eval().to(device)


def compute_in(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Let a reference compute in ``dtype``, which must hold its weights exactly."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)


@torch.inference_mode()
def reference_logits(model: PreTrainedModel, prompt: Prompt) -> torch.Tensor:
    """Return logits [num_tokens, vocab_size] of every position, float32 on the host."""
    ids = torch.tensor([prompt.ids], device=model.device)
    return model(ids, use_cache=False).logits[0].float().cpu()


@dataclass(frozen=True)
class Greedy:
    """The reference's greedy tokens, and at each how far the best was ahead of the second best,
    in log probability."""

    token_ids: list[int]
    margins: list[float]


@torch.inference_mode()
def reference_greedy(
    model: PreTrainedModel, prompt: Prompt, max_tokens: int, tokenizer_size: int
) -> Greedy:
    """Return ``max_tokens`` tokens of ``generate``, whatever end of sequence may be among them.

    The repetition penalty is pinned to 1.0. Without that, ``generate`` takes the one in the model's
    generation_config (1.05 to 1.1 in Qwen2.5's), which changes greedy output too; pageserve's
    engine applies only what a request asks for. Ids that no token has (padding of the vocabulary)
    are never sampled by pageserve, so the reference may not either.
    """
    padding = list(range(tokenizer_size, model.config.vocab_size))
    config = GenerationConfig(
        max_new_tokens=max_tokens,
        do_sample=False,
        repetition_penalty=1.0,
        eos_token_id=None,
        pad_token_id=0,
        suppress_tokens=padding or None,
        output_scores=True,
        return_dict_in_generate=True,
    )
    model.generation_config = GenerationConfig(pad_token_id=0)  # nothing left to inherit
    ids = torch.tensor([prompt.ids], device=model.device)
    out = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
    best = torch.cat(out.scores).float().topk(2, dim=-1).values
    return Greedy(out.sequences[0, len(prompt.ids) :].tolist(), (best[:, 0] - best[:, 1]).tolist())


@dataclass(frozen=True)
class Preferences:
    """What a model likes best at every position of a text, and how far that is ahead of the second
    best, in log probability."""

    token_ids: torch.Tensor  # [num_tokens]
    margins: torch.Tensor  # [num_tokens]


def preferences(model: PreTrainedModel, prompt: Prompt, answer: Greedy) -> Preferences:
    """Return the preferences along a prompt and its answer."""
    logits = reference_logits(model, Prompt(prompt.name, prompt.ids + answer.token_ids))
    best = logits.topk(2, dim=-1)
    return Preferences(best.indices[:, 0], best.values[:, 0] - best.values[:, 1])


def widest_departure(own: Preferences, reference: Preferences) -> float:
    """Return how far ahead the reference's token is, at most, where another one is preferred."""
    differs = own.token_ids != reference.token_ids
    return float(reference.margins[differs].max()) if bool(differs.any()) else 0.0


def free_memory() -> None:
    """Return the memory of models that went out of scope to the device."""
    gc.unfreeze()  # the engine freezes what it has built, which would keep it
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# --- what comes out -------------------------------------------------------------------------------


def add_common_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that both commands take."""
    parser.add_argument(
        "--model",
        default=DEMO_MODEL,
        metavar="S",
        help="directory, hub id or .gguf file (default: the embedded model)",
    )
    parser.add_argument(
        "--reference", metavar="S", help="read the reference from here (default: the same model)"
    )
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    parser.add_argument(
        "--dtype",
        nargs="+",
        default=["float32"],
        choices=["float32", "bfloat16", "float16"],
        help="one or several (default: float32)",
    )
    parser.add_argument("--json", metavar="FILE", help="write the result here")


def print_table(rows: list[dict[str, Any]]) -> None:
    """Print rows of equal keys, numbers to the right."""
    if not rows:
        return
    cells = [list(rows[0])] + [[_cell(value) for value in row.values()] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    right = [not isinstance(value, str) for value in rows[0].values()]
    for line in cells:
        columns = zip(line, widths, right, strict=True)
        print("  ".join(c.rjust(w) if r else c.ljust(w) for c, w, r in columns).rstrip())
    print(flush=True)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.2e}" if 0 < abs(value) < 0.01 else f"{value:.3f}"
    return str(value)


def finish(name: str, args: argparse.Namespace, device: str, runs: list[dict[str, Any]]) -> int:
    """Say whether all ``runs`` passed, print and write the result; returns the exit code."""
    passed = all(run["passed"] for run in runs)
    print("passed" if passed else "FAILED")
    result = {
        "benchmark": name,
        "model": name_of(args.model),
        "reference": name_of(args.reference or args.model),
        "device": device,
        "machine": machine() | _versions(),
        "passed": passed,
        "runs": runs,
    }
    report(result, args.json)
    return int(not passed)


def _versions() -> dict[str, str]:
    versions = {"pageserve": __version__}
    for name in ("transformers", "triton"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return versions
