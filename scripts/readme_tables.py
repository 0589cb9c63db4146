"""Write the README's tables of measurements from the JSON files in benchmarks/results.

python scripts/readme_tables.py [--check]
"""

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
MARKERS = re.compile(r"(<!-- tables -->\n).*?(<!-- /tables -->)", re.S)


def main() -> int:
    """Rewrite the README, or only say whether it is up to date; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="exit 1 if the README is stale")
    check = parser.parse_args().check
    readme = ROOT / "README.md"
    text = readme.read_text()
    fresh = MARKERS.sub(lambda m: f"{m[1]}{tables()}{m[2]}", text)
    if check:
        return int(fresh != text)
    readme.write_text(fresh)
    return 0


def tables() -> str:
    """Return all tables as Markdown."""
    parts = [throughput(_load("cpu_throughput")), serving(_load("cpu_serving"))]
    parts += [gpu_offline(), gpu_served(_load("gpu_served"))]
    parts += [table(_load(name)) for name, table in STUDIES.items() if _path(name).exists()]
    return "\n".join(parts)


def throughput(result: dict[str, Any]) -> str:
    """Hugging Face against pageserve on the CPU."""
    rows, static = result["rows"], result["rows"][result["best_static"]]
    low, high = result["budgets"]
    out = [
        f"**CPU, float32, embedded model**: {result['requests']} chat requests at once, budgets "
        f"{low}-{high} tokens, {_host(result)}. `python benchmarks/throughput.py`. Memory read "
        f"{result['read_bandwidth_gb_s']:.0f} GB/s, so one stream cannot exceed "
        f"{result['ceiling_single_tokens_per_s']:.0f} tokens/s.",
        "",
        "| | tokens/s | against static | TTFT p50 / p99 s | TPOT p50 ms | latency p99 s | steps "
        "| preemptions | peak blocks |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, r in rows.items():
        if name.startswith("single"):
            continue
        ratio = r["tokens_per_s"] / static["tokens_per_s"]
        tpot = f"{1e3 * r['tpot_p50']:.0f}" if "tpot_p50" in r else ""
        out.append(
            f"| {name} | {r['tokens_per_s']:.1f} | {ratio:.2f}x "
            f"| {r['ttft_p50']:.2f} / {r['ttft_p99']:.2f} "
            f"| {tpot} | {r['latency_p99']:.2f} "
            f"| {r.get('steps', '')} | {r.get('preemptions', '')} | {r.get('peak_blocks', '')} |"
        )
    single = rows["single: pageserve"]["tokens_per_s"]
    out += [
        "",
        f"One stream: {single:.1f} tokens/s against {rows['single: hf']['tokens_per_s']:.1f} of "
        f"Hugging Face. The tokens of all runs are equal.{_picture_of(result['benchmark'])}",
        "",
    ]
    assert result["tokens_equal"], "the figures of unequal engines cannot be compared"
    return "\n".join(out)


def serving(result: dict[str, Any]) -> str:
    """What HTTP costs."""
    rows = result["rows"]
    return (
        f"**HTTP on the same machine**: {result['streams']} concurrent streams reach "
        f"{rows['served']['tokens_per_s']:.0f} tokens/s, the offline engine "
        f"{rows['offline']['tokens_per_s']:.0f}; lost {100 * result['loss']:.1f} % (median of "
        "paired rounds). `python benchmarks/serving.py`\n"
    )


def gpu_offline() -> str:
    """Offline throughput on the GPU, one file per model."""
    files = sorted(RESULTS.glob("gpu_offline_*.json"))
    results = {f.stem.removeprefix("gpu_offline_"): json.loads(f.read_text()) for f in files}
    first = next(iter(results.values()))
    names = list(dict.fromkeys(w for r in results.values() for w in r["rows"]))
    out = [
        f"**{first['machine']['gpu']}, bfloat16, Qwen2.5 shapes with random weights, offline**, "
        f"output tokens/s (workload:requests), torch {first['machine']['torch']}. "
        "`python benchmarks/offline.py`. The floor is the time to "
        "read the weights once at the measured copy bandwidth of "
        f"{first['bandwidth_gb_s']:.0f} GB/s.",
        "",
        f"| model | floor ms a step | {' | '.join(names)} | commit |",
        "|---|---|---|" + "---|" * len(names),
    ]
    for model, r in results.items():
        floor = r["weights_gb"] / r["bandwidth_gb_s"] * 1e3
        cells = [f"{r['rows'][n]['tokens_per_s']:,.0f}" if n in r["rows"] else "" for n in names]
        cells.append(r["machine"]["commit"])
        out.append(f"| {model} | {floor:.2f} | {' | '.join(cells)} |")
    return "\n".join([*out, ""])


def gpu_served(result: dict[str, Any]) -> str:
    """Throughput over HTTP on the GPU."""
    out = [
        "**Served over HTTP on the same GPU**, streaming, greedy, token-id prompts; single: 512 in "
        "/ 256 out, chat: log-normal, mean 272 in / 205 out, prefix: 2048 shared + 64 in / 64 out.",
        "",
        "| model | workload | streams | tokens/s | TTFT p50/p99 ms | TPOT ms | errors | commit |",
        "|---|---|---|---|---|---|---|---|",
    ]
    out += [
        f"| {r['model']} | {r['workload']} | {r['conc']} | {r['out_tok_s']:,.0f} "
        f"| {r['ttft_p50']:.0f} / {r['ttft_p99']:.0f} | {r['tpot_p50']:.2f} | {r['errors']} "
        f"| {r['commit']} |"
        for r in result["rows"]
    ]
    return "\n".join([*out, ""])


def against_vllm(result: dict[str, Any]) -> str:
    """Both engines on one GPU in one run."""
    rows = {(r["engine"], r["model"]): r for r in result["rows"] if r["workload"] == "chat"}
    out = [
        f"**Against vLLM {result['vllm'].split(',')[0]} on one {result['machine']['gpu']}**, one "
        "after the other, `chat` over HTTP at 256 streams, bfloat16, commit "
        f"{result['machine']['commit']}:",
        "",
        "| model | pageserve tokens/s | vLLM tokens/s | ratio | TTFT p50 ms | vLLM's |",
        "|---|---|---|---|---|---|",
    ]
    for model in dict.fromkeys(model for _, model in rows):
        ours, theirs = rows["pageserve", model], rows["vllm", model]
        out.append(
            f"| {model} | {ours['out_tok_s']:,.0f} | {theirs['out_tok_s']:,.0f} "
            f"| {ours['out_tok_s'] / theirs['out_tok_s']:.1f}x | {ours['ttft_p50']:.0f} "
            f"| {theirs['ttft_p50']:,.0f} |"
        )
    return "\n".join([*out, ""])


def kernels(result: dict[str, Any]) -> str:
    """Decode attention as a share of the copy bandwidth."""
    lines = result["lines"]
    copy = next(x["GB/s"] for x in lines if x["case"] == "copy")
    cells: dict[str, dict[str, float]] = {}
    for line in lines:
        if line["section"] == "decode" and "share" in line:
            model, case = line["case"].split(" ", 1)
            cells.setdefault(case, {})[model] = line["share"]
    models = list(next(iter(cells.values())))
    out = [
        "**Decode attention** in GB/s of KV over the copy bandwidth measured in the same run "
        f"({copy:,.0f} GB/s), rows x tokens, {result['machine']['gpu']}, commit "
        f"{result['machine']['commit']}. `python benchmarks/kernels.py --sections decode`",
        "",
        f"| | {' | '.join(models)} |",
        "|---|" + "---|" * len(models),
    ]
    for case, shares in cells.items():
        shown = (f"{100 * shares[m]:.0f} %" if m in shares else "" for m in models)
        out.append(_row(case, shown))
    return "\n".join([*out, ""])


def capacity(result: dict[str, Any]) -> str:
    """Sequences resident with blocks against reservation."""
    best = str(result["block_size"])
    sizes = list(dict.fromkeys([best, "4", "16"]))
    out = [
        f"**Capacity** of a pool of {result['slots']:,} token slots, saturated: sequences resident "
        "with blocks on demand against reservation of prompt + max_tokens, and slots left empty in "
        "allocated blocks. Simulated with the real scheduler, no model. "
        f"`python benchmarks/capacity.py`, {_picture('capacity')}. Blocks of {best} are the "
        "largest to waste less than 4 % in both; 16 is the default for the kernels' sake.",
        "",
        "| budget / mean output | reserved | " + " | ".join(f"blocks of {s}" for s in sizes) + " |",
        "|---|---|" + "---|" * len(sizes),
    ]
    for name, row in result["workloads"].items():
        cells = [
            f"{r['sequences']:.0f} ({r['gain']:.2f}x), waste {100 * r['waste']:.1f} %, "
            f"{r['entries']:.0f} table entries"
            for r in (row["paged"][s] for s in sizes)
        ]
        out.append(
            f"| {name}: {row['budget']} / {row['mean_output']:.0f} "
            f"| {row['contiguous']['sequences']:.0f} | {' | '.join(cells)} |"
        )
    return "\n".join([*out, ""])


def fragmentation(result: dict[str, Any]) -> str:
    """Internal and external fragmentation of three allocators."""
    pictures = ", ".join(
        _picture(f"fragmentation_{kind}", f"{kind} over time") for kind in ("internal", "external")
    )
    names = list(next(iter(result["rows"].values())))
    out = [
        "**Fragmentation**, internal / external in %, and pool in use, with prompts and outputs of "
        f"up to {result['longest']} tokens (simulated). `python benchmarks/fragmentation.py`, "
        f"{pictures}.",
        "",
        f"| lengths | {' | '.join(names)} |",
        "|---|" + "---|" * len(names),
    ]
    for name, by_allocator in result["rows"].items():
        cells = [
            f"{100 * r['internal']:.1f} / {100 * r['external']:.0f}, use {100 * r['use']:.0f} %"
            for r in by_allocator.values()
        ]
        out.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join([*out, ""])


def policies(result: dict[str, Any]) -> str:
    """What four scheduling policies do to three workloads."""
    device, names = result["device"], list(result["rows"])
    out = [
        "**Scheduling policies**, simulated: TTFT p50 / p99 (p50 of urgent requests, of long "
        "prompts) in s, preemptions, Jain's fairness index. A step takes "
        f"{device['fixed'] * 1e3:.1f} ms + {device['per_token'] * 1e3:.2f} ms a token, from the "
        f"{device['name'].upper()} figures above. `python benchmarks/policies.py`, "
        f"{_picture('policies')}; `--trace FILE` replays your own traffic.",
        "",
        f"| | {' | '.join(names)} |",
        "|---|" + "---|" * len(names),
    ]
    for policy in result["rows"][names[0]]:
        cells = [
            f"{r['ttft_p50']:.1f} / {r['ttft_p99']:.0f} ({r['ttft_urgent_p50']:.1f}, "
            f"{r['ttft_long_p50']:.1f}), {r['preemptions']}, {r['fairness']:.2f}"
            for r in (result["rows"][name][policy] for name in names)
        ]
        out.append(f"| {policy} | {' | '.join(cells)} |")
    return "\n".join([*out, ""])


def prefix(result: dict[str, Any]) -> str:
    """What sharing a prefix saves."""
    out = [
        f"**Prefix sharing**: {result['requests']} prompts of {result['prompt_tokens']} tokens at "
        f"once, embedded model, {_host(result)}. `python benchmarks/prefix.py`, "
        f"{_picture('prefix')}.",
        "",
        "| common part of the prompt | peak blocks | against no sharing | TTFT p50 s | ratio |",
        "|---|---|---|---|---|",
    ]
    for share, row in result["rows"].items():
        on, off = row["sharing"], row["no_sharing"]
        out.append(
            f"| {share} % | {on['peak_blocks']:.0f} of {off['peak_blocks']:.0f} "
            f"| {100 * row['blocks_saved']:.0f} % less | {on['ttft_p50']:.2f} against "
            f"{off['ttft_p50']:.2f} | {row['ttft_p50_ratio']:.2f}x |"
        )
    return "\n".join([*out, ""])


def attention(result: dict[str, Any]) -> str:
    """Temporary memory and latency of attention in place against a gather."""
    rows = result["memory"]
    out = [
        "**Attention over blocks in place**, one decode row of the embedded model's shape, "
        f"{_host(result)}: peak of temporary memory and time of a layer, against gathering the "
        f"sequence first. `python benchmarks/attention.py`, {_picture('attention')}.",
        "",
        _row("tokens", (f"{r['seq_len']:,}" for r in rows)),
        "|---|" + "---|" * len(rows),
        _row("gather, KiB", (f"{r['gather_bytes'] / 1024:,.0f}" for r in rows)),
        _row("keys and values alone, KiB", (f"{r['copied_kv_bytes'] / 1024:,.0f}" for r in rows)),
    ]
    for name, title in result["tiles"].items():
        tiles = [r["paged"][name] for r in rows]
        times = (
            f"{t['bytes'] / 1024:,.0f} ({r['gather_bytes'] / t['bytes']:,.1f}x less)"
            for t, r in zip(tiles, rows, strict=True)
        )
        out.append(_row(f"{title}, KiB", times))
    out.append(_row("gather, µs", (f"{r['gather_us']:,.0f}" for r in rows)))
    for name, title in result["tiles"].items():
        out.append(_row(f"{title}, µs", (f"{r['paged'][name]['us']:,.0f}" for r in rows)))
    return "\n".join([*out, ""])


def _row(title: str, cells: Iterable[str]) -> str:
    return f"| {title} | {' | '.join(cells)} |"


def _host(result: dict[str, Any]) -> str:
    m = result["machine"]
    return f"{m['cpu']}, {m['cores']} cores, torch {m['torch']}, commit {m['commit']}"


def _load(name: str) -> dict[str, Any]:
    return json.loads(_path(name).read_text())


def http_load(result: dict[str, Any]) -> str:
    """Latencies and goodput under rising load."""
    runs, server = result["runs"], result["server"]
    slo = " and ".join(f"{k.upper()} {v:g} ms" for k, v in runs[0]["goodput"]["slo_ms"].items())
    out = [
        f"**Under load over HTTP**: {server['model']} on {_host(result)}, {runs[0]['requests']} "
        f"requests a row, {_picture('cpu_http_load')}. `{result['machine']['command']}`. Goodput "
        f"counts requests within {slo}; the client shares the cores, and TTFT counts from when a "
        "request was due.",
        "",
        "| load | done | shed / failed | output tokens/s | goodput /s | within limits "
        "| TTFT p50 / p99 ms | TPOT p50 / p99 ms |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for r in runs:
        load = r["load"]
        name = f"{load['rate']}/s" if "rate" in load else f"{load['concurrency']} users"
        cells = [
            name,
            f"{r['completed']} of {r['requests']}",
            f"{r['shed']} / {r['failed']}",
            f"{r['output_tokens_per_s']:.1f}",
            f"{r['goodput']['requests_per_s']:.2f}",
            f"{100 * r['goodput']['share']:.0f} %",
            *(f"{r[x]['p50']:.0f} / {r[x]['p99']:.0f}" for x in ("ttft_ms", "tpot_ms")),
        ]
        out.append(f"| {' | '.join(cells)} |")
    return "\n".join([*out, ""])


def frontend(result: dict[str, Any]) -> str:
    """CPU time of the HTTP process."""
    us = {k.removesuffix("_us_per_token"): v for k, v in result.items() if k.endswith("_token")}
    return (
        f"**CPU time of the HTTP process per streamed token**, {result['streams']} chat streams of "
        f"{result['tokens_per_stream']} tokens from a scripted engine, set-up of the requests "
        f"included: {us['over_sockets']:.1f} µs with uvicorn and sockets, of which reading the "
        f"engine's streams is {us['engine_only']:.1f} µs and the application {us['api']:.1f} µs "
        f"({_host(result)}). `{result['machine']['command']}`\n"
    )


def llama_cpp(result: dict[str, Any]) -> str:
    """Beside llama.cpp's server on the CPU."""
    out = [
        f"**Beside llama.cpp on the CPU**: the same file ({result['model']}), prompts of token ids "
        f"with a shared system message, answers of {result['budgets'][0]}-{result['budgets'][1]} "
        f"tokens, both servers in one run, medians of {result['rounds']} rounds; {_host(result)}; "
        f"llama.cpp {result['llama_cpp']}. llama.cpp computes on the 4-bit weights, pageserve in "
        "float32. `python benchmarks/llama_cpp.py`",
        "",
        "| streams | server | tokens/s | TTFT p50 ms | TPOT p50 ms |",
        "|---|---|---|---|---|",
    ]
    out += [
        f"| {r['streams']} | {r['server']} | {r['output_tokens_per_s']:.1f} | {r['ttft_ms']:.0f} "
        f"| {r['tpot_ms']:.1f} |"
        for r in result["rows"]
    ]
    return "\n".join([*out, ""])


def _path(name: str) -> Path:
    return RESULTS / f"{name}.json"


def _picture_of(benchmark: str) -> str:
    """A link to the CPU run's picture, for results that are older than pictures: none."""
    name = f"cpu_{benchmark}"
    return f" ({_picture(name)})" if (RESULTS / f"{name}.svg").exists() else ""


def _picture(name: str, text: str = "picture") -> str:
    assert (RESULTS / f"{name}.svg").exists(), f"the picture {name} is missing"
    return f"[{text}](benchmarks/results/{name}.svg)"


# Studies whose result is committed, in the order of the README.
STUDIES: dict[str, Callable[[dict[str, Any]], str]] = {
    "gpu_against_vllm": against_vllm,
    "gpu_kernels": kernels,
    "capacity": capacity,
    "fragmentation": fragmentation,
    "policies": policies,
    "cpu_frontend": frontend,
    "cpu_http_load": http_load,
    "cpu_llama_cpp": llama_cpp,
    "attention": attention,
    "prefix": prefix,
}


if __name__ == "__main__":
    sys.exit(main())
