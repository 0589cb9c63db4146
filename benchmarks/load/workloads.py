"""What is asked: prompts of token ids or text, and how many tokens to answer with.

Text prompts are strings of short common words, each a single token of nearly every vocabulary:
close to the wanted length, and the server's own count is what gets reported.
"""

import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

WORDS = (
    "the", "and", "you", "that", "was", "for", "are", "with", "his", "they", "this", "have",
    "from", "one", "had", "word", "but", "not", "what", "all", "were", "when", "your", "can",
    "said", "there", "use", "each", "which", "she", "how", "their", "will", "other", "about",
    "out", "many", "then", "them", "these", "some", "her", "would", "make", "like", "him", "into",
    "time", "has", "look", "two", "more", "write", "see", "number", "way", "could", "people",
    "than", "first", "water", "been", "call", "who", "its", "now", "find", "long", "down", "day",
)  # fmt: skip
FIRST_ID = 100  # below lie special tokens in many vocabularies
CHARS_PER_TOKEN = 4  # of English, where nothing else tells a text's length
MIN_CHARS, MAX_CHARS = 4, 16_000  # ShareGPT entries outside are left out
MAX_ANSWER = 1024

Sampler = Callable[[random.Random], int]


@dataclass(frozen=True)
class Prompt:
    """One request. ``max_tokens`` is exact where the server honours ``ignore_eos``."""

    content: str | list[int]
    max_tokens: int


@dataclass(frozen=True)
class Shape:
    """Lengths of a workload in tokens; ``long_share`` of the requests are long prompts, and all
    requests of a group begin with the same ``prefix_len`` tokens."""

    input_len: Sampler
    output_len: Sampler
    prefix_len: int = 0
    num_prefixes: int = 1
    long_share: float = 0.0
    long_len: Sampler | None = None


def parse_lengths(spec: str) -> Sampler:
    """Return a sampler of token counts from ``N``, ``LOW-HIGH`` (uniform) or
    ``lognormal:MEDIAN:SIGMA:LOW:HIGH`` (cut to the bounds). Raises ValueError on anything else."""
    if spec.startswith("lognormal:"):
        median, sigma, low, high = spec.removeprefix("lognormal:").split(":")
        mu, spread, bounds = math.log(float(median)), float(sigma), (int(low), int(high))
        _check(spec, *bounds)
        return lambda rng: min(bounds[1], max(bounds[0], round(rng.lognormvariate(mu, spread))))
    least, _, most = spec.partition("-")
    first, last = int(least), int(most or least)
    _check(spec, first, last)
    return lambda rng: rng.randint(first, last)


def _check(spec: str, low: int, high: int) -> None:
    if not 1 <= low <= high:
        raise ValueError(f"lengths must be positive and in order, got {spec!r}")


def random_prompts(
    count: int, shape: Shape, *, vocab_size: int | None, seed: int = 0
) -> list[Prompt]:
    """Return ``count`` prompts of ``shape``, of token ids below ``vocab_size`` or, where that is
    None, of text."""
    rng = random.Random(seed)

    def draw(n: int) -> list[int]:
        high = len(WORDS) if vocab_size is None else vocab_size
        low = 0 if vocab_size is None else min(FIRST_ID, vocab_size - 1)
        return [rng.randrange(low, high) for _ in range(n)]

    prefixes = [draw(shape.prefix_len) for _ in range(shape.num_prefixes)]
    prompts = []
    for _ in range(count):
        is_long = shape.long_len is not None and rng.random() < shape.long_share
        length = shape.long_len if is_long and shape.long_len is not None else shape.input_len
        ids = rng.choice(prefixes) + draw(length(rng))
        content = ids if vocab_size is not None else " ".join(WORDS[i] for i in ids)
        prompts.append(Prompt(content, shape.output_len(rng)))
    return prompts


def sharegpt_prompts(
    path: Path, count: int, *, output_len: Sampler | None = None, seed: int = 0
) -> list[Prompt]:
    """Return up to ``count`` first turns of a file in ShareGPT's format, in shuffled order.

    The answer in the file sets how many tokens to generate, at CHARS_PER_TOKEN, unless
    ``output_len`` says otherwise. Entries that do not begin with a question and an answer, and
    very short or long questions, are left out. Raises ValueError if none is left.
    """
    entries = json.loads(path.read_text())
    rng = random.Random(seed)
    rng.shuffle(entries)
    prompts = []
    for entry in entries:
        turns = _first_turns(entry.get("conversations") or [])
        if turns is None or not MIN_CHARS <= len(turns[0]) <= MAX_CHARS:
            continue
        estimate = min(MAX_ANSWER, max(1, len(turns[1]) // CHARS_PER_TOKEN))
        prompts.append(Prompt(turns[0], output_len(rng) if output_len else estimate))
        if len(prompts) == count:
            break
    if not prompts:
        raise ValueError(f"{path} holds no conversation that begins with a question and an answer")
    return prompts


def _first_turns(conversation: Sequence[dict[str, str]]) -> tuple[str, str] | None:
    """The question and the answer a conversation begins with, past a system message."""
    turns = [t for t in conversation if t.get("from") != "system"]
    if len(turns) < 2 or turns[0].get("from") not in ("human", "user"):
        return None
    return turns[0].get("value") or "", turns[1].get("value") or ""
