"""Flags, progress, table, JSON and picture of ``benchmarks/http_load.py``."""

import argparse
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
from common import machine, name_of, report
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from load.arrivals import arrival_times
from load.client import Record, Target
from load.pool import ClientPool
from load.summary import e2e, parse_slo, summarise, tpot, ttft
from load.workloads import Prompt, Shape, parse_lengths, random_prompts, sharegpt_prompts

PROBE = [101, 102, 103, 104, 105]  # token ids that any vocabulary has


def main(doc: str | None, argv: Sequence[str] | None = None) -> int:
    """Run the command; returns 1 if a run had no completed request."""
    parser = make_parser(doc)
    args = parser.parse_args(argv)
    console = Console(stderr=True)
    try:
        slo, shape = parse_slo(args.goodput), shape_of(args)
        loads = loads_of(args)
        target, server = find_server(args)
    except (ValueError, httpx.HTTPError) as error:
        parser.error(str(error))
    runs, everything = [], []
    with ClientPool(args.processes) as pool:
        warm = make_prompts(
            args, shape, args.warmup, text=server["text"], seed=args.seed + len(loads)
        )
        pool.run(target, warm, concurrency=min(8, len(warm)) or 1)
        for i, load in enumerate(loads):
            seed = args.seed + i
            prompts = make_prompts(args, shape, args.requests, text=server["text"], seed=seed)
            records = run_with_bar(pool, console, target, prompts, load, args.seed)
            runs.append({"load": load, **summarise(records, slo)})
            everything.append(records)
    print_table(runs)
    if args.plot:
        draw(Path(args.plot), [label(r["load"]) for r in runs], runs, everything)
    result = {
        "benchmark": "http_load",
        "not_shown": "a client on another machine; answer quality; prefix hits of real prompts",
        "machine": machine(),
        "server": server,
        "workload": {"prompts": args.workload, "as": "text" if server["text"] else "token ids"},
        "processes": args.processes,
        "runs": [{**r, "load": in_json(r["load"])} for r in runs],
    }
    report(result, args.json)
    return int(any(not r["completed"] for r in runs))


def make_parser(doc: str | None) -> argparse.ArgumentParser:
    """All flags; ``doc`` is the description."""
    parser = argparse.ArgumentParser(
        prog="http_load.py", description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--url", default="http://127.0.0.1:8000", help="the server, without /v1")
    add("--model", help="default: the first of /v1/models")
    add("--api-key", default=os.environ.get("OPENAI_API_KEY"), help="default: $OPENAI_API_KEY")
    add("--endpoint", choices=("completions", "chat"), default="completions")
    add("--text", action="store_true", help="send text even where token ids would be taken")
    add("--extra-body", type=json_object, default={}, help="JSON merged into each request")
    add("--stop-at-eos", action="store_true", help="do not send ignore_eos: answers may be shorter")
    add("--timeout", type=float, default=300, help="seconds for one request")
    load = parser.add_argument_group("load")
    load.add_argument("--rate", type=float, nargs="+", help="open loop: requests a second, or inf")
    load.add_argument("--burstiness", type=float, default=1.0, help="gamma shape; inf: even")
    load.add_argument("--concurrency", type=int, nargs="+", help="closed loop: users")
    load.add_argument("--requests", type=int, default=100, help="per run")
    load.add_argument("--warmup", type=int, default=4, help="requests before, not counted")
    load.add_argument("--processes", type=int, default=min(4, os.cpu_count() or 1))
    load.add_argument("--seed", type=int, default=0)
    lengths = "lengths: N, LOW-HIGH or lognormal:MEDIAN:SIGMA:LOW:HIGH"
    work = parser.add_argument_group("workload", lengths)
    work.add_argument(
        "--workload", choices=("random", "shared-prefix", "mixed", "sharegpt"), default="random"
    )
    work.add_argument("--input-len", default="lognormal:180:0.9:16:2048", help="tokens asked")
    work.add_argument("--output-len", help="tokens answered (default: lognormal:150:0.8:8:1024)")
    work.add_argument("--prefix-len", type=int, default=1024, help="shared-prefix: tokens shared")
    work.add_argument("--num-prefixes", type=int, default=1, help="shared-prefix: groups")
    work.add_argument("--long-share", type=float, default=0.1, help="mixed: share of long prompts")
    work.add_argument("--long-len", default="2048-4096", help="mixed: their length")
    work.add_argument("--sharegpt", type=Path, metavar="FILE", help="sharegpt: the conversations")
    work.add_argument("--vocab-size", type=int, default=30_000, help="token ids lie below")
    out = parser.add_argument_group("result")
    out.add_argument(
        "--goodput", nargs="+", default=[], metavar="NAME:MS", help="limits on ttft, tpot, e2e"
    )
    out.add_argument("--json", help="also write the result to this file")
    out.add_argument("--plot", metavar="PATH", help="draw PATH.png and PATH.svg")
    return parser


def json_object(text: str) -> dict[str, Any]:
    """Parse a flag's JSON object; raises ValueError."""
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    return value


def shape_of(args: argparse.Namespace) -> Shape:
    """The lengths that the flags ask for; raises ValueError."""
    mixed, shared = args.workload == "mixed", args.workload == "shared-prefix"
    if (args.workload == "sharegpt") != (args.sharegpt is not None):
        raise ValueError("--workload sharegpt and --sharegpt FILE go together")
    return Shape(
        input_len=parse_lengths(args.input_len),
        output_len=parse_lengths(args.output_len or "lognormal:150:0.8:8:1024"),
        prefix_len=args.prefix_len if shared else 0,
        num_prefixes=args.num_prefixes if shared else 1,
        long_share=args.long_share if mixed else 0.0,
        long_len=parse_lengths(args.long_len) if mixed else None,
    )


def loads_of(args: argparse.Namespace) -> list[dict[str, float]]:
    """The runs that the flags ask for; raises ValueError."""
    if bool(args.rate) == bool(args.concurrency):
        raise ValueError("give --rate (open loop) or --concurrency (closed loop)")
    for name in ("requests", "processes"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name} must be at least 1")
    if args.rate:
        for rate in args.rate:
            arrival_times(rate, 0, burstiness=args.burstiness)  # raises for what cannot be
        return [{"rate": rate, "burstiness": args.burstiness} for rate in args.rate]
    if min(args.concurrency) < 1:
        raise ValueError("--concurrency must be at least 1")
    return [{"concurrency": n} for n in args.concurrency]


def find_server(args: argparse.Namespace) -> tuple[Target, dict[str, Any]]:
    """The target, and facts about the server: its software, its model, whether it is sent text.

    Raises ValueError for a server that has no model, ``httpx.HTTPError`` for none at all.
    """
    extra = {**({} if args.stop_at_eos else {"ignore_eos": True}), **args.extra_body}
    url = args.url.rstrip("/").removesuffix("/v1")
    target = Target(url, args.model or "", args.endpoint, args.api_key, extra, args.timeout)
    with httpx.Client(base_url=url, headers=target.headers, timeout=args.timeout) as http:
        answer = http.get("/v1/models").raise_for_status()
        models = [m["id"] for m in answer.json()["data"]]
        if not args.model and not models:
            raise ValueError(f"{url}/v1/models names no model; give --model")
        model = args.model or models[0]
        target = Target(url, model, args.endpoint, args.api_key, extra, args.timeout)
        sends_text = args.text or args.endpoint == "chat" or args.workload == "sharegpt"
        sends_text = sends_text or not takes_token_ids(http, model)
        version = http.get("/version")
    facts = {
        "software": answer.headers.get("server", "unknown"),
        "version": version.json().get("version") if version.status_code == 200 else None,
        "model": name_of(model),
        "endpoint": args.endpoint,
        "text": sends_text,
    }
    return target, facts


def takes_token_ids(http: httpx.Client, model: str) -> bool:
    """Whether the server reads a list of integers as a prompt of that many tokens."""
    answer = http.post("/v1/completions", json={"model": model, "prompt": PROBE, "max_tokens": 1})
    if answer.status_code != 200:
        return False
    return (answer.json().get("usage") or {}).get("prompt_tokens") == len(PROBE)


def make_prompts(
    args: argparse.Namespace, shape: Shape, count: int, *, text: bool, seed: int
) -> list[Prompt]:
    """``count`` prompts of the workload; another seed has other ones."""
    if args.workload == "sharegpt":
        output_len = parse_lengths(args.output_len) if args.output_len else None
        return sharegpt_prompts(args.sharegpt, count, output_len=output_len, seed=seed)
    return random_prompts(count, shape, vocab_size=None if text else args.vocab_size, seed=seed)


def run_with_bar(
    pool: ClientPool,
    console: Console,
    target: Target,
    prompts: Sequence[Prompt],
    load: dict[str, float],
    seed: int,
) -> list[Record]:
    """Run one load under a progress bar on stderr."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console) as bars:
        task = bars.add_task(label(load), total=len(prompts))
        how: dict[str, Any] = {"concurrency": load.get("concurrency")}
        if "rate" in load:
            burstiness = load["burstiness"]
            times = arrival_times(load["rate"], len(prompts), burstiness=burstiness, seed=seed)
            how = {"times": times}
        return pool.run(target, prompts, **how, progress=lambda n: bars.update(task, completed=n))


def in_json(load: dict[str, float]) -> dict[str, float | str]:
    """A load as JSON can say it, which knows no infinity."""
    return {k: v if math.isfinite(v) else "inf" for k, v in load.items()}


def label(load: dict[str, float]) -> str:
    """A run's name in table and picture."""
    if "concurrency" in load:
        return f"{load['concurrency']:g} users"
    burst = "" if load["burstiness"] == 1 else f", burstiness {load['burstiness']:g}"
    return f"{load['rate']:g}/s{burst}"


def print_table(runs: Sequence[dict[str, Any]]) -> None:
    """One column per run on stdout, then what a reader must know about the counts."""
    table = Table(box=None)
    table.add_column("")
    for run in runs:
        table.add_column(label(run["load"]), justify="right")

    def row(name: str, cell: Any) -> None:
        table.add_row(name, *(cell(run) for run in runs))

    row("completed", lambda r: f"{r['completed']} of {r['requests']}")
    row("shed / failed %", lambda r: f"{_share(r, 'shed')} / {_share(r, 'failed')}")
    row("requests/s", lambda r: f"{r['requests_per_s']:.2f}")
    row("output tokens/s", lambda r: f"{r['output_tokens_per_s']:,.1f}")
    if all("total_tokens_per_s" in r for r in runs):
        row("total tokens/s", lambda r: f"{r['total_tokens_per_s']:,.1f}")
    if "goodput" in runs[0]:
        row("goodput requests/s", lambda r: f"{r['goodput']['requests_per_s']:.2f}")
        row("goodput %", lambda r: f"{100 * r['goodput']['share']:.1f}")
    for name in ("ttft", "tpot", "itl", "e2e", "lag"):
        row(f"{name} p50 / p90 / p99 ms", lambda r, name=name: _triple(r[f"{name}_ms"]))
    Console(width=max(80, 36 + 30 * len(runs))).print(table)
    if any(r["counted_by"] == "chunks" for r in runs):
        print("no usage in the stream: tokens are counted as chunks, and a chunk may hold several")
    for run in runs:
        for error, count in run["errors"].items():
            print(f"{label(run['load'])}: {count} x {error}")


def _share(run: dict[str, Any], name: str) -> str:
    return f"{100 * run[name] / run['requests']:.1f}"


def _triple(spread: dict[str, float] | None) -> str:
    if spread is None:
        return "-"
    return " / ".join(f"{spread[p]:,.1f}" for p in ("p50", "p90", "p99"))


def draw(
    path: Path,
    labels: Sequence[str],
    runs: Sequence[dict[str, Any]],
    everything: Sequence[Sequence[Record]],
) -> None:
    """Draw the distributions of the latencies and the throughput over time, a line per run."""
    import plots

    titles = ("TTFT", "TPOT", "end to end", "throughput")
    with plots.figures(path, titles) as panels:
        for axes, value in zip(panels, (ttft, tpot, e2e), strict=False):
            axes.set(xlabel="ms", ylabel="share of requests", xscale="log", ylim=(0, 1.02))
            for i, records in enumerate(everything):
                values = [value(r) for r in records if r.ok]
                ms = sorted(1e3 * x for x in values if x is not None)
                shares = [(k + 1) / len(ms) for k in range(len(ms))]
                style = {**plots.line_style(i), "markevery": 0.2}
                axes.plot(ms, shares, label=labels[i], drawstyle="steps-post", **style)
        panels[3].set(xlabel="s", ylabel="output tokens/s")
        for i, run in enumerate(runs):
            each = run["output_tokens_each_second"]
            style = {**plots.line_style(i), "markevery": 0.2}
            panels[3].plot(range(len(each)), each, label=labels[i], **style)
