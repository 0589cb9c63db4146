"""What streams under a grammar cost the plain streams beside them.

Plain streams decode alone, then with streams that write JSON under a schema, and, as the control,
with as many more plain ones: a bigger batch costs something whatever is in it. Counted are the
plain streams' tokens per second from the moment when all streams run. Runs in one process without
HTTP; JSON as the last line.

    python benchmarks/structured.py                       # the embedded model
    python benchmarks/structured.py --model DIR --rounds 5
"""

import argparse
import itertools
import statistics
import time
from typing import Any

from common import chat_jobs, machine, report
from llguidance import LLMatcher

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
SETTINGS = ("plain", "with grammars", "with more plain")


def measure(
    llm: LLM, prompts: list[list[int]], num_plain: int, budget: int, grammar: str | None
) -> dict[str, float]:
    """Run ``num_plain`` streams of ``budget`` tokens; the other prompts join them, under
    ``grammar`` if there is one, and go on as long as they do."""
    engine = llm.engine
    engine.scheduler.reset_prefix_cache()
    serial = next(_serial)
    seen: dict[str, int] = {}
    for i, prompt in enumerate(prompts):
        joins = i >= num_plain
        params = SamplingParams(
            temperature=0 if not joins else 1.0,
            seed=i,
            max_tokens=budget + budget * joins,
            ignore_eos=True,
        )
        name = f"{'joined' if joins else 'plain'}-{serial}-{i}"
        request = AddRequest(name, prompt, params, time.monotonic())
        request.grammar = grammar if joins else None
        engine.add(request)
        seen[name] = 0
    start, counts, steps = 0.0, {"plain": 0, "joined": 0}, 0
    ended = False
    while not ended:
        outputs = engine.step()
        for output in outputs:
            kind, num_tokens = output.request_id.partition("-")[0], len(output.new_token_ids)
            assert output.error is None, output.error
            seen[output.request_id] += num_tokens
            counts[kind] += num_tokens
            ended |= output.finish_reason is not None
        if not start and all(seen.values()):
            start, counts, steps = time.perf_counter(), {"plain": 0, "joined": 0}, 0
            first_step = engine.stats().steps_total
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
    }


_serial = itertools.count()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="SmolLM2-135M-Instruct")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--plain", type=int, default=32, help="plain streams")
    parser.add_argument("--joined", type=int, default=8, help="streams that join them")
    parser.add_argument("--budget", type=int, default=128, help="tokens of a plain stream")
    parser.add_argument("--rounds", type=int, default=3, help="the median counts")
    parser.add_argument("--json", help="also write the result to this file")
    args = parser.parse_args()

    count = args.plain + args.joined
    llm = LLM(
        model=args.model, dtype=args.dtype, max_num_seqs=count, max_model_len=256 + 2 * args.budget
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
    against_control = _loss(rounds, "with more plain", "with grammars")
    print(f"plain streams lose {100 * loss['with grammars']:.1f} % beside streams with a grammar,")
    print(
        f"{100 * loss['with more plain']:.1f} % beside as many plain ones: the grammars themselves"
    )
    print(f"cost {100 * against_control:.1f} %\n")
    stats = llm.engine.stats()
    facts: dict[str, Any] = {
        "benchmark": "structured",
        "model": args.model,
        "machine": machine(),
        "plain": args.plain,
        "joined": args.joined,
        "budget": args.budget,
        "rows": rows,
        "loss": loss,
        "loss_against_control": against_control,
        "compile_seconds": stats.grammar_compile_seconds_total,
    }
    report(facts, args.json)


def _loss(rounds: list[dict[str, dict[str, float]]], base: str, name: str) -> float:
    """Share of the plain streams' speed that is lost, the median over paired rounds."""
    key = "plain_tokens_per_s"
    return 1 - statistics.median(r[name][key] / r[base][key] for r in rounds)


if __name__ == "__main__":
    main()
