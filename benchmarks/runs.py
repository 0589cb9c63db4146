"""One run of the offline engine on a list of jobs, and what is kept of any engine's run."""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from common import Job, percentile

from pageserve.core.scheduler import Scheduler
from pageserve.llm import LLM
from pageserve.sampling_params import SamplingParams


@dataclass
class Run:
    """Times in seconds from the common arrival, one entry per request.

    ``first_token`` is None for an engine whose callers get nothing before the end.
    """

    seconds: float
    tokens: list[list[int]]
    first_token: list[float] | None
    latency: list[float]
    extra: dict[str, Any] = field(default_factory=dict)

    def row(self) -> dict[str, Any]:
        """Summarise: tokens/s, time to first token, time per token after it, latency."""
        row: dict[str, Any] = {"tokens_per_s": sum(map(len, self.tokens)) / self.seconds}
        ttft = self.latency if self.first_token is None else self.first_token
        row |= {"ttft_p50": percentile(ttft, 50), "ttft_p99": percentile(ttft, 99)}
        row |= {"latency_p99": percentile(self.latency, 99)}
        if self.first_token is not None:
            times = zip(self.first_token, self.latency, self.tokens, strict=True)
            tpot = [(end - first) / (len(t) - 1) for first, end, t in times if len(t) > 1]
            if tpot:
                row |= {"tpot_p50": percentile(tpot, 50), "tpot_p99": percentile(tpot, 99)}
        return row | self.extra


def median_row(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the median of every figure over repeated runs."""
    return {key: statistics.median(row[key] for row in rows) for key in rows[0]}


def fresh_scheduler(
    llm: LLM, *, max_num_seqs: int | None = None, enable_prefix_caching: bool = True
) -> None:
    """Give an idle engine an empty pool and counters at zero, and perhaps a smaller batch.

    One loaded model so serves all configurations that differ in scheduling alone.
    """
    assert not llm.engine.has_work()
    ready = llm.engine.ready
    assert max_num_seqs is None or max_num_seqs <= ready.max_num_seqs, "the worker has no row"
    llm.engine.scheduler = Scheduler(
        num_blocks=ready.num_kv_blocks,
        block_size=ready.block_size,
        max_num_seqs=max_num_seqs or ready.max_num_seqs,
        max_num_batched_tokens=ready.max_num_batched_tokens,
        max_model_len=ready.max_model_len,
        enable_prefix_caching=enable_prefix_caching,
        eos_token_ids=ready.eos_token_ids,
    )


def run_pageserve(llm: LLM, jobs: Sequence[Job], **options: Any) -> Run:
    """Run the jobs greedily, each to its budget; ``options`` are :func:`fresh_scheduler`'s."""
    fresh_scheduler(llm, **options)
    params = [SamplingParams(temperature=0, max_tokens=j.budget, ignore_eos=True) for j in jobs]
    start = time.perf_counter()
    done = llm.generate([j.prompt_token_ids for j in jobs], params)
    seconds = time.perf_counter() - start
    stats = llm.engine.stats()
    return Run(
        seconds,
        [c.token_ids for c in done],
        [c.first_token_time for c in done],
        [c.finish_time for c in done],
        {
            "steps": stats.steps_total,
            "preemptions": stats.preemptions_total,
            "peak_blocks": stats.peak_used_blocks,
            "cached_tokens": sum(c.num_cached_tokens for c in done),
        },
    )
