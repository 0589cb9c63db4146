"""The engine in its own process, and the asyncio client that owns it.

    API process                                   engine process
    ProcessClient.launch ── spawn ───────────────► imports what takes seconds
                 .start  ── LoadModel ───────────► EngineCore()
    ProcessClient.submit ── AddRequest ──────────► PULL ─► EngineCore.add
                         ── AbortRequests ───────►      └► EngineCore.abort
    sink of a request ◄──── StepOutputs ────────── PUSH ◄─ EngineCore.step

Two one-way ZMQ sockets carry msgpack of the structs in messages.py. The engine ignores SIGINT and
SIGTERM: the front decides when to drain, so a Ctrl-C that reaches the whole process group does not
cut streams. It exits on Shutdown, or when its parent is gone.
"""

import asyncio
import importlib.util
import itertools
import logging
import multiprocessing
import multiprocessing.process
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from multiprocessing import resource_tracker
from typing import TYPE_CHECKING, Any

import msgspec
import zmq

from pageserve.config import EngineConfig
from pageserve.engine.client import EngineDeadError, OutputSink, merge
from pageserve.kernels.compiler_process import start_compiler, stop_compiler
from pageserve.messages import (
    ENGINE_DEAD,
    AbortRequests,
    AddRequest,
    EngineDead,
    EngineLog,
    EngineMessage,
    EngineReady,
    EngineRequest,
    GetProgress,
    LoadModel,
    LoadProgress,
    PrefixCacheReset,
    Progress,
    RequestOutput,
    RequestProgress,
    ResetPrefixCache,
    SchedulerStats,
    Shutdown,
    StepOutputs,
    StepStats,
)

if TYPE_CHECKING:
    from pageserve.engine.core import EngineCore

logger = logging.getLogger("pageserve.engine")

SIGN_OF_LIFE = 1.0  # seconds between messages while there is work of which no step can run
IDLE_POLL_MS = 1000  # how long an idle engine waits before it looks for its parent
STOP_TIMEOUT = 10.0  # seconds between Shutdown and kill
POLLIN = int(zmq.POLLIN)  # plain, for it is asked for once a message
NVIDIA_DEVICE = "/dev/nvidiactl"  # there where the driver is
IPC = "ipc://"
SIGNALS = (signal.SIGINT, signal.SIGTERM)  # the front-end decides what these mean


# --- engine process -------------------------------------------------------------------------------


def run_engine(config: EngineConfig, request_address: str, output_address: str) -> None:
    """Main function of the engine process. Exits 0 after Shutdown, 1 on any failure."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # see _start
    context = zmq.Context()
    requests = context.socket(zmq.PULL)
    requests.bind(request_address)
    outputs = context.socket(zmq.PUSH)
    outputs.connect(output_address)
    encoder = msgspec.msgpack.Encoder()

    def send(message: EngineMessage) -> None:
        outputs.send(encoder.encode(message))

    package = logging.getLogger("pageserve")
    package.setLevel(logging.DEBUG)  # the front-end's own level decides what is shown
    package.addHandler(_LogSender(send))
    try:
        _serve(config, requests, send)
        code = 0
    except Exception as error:  # the one place that may catch everything: report, then die
        logger.debug("engine died", exc_info=True)
        send(EngineDead(_one_line(error)))
        code = 1
    context.destroy(linger=2000)
    if _orphaned():  # who would have done so has not: a SIGKILL, or a signal while it imported
        shutil.rmtree(os.path.dirname(request_address.removeprefix(IPC)), ignore_errors=True)
    sys.exit(code)


def _orphaned() -> bool:
    """Whether the front-end is gone, be it since before this process could look for it."""
    parent = multiprocessing.parent_process()
    return parent is not None and os.getppid() != parent.pid


class _LogSender(logging.Handler):
    """Hands log lines to the front-end: one process writes to the terminal, around its bars."""

    def __init__(self, send: Callable[[EngineMessage], None]) -> None:
        super().__init__()
        self._send = send

    def emit(self, record: logging.LogRecord) -> None:
        """Send a record, its traceback included."""
        self._send(EngineLog(record.levelno, self.format(record)))


def _serve(
    config: EngineConfig, requests: zmq.Socket[bytes], send: Callable[[EngineMessage], None]
) -> None:
    compiler = start_compiler() if _may_compile(config) else None
    try:
        from pageserve.engine.core import EngineCore  # imports torch: only this process needs it

        path = _wait_for_model(requests)
        if path is None:
            return
        config = replace(config, model=replace(config.model, model=path))

        def progress(phase: str, done: int, total: int) -> None:
            if _orphaned():  # a load may take minutes, and nobody waits for it
                raise InterruptedError("the front-end is gone")
            send(LoadProgress(phase, done, total))

        core = EngineCore(config, progress, compiler)
    finally:
        if compiler is not None:
            stop_compiler(compiler)  # unless it has done its work and left
    try:
        _loop(core, requests, send)
    finally:
        core.close()


def _wait_for_model(requests: zmq.Socket[bytes]) -> str | None:
    """Return the path of the model to load, None if there is nothing to load any more: the parent
    is gone, or says so."""
    while not requests.poll(IDLE_POLL_MS):
        if _orphaned():
            return None
    message = msgspec.msgpack.decode(requests.recv(), type=LoadModel | Shutdown)
    return message.path if isinstance(message, LoadModel) else None


def _may_compile(config: EngineConfig) -> bool:
    """Whether Triton may be wanted, as far as can be told without importing torch."""
    return (
        config.model.device in ("auto", "cuda")
        and config.model.attention_backend in ("auto", "triton")
        and os.path.exists(NVIDIA_DEVICE)
        and importlib.util.find_spec("triton") is not None  # torch for CPUs comes without it
    )


def _loop(
    core: "EngineCore", requests: zmq.Socket[bytes], send: Callable[[EngineMessage], None]
) -> None:
    send(core.ready)
    decoder = msgspec.msgpack.Decoder(EngineRequest)
    last_sent = time.monotonic()
    while True:
        outputs: list[RequestOutput] = []
        if not core.has_work() and not requests.poll(IDLE_POLL_MS):
            while core.prepare_idle() and not requests.poll(0):
                pass  # nobody has come for a while, and the first who does waits for one at most
        if _orphaned():  # also with work: nobody would take its outputs
            return
        while requests.poll(0):
            request = decoder.decode(requests.recv())
            if isinstance(request, AddRequest):
                outputs += core.add(request)
            elif isinstance(request, AbortRequests):
                outputs += core.abort(request.request_ids)
            elif isinstance(request, GetProgress):
                send(Progress(core.progress(request.request_ids)))
            elif isinstance(request, ResetPrefixCache):
                send(PrefixCacheReset(core.reset_prefix_cache()))
            else:
                assert isinstance(request, Shutdown), "one engine loads one model"
                return
        had_work = core.has_work()
        outputs += core.step()
        quiet = not outputs and core.last_step is None  # at most a grammar is being compiled
        if quiet and not (had_work and time.monotonic() - last_sent >= SIGN_OF_LIFE):
            continue
        send(StepOutputs(outputs, core.stats(), core.last_step))
        last_sent = time.monotonic()


def _one_line(error: Exception) -> str:
    """What the operator needs to read; user errors are sentences, ours get type and place."""
    if isinstance(error, ValueError):
        return str(error)
    if type(error).__name__ == "OutOfMemoryError":  # torch's, which this module does not import
        return (
            "the device is out of memory: lower --gpu-memory-utilization, "
            "--max-num-batched-tokens or --max-num-seqs"
        )
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} (in {frame.name}, line {frame.lineno})"


# --- client ---------------------------------------------------------------------------------------


def _merged(steps: list[list[RequestOutput]]) -> Iterable[RequestOutput]:
    """Return what several steps released, one output for each request."""
    outputs: dict[str, RequestOutput] = {}
    for output in itertools.chain.from_iterable(steps):
        earlier = outputs.setdefault(output.request_id, output)
        if earlier is not output:
            merge(earlier, output)
    return outputs.values()


def _start(process: multiprocessing.process.BaseProcess) -> None:
    """Start the engine so that no signal to the whole group reaches it: not even while it still
    imports and :func:`run_engine` has not said that it ignores them."""
    resource_tracker.ensure_running()  # started on the way, it would unblock them
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class ProcessClient:
    """Starts, feeds and watches the engine process; an :class:`EngineClient`."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.ready: EngineReady | None = None
        self.startup_seconds: dict[str, float] = {}
        self._progress = LoadProgress("starting")
        self._phase_began = time.monotonic()
        self.stats = SchedulerStats()
        self.on_step: Callable[[StepStats], None] = lambda step: None
        self.dead: str | None = None
        self.stopped = asyncio.Event()  # set when the engine process is gone, however it went
        self._last_message = time.monotonic()
        self._sinks: dict[str, OutputSink] = {}
        self._unfinished: set[str] = set()  # requests whose final output has not come
        self._questions: deque[asyncio.Future[Any]] = deque()  # answers come in their order
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(EngineMessage)
        self._stopping = False
        self._directory = ""  # not there yet
        self._process: multiprocessing.process.BaseProcess | None = None
        self._watching: asyncio.Task[None] | None = None

    @property
    def progress(self) -> LoadProgress:
        """How far start-up is; setting it books the time of the phase that ends."""
        return self._progress

    @progress.setter
    def progress(self, progress: LoadProgress) -> None:
        if progress.phase != self._progress.phase:
            self._end_phase()
        self._progress = progress

    def _end_phase(self) -> None:
        now, phase = time.monotonic(), self._progress.phase
        seconds = now - self._phase_began
        self.startup_seconds[phase] = self.startup_seconds.get(phase, 0.0) + seconds
        self._phase_began = now

    @property
    def busy_since(self) -> float | None:
        """When the engine last showed life, None while nothing is expected of it."""
        return self._last_message if self._unfinished else None

    def launch(self) -> None:
        """Spawn the process, which prepares for :meth:`start` meanwhile; :meth:`kill` ends it."""
        self._directory = tempfile.mkdtemp(prefix="pageserve-")
        request_address = f"{IPC}{self._directory}/requests"
        output_address = f"{IPC}{self._directory}/outputs"
        self._context = zmq.Context()
        self._requests = self._context.socket(zmq.PUSH)
        self._requests.set(zmq.SNDHWM, 0)
        self._requests.set(zmq.RECONNECT_IVL, 10)  # ms, until the engine is there
        self._requests.connect(request_address)  # keeps what is sent before
        self._outputs = self._context.socket(zmq.PULL)
        self._outputs.set(zmq.RCVHWM, 0)
        self._outputs.bind(output_address)
        self._process = multiprocessing.get_context("spawn").Process(
            target=run_engine,
            args=(self.config, request_address, output_address),
            name="pageserve-engine",
            daemon=True,
        )
        _start(self._process)

    def watch(self) -> None:
        """Listen to the engine, launched now if it was not before: from now on its death is known,
        also where finding out what to load takes long."""
        if self._process is None:
            self.launch()
        assert self._process is not None
        self._watching = asyncio.create_task(self._watch(self._process))
        # Becomes readable when messages come, and not again before all of them were taken.
        self._output_fd = self._outputs.fileno()
        loop = asyncio.get_running_loop()
        loop.add_reader(self._output_fd, self._read)
        loop.call_soon(self._read)

    async def start(self, path: str | None = None) -> None:
        """Let the engine load the checkpoint at ``path`` (else the configured one); ``ready`` or
        ``dead`` is set when loading has ended."""
        if self._watching is None:
            self.watch()
        self._send(LoadModel(path or self.config.model.model))

    async def stop(self) -> None:
        """Ask the engine to leave, kill it if it does not; no request may run any more."""
        self._stopping = True
        if self._process is None:
            return
        if self._process.is_alive():
            if self.ready is None:
                self._process.kill()
            else:
                self._send(Shutdown())
        # A loop that ends cancels the watch.
        watched = self._watching is not None and not self._watching.done()
        try:
            await asyncio.wait_for(self.stopped.wait(), STOP_TIMEOUT if watched else 0)
        except TimeoutError:
            self._process.kill()
            self._process.join()
            self.stopped.set()
        if self._watching is not None:
            self._watching.cancel()
            asyncio.get_running_loop().remove_reader(self._output_fd)
        self._context.destroy(linger=0)
        shutil.rmtree(self._directory, ignore_errors=True)

    def kill(self) -> None:
        """End the engine process at once, without waiting, however far it or :meth:`launch` is."""
        if self._process is not None and self._process.pid is not None:
            self._process.kill()
        if self._directory:
            shutil.rmtree(self._directory, ignore_errors=True)

    def submit(self, request: AddRequest, sink: OutputSink) -> None:
        """Send the request now; see :class:`EngineClient`."""
        if self.dead is not None:
            raise EngineDeadError(self.dead)
        assert self.ready is not None, "nothing is submitted before the engine is ready"
        assert request.request_id not in self._sinks, "request ids are unique"
        self._send(request)  # raises for what msgpack cannot say, and then nothing is left of it
        self._sinks[request.request_id] = sink
        if not self._unfinished:
            self._last_message = time.monotonic()
        self._unfinished.add(request.request_id)

    def abort(self, request_ids: list[str]) -> None:
        """Tell the engine to forget requests; see :class:`EngineClient`."""
        self._send(AbortRequests(request_ids))
        sinks = {i: self._sinks.pop(i) for i in request_ids if i in self._sinks}
        for request_id, sink in sinks.items():
            sink(RequestOutput(request_id, [], "abort"))

    def forget(self, request_id: str) -> None:
        """Tell nobody of a request any more; see :class:`EngineClient`."""
        if self._sinks.pop(request_id, None) is not None and self.dead is None:
            self._send(AbortRequests([request_id]))

    async def get_progress(self, request_ids: list[str] | None = None) -> list[RequestProgress]:
        """Ask where requests are; see :class:`EngineClient`."""
        answer: Progress = await self._ask(GetProgress(request_ids))
        return answer.requests

    async def reset_prefix_cache(self) -> int:
        """Forget all cached prefixes; see :class:`EngineClient`."""
        answer: PrefixCacheReset = await self._ask(ResetPrefixCache())
        return answer.num_blocks

    async def _ask(self, question: EngineRequest) -> Any:
        if self.dead is not None:
            raise EngineDeadError(self.dead)
        self._send(question)
        answer = asyncio.get_running_loop().create_future()
        self._questions.append(answer)
        return await answer

    def _send(self, message: EngineRequest) -> None:
        # The socket has no high-water mark, so this never blocks and needs no task. What an engine
        # that has just died cannot take any more waits there until _watch tells the sinks.
        self._requests.send(self._encoder.encode(message), zmq.NOBLOCK)

    def _read(self) -> None:
        """Take all messages that have come. An engine that was faster than its reader is caught up
        with: what several steps released for one request is handed over as one output."""
        steps: list[list[RequestOutput]] = []
        try:
            while int(self._outputs.get(zmq.EVENTS)) & POLLIN:
                message = self._decoder.decode(self._outputs.recv())
                self._last_message = time.monotonic()
                if isinstance(message, StepOutputs):
                    self.stats = message.stats
                    if message.step is not None:
                        self.on_step(message.step)
                    steps.append(message.outputs)
                else:
                    self._hand_over(steps)  # what was generated comes before an engine's death
                    self._note(message)
            self._hand_over(steps)
        except Exception as error:  # a bug: nobody would read on, and every request wait for ever
            self.kill()
            asyncio.get_running_loop().remove_reader(self._output_fd)
            self._die(f"the engine's outputs cannot be read: {error}")

    def _hand_over(self, steps: list[list[RequestOutput]]) -> None:
        """Give the outputs to their sinks, and forget them."""
        outputs = steps[0] if len(steps) == 1 else _merged(steps)
        for output in outputs:
            if output.finish_reason is None:
                sink = self._sinks.get(output.request_id)
            else:
                sink = self._sinks.pop(output.request_id, None)
                self._unfinished.discard(output.request_id)
            if sink is not None:  # None: aborted by us a moment ago
                sink(output)
        steps.clear()

    def _note(self, message: EngineMessage) -> None:
        """Take anything but the outputs of a step."""
        if isinstance(message, Progress | PrefixCacheReset):
            answer = self._questions.popleft()
            if not answer.done():  # it is if nobody waits any more
                answer.set_result(message)
        elif isinstance(message, LoadProgress):
            self.progress = message
        elif isinstance(message, EngineReady):
            self.ready = message
            self._end_phase()
        elif isinstance(message, EngineLog):
            logger.log(message.level, "%s", message.message)
        elif isinstance(message, EngineDead):
            self._die(message.message)

    async def _watch(self, process: multiprocessing.process.BaseProcess) -> None:
        loop = asyncio.get_running_loop()
        gone = asyncio.Event()
        loop.add_reader(process.sentinel, gone.set)
        try:
            await gone.wait()
        finally:
            loop.remove_reader(process.sentinel)
        await asyncio.sleep(0.05)  # let _read take a last message: it says why
        process.join()
        if not self._stopping:
            self._die(f"the engine process ended with exit code {process.exitcode}")
        self.stopped.set()

    def _die(self, message: str) -> None:
        if self.dead is None:
            self.dead = message
            logger.error("engine: %s", message)
        sinks, self._sinks = self._sinks, {}
        for request_id, sink in sinks.items():
            sink(RequestOutput(request_id, [], "error", error=ENGINE_DEAD))
        questions, self._questions = self._questions, deque()
        for answer in questions:
            if not answer.done():
                answer.set_exception(EngineDeadError(self.dead))
