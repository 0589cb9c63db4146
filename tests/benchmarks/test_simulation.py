"""The simulated traffic: traces, clocks, and the two kinds of memory."""

import math

import pytest
from contiguous import EqualRuns, FirstFit, Ideal, serve_contiguous
from simulation import EOS, Arrival, read_trace, simulate, write_trace

from pageserve.core.scheduler import Scheduler


def create_scheduler(**changes):
    options = {
        "num_blocks": 64,
        "block_size": 4,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "max_model_len": 256,
        "eos_token_ids": [EOS],
    }
    return Scheduler(**(options | changes))


def test_times_of_two_requests():
    """Steps last as long as they have tokens; a request waits for the end of the running step."""
    trace = [Arrival(1.0, 8, 3), Arrival(2.0, 4, 2, max_tokens=9)]
    first, second = simulate(create_scheduler(), trace, lambda step: step.num_scheduled_tokens)
    # Steps: [1, 9) prompt of 8; [9, 14) 1 + prompt of 4; [14, 16) 1 + 1.
    assert (first.scheduled, first.first_token, first.finished) == (1.0, 9.0, 16.0)
    assert (second.scheduled, second.first_token, second.finished) == (9.0, 14.0, 16.0)
    assert (second.queue_time, second.ttft, second.latency) == (7.0, 12.0, 14.0)
    assert (first.longest_gap, second.longest_gap) == (5.0, 2.0)


def test_a_request_ends_at_its_output_and_idle_time_is_skipped():
    trace = [Arrival(0.0, 4, 2, max_tokens=200), Arrival(100.0, 4, 1)]
    first, second = simulate(create_scheduler(), trace)
    assert first.finished == 2.0 and second.finished == 101.0


def test_preempted_requests_end_all_the_same():
    trace = [Arrival(0.0, 8, 40) for _ in range(8)]
    outcomes = simulate(create_scheduler(num_blocks=32), trace)
    assert sum(o.preemptions for o in outcomes) > 0
    assert not any(math.isnan(o.finished) for o in outcomes)


def test_groups_share_their_prefix_and_nothing_else():
    group = {"prefix_group": "a", "prefix_tokens": 16}
    trace = [Arrival(float(i), 32, 1, **group) for i in range(2)]
    trace += [Arrival(5.0, 32, 1, prefix_group="b", prefix_tokens=16), Arrival(6.0, 32, 1)]
    cached = [o.cached_tokens for o in simulate(create_scheduler(), trace)]
    assert cached == [0, 16, 0, 0]


def test_a_prompt_that_never_fits_is_an_error():
    with pytest.raises(ValueError, match="maximum context length"):
        simulate(create_scheduler(), [Arrival(0.0, 300, 1)])


def test_trace_survives_the_file(tmp_path):
    trace = [
        Arrival(0.0, 10, 5),
        Arrival(0.5, 20, 1, max_tokens=64, priority=-1, prefix_group="g", prefix_tokens=8),
    ]
    write_trace(tmp_path / "t.jsonl", reversed(trace))
    assert read_trace(tmp_path / "t.jsonl") == trace
    assert '"priority"' not in (tmp_path / "t.jsonl").read_text().splitlines()[1]


@pytest.mark.parametrize(
    "line",
    [
        "{",
        '{"arrival": 0, "prompt_tokens": 1}',
        '{"arrival": 0, "prompt_tokens": 1, "output_tokens": 2, "max_tokens": 1}',
        '{"arrival": 0, "prompt_tokens": 0, "output_tokens": 1}',
        '{"arrival": -1, "prompt_tokens": 1, "output_tokens": 1}',
        '{"arrival": 0, "prompt_tokens": 1, "output_tokens": 1, "prefix_tokens": 2}',
        '{"arrival": 0, "prompt_tokens": 1, "output_tokens": 1, "prefix": "x"}',
    ],
)
def test_a_wrong_line_is_named(tmp_path, line):
    path = tmp_path / "t.jsonl"
    path.write_text('{"arrival": 0, "prompt_tokens": 1, "output_tokens": 1}\n' + line + "\n")
    with pytest.raises(ValueError, match=r"t\.jsonl:2: "):
        read_trace(path)


def test_first_fit_leaves_holes_and_merges_them():
    pool = FirstFit(10)
    a, b, c = pool.allocate(4), pool.allocate(2), pool.allocate(4)
    assert (a, b, c) == (0, 4, 6) and pool.free == 0 and pool.allocate(1) is None
    pool.release(a)
    pool.release(c)
    assert pool.free == 8 and pool.largest_hole() == 4 and pool.allocate(5) is None
    pool.release(b)
    assert pool.largest_hole() == 10 and pool.allocate(10) == 0


def test_equal_runs_and_ideal():
    runs, ideal = EqualRuns(10, 4), Ideal(10)
    assert runs.free == 8 and ideal.free == 10
    first = runs.allocate(1)
    assert runs.free == 4 and runs.allocate(4) is not None and runs.allocate(1) is None
    runs.release(first)
    assert runs.free == runs.largest_hole() == 4
    a, b = ideal.allocate(4), ideal.allocate(4)
    ideal.release(a)
    assert ideal.largest_hole() == 6 and ideal.allocate(7) is None
    ideal.release(b)
    assert ideal.free == 10


def test_contiguous_serving_by_hand():
    """Ten slots, runs of five: two at a time; the third enters when the first has left."""
    arrivals = [Arrival(0.0, 2, 1, max_tokens=3), Arrival(0.0, 2, 3), Arrival(0.0, 2, 2, 3)]
    seen = []
    steps = serve_contiguous(arrivals, FirstFit(10), lambda step, moment: seen.append(moment))
    assert steps == 3
    assert [m.num_running for m in seen] == [2, 2, 2] and [m.num_waiting for m in seen] == [1, 0, 0]
    assert [m.used for m in seen] == [4, 5, 7]  # a token's slot is written the step after
    assert seen[0].wanted == 5 and seen[0].free == 0
