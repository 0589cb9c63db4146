"""/metrics: names, exact counts, and no label that a client can choose."""

import json
import re
from pathlib import Path

import pytest
from api_harness import CHAT, CMPL
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as openmetrics_families,
)
from prometheus_client.parser import text_string_to_metric_families

GAUGES = [
    "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "gpu_cache_usage_perc",
]  # fmt: skip
COUNTERS = [
    "prefix_cache_queries_total", "prefix_cache_hits_total", "prompt_tokens_total",
    "generation_tokens_total", "num_preemptions_total", "prompt_tokens_cached_total",
]  # fmt: skip
HISTOGRAMS = [
    "time_to_first_token_seconds", "inter_token_latency_seconds", "time_per_output_token_seconds",
    "request_time_per_output_token_seconds", "e2e_request_latency_seconds",
    "request_queue_time_seconds", "request_inference_time_seconds", "request_prefill_time_seconds",
    "request_decode_time_seconds", "request_prompt_tokens", "request_generation_tokens",
    "request_max_num_generation_tokens", "request_params_n", "request_params_max_tokens",
    "iteration_tokens_total",
]  # fmt: skip
REASONS = ("stop", "length", "abort", "error", "repetition")


def sample(metrics, name, **labels):
    pairs = {"engine": "0", "model_name": "tiny", **labels}
    inner = ",".join(f'{k}="{v}"' for k, v in sorted(pairs.items()))
    return metrics[f"vllm:{name}{{{inner}}}"]


def own(metrics, name, **labels):
    pairs = {"engine": "0", "model_name": "tiny", **labels}
    inner = ",".join(f'{k}="{v}"' for k, v in sorted(pairs.items()))
    return metrics[f"pageserve:{name}{{{inner}}}"]


def test_every_name_is_there_at_zero(make_api):
    metrics = make_api(loaded=False).metrics()
    for name in (*GAUGES, *COUNTERS):
        assert sample(metrics, name) == 0
    for name in HISTOGRAMS:
        assert sample(metrics, name + "_count") == sample(metrics, name + "_sum") == 0
        assert sample(metrics, name + "_bucket", le="+Inf") == 0
    for name in ("cache_hits_total", "compile_seconds_count", "compile_seconds_sum"):
        assert own(metrics, "grammar_" + name) == 0
    for reason in REASONS:
        assert sample(metrics, "request_success_total", finished_reason=reason) == 0
    assert any(name.startswith("vllm:cache_config_info{") for name in metrics)
    assert any(name.startswith("process_") for name in metrics)
    assert any(name.startswith("python_gc_") for name in metrics)


def test_labels_with_known_values_are_there_at_zero(make_api):
    metrics = make_api(loaded=False).metrics()
    for reason in ("capacity", "deferred"):
        assert sample(metrics, "num_requests_waiting_by_reason", reason=reason) == 0
    for source in ("local_compute", "local_cache_hit", "external_kv_transfer"):
        assert sample(metrics, "prompt_tokens_by_source_total", source=source) == 0
    assert metrics['vllm:admission_rejections_total{model_name="tiny",reason="queue_full"}'] == 0
    for phase in ("schedule", "launch", "wait", "update"):
        assert own(metrics, "step_seconds_count", phase=phase) == 0
    for name in ("deadline_exceeded", "corrupted_requests", "client_disconnects"):
        assert own(metrics, name + "_total") == 0
    for code in ("internal_error", "engine_dead", "request_cancelled", "deadline_exceeded"):
        assert own(metrics, "stream_errors_total", code=code) == 0


def test_engine_facts_and_steps(make_api):
    api = make_api(loaded=False)
    assert own(api.metrics(), "startup_seconds", phase="starting") == 0.25
    api = make_api(script=list(b"abc"))
    api.chat()  # four steps; the scripted engine says 8 tokens of graph and 1 to 4 ms each
    metrics = api.metrics()
    assert own(metrics, "cudagraph_replays_total", size="8") == 4
    for milliseconds, phase in enumerate(("schedule", "launch", "wait", "update"), 1):
        assert own(metrics, "step_seconds_count", phase=phase) == 4
        assert own(metrics, "step_seconds_sum", phase=phase) == pytest.approx(4e-3 * milliseconds)
    assert own(metrics, "gpu_memory_bytes", kind="weights") == 1000


def test_steps_are_counted_even_if_no_request_hears_of_them(make_api):
    """Three prompt chunks without a token are three samples of tokens per step."""
    from pageserve.messages import StepStats

    api = make_api()
    for num_tokens in (512, 512, 100):
        api.engine.on_step(StepStats(num_tokens))
    metrics = api.metrics()
    assert sample(metrics, "iteration_tokens_total_count") == 3
    assert sample(metrics, "iteration_tokens_total_sum") == 1124


def test_http_itself(api):
    api.chat()
    api.chat(stream=True)
    metrics = api.metrics()
    route = f'{{handler="{CHAT}",method="POST"}}'
    assert metrics["http_request_duration_seconds_count" + route] == 2
    assert metrics["http_request_duration_highr_seconds_count"] == 2
    sizes = [
        metrics[f'http_{x}_size_bytes_sum{{handler="{CHAT}"}}'] for x in ("request", "response")
    ]
    assert all(size > 50 for size in sizes)


def test_corrupted_requests(make_api):
    from pageserve.messages import INVALID_LOGITS

    api = make_api(fail_at=1, error=INVALID_LOGITS)
    assert api.chat().status_code == 500
    assert own(api.metrics(), "corrupted_requests_total") == 1
    assert api.chat(n=3, temperature=1).status_code == 500  # a request, whatever its sequences
    assert own(api.metrics(), "corrupted_requests_total") == 2


# --- dashboards -----------------------------------------------------------------------------------

# What the panels of vLLM's published dashboards ask for.
SELECTOR = '{model_name="$model_name"}'
RATES = [
    "prompt_tokens_total", "generation_tokens_total", "e2e_request_latency_seconds_sum",
    "e2e_request_latency_seconds_count", "inter_token_latency_seconds_sum",
    "inter_token_latency_seconds_count", "request_queue_time_seconds_sum",
    "request_prefill_time_seconds_sum", "request_decode_time_seconds_sum",
    "request_max_num_generation_tokens_sum",
]  # fmt: skip
BUCKETS = [
    "e2e_request_latency_seconds", "inter_token_latency_seconds", "time_per_output_token_seconds",
    "time_to_first_token_seconds", "request_prompt_tokens", "request_generation_tokens",
]  # fmt: skip
VLLM_QUERIES = [
    *(f"rate(vllm:{name}{SELECTOR}[$__rate_interval])" for name in RATES),
    *(f"sum by(le) (rate(vllm:{name}_bucket{SELECTOR}[$__rate_interval]))" for name in BUCKETS),
    *(f"vllm:{name}{SELECTOR}" for name in GAUGES),
    f"sum by(finished_reason) (increase(vllm:request_success_total{SELECTOR}[$__rate_interval]))",
    'sum(rate(http_requests_total{status="5xx"}[5m])) / sum(rate(http_requests_total[5m]))',
    "histogram_quantile(0.99, sum(rate(http_request_duration_highr_seconds_bucket[1m])) by (le))",
]


def own_queries():
    path = Path(__file__).resolve().parents[2] / "scripts" / "grafana_dashboard.json"
    dashboard = json.loads(path.read_text())
    assert all(panel["targets"] for panel in dashboard["panels"])
    return [t["expr"] for panel in dashboard["panels"] for t in panel["targets"]]


@pytest.mark.parametrize("source", ["ours", "vLLM's"])
def test_every_query_of_a_dashboard_finds_its_samples(api, source):
    """Each selector matches a sample, labels that it names or groups by included."""
    api.chat()
    samples = set(api.metrics())
    queries = own_queries() if source == "ours" else VLLM_QUERIES
    assert len(queries) > 20
    for query in queries:
        selectors = re.findall(r"((?:vllm:|pageserve:|http_|process_)\w+)(\{[^}]*\})?", query)
        assert selectors, query
        grouped = {x.strip() for by in re.findall(r"by ?\(([^)]*)\)", query) for x in by.split(",")}
        for name, labels in selectors:
            wanted = set(re.findall(r"(\w+)=", labels)) | grouped
            found = [s for s in samples if re.match(re.escape(name) + r"(\{|$)", s)]
            assert found, (name, query)
            assert any(wanted <= set(re.findall(r"(\w+)=", s)) for s in found), (wanted, query)


def test_text_parses_and_openmetrics_is_served_when_asked_for(api):
    api.chat()
    response = api.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    families = {f.name for f in text_string_to_metric_families(response.text)}
    assert "vllm:generation_tokens" in families
    accept = {"accept": "application/openmetrics-text; version=1.0.0"}
    response = api.get("/metrics", headers=accept)
    assert response.headers["content-type"].startswith("application/openmetrics-text")
    assert response.text.endswith("# EOF\n")
    again = {f.name for f in openmetrics_families(response.text)}
    assert "vllm:generation_tokens" in again


@pytest.mark.parametrize(
    "accept",
    [
        "*/*",
        "text/plain;version=0.0.4",
        "application/openmetrics-text",
        "application/openmetrics-text; version=1.0.0",
        # Prometheus 2 and 3
        "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;"
        "q=0.75,text/plain;version=0.0.4;q=0.5,*/*;q=0.1",
        "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,"
        "application/openmetrics-text;version=0.0.1;q=0.5,text/plain;version=1.0.0;"
        "escaping=allow-utf-8;q=0.4,text/plain;version=0.0.4;q=0.3,*/*;q=0.2",
    ],
)
def test_names_keep_their_colon_whoever_scrapes(api, accept):
    """Dashboards ask for vllm:num_requests_running, and find nothing under vllm_."""
    api.chat()

    def names(accept):
        lines = api.get("/metrics", headers={"accept": accept}).text.splitlines()
        return {re.match(r"[^{ ]*", x)[0] for x in lines if not x.startswith("#")}

    assert names(accept) == names("text/plain") >= {f"vllm:{name}" for name in GAUGES}


def test_counts_of_a_scripted_workload_are_exact(make_api):
    api = make_api(script=list(b"abcdef"), num_cached=1)
    prompts = []
    for stream in (False, True):
        api.chat(stream=stream)  # 6 tokens and EOS
        prompts.append(len(api.engine.requests[-1].prompt_token_ids))
        api.cmpl(max_tokens=3, stream=stream)
        prompts.append(2)
    api.cmpl(prompt=["one", "three"], max_tokens=1)
    prompts += [3, 5]
    api.cmpl(max_tokens=0)  # refused
    metrics = api.metrics()

    def value(name, **labels):
        return sample(metrics, name, **labels)

    num_output = [7, 3, 7, 3, 1, 1]
    assert value("prompt_tokens_total") == sum(prompts)
    assert value("prompt_tokens_cached_total") == len(prompts)
    assert value("prefix_cache_queries_total") == sum(prompts)
    assert value("prefix_cache_hits_total") == len(prompts)
    assert value("generation_tokens_total") == sum(num_output)
    assert value("request_success_total", finished_reason="stop") == 2
    assert value("request_success_total", finished_reason="length") == 4
    for name in ("inter_token_latency_seconds", "time_per_output_token_seconds"):
        assert value(name + "_count") == sum(n - 1 for n in num_output)
    for name in (
        "time_to_first_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds",
        "request_inference_time_seconds", "request_prefill_time_seconds",
        "request_decode_time_seconds", "request_params_n", "request_num_preemptions",
    ):  # fmt: skip
        assert value(name + "_count") == 6, name
    assert value("request_time_per_output_token_seconds_count") == 4
    assert value("request_prompt_tokens_sum") == sum(prompts)
    assert value("request_generation_tokens_sum") == sum(num_output)
    assert value("request_params_max_tokens_count") == 6
    assert value("iteration_tokens_total_count") == api.engine.stats.steps_total
    assert value("iteration_tokens_total_sum") == sum(prompts) + sum(n - 1 for n in num_output)
    assert metrics[f'http_requests_total{{handler="{CHAT}",method="POST",status="2xx"}}'] == 2
    assert metrics[f'http_requests_total{{handler="{CMPL}",method="POST",status="4xx"}}'] == 1


def test_longest_output_of_a_prompt_counts_once(make_api):
    """vLLM's panel of it shows requests, not their choices."""

    def by_seed(request):
        return list(b"abcdefgh")[: request.sampling_params.seed % 10]

    api = make_api(script=by_seed)
    api.cmpl(prompt=["one", "two"], n=3, seed=2, temperature=1)  # 2 to 4 tokens and EOS
    metrics = api.metrics()
    assert sample(metrics, "request_generation_tokens_count") == 6
    assert sample(metrics, "request_generation_tokens_sum") == 2 * (3 + 4 + 5)
    assert sample(metrics, "request_max_num_generation_tokens_count") == 2
    assert sample(metrics, "request_max_num_generation_tokens_sum") == 2 * 5
    assert sample(metrics, "request_params_n_count") == 2


def test_gauges_are_those_of_the_engine(api):
    from pageserve.messages import SchedulerStats

    api.engine.stats = SchedulerStats(
        num_running=3,
        num_waiting=5,
        num_deferred=2,
        num_free_blocks=6,
        num_used_blocks=2,
        preemptions_total=4,
    )
    metrics = api.metrics()
    for name, expected in (
        ("num_requests_running", 3),
        ("num_requests_waiting", 5),
        ("kv_cache_usage_perc", 0.25),
        ("gpu_cache_usage_perc", 0.25),
        ("num_preemptions_total", 4),
    ):
        assert sample(metrics, name) == expected
    for reason, expected in (("capacity", 3), ("deferred", 2)):  # which sum to all that wait
        assert sample(metrics, "num_requests_waiting_by_reason", reason=reason) == expected


def test_cache_facts_once_loaded(api):
    (name,) = (n for n in api.metrics() if n.startswith("vllm:cache_config_info"))
    for fact in ('block_size="16"', 'num_gpu_blocks="1024"', 'enable_prefix_caching="True"'):
        assert fact in name


def test_clients_cannot_make_series(api):
    def ask(i):
        api.chat(model=f"model-{i}", user=f"user-{i}")
        api.get(f"/path-{i}", headers={"x-request-id": f"id-{i}"})
        api.get(f"/v1/models/model-{i}")
        api.run(api.send(f"METHOD{i}", "/v1/models"))

    ask(0)
    api.metrics()  # the scrape itself is a series too
    before = set(api.metrics())
    for i in range(1, 200):
        ask(i)
    assert set(api.metrics()) == before


@pytest.mark.parametrize("name", ['a"b', "a\\b", "a\nb"])
def test_label_values_are_escaped(make_api, name):
    api = make_api(names=(name,))
    api.chat()
    families = text_string_to_metric_families(api.get("/metrics").text)
    labels = {
        s.labels["model_name"] for f in families for s in f.samples if "model_name" in s.labels
    }
    assert labels == {name}


def test_failures_are_counted(make_api):
    api = make_api(fail_at=2)
    api.chat(stream=True)
    metrics = api.metrics()
    assert sample(metrics, "request_success_total", finished_reason="error") == 1
    assert sample(metrics, "generation_tokens_total") == 2
    errors = 'pageserve:stream_errors_total{code="internal_error",engine="0",model_name="tiny"}'
    assert metrics[errors] == 1
