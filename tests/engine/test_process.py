"""The engine process and its client: merging, death at every moment, and what the operator reads.

Some engines here are functions of this module, run in the spawned process in place of the real one.
"""

import asyncio
import itertools
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from pageserve import cli
from pageserve.api import server
from pageserve.config import CacheArgs, ConfigError, EngineConfig, ModelArgs, SchedulerArgs
from pageserve.engine import core, process
from pageserve.engine.client import EngineDeadError, merge
from pageserve.engine.process import ProcessClient, run_engine
from pageserve.messages import (
    ENGINE_DEAD,
    AddRequest,
    EngineDead,
    EngineReady,
    LoadModel,
    RequestOutput,
    SchedulerStats,
    Shutdown,
    StepOutputs,
    TokenLogprobs,
)
from pageserve.sampling_params import SamplingParams

READY = EngineReady(256, 100, [0], 16, 32, 4, 64, "float32", "cpu", "torch_blockwise", "fp")


def config(path, trace: Path | None = None, **options) -> EngineConfig:
    model = ModelArgs(model=str(path), device="cpu", max_model_len=256, **options)
    scheduler = SchedulerArgs(trace=None if trace is None else str(trace))
    return EngineConfig(model, CacheArgs(num_kv_blocks=32), scheduler)


def request(name: str, max_tokens: int = 200) -> AddRequest:
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    return AddRequest(name, [5, 6, 7], params, time.monotonic())


async def until(condition, timeout: float = 60) -> None:
    async with asyncio.timeout(timeout):
        while not condition():
            await asyncio.sleep(0.01)


async def start(client: ProcessClient) -> None:
    await client.start()
    await until(lambda: client.ready is not None or client.dead is not None)


def sleeping_engine(*_: object) -> None:
    time.sleep(60)


def failing_engine(*args) -> None:
    """The real engine, but its third step raises."""
    step, count = core.EngineCore.step, [0]

    def fail(self):
        count[0] += self.has_work()
        if count[0] == 3:
            raise RuntimeError("broken step")
        return step(self)

    core.EngineCore.step = fail
    run_engine(*args)


def unreadable_engine(config, request_address: str, output_address: str) -> None:
    """An engine whose first message is no message."""
    context = zmq.Context()
    outputs = context.socket(zmq.PUSH)
    outputs.connect(output_address)
    outputs.send(b"\xc1")
    time.sleep(60)


# --- outputs --------------------------------------------------------------------------------------


class Reader:
    """Submits a request and keeps what its sink gets."""

    def __init__(self, client: ProcessClient, request: AddRequest) -> None:
        self.outputs: list[RequestOutput] = []
        client.submit(request, self.outputs.append)

    @property
    def ended(self) -> bool:
        return bool(self.outputs) and self.outputs[-1].finish_reason is not None

    async def read(self, timeout: float = 10) -> list[RequestOutput]:
        """All outputs, of which only the last one has a finish reason."""
        await until(lambda: self.ended, timeout)
        assert all(o.finish_reason is None for o in self.outputs[:-1])
        return self.outputs

    async def first(self) -> None:
        await until(lambda: self.outputs)


def test_merged_outputs_have_everything_of_both():
    first = RequestOutput("r", [0], num_cached_tokens=16, num_preemptions=0, scheduled_time=7.0)
    first.new_logprobs = [TokenLogprobs(0, 0.0)]
    for n in (1, 2):
        logprobs = [TokenLogprobs(n, -n)]
        merge(first, RequestOutput("r", [n], new_logprobs=logprobs, num_preemptions=n))
    assert first.new_token_ids == [0, 1, 2] and first.finish_reason is None
    assert [entry.token_id for entry in first.new_logprobs] == [0, 1, 2]
    assert (first.num_cached_tokens, first.num_preemptions) == (16, 2)
    assert first.scheduled_time == 7.0
    merge(first, RequestOutput("r", [3], "stop", stop_reason=3, num_cached_tokens=16))
    assert first.new_token_ids == [0, 1, 2, 3]
    assert (first.finish_reason, first.stop_reason) == ("stop", 3)


def hasty_engine(config, request_address: str, output_address: str) -> None:
    """An engine that sends ten steps of two requests at once, and dies."""
    context = zmq.Context()
    requests, outputs = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    requests.bind(request_address)
    outputs.connect(output_address)
    outputs.send(msgspec.msgpack.encode(READY))
    for _ in range(3):  # one tells it what to load
        requests.recv()
    for n in range(10):
        step = [RequestOutput("a", [n]), RequestOutput("b", [n], "length" if n == 9 else None)]
        outputs.send(msgspec.msgpack.encode(StepOutputs(step, SchedulerStats(steps_total=n + 1))))
    outputs.send(msgspec.msgpack.encode(EngineDead("tired")))
    time.sleep(60)


def test_an_engine_ahead_of_its_reader_is_caught_up_with(monkeypatch):
    """All that has come is handed over at once, and before the engine's death."""
    monkeypatch.setattr(process, "run_engine", hasty_engine)

    async def run():
        client = ProcessClient(EngineConfig())
        await start(client)
        a, b = Reader(client, request("a")), Reader(client, request("b"))
        time.sleep(1)  # the loop is busy while the engine sends
        outputs_a, outputs_b = await a.read(), await b.read()
        client.kill()
        await client.stop()
        assert client.stats.steps_total == 10 and client.dead == "tired"
        return outputs_a, outputs_b

    (first, death), (whole,) = asyncio.run(run())
    assert first.new_token_ids == whole.new_token_ids == list(range(10))
    assert whole.finish_reason == "length"
    assert (death.finish_reason, death.error) == ("error", ENGINE_DEAD)


# --- the real engine ------------------------------------------------------------------------------


def test_life_of_an_engine_process(tiny_checkpoint, caplog):
    """C072 for the client: requests run, and forgotten and aborted ones free what they had."""

    async def run():
        client = ProcessClient(config(tiny_checkpoint("mistral", sliding_window=100)))
        # Its window is shorter than what is asked for, so ask for less.
        client.config = EngineConfig(
            ModelArgs(model=client.config.model.model, device="cpu"), CacheArgs(num_kv_blocks=32)
        )
        await start(client)
        assert client.dead is None and client.busy_since is None
        unspeakable = request("unspeakable")
        unspeakable.priority = 2**64
        with pytest.raises(OverflowError):
            Reader(client, unspeakable)
        assert client.busy_since is None, "nothing waits for a request that was never sent"
        whole = Reader(client, request("whole", 20))
        forgotten = Reader(client, request("forgotten"))
        aborted = Reader(client, request("aborted"))
        assert client.busy_since is not None
        await forgotten.first()
        client.forget("forgotten")
        client.abort(["aborted"])
        num_read = len(forgotten.outputs)
        assert aborted.ended and aborted.outputs[-1].finish_reason == "abort"
        await until(lambda: client.busy_since is None)
        assert len(forgotten.outputs) == num_read and len(await aborted.read()) > 0
        outputs = await whole.read()
        assert sum(len(o.new_token_ids) for o in outputs) == 20
        assert outputs[-1].finish_reason == "length"
        await until(lambda: client.stats.num_used_blocks == client.stats.num_running == 0)
        await client.stop()
        assert client.dead is None and client._process.exitcode == 0

    with caplog.at_level(logging.INFO, "pageserve"):
        asyncio.run(run())
    lines = [record.getMessage() for record in caplog.records]
    assert any("32 KV blocks of 16 tokens" in line for line in lines), "the engine's log arrives"
    assert sum("limited to 100 tokens" in line for line in lines) == 1


def test_exception_in_a_step_ends_all_streams(tiny_checkpoint, monkeypatch, tmp_path):
    """C075: nobody is left waiting, and the message names the failure without a stack; the
    timeline of what led there is complete."""
    monkeypatch.setattr(process, "run_engine", failing_engine)
    trace = tmp_path / "trace.json"

    async def run():
        client = ProcessClient(config(tiny_checkpoint("llama"), trace))
        await start(client)
        for reader in [Reader(client, request(f"r{n}")) for n in range(3)]:
            assert (await reader.read())[-1].error == ENGINE_DEAD
        assert "RuntimeError: broken step" in client.dead
        with pytest.raises(EngineDeadError):
            Reader(client, request("late"))
        await client.stop()
        assert client._process.exitcode == 1

    asyncio.run(run())
    assert any(event["name"] == "absorb" for event in json.loads(trace.read_text()))


def test_killed_with_streams_open(tiny_checkpoint):
    """Between the death and its discovery nobody is there to take a message; that is no error."""

    async def run():
        client = ProcessClient(config(tiny_checkpoint("llama")))
        await start(client)
        running, closed = (Reader(client, request(name)) for name in ("running", "closed"))
        await closed.first()
        client.kill()
        client._process.join()
        await asyncio.sleep(0.02)
        for n in range(3):
            client.abort([f"unknown {n}"])
            await asyncio.sleep(0)
        client.forget("closed")
        assert (await running.read())[-1].error == ENGINE_DEAD
        assert "exit code -9" in client.dead
        await client.stop()

    asyncio.run(run())


def test_what_the_user_can_mend_reaches_the_operator(tmp_path):
    async def run():
        client = ProcessClient(config(tmp_path))
        await start(client)
        assert "config.json" in client.dead and "\n" not in client.dead
        assert client.ready is None
        await client.stop()

    asyncio.run(run())


# --- while loading --------------------------------------------------------------------------------


def test_outputs_that_cannot_be_read_end_the_engine(monkeypatch):
    """Nobody would ever read another one, and every stream would wait for ever."""

    async def live() -> None:
        monkeypatch.setattr(process, "run_engine", unreadable_engine)
        client = ProcessClient(config("nothing"))
        await client.start()
        await until(lambda: client.dead is not None)
        assert "cannot be read" in client.dead
        await until(client.stopped.is_set)
        await client.stop()

    asyncio.run(live())


def test_killed_before_it_was_ready(monkeypatch):
    monkeypatch.setattr(process, "run_engine", sleeping_engine)

    async def run():
        client = ProcessClient(config("unused"))
        await client.start()
        client.kill()
        await until(client.stopped.is_set)
        assert client.ready is None and "exit code -9" in client.dead
        with pytest.raises(EngineDeadError, match="exit code -9"):
            Reader(client, request("late"))
        await client.stop()

    asyncio.run(run())


def test_stop_while_loading_does_not_wait_for_the_load(monkeypatch):
    monkeypatch.setattr(process, "run_engine", sleeping_engine)

    async def run():
        client = ProcessClient(config("unused"))
        await client.start()
        begin = time.monotonic()
        await client.stop()
        assert time.monotonic() - begin < 5 and client.stopped.is_set()
        assert client.dead is None, "it was told to go"

    asyncio.run(run())


def test_stop_in_a_loop_that_has_cancelled_everything(monkeypatch):
    """As when SystemExit leaves the loop: nobody is left to watch the engine's process."""
    monkeypatch.setattr(process, "run_engine", sleeping_engine)

    async def run():
        client = ProcessClient(EngineConfig())
        await client.start()
        await asyncio.sleep(0)
        client._watching.cancel()
        await asyncio.sleep(0)
        async with asyncio.timeout(20):
            await client.stop()
        assert client.stopped.is_set() and not client._process.is_alive()

    asyncio.run(run())


class ToldToLoad:
    """A socket that brings the first message and then nothing."""

    def __init__(self) -> None:
        self.messages = [msgspec.msgpack.encode(LoadModel("/models/tiny"))]

    def poll(self, _: int) -> int:
        return len(self.messages)

    def recv(self) -> bytes:
        return self.messages.pop()


def test_engine_without_a_parent_leaves_in_the_middle_of_its_work(monkeypatch):
    class Busy:
        ready, num_steps, last_step = None, 0, None

        def __init__(self, *_: object) -> None:
            pass

        def has_work(self) -> bool:
            return True

        def step(self) -> list[RequestOutput]:
            Busy.num_steps += 1
            assert Busy.num_steps < 100, "works for nobody"
            return []

        def stats(self) -> SchedulerStats:
            return SchedulerStats()

        def close(self) -> None:
            pass

    orphaned = itertools.chain([False] * 3, itertools.repeat(True))
    monkeypatch.setattr(core, "EngineCore", Busy)
    monkeypatch.setattr(process, "_orphaned", lambda: next(orphaned))
    process._serve(EngineConfig(), ToldToLoad(), lambda _: None)
    assert Busy.num_steps == 3


def test_engine_whose_parent_dies_while_it_loads_does_not_load_on(monkeypatch):
    sent, orphaned = [], iter([False, False, True])

    class Loading:
        def __init__(self, config: EngineConfig, progress: Any, compiler: object) -> None:
            for done in range(100):
                progress("loading weights", done, 100)

    monkeypatch.setattr(core, "EngineCore", Loading)
    monkeypatch.setattr(process, "_orphaned", lambda: next(orphaned))
    with pytest.raises(InterruptedError, match="front-end is gone"):
        process._serve(EngineConfig(), ToldToLoad(), sent.append)
    assert len(sent) == 2


def early_death(config, request_address: str, output_address: str) -> None:
    """An engine that fails before it is told anything."""
    context = zmq.Context()
    outputs = context.socket(zmq.PUSH)
    outputs.connect(output_address)
    outputs.send(msgspec.msgpack.encode(EngineDead("no such library")))
    context.destroy(linger=2000)


def test_the_death_of_an_engine_that_waits_for_its_model_is_noticed(monkeypatch):
    """As one that cannot import something, while a checkpoint is downloaded for minutes."""
    monkeypatch.setattr(process, "run_engine", early_death)

    async def run():
        client = ProcessClient(config("owner/a-large-model"))
        client.launch()
        client.watch()
        await until(client.stopped.is_set)
        assert client.dead == "no such library"
        await client.stop()

    asyncio.run(run())


def serve_a_slow_download() -> int:
    """Serve, where the checkpoint takes a minute to download and the engine dies meanwhile."""

    def download(model: str, progress: Any) -> Path:
        for done in range(600):
            progress("downloading", done, 600)
            time.sleep(0.1)
        return Path(model)

    process.run_engine = early_death
    server.resolve_model = download
    return cli.serve(["--port", "0"])


def test_a_download_ends_with_the_engine_it_was_for():
    code = "import sys, test_process; sys.exit(test_process.serve_a_slow_download())"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", code], env=env, timeout=50).returncode == 1


@pytest.mark.parametrize("told_to_leave", [False, True])
def test_engine_whose_parent_never_names_a_model_leaves(told_to_leave, monkeypatch):
    """It has only prepared, as the parent found a mistake in a flag, say, or was killed."""
    socket = ToldToLoad()
    socket.messages = [msgspec.msgpack.encode(Shutdown())] if told_to_leave else []
    orphaned = itertools.chain([False] * 3, itertools.repeat(True))
    monkeypatch.setattr(core, "EngineCore", None)
    monkeypatch.setattr(process, "_orphaned", lambda: next(orphaned))
    process._serve(EngineConfig(), socket, lambda _: None)


def test_an_engine_launched_early_prepares_and_loads_what_it_is_told(tiny_checkpoint):
    """Where the model is may take long to find out; what else the engine needs it has by then."""

    async def run():
        client = ProcessClient(config("owner/name-of-a-hub"))
        client.launch()
        first = client._process
        await asyncio.sleep(0.2)
        await client.start(str(tiny_checkpoint("llama")))
        await until(lambda: client.ready is not None or client.dead is not None)
        assert client.dead is None and client._process is first
        assert len(await Reader(client, request("r", 3)).read()) > 0
        await client.stop()
        assert first.exitcode == 0
        never_started = ProcessClient(config("nothing"))
        never_started.launch()
        await never_started.stop()
        assert never_started._process.exitcode == -signal.SIGKILL
        assert not Path(never_started._directory).exists()

    asyncio.run(run())


def test_interrupt_while_the_engine_is_launched(monkeypatch):
    """It comes when the launch unblocks signals. An engine left behind, which ignores what
    multiprocessing ends children by, would wait for a model, and this process for the engine."""
    launched = []

    def start_and_interrupt(self) -> None:
        launched.append(self)
        signal.raise_signal(signal.SIGINT)
        real(self)

    spawn = type(process.multiprocessing.get_context("spawn").Process())
    real = spawn.start
    directories = set(Path(tempfile.gettempdir()).glob("pageserve-*"))
    monkeypatch.setattr(spawn, "start", start_and_interrupt)
    # Which is not there where a shell has started the tests in the background.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            cli.serve([])
    finally:
        signal.signal(signal.SIGINT, before)
    (engine,) = launched
    engine.join(10)
    assert engine.exitcode == -signal.SIGKILL
    assert set(Path(tempfile.gettempdir()).glob("pageserve-*")) <= directories


def test_what_fails_before_there_is_an_engine(monkeypatch):
    def fail(_: object) -> None:
        raise OSError("no more processes")

    client = ProcessClient(EngineConfig())
    client.kill()
    monkeypatch.setattr(process, "_start", fail)
    with pytest.raises(OSError, match="no more"):
        client.launch()
    client.kill()
    assert not Path(client._directory).exists()


@pytest.mark.parametrize(("device", "triton"), [("auto", True), ("auto", False), ("cpu", True)])
def test_a_compiler_started_for_a_gpu_is_not_left_behind(device, triton, monkeypatch, tmp_path):
    """Here the engine comes to nothing before it could take it over."""
    given = []

    class Failing:
        def __init__(self, config: EngineConfig, progress: object, compiler: Any) -> None:
            given.append(compiler)
            raise ConfigError("no such model")

    monkeypatch.setattr(process, "NVIDIA_DEVICE", str(tmp_path))
    monkeypatch.setattr(process.importlib.util, "find_spec", lambda name: triton or None)
    monkeypatch.setattr(core, "EngineCore", Failing)
    with pytest.raises(ConfigError):
        process._serve(EngineConfig(ModelArgs(device=device)), ToldToLoad(), lambda _: None)
    assert [compiler is not None for compiler in given] == [device == "auto" and triton]
    assert all(compiler.returncode == -signal.SIGKILL for compiler in given if compiler)


def test_engine_that_only_waits_for_a_grammar_says_no_more_than_that_it_lives(monkeypatch):
    now, sent = itertools.count(), []

    class Waiting:
        ready: None = None
        last_step: None = None

        def has_work(self) -> bool:
            return True

        def step(self) -> list[RequestOutput]:
            return []

        def stats(self) -> SchedulerStats:
            return SchedulerStats()

    class Silent:
        def poll(self, _: int) -> int:
            return 0

    orphaned = itertools.chain([False] * 1000, itertools.repeat(True))
    monkeypatch.setattr(process, "_orphaned", lambda: next(orphaned))
    monkeypatch.setattr(process.time, "monotonic", lambda: next(now) / 400)
    process._loop(Waiting(), Silent(), sent.append)
    assert [type(m) for m in sent[1:]] == [StepOutputs, StepOutputs]  # of 1000 turns in 2.5 s


# --- questions and aborts -------------------------------------------------------------------------


def hanging_engine(config, request_address: str, output_address: str) -> None:
    """An engine that gets ready and then never does anything again."""
    context = zmq.Context()
    outputs = context.socket(zmq.PUSH)
    outputs.connect(output_address)
    outputs.send(msgspec.msgpack.encode(READY))
    time.sleep(60)


def test_hung_engine_keeps_no_aborted_stream_and_does_not_look_idle(monkeypatch):
    monkeypatch.setattr(process, "run_engine", hanging_engine)

    async def run():
        client = ProcessClient(EngineConfig())
        await start(client)
        try:
            reader = Reader(client, request("r"))
            client.abort(["r"])
            assert [o.finish_reason for o in reader.outputs] == ["abort"]
            assert client.busy_since is not None
            question = asyncio.ensure_future(client.get_progress())
            await asyncio.sleep(0)
            client.kill()
            with pytest.raises(EngineDeadError):
                await asyncio.wait_for(question, 10)
            with pytest.raises(EngineDeadError):
                await client.reset_prefix_cache()
        finally:
            client.kill()
            await client.stop()

    asyncio.run(run())


def test_questions_are_answered_in_order(tiny_checkpoint):
    async def run():
        client = ProcessClient(config(tiny_checkpoint("llama")))
        await start(client)
        try:
            assert await client.get_progress() == []
            await Reader(client, request("r")).first()
            gone = asyncio.ensure_future(
                client.get_progress()
            )  # nobody waits for this one's answer
            await asyncio.sleep(0)
            gone.cancel()
            found, nothing, num_blocks = await asyncio.gather(
                client.get_progress(["r", "x"]),
                client.get_progress(["x"]),
                client.reset_prefix_cache(),
            )
            (progress,) = found
            assert (progress.request_id, progress.queue_position) == ("r", 0)
            assert progress.num_prompt_tokens == 3 and progress.num_output_tokens >= 1
            assert nothing == [] and num_blocks == 0
            client.forget("r")
            await until(lambda: client.busy_since is None)
        finally:
            await client.stop()

    asyncio.run(run())
