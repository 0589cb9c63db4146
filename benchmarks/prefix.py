"""What prefix sharing saves as the common part of the prompts grows: blocks and waiting time.

All requests arrive at once with prompts of equal length whose first part is the same for all; each
configuration runs with and without prefix caching, on one loaded model and an empty pool. Even the
first of the requests finds nothing in the cache: what is shared is shared within the run.

    peak blocks   most blocks held at once, prompts and outputs
    TTFT          from the common arrival, so without sharing it grows with the queue of prompts
    cached        prompt tokens that were not computed

What this does not show: hits on earlier traffic (where nothing but the last block is computed),
eviction, prompts that share less than a block. The prompts are random token ids, which cost what
any others do. In float32 both must give the same tokens; in 16 bits how many requests do is told. A
GPU wants longer prompts and more of them, or all are read in one step:

    python benchmarks/prefix.py [--requests 16] [--prompt 256] [--output 8] [--json FILE]
    python benchmarks/prefix.py --dtype bfloat16 --requests 64 --prompt 2048 [--model DIR]
"""

import argparse
import random
from pathlib import Path
from typing import Any

from common import Job, machine, name_of, report
from plots import figures, lines
from runs import median_row, run_pageserve

from pageserve.config import DEMO_MODEL
from pageserve.llm import LLM

SHARES = (0, 25, 50, 75, 90, 100)  # percent of the prompt


def prompts_with_common_part(
    share: int, count: int, length: int, output: int, vocab_size: int
) -> list[Job]:
    """Return ``count`` jobs whose prompts agree in their first ``share`` percent only."""
    rng = random.Random(share)
    common_length = share * length // 100
    common = [rng.randrange(vocab_size) for _ in range(common_length)]
    own = length - common_length
    jobs = []
    for index in range(count):
        rest = [rng.randrange(vocab_size) for _ in range(own)]
        if rest:
            rest[0] = index  # different from all others, whatever was drawn
        jobs.append(Job(common + rest, output))
    return jobs


def study(llm: LLM, args: argparse.Namespace) -> dict[str, Any]:
    """Run every share with and without sharing, in turn, and return the medians."""
    jobs = {
        share: prompts_with_common_part(
            share, args.requests, args.prompt, args.output, llm.tokenizer.size
        )
        for share in SHARES
    }
    run_pageserve(llm, jobs[0])  # warm up: thread pools, allocator, code
    runs: dict[tuple[int, bool], list[dict[str, Any]]] = {}
    for _ in range(args.repeat):  # interleaved, so that a slow minute hits all alike
        for share in SHARES:
            on, off = (
                run_pageserve(llm, jobs[share], enable_prefix_caching=sharing)
                for sharing in (True, False)
            )
            equal = sum(a == b for a, b in zip(on.tokens, off.tokens, strict=True))
            if args.dtype == "float32":
                assert equal == args.requests, "sharing changed the output"
            runs.setdefault((share, True), []).append(on.row() | {"equal": equal})
            runs.setdefault((share, False), []).append(off.row())
    rows: dict[str, Any] = {}
    for share in SHARES:
        shared, plain = (median_row(runs[share, sharing]) for sharing in (True, False))
        rows[str(share)] = {
            "sharing": shared,
            "no_sharing": plain,
            "blocks_saved": 1 - shared["peak_blocks"] / plain["peak_blocks"],
            "ttft_p50_ratio": shared["ttft_p50"] / plain["ttft_p50"],
        }
    return rows


def draw(rows: dict[str, Any], path: Path) -> None:
    """Peak blocks and TTFT over the common share, with and without sharing."""
    with figures(
        path, ["Peak blocks", "TTFT p50 (s)"], xlabel="common part of the prompts (%)"
    ) as (
        blocks,
        ttft,
    ):
        for axes, key in ((blocks, "peak_blocks"), (ttft, "ttft_p50")):
            series = {
                label: [row[name][key] for row in rows.values()]
                for label, name in (("no sharing", "no_sharing"), ("sharing", "sharing"))
            }
            lines(axes, [int(share) for share in rows], series)
            axes.set_ylim(bottom=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=DEMO_MODEL)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=256, help="tokens of every prompt")
    parser.add_argument("--output", type=int, default=8, help="tokens each request generates")
    parser.add_argument("--repeat", type=int, default=3, help="runs of each; the median counts")
    parser.add_argument("--json", help="write the result here, a picture beside it")
    args = parser.parse_args()
    longest = max(512, args.prompt + args.output)
    llm = LLM(model=args.model, dtype=args.dtype, max_model_len=longest)
    rows = study(llm, args)
    print(
        "common   peak blocks on/off  saved   TTFT p50 on/off s   ratio   TTFT p99 on/off s  cached"
    )
    for share, row in rows.items():
        on, off = row["sharing"], row["no_sharing"]
        print(
            f"{share:>4} %   {on['peak_blocks']:>8} / {off['peak_blocks']:<6} "
            f"{row['blocks_saved']:>7.0%} {on['ttft_p50']:>9.3f} / {off['ttft_p50']:<7.3f} "
            f"{row['ttft_p50_ratio']:>6.2f}x {on['ttft_p99']:>9.3f} / {off['ttft_p99']:<6.3f} "
            f"{on['cached_tokens']:>8}"
        )
    if args.json:
        draw(rows, Path(args.json).with_suffix(""))
    report(
        {
            "benchmark": "prefix",
            "not_shown": "hits on earlier traffic; eviction; common parts of less than a block",
            "machine": machine(),
            "model": name_of(args.model),
            "dtype": args.dtype,
            "device": llm.engine.ready.device,
            "block_size": llm.engine.ready.block_size,
            "requests": args.requests,
            "prompt_tokens": args.prompt,
            "output_tokens": args.output,
            "rows": rows,
        },
        args.json,
    )


if __name__ == "__main__":
    main()
