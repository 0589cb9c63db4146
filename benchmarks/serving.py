"""What HTTP costs: the same requests offline and as concurrent streams of a server, in one run.

Both engines have the same settings and take turns on the same prompts, a fresh set each round, so
that both find the shared system message in their prefix cache and nothing else. The client runs
beside the server and competes with it for the cores, as it does on a laptop.

What this does not show: an open loop of arrivals, a client on another machine, a GPU.

    python benchmarks/serving.py [--streams 24] [--rounds 3] [--json FILE]
"""

import argparse
import asyncio
import json
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
from common import Job, chat_jobs, machine, percentile, report

from pageserve.llm import LLM
from pageserve.sampling_params import SamplingParams

# The CPU everywhere: a GPU's memory does not hold both engines' pools.
FLAGS = {"device": "cpu", "dtype": "float32", "max_model_len": 1024, "max_num_seqs": 32}


def run_offline(llm: LLM, jobs: list[Job]) -> dict[str, float]:
    params = [SamplingParams(temperature=0, max_tokens=j.budget, ignore_eos=True) for j in jobs]
    start = time.perf_counter()
    done = llm.generate([j.prompt_token_ids for j in jobs], params)
    seconds = time.perf_counter() - start
    return {
        "tokens_per_s": sum(j.budget for j in jobs) / seconds,
        "ttft_p50": percentile([c.first_token_time for c in done], 50),
    }


async def run_streams(url: str, jobs: list[Job]) -> dict[str, float]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, limits=limits, timeout=300) as http:
        start = time.perf_counter()
        streams = await asyncio.gather(*(_stream(http, job, start) for job in jobs))
        seconds = time.perf_counter() - start
    return {
        "tokens_per_s": sum(j.budget for j in jobs) / seconds,
        "ttft_p50": percentile([first for first, _ in streams], 50),
    }


async def _stream(http: httpx.AsyncClient, job: Job, start: float) -> tuple[float, float]:
    """Return the times of the first and the last event, in seconds from ``start``."""
    body = {
        "prompt": job.prompt_token_ids,
        "max_tokens": job.budget,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    first, usage = 0.0, {}
    async with http.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                first = first or time.perf_counter() - start
                usage = json.loads(line[6:])["usage"] or usage
    assert usage["completion_tokens"] == job.budget
    return first, time.perf_counter() - start


def start_server() -> tuple[subprocess.Popen[str], str]:
    flags = [f"--{k.replace('_', '-')}={v}" for k, v in FLAGS.items()]
    process = subprocess.Popen(
        [sys.executable, "server.py", "--port", "0", *flags],
        cwd=Path(__file__).resolve().parents[1],
        stderr=subprocess.PIPE,
        text=True,
    )
    url, ready = "", False
    assert process.stderr is not None
    for line in process.stderr:
        if match := re.search(r"listening on (\S+)", line):
            url = match.group(1)
        if "ready:" in line:
            ready = True
            break
    assert ready, "the server did not start"
    return process, url


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=24)
    parser.add_argument("--budgets", type=int, nargs=2, default=(32, 64), metavar=("LOW", "HIGH"))
    parser.add_argument("--rounds", type=int, default=3, help="the median counts")
    parser.add_argument("--json", help="also write the result to this file")
    args = parser.parse_args()

    llm = LLM(**FLAGS)
    process, url = start_server()
    offline: list[dict[str, float]] = []
    served: list[dict[str, float]] = []
    try:
        for turn in range(args.rounds + 1):  # the first one warms up
            jobs = chat_jobs(llm.tokenizer, args.streams, *args.budgets, turn=turn)
            offline.append(run_offline(llm, jobs))
            served.append(asyncio.run(run_streams(url, jobs)))
    finally:
        process.terminate()
        process.wait(60)
    rows = {"offline": _median(offline[1:]), "served": _median(served[1:])}
    ratios = [s["tokens_per_s"] / o["tokens_per_s"] for s, o in zip(served, offline, strict=True)]
    loss = 1 - statistics.median(ratios[1:])
    print(f"the ceiling is the offline engine: {rows['offline']['tokens_per_s']:.1f} tokens/s")
    for name, row in rows.items():
        print(f"{name:<8} {row['tokens_per_s']:>7.1f} tokens/s  TTFT p50 {row['ttft_p50']:.3f} s")
    print(f"lost over HTTP: {100 * loss:.1f} % (median of {args.rounds} paired rounds)\n")
    report(
        {
            "benchmark": "serving",
            "not_shown": "an open loop of arrivals; a client on another machine; a GPU",
            "machine": machine(),
            "streams": args.streams,
            "budgets": list(args.budgets),
            "rows": rows,
            "loss": loss,
        },
        args.json,
    )


def _median(rows: list[dict[str, float]]) -> dict[str, Any]:
    return {k: statistics.median(row[k] for row in rows) for k in rows[0]}


if __name__ == "__main__":
    main()
