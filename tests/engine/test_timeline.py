"""The timeline's file is valid, balanced and true, whatever requests and engine go through."""

import io
import json
import random
from collections import defaultdict

import pytest
from helpers import make_tiny_checkpoint

from pageserve.config import CacheArgs, ConfigError, EngineConfig, ModelArgs, SchedulerArgs
from pageserve.core.request import Request
from pageserve.engine.core import EngineCore
from pageserve.engine.timeline import (
    ABSORB,
    DEVICE,
    ENGINE,
    LAUNCH,
    REQUESTS,
    DeviceClock,
    Timeline,
)
from pageserve.messages import AddRequest, RequestOutput, SchedulerStats
from pageserve.messages import ScheduledRow as Row
from pageserve.messages import SchedulerOutput as Plan
from pageserve.sampling_params import SamplingParams


def nanoseconds(microseconds):
    """A time as Perfetto reads it: older versions truncate, newer ones round."""
    truncated = int(microseconds * 1000.0)
    assert truncated == round(microseconds * 1000.0)
    return truncated


def end_of(slice_):
    return nanoseconds(slice_["ts"]) + nanoseconds(slice_["dur"])


def tracks_of(events):
    """Check the file against the format and return its events by (process, track)."""
    tracks = defaultdict(list)
    for event in events:
        assert event["ph"] in "MBEXiC" and len(event["ph"]) == 1
        assert isinstance(event["name"], str) and event["name"]
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int)
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "thread_name", "thread_sort_index")
            continue
        assert event["ts"] >= 0
        tracks[event["pid"], event["tid"]].append(event)
    groups = {event["pid"] for event in events}
    numbers = [track for _, track in names_of(events)]
    assert len(numbers) == len(set(numbers)), "two groups use one track number"
    assert all(track not in groups - {group} for group, track in names_of(events))
    for key, track in tracks.items():
        assert names_of(events).get(key) or key == (ENGINE, 0), "a track without a name"
        times = [nanoseconds(event["ts"]) for event in track]
        assert times == sorted(times), f"track {key} goes back in time"
        check_slices(track)
    return tracks


def names_of(events):
    return {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}


def check_slices(track):
    """Begins and ends alternate and agree, and nothing overlaps."""
    opened, free_from = None, 0
    for event in track:
        if event["ph"] == "C":
            continue
        assert nanoseconds(event["ts"]) >= free_from, f"{event} overlaps what is before it"
        if event["ph"] == "B":
            assert opened is None
            opened = event["name"]
        elif event["ph"] == "E":
            assert opened == event["name"]
            opened = None
        elif event["ph"] == "X":
            assert opened is None, f"{event} lies within {opened}"
            free_from = end_of(event)
    assert opened is None, f"{opened} never ends"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    make_tiny_checkpoint(folder, "llama", head_dim=16)
    return str(folder)


def engine(checkpoint, file, device="cpu", **scheduler):
    scheduler = {"max_num_batched_tokens": 16, "max_num_seqs": 4, **scheduler}
    return EngineCore(
        EngineConfig(
            ModelArgs(checkpoint, device=device, max_model_len=128),
            CacheArgs(block_size=4, num_kv_blocks=18),
            SchedulerArgs(trace=str(file), **scheduler),
        )
    )


def add(core, name, num_tokens, max_tokens):
    rng = random.Random(name)
    prompt = [rng.randrange(3, 300) for _ in range(num_tokens)]
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    return core.add(AddRequest(name, prompt, params, core._timeline._origin))


@pytest.mark.parametrize("depth", [1, 2])
def test_a_run_with_chunks_preemption_abort_and_refusal(checkpoint, tmp_path, depth):
    """A pool of 72 slots for four requests of up to 45 tokens: some are preempted."""
    file = tmp_path / "trace.json"
    core = engine(checkpoint, file, max_steps_in_flight=depth)
    outputs = []
    for i in range(4):
        outputs += add(core, f"r{i}", 21, 24)
    outputs += add(core, "refused", 500, 4)
    outputs += add(core, "aborted", 9, 90)
    aborted = False
    while core.has_work():
        outputs += core.step()
        if not aborted and sum(bool(o.finish_reason) for o in outputs) == 3:
            outputs += core.abort(["aborted"])
            aborted = True
    stats = core.stats()
    core.close()
    finished = {o.request_id: o.finish_reason for o in outputs if o.finish_reason}
    assert stats.preemptions_total > 0 and aborted

    events = json.loads(file.read_text())
    tracks = tracks_of(events)
    names = names_of(events)
    requests = {names[key]: track for key, track in tracks.items() if key[0] == REQUESTS}
    assert requests.keys() == finished.keys()  # one track each
    for name, track in requests.items():
        assert track[0]["name"] == "queued" and track[-1]["name"] == f"finished: {finished[name]}"
    first = [e for e in requests["r0"] if e["ph"] == "X"]
    assert [(e["name"], e["args"]["first"], e["args"]["tokens"]) for e in first] == [
        ("prefill", 0, 16),
        ("prefill", 16, 5),
    ]
    assert requests["r0"][-1]["args"]["output_tokens"] == 24
    begun = [e["name"] for track in requests.values() for e in track if e["ph"] == "B"]
    assert begun.count("preempted") == stats.preemptions_total
    assert any(e["name"] == "recompute" for track in requests.values() for e in track)

    per_step = {names[key]: track for key, track in tracks.items() if key[0] == ENGINE and key[1]}
    assert set(per_step) == {"plan", "launch", "device", "absorb"}
    steps = list(range(1, stats.steps_total + 1))
    for name, kinds in (("plan", 1), ("launch", 1), ("device", 1), ("absorb", 2)):
        numbers = [e["args"]["step"] for e in per_step[name]]
        assert numbers[::kinds] == numbers[kinds - 1 :: kinds] == steps, name
    assert {e["name"] for e in per_step["device"]} >= {"prefill", "decode"}
    planned = sum(e["args"]["tokens"] for e in per_step["device"])
    counters = defaultdict(list)
    for event in tracks[ENGINE, 0]:
        counters[event["name"]].append(event["args"])
    assert planned == sum(c["tokens"] for c in counters["tokens per step"])
    assert max(c["used"] for c in counters["KV blocks of 18"]) == stats.peak_used_blocks
    assert counters["requests"][-1] == {"running": 0, "waiting": 0}


@pytest.mark.gpu
def test_on_cuda_each_step_runs_between_its_launch_and_its_results(checkpoint, tmp_path):
    file = tmp_path / "trace.json"
    core = engine(checkpoint, file, device="cuda", max_steps_in_flight=2)
    for i in range(4):
        add(core, f"r{i}", 21, 24)
    while core.has_work():
        core.step()
    core.close()
    tracks = tracks_of(json.loads(file.read_text()))
    launches, steps = tracks[ENGINE, LAUNCH], tracks[ENGINE, DEVICE]
    absorbed = [e for e in tracks[ENGINE, ABSORB] if e["name"] == "absorb"]
    assert len(steps) == core.stats().steps_total
    for launch, step, seen in zip(launches, steps, absorbed, strict=True):
        assert launch["args"]["step"] == step["args"]["step"] == seen["args"]["step"]
        assert step["dur"] > 0
        assert launch["ts"] <= step["ts"]
        if step["name"] != "prefill":  # one that samples nothing is not waited for
            assert end_of(step) <= nanoseconds(seen["ts"])


def test_off_there_is_no_timeline_and_no_timing(checkpoint):
    core = EngineCore(
        EngineConfig(
            ModelArgs(checkpoint, device="cpu", max_model_len=64), CacheArgs(num_kv_blocks=8)
        )
    )
    assert core._timeline is None and not core.worker.runner.timed
    core.close()


def test_a_file_that_cannot_be_written_is_refused_before_the_model_is_read(tmp_path):
    with pytest.raises(ConfigError, match=r"--trace .*No such file or directory"):
        engine(str(tmp_path / "no model"), tmp_path / "no" / "trace.json")


def test_after_a_crash_all_but_the_end_is_there(checkpoint, tmp_path):
    """Nothing is closed; a quiet engine has everything on disk."""
    file = tmp_path / "trace.json"
    core = engine(checkpoint, file)
    add(core, "r", 5, 3)
    while core.has_work():
        core.step()
    tracks_of(json.loads(file.read_text() + "]"))
    core.close()
    tracks_of(json.loads(file.read_text()))
    assert file.read_bytes().endswith(b"}\n]")


# --- without an engine ----------------------------------------------------------------------------


class Event:
    """A CUDA event at a time of the device's clock, which is 7 s ahead; passed once it is told."""

    def __init__(self, at, passed=True):
        self.at = at + 7
        self.passed = passed

    def query(self):
        return self.passed

    def elapsed_time(self, end_event):
        assert self.passed and end_event.passed, "the driver would raise"
        return (end_event.at - self.at) * 1e3


def test_the_device_clock_keeps_lengths_and_gaps():
    clock = DeviceClock()
    # Launched at 1, ran 1.0 to 1.5; launched at 1.1 behind it, ran 1.5 to 2.0, a gap, 2.2 to 2.3.
    assert clock.place(Event(1.0), Event(1.5), 1.0, 1.6) == pytest.approx((1.0, 1.5))
    assert clock.place(Event(1.5), Event(2.0), 1.1, 2.1) == pytest.approx((1.5, 2.0))
    assert clock.place(Event(2.2), Event(2.3), 2.15, 2.4) == pytest.approx((2.2, 2.3))


def test_the_device_clock_follows_the_hosts_where_they_drift():
    """Nothing runs before its launch or after its results were seen, and no steps overlap."""
    for drift in (0.999, 1.001):
        clock, last = DeviceClock(), 0.0
        for i in range(1, 5000):
            start, end = clock.place(Event(i * drift), Event((i + 0.5) * drift), i - 0.01, i + 0.51)
            assert max(last, i - 0.01) <= start <= end <= i + 0.51
            assert end - start == pytest.approx(0.5, abs=0.03)
            last = end


def request(name, slot):
    message = AddRequest(name, [1] * 8, SamplingParams(), 0.0)
    made = Request(message, arrival=0, seed=0, max_num_tokens=99, eos_token_ids=frozenset())
    made.slot = slot
    return message, made


class Handle:
    def __init__(self, started, ended):
        self.started, self.ended = started, ended


def test_steps_whose_event_has_not_passed_are_drawn_later_and_never_waited_for():
    """A chunk that samples nothing has no results to wait for: the device may still run it."""
    file = io.BytesIO()
    timeline = Timeline(file, synchronous=False, num_kv_blocks=4)
    message, running = request("r", 3)
    timeline.queued(message)
    ends = [Event(0.5, passed=False), Event(1.0, passed=False)]
    plans = [Plan(1, [], [], [Row(3, 0, 5, False)]), Plan(2, [], [], [Row(3, 5, 3, True)])]
    now = timeline._origin
    for plan, end in zip(plans, ends, strict=True):
        handle = Handle(Event(end.at - 7.4), end)
        timeline.launched(plan, handle, [running], SchedulerStats(), (now, now + 0.1, now + 0.2))
        now += 0.2
    timeline.absorbed(plans[0], [], SchedulerStats(num_running=1), (now, now + 0.1, now + 0.2))
    for end in ends:
        end.passed = True
    now += 1
    done = RequestOutput("r", [5], "length")
    timeline.absorbed(plans[1], [done], SchedulerStats(), (now, now + 0.1, now + 0.2))
    timeline._flush(0.0)
    events = json.loads(file.getvalue() + b"]")
    tracks = tracks_of(events)
    assert [e["args"]["step"] for e in tracks[ENGINE, DEVICE]] == [1, 2]
    names = [e["name"] for key, track in tracks.items() if key[0] == REQUESTS for e in track]
    assert names == ["queued"] * 2 + ["prefill"] * 2 + ["decode"] * 2 + ["finished: length"]
    assert not timeline._tracks and not timeline._steps


def test_neighbours_do_not_overlap_however_a_reader_rounds():
    """Microseconds with three decimals are not exact in binary: Perfetto, which truncated to
    nanoseconds, saw slices begin 1 ns before their neighbours had ended, and dropped them."""
    file = io.BytesIO()
    timeline = Timeline(file, synchronous=True, num_kv_blocks=4)
    rng = random.Random(0)
    now = timeline._origin
    for step in range(2000):
        times = (now, now + rng.random() / 1e3, now + rng.random() / 1e3 + 1e-3)
        timeline.absorbed(Plan(step, [], [], []), [], SchedulerStats(), times)
        now = times[-1]
    timeline._flush(0.0)
    tracks_of(json.loads(file.getvalue() + b"]"))


def test_a_full_disk_ends_the_timeline_and_nothing_else(caplog):
    class Full(io.BytesIO):
        def write(self, data):
            raise OSError(28, "No space left on device")

    timeline = Timeline(Full(), synchronous=True, num_kv_blocks=4)
    timeline._flush(0.0)
    assert "No space left" in caplog.text
    message, _ = request("r", 0)
    timeline.queued(message)
    timeline.released([RequestOutput("r", [], "abort")])
    timeline.close()
    assert not timeline._buffer
