"""Write the README's tables of measurements from the JSON files in benchmarks/results.

python scripts/readme_tables.py [--check]
"""

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
EMBEDDED = "SmolLM2-135M-Instruct"
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
    parts += [verified_logits(), verified_tokens()]
    return "\n".join(parts)


def throughput(result: dict[str, Any]) -> str:
    """Hugging Face against pageserve."""
    rows, static = result["rows"], result["rows"][result["best_static"]]
    low, high = result["budgets"]
    dtype = result.get("dtype", "float32")  # older results are of this, and of the embedded model
    device = result["device"].replace("cuda", "gpu").upper()
    out = [
        f"**{device}, {dtype}, {_model(result)}**: {result['requests']} chat requests at once, "
        f"budgets {low}-{high} tokens, {_host(result)}. {_command(result)}. Memory gives "
        f"{result['read_bandwidth_gb_s']:,.0f} GB/s, so one stream cannot exceed "
        f"{result['ceiling_single_tokens_per_s']:,.0f} tokens/s.",
        "",
        "| | tokens/s | against static | TTFT p50 / p99 s | TPOT p50 ms | latency p99 s | steps "
        "| preemptions | peak blocks |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, r in rows.items():
        if name.startswith("single"):
            continue
        ratio = r["tokens_per_s"] / static["tokens_per_s"]
        tpot = _ms(1e3 * r["tpot_p50"]) if "tpot_p50" in r else ""
        out.append(
            f"| {name} | {r['tokens_per_s']:,.1f} | {ratio:.2f}x "
            f"| {_seconds(r['ttft_p50'])} / {_seconds(r['ttft_p99'])} "
            f"| {tpot} | {_seconds(r['latency_p99'])} "
            f"| {r.get('steps', '')} | {r.get('preemptions', '')} | {r.get('peak_blocks', '')} |"
        )
    single = rows["single: pageserve"]["tokens_per_s"]
    equal = "The tokens of all runs are equal."
    if not result["tokens_equal"]:
        assert dtype != "float32", "the figures of unequal engines cannot be compared"
        counts = ", ".join(f"{name} {count}" for name, count in result["equal"].items())
        equal = (
            f"In {dtype} near ties fall either way; of the {result['requests']} answers, these are "
            f"sequential Hugging Face's: {counts}."
        )
    out += [
        "",
        f"One stream: {single:,.1f} tokens/s against {rows['single: hf']['tokens_per_s']:,.1f} of "
        f"Hugging Face. {equal} ({_picture(result['file'])})",
        "",
    ]
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
        "/ 256 out, chat: log-normal, mean 272 in / 205 out, prefix: 2048 shared + 64 in / 64 out. "
        "`chat` and `prefix` are a server's first run of their prompts; a second one finds them in "
        "the prefix cache.",
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


def cascade(result: dict[str, Any]) -> str:
    """What reading a common prefix once saves of a step."""
    cells: dict[str, dict[str, float]] = {}
    for line in result["lines"]:
        if line["section"] == "cascade":
            cells.setdefault(line["case"], {})[line["variant"]] = line["us"] / 1e3
    out = [
        "**Decode steps whose rows have 2,048 of 2,112 tokens in common**, ms: each row reads "
        f"them, or a cascade does for a group of rows; {result['machine']['gpu']}, commit "
        f"{result['machine']['commit']}. `python benchmarks/kernels.py --sections cascade`",
        "",
        "| | each row | cascade | |",
        "|---|---|---|---|",
    ]
    for case, ms in cells.items():
        ratio = ms["cascade"] / ms["each row"]
        shown = [f"{ms['each row']:.2f}", f"{ms['cascade']:.2f}", f"{ratio:.2f}x"]
        out.append(_row(case.replace("batch ", "x "), shown))
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
        "largest to waste less than 4 % in both; 16 is the default for the kernels' sake. "
        "Admission leaves a block free for each running sequence, which costs most where sequences "
        "are but a few blocks long: [LOG.md](benchmarks/LOG.md) says what other rules cost.",
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
        f"{_ms(device['fixed'] * 1e3)} ms + {_ms(device['per_token'] * 1e6)} µs a token, from the "
        f"{device['name'].upper()} figures above. {_command(result)}, {_picture(result['file'])}; "
        "`--trace FILE` replays your own traffic.",
        "",
        f"| | {' | '.join(names)} |",
        "|---|" + "---|" * len(names),
    ]
    for policy in result["rows"][names[0]]:
        cells = [
            f"{_seconds(r['ttft_p50'])} / {_seconds(r['ttft_p99'])} "
            f"({_seconds(r['ttft_urgent_p50'])}, {_seconds(r['ttft_long_p50'])}), "
            f"{r['preemptions']}, {r['fairness']:.2f}"
            for r in (result["rows"][name][policy] for name in names)
        ]
        out.append(f"| {policy} | {' | '.join(cells)} |")
    return "\n".join([*out, ""])


def prefix(result: dict[str, Any]) -> str:
    """What sharing a prefix saves."""
    out = [
        f"**Prefix sharing**: {result['requests']} prompts of {result['prompt_tokens']} tokens at "
        f"once, {_model(result)}, {_host(result)}. {_command(result)}, {_picture(result['file'])}.",
        "",
        "| common part of the prompt | peak blocks | against no sharing | TTFT p50 s | ratio |",
        "|---|---|---|---|---|",
    ]
    for share, row in result["rows"].items():
        on, off = row["sharing"], row["no_sharing"]
        out.append(
            f"| {share} % | {on['peak_blocks']:.0f} of {off['peak_blocks']:.0f} "
            f"| {100 * row['blocks_saved']:.0f} % less | {_seconds(on['ttft_p50'])} against "
            f"{_seconds(off['ttft_p50'])} | {row['ttft_p50_ratio']:.2f}x |"
        )
    return "\n".join([*out, ""])


def attention(result: dict[str, Any]) -> str:
    """Temporary memory and latency of attention in place against a gather."""
    rows = result["memory"]
    out = [
        "**Attention over blocks in place**, one decode row of the embedded model's shape, "
        f"{result['dtype']}, {_host(result)}: peak of temporary memory and time of a layer, "
        f"against gathering the sequence first. {_command(result)}, {_picture(result['file'])}.",
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
    host = m["gpu"] if "gpu" in m else f"{m['cpu']}, {m['cores']} cores"
    return f"{host}, torch {m['torch']}, commit {m['commit']}"


def _command(result: dict[str, Any]) -> str:
    """The command that was run, but for where it left its result."""
    return f"`{re.sub(r' --(json|plot) [^ ]+', '', result['machine']['command'])}`"


def _model(result: dict[str, Any]) -> str:
    model = result.get("model", EMBEDDED)
    return "embedded model" if model.startswith(EMBEDDED) else model


def _seconds(value: float) -> str:
    """Two decimals, one from 10 s on, or two digits of what is shorter."""
    return f"{value:.{1 if value >= 10 else 2}f}" if value >= 0.1 else f"{value:.2g}"


def _ms(value: float) -> str:
    """Three digits, and no fraction of what has them."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _load(name: str) -> dict[str, Any]:
    return json.loads(_path(name).read_text()) | {"file": name}


def http_load(result: dict[str, Any]) -> str:
    """Latencies and goodput under rising load."""
    runs, server = result["runs"], result["server"]
    slo = " and ".join(f"{k.upper()} {v:g} ms" for k, v in runs[0]["goodput"]["slo_ms"].items())
    out = [
        f"**Under load over HTTP**: {server['model']} on {_host(result)}, {runs[0]['requests']} "
        f"requests a row, {_picture(result['file'])}. {_command(result)}. Goodput counts requests "
        f"within {slo}; the client shares the machine, TTFT counts from when a request was due.",
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
            f"{r['output_tokens_per_s']:,.1f}",
            f"{r['goodput']['requests_per_s']:.2f}",
            f"{100 * r['goodput']['share']:.0f} %",
            *(f"{_ms(r[x]['p50'])} / {_ms(r[x]['p99'])}" for x in ("ttft_ms", "tpot_ms")),
        ]
        out.append(f"| {' | '.join(cells)} |")
    return "\n".join([*out, ""])


def frontend(result: dict[str, Any]) -> str:
    """CPU time of the HTTP process."""
    us = {k.partition("_us_per_")[0]: v for k, v in result.items() if "_us_per_" in k}
    return (
        f"**CPU time of the HTTP process per streamed token**, {result['streams']} chat streams of "
        f"{result['tokens_per_stream']} tokens from a scripted engine in its own process, each "
        f"token an event: {us['over_sockets']:.1f} µs, nothing subtracted, of which writing the "
        f"event to its socket is {us['bare_write']:.1f} µs, reading the engine's messages "
        f"{us['engine_link']:.1f} µs and setting the requests up {us['set-up']:.1f} µs. A prompt "
        f"of {result['prompt_tokens']:,} token ids that arrives with 31 others takes "
        f"{us['intake']:.0f} µs until the engine has it ({_host(result)}). "
        f"{_command(result)}\n"
    )


def llama_cpp(result: dict[str, Any]) -> str:
    """Beside llama.cpp's server on the CPU."""
    out = [
        f"**Beside llama.cpp on the CPU**: the same file ({result['model']}), prompts of token ids "
        f"with a shared system message, answers of {result['budgets'][0]}-{result['budgets'][1]} "
        f"tokens, both servers in one run, medians of {result['rounds']} rounds; {_host(result)}; "
        f"llama.cpp {result['llama_cpp']}. llama.cpp computes on the 4-bit weights, pageserve in "
        f"float32. `python benchmarks/llama_cpp.py`, {_picture(result['file'])}",
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


def structured(result: dict[str, Any]) -> str:
    """What streams under a grammar cost the plain ones."""
    rows, loss = result["rows"], result["loss"]
    out = [
        f"**Streams that write JSON under a schema**, beside {result['plain']} plain ones, "
        f"{result['joined']} of them or as many plain ones more, {_model(result)}, "
        f"{_host(result)}. {_command(result)}, {_picture(result['file'])}.",
        "",
        "| beside | plain streams, tokens/s | lost | those beside them, tokens/s | steps/s |",
        "|---|---|---|---|---|",
    ]
    titles = {"plain": "none", "with more plain": "plain", "with grammars": "under a schema"}
    for name, title in titles.items():
        r = rows[name]
        lost = f"{100 * loss[name]:.1f} %" if name in loss else ""
        cells = (f"{r[f'{kind}_per_s']:,.0f}" for kind in ("plain_tokens", "joined_tokens"))
        plain, joined = cells
        out.append(_row(title, (plain, lost, joined, f"{r['steps_per_s']:,.1f}")))
    return "\n".join([*out, ""])


def cold_start(result: dict[str, Any]) -> str:
    """What a first start takes, and a later one."""
    starts = result["starts"]
    phases = list(starts["cold"]["phases"])
    out = [
        f"**Start of the server until it is ready**: {result['model']} shape, {_host(result)}. "
        f"{_command(result)}. Cold: nothing is in Triton's cache; {len(starts['cold']['kernels'])} "
        "kernels are compiled. The phases are those of the engine, started alone.",
        "",
        _row("seconds", ["server", *phases]),
        "|---|" + "---|" * (len(phases) + 1),
    ]
    for name, start in starts.items():
        cells = [start["server_seconds"], *(start["phases"].get(p, 0.0) for p in phases)]
        out.append(_row(name, (f"{c:.1f}" if c >= 0.05 else "" for c in cells)))
    return "\n".join([*out, ""])


def verified_logits() -> str:
    """Logits against transformers, one row per result and type."""
    out = [
        "**Logits against transformers**, every position of 13 prompts, run whole and in pieces "
        "(the worse of both). Differences are in units of the logits' standard deviation, in 16 "
        "bits from float32 on the same weights, beside transformers' own. "
        "`python scripts/verify_model.py`",
        "",
        "| model | device | type | positions | largest difference | mean | transformers' mean "
        "| other best token | of these near ties | commit |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for result, run in _verified("verify_model"):
        ways = [c for name, c in run["all"].items() if name != "transformers"]
        other = max(c["positions"] - c["same_top1"] for c in ways)
        ties = max(c["near_ties"] for c in ways)
        theirs = run["all"].get("transformers")
        cells = [
            _device(result),
            run["dtype"],
            f"{ways[0]['positions']:,}",
            f"{max(c['max_diff'] for c in ways):.2g}",
            f"{max(c['mean_diff'] for c in ways):.2g}",
            f"{theirs['mean_diff']:.2g}" if theirs else "",
            str(other),
            str(ties),
            result["machine"]["commit"],
        ]
        out.append(_row(_model(result), cells))
    return "\n".join([*out, ""])


def verified_tokens() -> str:
    """Greedy tokens of the whole engine against generate, one row per result and type."""
    out = [
        "**Greedy tokens of the whole engine against `generate`**: batch and block sizes, chunks, "
        "prefix cache, overlap, preemption, on a GPU also without graphs and on the other backend. "
        "Equal: prompts with all of the reference's tokens, in the worst variant; others depart at "
        "near ties. `python scripts/verify_end_to_end.py`",
        "",
        "| model | device | type | variants | prompts x tokens | equal | widest tie that fell "
        "otherwise | bound | commit |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for result, run in _verified("verify_end_to_end"):
        rows = run["rows"]
        cells = [
            _device(result),
            run["dtype"],
            str(len(rows)),
            f"{run['prompts']} x {run['max_tokens']}",
            str(min(r["equal"] for r in rows)),
            f"{max(r['widest'] for r in rows):.2g}",
            f"{run['bound']:.2g}",
            result["machine"]["commit"],
        ]
        out.append(_row(_model(result), cells))
    return "\n".join([*out, ""])


def _verified(command: str) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield each run of a verification command with its result."""
    for path in sorted(RESULTS.glob(f"*_{command}*.json")):
        result = _load(path.stem)
        for run in result["runs"]:
            assert run["passed"], f"{path.name}: a failed verification proves nothing"
            yield result, run


def _device(result: dict[str, Any]) -> str:
    return result["machine"]["gpu"] if result["device"] == "cuda" else "CPU"


def _path(name: str) -> Path:
    return RESULTS / f"{name}.json"


def _picture(name: str, text: str = "picture") -> str:
    assert (RESULTS / f"{name}.svg").exists(), f"the picture {name} is missing"
    return f"[{text}](benchmarks/results/{name}.svg)"


# Studies whose result is committed, in the order of the README.
STUDIES: dict[str, Callable[[dict[str, Any]], str]] = {
    "cpu_throughput_bfloat16": throughput,
    "gpu_throughput": throughput,
    "gpu_http_load": http_load,
    "gpu_against_vllm": against_vllm,
    "gpu_kernels": kernels,
    "gpu_cascade": cascade,
    "capacity": capacity,
    "fragmentation": fragmentation,
    "policies": policies,
    "gpu_policies": policies,
    "cpu_frontend": frontend,
    "cpu_http_load": http_load,
    "cpu_llama_cpp": llama_cpp,
    "attention": attention,
    "gpu_attention": attention,
    "prefix": prefix,
    "gpu_prefix": prefix,
    "cpu_structured": structured,
    "gpu_structured_3b": structured,
    "gpu_structured": structured,
    "gpu_cold_start": cold_start,
}


if __name__ == "__main__":
    sys.exit(main())
