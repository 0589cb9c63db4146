"""The policy study: its formulas, its traffic, and that a replayed trace gives the same figures."""

import json

import policies
import pytest
from simulation import Arrival, Outcome, read_trace, write_trace

DEVICE = policies.Device(0.04, 0.0015, 4, 64)


def test_constants_are_those_of_the_measured_runs(tmp_path):
    """Made-up results of a device of 10 ms a step and 1 ms a token are explained exactly."""
    steps, tokens = 20, 24 * 9 + 300  # nine of each request's ten tokens, prompts less cached
    result = {
        "requests": 24,
        "prompt_tokens": 500,
        "output_tokens": 240,
        "rows": {
            "single: pageserve": {"tokens_per_s": 1 / 0.011},
            "pageserve": {
                "tokens_per_s": 240 / (0.010 * steps + 0.001 * tokens),
                "steps": steps,
                "cached_tokens": 200,
            },
        },
    }
    (tmp_path / "cpu_throughput.json").write_text(json.dumps(result))
    device = policies.cpu_device(tmp_path)
    assert device.fixed == pytest.approx(0.010) and device.per_token == pytest.approx(0.001)

    rows = {"decode:1": {"tokens_per_s": 1 / 0.011}, "decode:256": {"tokens_per_s": 256 / 0.266}}
    (tmp_path / "gpu_offline_0.5b.json").write_text(json.dumps({"rows": rows}))
    device = policies.gpu_device(tmp_path)
    assert device.fixed == pytest.approx(0.010) and device.per_token == pytest.approx(0.001)


@pytest.mark.parametrize("name", policies.DEVICES)
def test_committed_results_give_a_sensible_device(name):
    device = policies.DEVICES[name]()
    assert device.fixed > 0 and device.per_token > 0


def test_a_request_alone_has_its_ideal_latency():
    """Over several chunks of 64, and a whole one: then Jain's index of one request is 1."""
    for prompt in (10, 64, 150):
        workload = policies.Workload([Arrival(0.0, prompt, 5)], 256)
        row = policies.run("fcfs", workload, DEVICE)
        assert row["latency_p50"] == pytest.approx(DEVICE.alone(workload.arrivals[0]))
        assert row["fairness"] == pytest.approx(1)


def test_jain():
    assert policies.jain([2, 2, 2]) == pytest.approx(1)
    assert policies.jain([1, 0, 0, 0]) == pytest.approx(0.25)


def test_summary_by_hand():
    done = [
        Outcome(Arrival(0.0, 10, 1), scheduled=0.0, first_token=1.0, finished=1.0),
        Outcome(Arrival(0.0, 10, 1), scheduled=0.5, first_token=2.0, finished=2.0),
        Outcome(Arrival(1.0, 90, 1, priority=-1), scheduled=1.0, first_token=4.0, finished=4.0),
    ]
    row = policies.summary(done, DEVICE)
    assert row["output_tokens_per_s"] == 3 / 4
    assert (row["queue_time_p99"], row["ttft_p50"], row["ttft_p99"]) == (0.5, 2.0, 3.0)
    assert row["ttft_urgent_p50"] == row["ttft_long_p50"] == 3.0


@pytest.fixture(scope="module")
def workloads():
    return policies.make_workloads(DEVICE, 64 * DEVICE.max_num_seqs)


def test_policies_do_what_they_are_for(workloads):
    bursts = {p: policies.run(p, workloads["bursts"], DEVICE) for p in policies.POLICIES}
    assert bursts["priority"]["ttft_urgent_p50"] < bursts["fcfs"]["ttft_urgent_p50"] / 2
    assert bursts["shortest-prompt"]["ttft_p50"] < bursts["fcfs"]["ttft_p50"]
    assert all(0 < r["fairness"] <= 1 for r in bursts.values())
    assert policies.run("fcfs", workloads["tight"], DEVICE)["preemptions"] > 0


def test_traffic_is_ordered_and_bursts_do_not_change_the_load(workloads):
    for workload in workloads.values():
        times = [a.arrival for a in workload.arrivals]
        assert times == sorted(times)
    plain = policies._poisson(workloads["bursts"].arrivals, DEVICE)
    assert workloads["bursts"].arrivals[-1].arrival == pytest.approx(plain[-1].arrival, rel=0.3)


def test_a_replayed_trace_gives_the_same_figures(workloads, tmp_path):
    workload = workloads["long"]
    write_trace(tmp_path / "t.jsonl", workload.arrivals)
    replayed = policies.Workload(read_trace(tmp_path / "t.jsonl"), workload.pool_per_seq)
    rows = [policies.run("shortest-prompt", w, DEVICE) for w in (workload, replayed)]
    assert rows[0] == rows[1]
