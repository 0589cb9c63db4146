"""What each step held, as a file for https://ui.perfetto.dev (Chrome's trace-event format).

    engine     plan    │▪    ▪    ▪
               launch  │ ▪▪   ▪▪   ▪▪
               device  │  ▬▬▬▬▬▬▬▬▬▬▬▬▬     from CUDA events; on the CPU, the launch itself
               absorb  │ wait▪    wait▪     "wait" is the host waiting for the device
    counters           │ requests running and waiting, KV blocks used, tokens of the step
    requests   one track each: queued, prefill chunks where they ran, decode, finished

The file is a JSON array written as events come, about 1 kB a step, so it is usable after a crash
(the format forgives a missing end) and memory stays bounded by the live requests. All times are
microseconds of ``time.monotonic()`` since the file was opened, in eighths: such numbers are exact
in binary, so that however a reader rounds (Perfetto counts in nanoseconds) no slice begins before
its neighbour has ended; it would be dropped or drawn elsewhere.
"""

import logging
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import IO, Any, Protocol

import msgspec

from pageserve.config import ConfigError
from pageserve.core.request import Request
from pageserve.messages import AddRequest, RequestOutput, SchedulerOutput, SchedulerStats

logger = logging.getLogger("pageserve.engine")

ENGINE, REQUESTS = 1, 10  # Perfetto's "processes": groups of tracks
PLAN, LAUNCH, DEVICE, ABSORB = 1, 2, 3, 4
FIRST_REQUEST = 100  # viewers take numbers to be unique over the tracks of all groups; the group's
# own is its first track, if there is one
FLUSH_BYTES = 1 << 16
FLUSH_SECONDS = 1.0


class DeviceEvent(Protocol):
    """The part of ``torch.cuda.Event`` (with timing) that is read here."""

    def query(self) -> bool:
        """Whether the device has passed it."""

    def elapsed_time(self, end_event: Any) -> float:
        """Milliseconds from this event to a later one; both must have passed."""


class LaunchedStep(Protocol):
    """A step that a worker has launched; both events are None where the device has none."""

    @property
    def started(self) -> DeviceEvent | None:
        """Passed when the device begins the step."""

    @property
    def ended(self) -> DeviceEvent | None:
        """Passed when the device has run the step."""


class DeviceClock:
    """Places what events measured on the host's clock.

    Lengths and gaps are the device's own. They are shifted only to keep each step between its
    launch and the moment its results were seen, which also takes up the drift of the two clocks.
    """

    def __init__(self) -> None:
        self._end = 0.0
        self._last: DeviceEvent | None = None

    def place(
        self, started: DeviceEvent, ended: DeviceEvent, launched: float, seen: float
    ) -> tuple[float, float]:
        """Return start and end in host seconds of a step; steps are given in order."""
        length = started.elapsed_time(ended) / 1e3
        start = launched
        if self._last is not None:
            start = max(start, self._end + self._last.elapsed_time(started) / 1e3)
        end = min(start + length, seen)
        start = max(end - length, launched, self._end)
        self._last, self._end = ended, max(start, end)
        return start, self._end


@dataclass
class _Track:
    """A live request: its number in the file and the slice that is open."""

    number: int
    last: float  # time of its newest event
    open: str | None = None
    running: bool = False
    decoding: bool = False
    num_preemptions: int = 0
    num_tokens: int = 0  # released


@dataclass(frozen=True)
class _Chunk:
    """A row that computes more than the newest token: ``count`` tokens from ``first`` on."""

    track: _Track
    num_preemptions: int
    first: int
    count: int
    samples: bool


@dataclass
class _Step:
    """A step between its launch and the device's end."""

    plan: SchedulerOutput
    launched: float
    returned: float
    started: DeviceEvent | None
    ended: DeviceEvent | None
    chunks: list[_Chunk] = field(default_factory=list)


class Timeline:
    """Writes the file. The engine's loop tells it what it has just done, with the times at which
    it did so."""

    def __init__(self, file: IO[bytes], *, synchronous: bool, num_kv_blocks: int) -> None:
        """Write to ``file`` from now on. ``synchronous`` says that a launch returns only when the
        step has run (CPU)."""
        self._file: IO[bytes] | None = file
        self._synchronous = synchronous
        self._num_kv_blocks = num_kv_blocks
        self._origin = self._flushed = time.monotonic()
        self._encode = msgspec.json.Encoder().encode
        self._buffer = bytearray()
        self._separator = b"[\n"
        self._clock = DeviceClock()
        self._steps: deque[_Step] = deque()  # launched, not yet on the device's track
        self._tracks: dict[str, _Track] = {}
        self._num_tracks = 0
        self._num_preemptions = 0
        for number, name in ((ENGINE, "engine"), (REQUESTS, "requests")):
            self._emit("M", "process_name", number, 0, args={"name": name})
        for number, name in enumerate(("plan", "launch", "device", "absorb"), 1):
            self._emit("M", "thread_name", ENGINE, number, args={"name": name})
            self._emit("M", "thread_sort_index", ENGINE, number, args={"sort_index": number})

    # --- requests ---------------------------------------------------------------------------------

    def queued(self, request: AddRequest) -> None:
        """A request has come in."""
        number = FIRST_REQUEST + self._num_tracks
        self._num_tracks += 1
        track = _Track(number, max(request.arrival_time, self._origin))
        self._tracks[request.request_id] = track
        self._emit("M", "thread_name", REQUESTS, track.number, args={"name": request.request_id})
        num_tokens = len(request.prompt_token_ids)
        self._open(track, "queued", track.last, {"prompt_tokens": num_tokens})

    def released(self, outputs: Iterable[RequestOutput]) -> None:
        """These outputs are on their way; those with a finish reason end their tracks."""
        now = time.monotonic()
        for output in outputs:
            track = self._tracks.get(output.request_id)
            if track is None:
                continue
            track.num_tokens += len(output.new_token_ids)
            if output.finish_reason is not None:
                del self._tracks[output.request_id]
                self._close(track, now)
                self._emit(
                    "i",
                    f"finished: {output.finish_reason}",
                    REQUESTS,
                    track.number,
                    at=track.last,
                    s="t",
                    args={
                        "output_tokens": track.num_tokens,
                        "cached_tokens": output.num_cached_tokens,
                        "preemptions": output.num_preemptions,
                    },
                )
                track.running = False

    # --- steps, in the order of the loop ----------------------------------------------------------

    def launched(
        self,
        plan: SchedulerOutput,
        handle: LaunchedStep,
        running: Sequence[Request],
        stats: SchedulerStats,
        times: tuple[float, float, float],
    ) -> None:
        """A step was planned for some of the ``running`` requests and given to the worker; on an
        accelerator it may not have begun. ``times``: begin of the plan, of the launch, its end."""
        start, planned, returned = times
        step = _Step(plan, planned, returned, handle.started, handle.ended)
        self._steps.append(step)
        if stats.preemptions_total != self._num_preemptions:
            self._num_preemptions = stats.preemptions_total
            self._note_preemptions(running, planned)
        by_slot = {request.slot: request for request in running}
        for row in plan.rows:
            track = self._tracks[by_slot[row.slot].request_id]
            if not track.decoding:
                first, count = row.num_computed_tokens, row.num_scheduled_tokens
                chunk = _Chunk(track, track.num_preemptions, first, count, row.samples)
                step.chunks.append(chunk)
                track.running, track.decoding = True, row.samples
                self._close(track, planned)
        facts = {"step": plan.step_id}
        self._slice("plan", ENGINE, PLAN, start, planned, facts)
        self._slice("launch", ENGINE, LAUNCH, planned, returned, facts)

    def absorbed(
        self,
        plan: SchedulerOutput,
        outputs: Iterable[RequestOutput],
        stats: SchedulerStats,
        times: tuple[float, float, float],
    ) -> None:
        """The scheduler has taken a step's results and released ``outputs``. ``times``: begin of
        the wait for the results, their arrival, now."""
        start, ready, done = times
        facts = {"step": plan.step_id}
        self._slice("wait", ENGINE, ABSORB, start, ready, facts)
        self._slice("absorb", ENGINE, ABSORB, ready, done, facts)
        while self._steps and self._place(self._steps[0], ready):
            if self._steps.popleft().plan is plan:
                break
        self.released(outputs)
        requests = {"running": stats.num_running, "waiting": stats.num_waiting}
        self._emit("C", "requests", ENGINE, 0, at=done, args=requests)
        blocks = {"used": stats.num_used_blocks, "cached": stats.num_cached_blocks}
        self._emit("C", f"KV blocks of {self._num_kv_blocks}", ENGINE, 0, at=done, args=blocks)
        tokens = {"tokens": plan.num_scheduled_tokens}
        self._emit("C", "tokens per step", ENGINE, 0, at=done, args=tokens)
        if not (stats.num_running or stats.num_waiting) or self._is_due(done):
            self._flush(done)

    def close(self) -> None:
        """End what is open and complete the file."""
        now = time.monotonic()
        for track in self._tracks.values():
            self._close(track, now)
        self._buffer += b"\n]"  # nothing behind it: Perfetto may refuse even white space there
        self._flush(now)
        if self._file is not None:
            self._file.close()
            self._file = None

    # --- parts ------------------------------------------------------------------------------------

    def _place(self, step: _Step, now: float) -> bool:
        """Write a step on the device's track if the device has run it, and its prompt chunks on
        their requests'. Asks the device nothing that would make anybody wait."""
        if step.started is not None and step.ended is not None:
            if not step.ended.query():
                return False
            start, end = self._clock.place(step.started, step.ended, step.launched, now)
        else:
            start, end = step.launched, step.returned if self._synchronous else now
        num_rows, num_chunks = len(step.plan.rows), len(step.chunks)
        kind = "decode" if not num_chunks else "prefill" if num_chunks == num_rows else "mixed"
        facts = {
            "step": step.plan.step_id,
            "decodes": num_rows - num_chunks,
            "chunks": num_chunks,
            "tokens": step.plan.num_scheduled_tokens,
        }
        self._slice(kind, ENGINE, DEVICE, start, end, facts)
        for chunk in step.chunks:
            self._draw_chunk(chunk, step.plan.step_id, start, end)
        return True

    def _draw_chunk(self, chunk: _Chunk, step_id: int, start: float, end: float) -> None:
        track = chunk.track
        if not track.running or track.num_preemptions != chunk.num_preemptions:
            return  # gone meanwhile
        name = "recompute" if chunk.num_preemptions else "prefill"
        facts = {"first": chunk.first, "tokens": chunk.count, "step": step_id}
        self._slice(name, REQUESTS, track.number, max(start, track.last), end, facts)
        track.last = max(track.last, end)
        if chunk.samples:
            self._open(track, "decode", end)

    def _note_preemptions(self, running: Sequence[Request], now: float) -> None:
        alive = {request.request_id: request.num_preemptions for request in running}
        for request_id, track in self._tracks.items():
            if track.running and alive.get(request_id) != track.num_preemptions:
                self._close(track, now)
                self._open(track, "preempted", now)
                track.running = track.decoding = False
                track.num_preemptions += 1

    def _open(self, track: _Track, name: str, at: float, args: Any = None) -> None:
        track.open, track.last = name, max(at, track.last)
        self._emit("B", name, REQUESTS, track.number, at=track.last, args=args)

    def _close(self, track: _Track, at: float) -> None:
        track.last = max(at, track.last)
        if track.open is not None:
            self._emit("E", track.open, REQUESTS, track.number, at=track.last)
            track.open = None

    def _slice(
        self, name: str, process: int, track: int, start: float, end: float, args: Any
    ) -> None:
        begin, finish = self._micros(start), self._micros(max(start, end))
        self._emit("X", name, process, track, at=start, dur=finish - begin, args=args)

    def _micros(self, at: float) -> float:
        return round((at - self._origin) * 8e6) / 8

    def _emit(
        self, kind: str, name: str, process: int, track: int, at: float | None = None, **more: Any
    ) -> None:
        event = {"ph": kind, "name": name, "pid": process, "tid": track}
        if at is not None:
            event["ts"] = self._micros(at)
        event |= {key: value for key, value in more.items() if value is not None}
        self._buffer += self._separator
        self._buffer += self._encode(event)
        self._separator = b",\n"

    def _is_due(self, now: float) -> bool:
        return len(self._buffer) > FLUSH_BYTES or now - self._flushed > FLUSH_SECONDS

    def _flush(self, now: float) -> None:
        self._flushed = now
        data, self._buffer = self._buffer, bytearray()
        if self._file is None:
            return
        try:
            self._file.write(data)
        except OSError as error:  # serving goes on without its picture
            logger.error("the timeline ends here: %s", error.strerror)
            self._file.close()
            self._file = None


def open_trace(path: str) -> IO[bytes]:
    """Open a file for :class:`Timeline`, replacing what is there; raises :class:`ConfigError` if
    it cannot be written."""
    try:
        return open(path, "wb", buffering=0)
    except OSError as error:
        raise ConfigError(f"--trace {path}: {error.strerror}") from error
