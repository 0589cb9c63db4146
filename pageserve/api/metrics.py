"""Prometheus metrics under vLLM's names, so that its dashboards work.

Every app has its own registry. What changes once a token, and all histograms, are kept in plain
numbers and turned into samples when Prometheus asks; the rest uses the client library. No label
value ever comes from a request: the model is the first served name, unknown paths share one
handler.
"""

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, GCCollector, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

from pageserve.api.http_metrics import HttpMetrics
from pageserve.config import EngineConfig
from pageserve.engine.client import EngineClient
from pageserve.messages import StepStats

prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]

# fmt: off
TTFT_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75,
    1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)
ITL_BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75,
    1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)
LATENCY_BUCKETS = (
    0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0,
    50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
)
# fmt: on
ITERATION_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
N_BUCKETS = (1, 2, 5, 10, 20)
FINISHED_REASONS = ("stop", "length", "abort", "error", "repetition")
PHASES = ("schedule", "launch", "wait", "update")
STREAM_ERRORS = (
    "internal_error", "engine_dead", "server_draining", "deadline_exceeded", "request_cancelled",
    "context_length_exceeded",
)  # fmt: skip
LABELS = ("model_name", "engine")
# Prometheus 2 asks for no escaping, and the library's default writes vllm_ for vllm: then. None of
# our names needs any.
_openmetrics: Callable[[CollectorRegistry], bytes] = partial(
    openmetrics.generate_latest, escaping=openmetrics.ALLOWUTF8
)
DEFAULT_CONTEXT = 131072  # for the buckets of token counts when --max-model-len is not given


def one_two_five(limit: int) -> list[int]:
    """Return 1, 2, 5, 10, 20, 50, … up to ``limit``."""
    return [m * 10**k for k in range(len(str(limit))) for m in (1, 2, 5) if m * 10**k <= limit]


class HotHistogram:
    """A histogram that costs a bisection per observation and no lock."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = list(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def buckets(self) -> list[tuple[str, float]]:
        """Return (upper bound, cumulative count) pairs."""
        total = 0
        pairs = []
        for bound, count in zip([*self._bounds, float("inf")], self._counts, strict=True):
            total += count
            name = "+Inf" if bound == float("inf") else str(float(bound))
            pairs.append((name, float(total)))
        return pairs

    def family(self, name: str, help: str, labels: Sequence[str]) -> HistogramMetricFamily:
        """Return the samples under ``name``."""
        family = HistogramMetricFamily(name, help, labels=LABELS)
        family.add_metric(labels, self.buckets(), self._sum)
        return family


class SequenceTimes:
    """When one sequence reached its stations, in ``time.monotonic()`` seconds (0: not yet)."""

    __slots__ = ("arrival", "enqueued", "first_token", "last_token", "scheduled")

    def __init__(self, arrival: float) -> None:
        self.arrival = arrival
        self.enqueued = time.monotonic()
        self.scheduled = 0.0
        self.first_token = 0.0
        self.last_token = 0.0


class Metrics:
    """All metrics of one app."""

    def __init__(
        self,
        model_name: str,
        client: EngineClient,
        engine_config: EngineConfig,
        key_names: Sequence[str] = (),
    ) -> None:
        """``key_names`` are the labels of what is counted by API key, never the secrets."""
        self.registry = CollectorRegistry()
        self.labels = (model_name, "0")
        self.prefill_rate = 0.0  # tokens per second, smoothed over requests
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.generation_tokens = 0
        self.gaps = HotHistogram(ITL_BUCKETS)
        self._iterations = HotHistogram(ITERATION_BUCKETS)
        self._client = client
        self._engine_config = engine_config
        self._phase_seconds = dict.fromkeys(PHASES, 0.0)
        self._num_steps = 0
        self._graph_replays: dict[int, int] = {}  # by size
        client.on_step = self.count_step
        self._make_histograms(engine_config.model.max_model_len or DEFAULT_CONTEXT)
        self._make_counters()
        self._make_key_counters(key_names)
        self.http = HttpMetrics(self.registry)
        self.registry.register(_ScrapeCollector(self))
        ProcessCollector(registry=self.registry)
        GCCollector(registry=self.registry)

    def _make_histograms(self, max_model_len: int) -> None:
        self._histograms: dict[tuple[str, str], HotHistogram] = {}  # by name and help

        def make(name: str, help: str, buckets: Sequence[float]) -> HotHistogram:
            metric = self._histograms[f"vllm:{name}", help] = HotHistogram(buckets)
            return metric

        def latency(name: str, help: str) -> HotHistogram:
            return make(name, help, LATENCY_BUCKETS)

        tokens = one_two_five(max_model_len)
        self._ttft = make("time_to_first_token_seconds", "arrival to first token", TTFT_BUCKETS)
        self._e2e = latency("e2e_request_latency_seconds", "arrival to last token")
        self._queue = latency("request_queue_time_seconds", "queued to first scheduled")
        self._inference = latency("request_inference_time_seconds", "scheduled to last token")
        self._prefill = latency("request_prefill_time_seconds", "scheduled to first token")
        self._decode = latency("request_decode_time_seconds", "first to last token")
        self._tpot = make(
            "request_time_per_output_token_seconds", "mean gap of a request", ITL_BUCKETS
        )
        self._prompt = make("request_prompt_tokens", "prompt tokens of a request", tokens)
        self._generated = make("request_generation_tokens", "tokens generated", tokens)
        self._max_generated = make(
            "request_max_num_generation_tokens", "tokens of the longest choice", tokens
        )
        self._params_n = make("request_params_n", "parameter n", N_BUCKETS)
        self._params_max_tokens = make("request_params_max_tokens", "parameter max_tokens", tokens)
        self._preemptions = make(
            "request_num_preemptions", "preemptions of a request", (0, 1, 2, 5, 10, 20, 50, 100)
        )

    def _make_counters(self) -> None:
        def make(name: str, help: str, labels: Sequence[str]) -> Counter:
            return Counter(name, help, labels, registry=self.registry)

        success = make("vllm:request_success", "finished requests", (*LABELS, "finished_reason"))
        self._success = {r: success.labels(*self.labels, r) for r in FINISHED_REASONS}
        rejections = make(
            "vllm:admission_rejections", "requests refused by a limit", ("model_name", "reason")
        )
        self._rejections = {"queue_full": rejections.labels(self.labels[0], "queue_full")}
        self.disconnects = make(
            "pageserve:client_disconnects", "clients that left early", LABELS
        ).labels(*self.labels)
        self.corrupted = make(
            "pageserve:corrupted_requests", "requests whose logits were no numbers", LABELS
        ).labels(*self.labels)
        self.deadlines = make(
            "pageserve:deadline_exceeded", "requests that were not done in time", LABELS
        ).labels(*self.labels)
        errors = make("pageserve:stream_errors", "streams that failed", (*LABELS, "code"))
        self._stream_errors = {code: errors.labels(*self.labels, code) for code in STREAM_ERRORS}

    def _make_key_counters(self, key_names: Sequence[str]) -> None:
        def make(name: str, help: str, *labels: str) -> Counter:
            names = (*LABELS, "key", *labels)
            return Counter(f"pageserve:key_{name}", help, names, registry=self.registry)

        prompt = make("prompt_tokens", "prompt tokens by API key")
        output = make("generation_tokens", "tokens generated by API key")
        requests = make("requests", "requests by API key and status class", "status")
        self._key_tokens = {
            key: (prompt.labels(*self.labels, key), output.labels(*self.labels, key))
            for key in key_names
        }
        self._key_requests = {
            (key, status): requests.labels(*self.labels, key, status)
            for key in key_names
            for status in ("2xx", "4xx", "5xx")
        }

    # --- events ---

    def count_key_request(self, key: str, status: int) -> None:
        """Count an answer to a key."""
        counter = self._key_requests.get((key, f"{status // 100}xx"))
        if counter is not None:  # None: the client left before there was a status
            counter.inc()

    def count_key_tokens(self, key: str, num_prompt: int, num_output: int) -> None:
        """Count what a request of a key has cost."""
        prompt, output = self._key_tokens[key]
        prompt.inc(num_prompt)
        output.inc(num_output)

    def count_step(self, step: StepStats) -> None:
        """Count an engine step."""
        self._num_steps += 1
        self._iterations.observe(step.num_scheduled_tokens)
        seconds = self._phase_seconds
        seconds["schedule"] += step.schedule_seconds
        seconds["launch"] += step.launch_seconds
        seconds["wait"] += step.wait_seconds
        seconds["update"] += step.update_seconds
        if size := step.replayed_tokens:
            self._graph_replays[size] = self._graph_replays.get(size, 0) + 1

    def first_token(self, times: SequenceTimes, num_prompt: int, num_cached: int) -> None:
        """Count a prompt whose prefill is complete."""
        self.prompt_tokens += num_prompt
        self.cached_tokens += num_cached
        self._ttft.observe(times.first_token - times.arrival)
        if not times.scheduled:
            return
        prefill = times.first_token - times.scheduled
        self._queue.observe(max(0.0, times.scheduled - times.enqueued))
        self._prefill.observe(max(0.0, prefill))
        if prefill > 0 and num_prompt > num_cached:
            rate = (num_prompt - num_cached) / prefill
            self.prefill_rate += 0.1 * (rate - self.prefill_rate) if self.prefill_rate else rate

    def enqueued(self, n: int, max_tokens: int) -> None:
        """Count the parameters of a request that was let in."""
        self._params_n.observe(n)
        self._params_max_tokens.observe(max_tokens)

    def finished(
        self, reason: str, times: SequenceTimes, num_prompt: int, num_output: int, preemptions: int
    ) -> None:
        """Count a sequence that ended, for whatever reason."""
        self._success[reason].inc()
        self._prompt.observe(num_prompt)
        self._generated.observe(num_output)
        self._preemptions.observe(preemptions)
        if not times.first_token:
            return
        self._e2e.observe(times.last_token - times.arrival)
        self._decode.observe(times.last_token - times.first_token)
        if times.scheduled:
            self._inference.observe(max(0.0, times.last_token - times.scheduled))
        if num_output > 1:
            self._tpot.observe((times.last_token - times.first_token) / (num_output - 1))

    def longest_output(self, num_output: int) -> None:
        """Count what the longest of a prompt's sequences came to."""
        self._max_generated.observe(num_output)

    def count_rejection(self, reason: str) -> None:
        """Count a request refused by a limit."""
        self._rejections[reason].inc()

    def stream_error(self, code: str | None) -> None:
        """Count a stream that ended with an error frame."""
        if code in self._stream_errors:
            self._stream_errors[code].inc()

    # --- scrape ---

    def render(self, accept: str) -> tuple[bytes, str]:
        """Return (body, content type), OpenMetrics if ``accept`` asks for it."""
        encode, content_type = choose_encoder(accept)
        if content_type.startswith("application/openmetrics-text"):
            return _openmetrics(self.registry), openmetrics.CONTENT_TYPE_LATEST
        return encode(self.registry), content_type

    def collect(self) -> Iterable[Metric]:
        """Yield what is kept in plain numbers here and in the engine."""
        stats = self._client.stats
        blocks = stats.num_used_blocks + stats.num_free_blocks
        usage = stats.num_used_blocks / blocks if blocks else 0.0
        yield self._gauge("num_requests_running", "requests in the batch", stats.num_running)
        yield self._gauge("num_requests_waiting", "requests in the queue", stats.num_waiting)
        yield self._gauge("kv_cache_usage_perc", "blocks held by live requests, 0 to 1", usage)
        yield self._gauge("gpu_cache_usage_perc", "old name of kv_cache_usage_perc", usage)
        counters = {
            "prefix_cache_queries": ("tokens looked up", stats.prefix_cache_queries_total),
            "prefix_cache_hits": ("tokens found", stats.prefix_cache_hits_total),
            "num_preemptions": ("preempted requests", stats.preemptions_total),
            "prompt_tokens": ("prompt tokens, cached ones included", self.prompt_tokens),
            "prompt_tokens_cached": ("prompt tokens from the cache", self.cached_tokens),
            "generation_tokens": ("tokens generated", self.generation_tokens),
        }
        for name, (help, value) in counters.items():
            counter = CounterMetricFamily(f"vllm:{name}", help, labels=LABELS)
            counter.add_metric(self.labels, value)
            yield counter
        hits = CounterMetricFamily(
            "pageserve:grammar_cache_hits", "grammars found compiled", labels=LABELS
        )
        hits.add_metric(self.labels, stats.grammar_cache_hits_total)
        yield hits
        compiled = SummaryMetricFamily(
            "pageserve:grammar_compile_seconds", "time to compile a grammar", labels=LABELS
        )
        compiled.add_metric(
            self.labels, stats.grammars_compiled_total, stats.grammar_compile_seconds_total
        )
        yield compiled
        yield from self._by_label()
        for (name, help), histogram in self._histograms.items():
            yield histogram.family(name, help, self.labels)
        for name in ("inter_token_latency_seconds", "time_per_output_token_seconds"):
            yield self.gaps.family(f"vllm:{name}", "gap between two outputs", self.labels)
        yield self._iterations.family("vllm:iteration_tokens_total", "tokens a step", self.labels)
        yield self._cache_config()

    def _by_label(self) -> Iterable[Metric]:
        """Yield the families that have a label of their own."""
        stats = self._client.stats
        deferred = stats.num_deferred
        waiting = {"capacity": stats.num_waiting - deferred, "deferred": deferred}
        yield self._labelled(
            GaugeMetricFamily, "vllm:num_requests_waiting_by_reason", "queued, by why", "reason",
            waiting,
        )  # fmt: skip
        sources = {
            "local_compute": self.prompt_tokens - self.cached_tokens,
            "local_cache_hit": self.cached_tokens,
            "external_kv_transfer": 0,
        }
        yield self._labelled(
            CounterMetricFamily, "vllm:prompt_tokens_by_source", "prompt tokens by where their "
            "KV came from", "source", sources,
        )  # fmt: skip
        yield self._labelled(
            CounterMetricFamily, "pageserve:cudagraph_replays", "steps that replayed a CUDA graph "
            "of this many tokens", "size", self._graph_replays,
        )  # fmt: skip
        ready = self._client.ready
        yield self._labelled(
            GaugeMetricFamily, "pageserve:gpu_memory_bytes", "memory of the device (the host's, "
            "where that is the device)", "kind", ready.memory_bytes if ready else {},
        )  # fmt: skip
        yield self._labelled(
            GaugeMetricFamily, "pageserve:startup_seconds", "time to get ready", "phase",
            self._client.startup_seconds,
        )  # fmt: skip
        steps = SummaryMetricFamily(
            "pageserve:step_seconds", "time of engine steps by phase", labels=(*LABELS, "phase")
        )
        for phase, seconds in self._phase_seconds.items():
            steps.add_metric((*self.labels, phase), self._num_steps, seconds)
        yield steps

    def _labelled(
        self,
        kind: type[CounterMetricFamily] | type[GaugeMetricFamily],
        name: str,
        help: str,
        label: str,
        values: Mapping[Any, float],
    ) -> Metric:
        family = kind(name, help, labels=(*LABELS, label))
        for key, value in values.items():
            family.add_metric((*self.labels, str(key)), value)
        return family

    def _gauge(self, name: str, help: str, value: float) -> GaugeMetricFamily:
        family = GaugeMetricFamily(f"vllm:{name}", help, labels=LABELS)
        family.add_metric(self.labels, value)
        return family

    def _cache_config(self) -> GaugeMetricFamily:
        ready = self._client.ready
        cache = self._engine_config.cache
        facts = {
            "block_size": ready.block_size if ready else cache.block_size,
            "cache_dtype": ready.dtype if ready else self._engine_config.model.dtype,
            "num_gpu_blocks": ready.num_kv_blocks if ready else "None",
            "gpu_memory_utilization": cache.gpu_memory_utilization,
            "enable_prefix_caching": cache.enable_prefix_caching,
        }
        family = GaugeMetricFamily(
            "vllm:cache_config_info", "facts of the KV cache", labels=(*LABELS, *facts)
        )
        family.add_metric((*self.labels, *map(str, facts.values())), 1.0)
        return family


class _ScrapeCollector(Collector):
    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return self._metrics.collect()
