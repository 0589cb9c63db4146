"""What streams under a grammar cost the plain streams beside them.

Plain streams decode alone, then with streams that write JSON under a schema, and, as the control,
with as many more plain ones: a bigger batch costs something whatever is in it. Counted are the
plain streams' tokens per second from the moment when all streams run. Runs in one process without
HTTP, on a GPU if there is one; JSON as the last line.

What this does not show: the time to compile a grammar (it is in the JSON), HTTP, other schemas.

    python benchmarks/structured.py                       # the embedded model
    python benchmarks/structured.py --model DIR --budget 512 --rounds 5   # steps of a GPU are short
"""

import argparse
import itertools
import statistics
import time
from pathlib import Path
from typing import Any

from common import chat_jobs, machine, name_of, report
from llguidance import LLMatcher
from plots import bars, figures

from pageserve.llm import LLM
from pageserve.messages import AddRequest
from pageserve.sampling_params import SamplingParams

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 24},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "email": {"type": "string", "pattern": "^[a-z]{1,12}@[a-z]{1,12}\\.(com|org)$"},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 4},
    },
    "required": ["name", "age", "email", "tags"],
    "additionalProperties": False,
}
GRAMMAR = LLMatcher.grammar_from_json_schema(  # an array that does not end before the streams do
    {"type": "array", "items": PERSON, "minItems": 100_000},
    overrides={"whitespace_flexible": False},
)
HOST_PARTS = ("schedule", "launch", "wait", "update")  # of the loop's time; grammars are the rest
SETTINGS = ("plain", "with grammars", "with more plain")


def measure(
    llm: LLM, prompts: list[list[int]], num_plain: int, budget: int, grammar: str | None
) -> dict[str, float]:
    """Run ``num_plain`` streams of ``budget`` tokens beside streams of the other prompts, under
    ``grammar`` if there is one. Those begin first, as a grammar has to be compiled, which may take
    longer than short answers, and go on as long as the plain ones do."""
    engine = llm.engine
    engine.scheduler.reset_prefix_cache()
    serial = next(_serial)
    seen: dict[str, int] = {}  # tokens of each stream
    counts = {"plain": 0, "joined": 0}
    ended = False

    def add(kind: str, first: int, some: list[list[int]], temperature: float, limit: int) -> None:
        for i, prompt in enumerate(some, first):
            params = SamplingParams(
                temperature=temperature, seed=i, max_tokens=limit, ignore_eos=True
            )
            request = AddRequest(f"{kind}-{serial}-{i}", prompt, params, time.monotonic())
            request.grammar = grammar if kind == "joined" else None
            refused = engine.add(request)
            assert not refused, refused[0].error
            seen[request.request_id] = 0

    def step() -> None:
        nonlocal ended
        for output in engine.step():
            kind, num_tokens = output.request_id.partition("-")[0], len(output.new_token_ids)
            assert output.error is None, output.error
            seen[output.request_id] += num_tokens
            counts[kind] += num_tokens
            ended |= output.finish_reason is not None

    add("joined", num_plain, prompts[num_plain:], 1.0, 4 * budget)
    while not all(seen.values()):
        step()
    add("plain", 0, prompts[:num_plain], 0.0, budget)
    while not all(seen.values()):
        step()
    assert not ended, "the budget is too small for all to run together"
    start, first_step = time.perf_counter(), engine.stats().steps_total
    counts |= {"plain": 0, "joined": 0}
    host = dict.fromkeys(HOST_PARTS, 0.0)
    while not ended:
        step()
        if engine.last_step is not None:
            for part in HOST_PARTS:
                host[part] += getattr(engine.last_step, f"{part}_seconds")
    seconds = time.perf_counter() - start
    steps = engine.stats().steps_total - first_step
    engine.abort(list(seen))
    while engine.has_work():
        engine.step()
    return {
        "plain_tokens_per_s": counts["plain"] / seconds,
        "joined_tokens_per_s": counts["joined"] / seconds,
        "steps_per_s": steps / seconds,
        "plain_tokens_per_step": counts["plain"] / steps / num_plain,
        **{f"{part}_ms_per_step": 1e3 * total / steps for part, total in host.items()},
    }


_serial = itertools.count()


def draw(rows: dict[str, dict[str, float]], path: Path) -> None:
    """Tokens of the plain streams and of those beside them, and steps, in each setting."""
    with figures(path, ["Output tokens/s", "Steps/s"]) as (tokens, steps):
        series = {
            "plain streams": [rows[name]["plain_tokens_per_s"] for name in SETTINGS],
            "beside them": [rows[name]["joined_tokens_per_s"] for name in SETTINGS],
        }
        bars(tokens, SETTINGS, series, number="{:.0f}")
        bars(steps, SETTINGS, {"": [rows[name]["steps_per_s"] for name in SETTINGS]}, "{:.3g}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="SmolLM2-135M-Instruct")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--plain", type=int, default=32, help="plain streams")
    parser.add_argument("--joined", type=int, default=8, help="streams that join them")
    parser.add_argument("--budget", type=int, default=128, help="tokens of a plain stream")
    parser.add_argument("--rounds", type=int, default=3, help="the median counts")
    parser.add_argument("--json", help="write the result here, a picture beside it")
    args = parser.parse_args()

    count = args.plain + args.joined
    llm = LLM(
        model=args.model, dtype=args.dtype, max_num_seqs=count, max_model_len=512 + 4 * args.budget
    )
    prompts = [job.prompt_token_ids for job in chat_jobs(llm.tokenizer, count, 1, 1)]
    cases: dict[str, tuple[list[list[int]], str | None]] = {
        "plain": (prompts[: args.plain], None),
        "with grammars": (prompts, GRAMMAR),
        "with more plain": (prompts, None),
    }
    rounds: list[dict[str, dict[str, float]]] = []
    for turn in range(args.rounds + 1):  # the first one warms up
        budget = args.budget if turn else min(args.budget, 32)
        rounds.append(
            {
                name: measure(llm, some, args.plain, budget, grammar)
                for name, (some, grammar) in cases.items()
            }
        )
    rounds = rounds[1:]
    rows: dict[str, dict[str, float]] = {
        name: {k: statistics.median(r[name][k] for r in rounds) for k in rounds[0][name]}
        for name in SETTINGS
    }
    loss = {name: _loss(rounds, "plain", name) for name in SETTINGS[1:]}
    print(f"{args.plain} plain streams, {args.joined} joined ones, medians of {args.rounds} rounds")
    for name, row in rows.items():
        print(
            f"{name:<16} {row['plain_tokens_per_s']:>9.1f} tokens/s of the plain streams, "
            f"{row['joined_tokens_per_s']:>8.1f} of the joined ones, "
            f"{row['steps_per_s']:>7.1f} steps/s"
        )
        parts = (f"{part} {row[f'{part}_ms_per_step']:.3f}" for part in HOST_PARTS)
        print(f"{'':<16} of {1e3 / row['steps_per_s']:.3f} ms a step: {', '.join(parts)}")
    against_control = _loss(rounds, "with more plain", "with grammars")
    print(f"plain streams lose {100 * loss['with grammars']:.1f} % beside streams with a grammar,")
    print(
        f"{100 * loss['with more plain']:.1f} % beside as many plain ones: the grammars themselves"
    )
    print(f"cost {100 * against_control:.1f} %\n")
    stats = llm.engine.stats()
    facts: dict[str, Any] = {
        "benchmark": "structured",
        "not_shown": "the time to compile a grammar; HTTP; other schemas",
        "model": name_of(args.model),
        "dtype": llm.engine.worker.config.model.dtype,
        "device": llm.engine.ready.device,
        "machine": machine(),
        "plain": args.plain,
        "joined": args.joined,
        "budget": args.budget,
        "rows": rows,
        "loss": loss,
        "loss_against_control": against_control,
        "compile_seconds": stats.grammar_compile_seconds_total,
    }
    if args.json:
        draw(rows, Path(args.json).with_suffix(""))
    report(facts, args.json)


def _loss(rounds: list[dict[str, dict[str, float]]], base: str, name: str) -> float:
    """Share of the plain streams' speed that is lost, the median over paired rounds."""
    key = "plain_tokens_per_s"
    return 1 - statistics.median(r[name][key] / r[base][key] for r in rounds)


if __name__ == "__main__":
    main()
