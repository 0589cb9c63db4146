"""From records to the figures of a run: rates, percentiles, goodput, and what went wrong."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from common import percentile

from load.client import SHED, Record

PERCENTILES = (50, 90, 95, 99)
ALIASES = {"e2el": "e2e"}  # vLLM's name for it
LIMITED = ("ttft", "tpot", "e2e")  # what a service-level objective may limit


def ttft(record: Record) -> float:
    """Seconds from when the request was due to its first output."""
    return record.times[0] - record.due


def e2e(record: Record) -> float:
    """Seconds from when the request was due to its last output."""
    return record.times[-1] - record.due


def tpot(record: Record) -> float | None:
    """Seconds per token after the first chunk's first; None for answers of one token."""
    if record.output_tokens < 2:
        return None
    return (record.times[-1] - record.times[0]) / (record.output_tokens - 1)


def gaps(record: Record) -> list[float]:
    """Seconds between chunks (ITL)."""
    return [b - a for a, b in zip(record.times, record.times[1:], strict=False)]


def parse_slo(specs: Sequence[str]) -> dict[str, float]:
    """Return the limits in milliseconds of ``ttft:500 tpot:50``; raises ValueError on others."""
    slo = {}
    for spec in specs:
        name, _, limit = spec.partition(":")
        name = ALIASES.get(name, name)
        if name not in LIMITED:
            raise ValueError(f"a limit is one of {', '.join(LIMITED)} with milliseconds: {spec!r}")
        slo[name] = float(limit)
        if not slo[name] > 0:
            raise ValueError(f"a limit must be positive: {spec!r}")
    return slo


def meets(record: Record, slo: dict[str, float]) -> bool:
    """Whether a request was answered in full within every limit (milliseconds)."""
    if not record.ok:
        return False
    values = {"ttft": ttft(record), "tpot": tpot(record) or 0.0, "e2e": e2e(record)}
    return all(1e3 * values[name] <= limit for name, limit in slo.items())


def summarise(records: Sequence[Record], slo: dict[str, float]) -> dict[str, Any]:
    """Return the figures of one run; times in milliseconds unless the name says otherwise.

    The run lasts from the first request's due time to the last output. Shares are of all requests,
    so a server that sheds half of them cannot have a goodput share above one half.
    """
    done = [r for r in records if r.ok]
    lost = [r for r in records if not r.ok]
    start = min(r.due for r in records)
    end = max((r.times[-1] for r in records if r.times), default=start)
    seconds = max(end - start, 1e-9)
    shed = sum(r.status in SHED for r in lost)
    output_tokens = sum(r.output_tokens for r in done)
    prompt_tokens = [r.prompt_tokens for r in done]
    figures: dict[str, Any] = {
        "requests": len(records),
        "completed": len(done),
        "shed": shed,
        "failed": len(lost) - shed,
        "errors": dict(Counter(f"{r.status}: {r.error}" for r in lost).most_common(5)),
        "seconds": seconds,
        "requests_per_s": len(done) / seconds,
        "output_tokens": output_tokens,
        "output_tokens_per_s": output_tokens / seconds,
        "counted_by": "usage" if all(r.completion_tokens is not None for r in done) else "chunks",
        "ttft_ms": _spread([ttft(r) for r in done]),
        "tpot_ms": _spread([t for r in done if (t := tpot(r)) is not None]),
        "itl_ms": _spread([gap for r in done for gap in gaps(r)]),
        "e2e_ms": _spread([e2e(r) for r in done]),
        "lag_ms": _spread([r.sent - r.due for r in records]),
        "output_tokens_each_second": tokens_each_second(done, start, seconds),
    }
    if all(n is not None for n in prompt_tokens):  # without usage nobody knows
        total = output_tokens + sum(n for n in prompt_tokens if n is not None)
        figures |= {"prompt_tokens": total - output_tokens, "total_tokens_per_s": total / seconds}
    if slo:
        good = sum(meets(r, slo) for r in records)
        share = good / len(records)
        figures["goodput"] = {"slo_ms": slo, "requests_per_s": good / seconds, "share": share}
    return figures


def tokens_each_second(records: Sequence[Record], start: float, seconds: float) -> list[float]:
    """Output tokens in each second of the run; a chunk counts as its answer's mean per chunk."""
    bins = [0.0] * (int(seconds) + 1)
    for record in records:
        weight = record.output_tokens / len(record.times)
        for at in record.times:
            bins[min(int(at - start), len(bins) - 1)] += weight
    return [round(x, 2) for x in bins]


def _spread(seconds: Sequence[float]) -> dict[str, float] | None:
    """Mean, percentiles and maximum in milliseconds; None of nothing."""
    if not seconds:
        return None
    ranks = {f"p{p}": 1e3 * percentile(seconds, p) for p in PERCENTILES}
    return {"mean": 1e3 * sum(seconds) / len(seconds), **ranks, "max": 1e3 * max(seconds)}
