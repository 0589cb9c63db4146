"""The engine process and its client: merging, death at every moment, and what the operator reads.

Some engines here are functions of this module, run in the spawned process in place of the real one.
"""

import asyncio
import itertools
import json
import logging
import time
from pathlib import Path

import msgspec
import pytest
import zmq

from pageserve.config import CacheArgs, EngineConfig, ModelArgs, SchedulerArgs
from pageserve.engine import core, process
from pageserve.engine.client import EngineDeadError
from pageserve.engine.process import ProcessClient, RequestStream, run_engine
from pageserve.messages import (
    AddRequest,
    EngineReady,
    RequestOutput,
    SchedulerStats,
    StepOutputs,
    TokenLogprobs,
)
from pageserve.sampling_params import SamplingParams


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


# --- streams --------------------------------------------------------------------------------------


class Forgetting:
    def __init__(self) -> None:
        self.forgotten: list[str] = []

    def forget(self, request_id: str) -> None:
        self.forgotten.append(request_id)


def test_outputs_nobody_took_are_merged():
    async def run():
        stream = RequestStream(Forgetting(), "r")
        for n in range(3):
            stream.put(
                RequestOutput(
                    "r",
                    [n],
                    new_logprobs=[TokenLogprobs(n, -n)],
                    num_cached_tokens=16,
                    num_preemptions=n,
                    scheduled_time=7.0,
                )
            )
        first = await anext(stream)
        assert first.new_token_ids == [0, 1, 2] and first.finish_reason is None
        assert [entry.token_id for entry in first.new_logprobs] == [0, 1, 2]
        assert (first.num_cached_tokens, first.num_preemptions) == (16, 2)
        assert first.scheduled_time == 7.0
        stream.put(RequestOutput("r", [3], num_cached_tokens=16))
        stream.put(RequestOutput("r", [4], "stop", stop_reason=4, num_cached_tokens=16))
        last = await anext(stream)
        assert (last.new_token_ids, last.finish_reason, last.stop_reason) == ([3, 4], "stop", 4)
        with pytest.raises(StopAsyncIteration):
            await anext(stream)

    asyncio.run(run())


def test_what_was_generated_is_read_before_the_engines_death():
    async def run():
        stream = RequestStream(Forgetting(), "r")
        stream.put(RequestOutput("r", [1]))
        stream.fail("killed")
        assert (await anext(stream)).new_token_ids == [1]
        with pytest.raises(EngineDeadError, match="killed"):
            await anext(stream)
        with pytest.raises(StopAsyncIteration):
            await anext(stream)

    asyncio.run(run())


def test_closing_a_stream_forgets_its_request():
    client = Forgetting()
    asyncio.run(RequestStream(client, "r").aclose())
    assert client.forgotten == ["r"]


# --- the real engine ------------------------------------------------------------------------------


def test_life_of_an_engine_process(tiny_checkpoint, caplog):
    """C072 for the client: requests run, a late reader gets all tokens, aclose and abort free."""

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
            client.submit(unspeakable)
        assert client.busy_since is None, "nothing waits for a request that was never sent"
        late = client.submit(request("late", 20))
        closed = client.submit(request("closed"))
        aborted = client.submit(request("aborted"))
        assert client.busy_since is not None
        await anext(closed)
        await closed.aclose()
        client.abort(["aborted"])
        outputs = [output async for output in aborted]
        assert [o.finish_reason for o in outputs if o.finish_reason] == ["abort"]
        await until(lambda: client.busy_since is None)
        outputs = [output async for output in late]
        assert sum(len(o.new_token_ids) for o in outputs) == 20 and len(outputs) == 1
        assert outputs[0].finish_reason == "length"
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
        streams = [client.submit(request(f"r{n}")) for n in range(3)]
        for stream in streams:
            with pytest.raises(EngineDeadError, match="RuntimeError: broken step"):
                async with asyncio.timeout(10):
                    async for _ in stream:
                        pass
        with pytest.raises(EngineDeadError):
            client.submit(request("late"))
        await client.stop()
        assert client._process.exitcode == 1

    asyncio.run(run())
    assert any(event["name"] == "absorb" for event in json.loads(trace.read_text()))


def test_killed_with_streams_open(tiny_checkpoint):
    """Between the death and its discovery nobody is there to take a message; that is no error."""

    async def run():
        client = ProcessClient(config(tiny_checkpoint("llama")))
        await start(client)
        running, closed = client.submit(request("running")), client.submit(request("closed"))
        await anext(closed)
        client.kill()
        client._process.join()
        await asyncio.sleep(0.02)
        for n in range(3):
            client.abort([f"unknown {n}"])
            await asyncio.sleep(0)
        await closed.aclose()
        with pytest.raises(EngineDeadError, match="exit code -9"):
            async with asyncio.timeout(10):
                async for _ in running:
                    pass
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
            client.submit(request("late"))
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
        for task in client._tasks:
            task.cancel()
        await asyncio.sleep(0)
        async with asyncio.timeout(20):
            await client.stop()
        assert client.stopped.is_set() and not client._process.is_alive()

    asyncio.run(run())


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

    class Silent:
        def poll(self, _: int) -> int:
            return 0

    parents = itertools.chain([7] * 4, itertools.repeat(1))
    monkeypatch.setattr(core, "EngineCore", Busy)
    monkeypatch.setattr(process.os, "getppid", lambda: next(parents))
    process._serve(EngineConfig(), Silent(), lambda _: None)
    assert Busy.num_steps == 3


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

    parents = itertools.chain([7] * 1001, itertools.repeat(1))
    monkeypatch.setattr(process.os, "getppid", lambda: next(parents))
    monkeypatch.setattr(process.time, "monotonic", lambda: next(now) / 400)
    process._loop(Waiting(), Silent(), sent.append)
    assert [type(m) for m in sent[1:]] == [StepOutputs, StepOutputs]  # of 1000 turns in 2.5 s


# --- questions and aborts -------------------------------------------------------------------------


def hanging_engine(config, request_address: str, output_address: str) -> None:
    """An engine that gets ready and then never does anything again."""
    context = zmq.Context()
    outputs = context.socket(zmq.PUSH)
    outputs.connect(output_address)
    facts = EngineReady(256, 100, [0], 16, 32, 4, 64, "float32", "cpu", "torch_blockwise", "fp")
    outputs.send(msgspec.msgpack.encode(facts))
    time.sleep(60)


def test_hung_engine_keeps_no_aborted_stream_and_does_not_look_idle(monkeypatch):
    monkeypatch.setattr(process, "run_engine", hanging_engine)

    async def run():
        client = ProcessClient(EngineConfig())
        await start(client)
        try:
            stream = client.submit(request("r"))
            client.abort(["r"])
            async with asyncio.timeout(5):
                outputs = [output async for output in stream]
            assert [o.finish_reason for o in outputs] == ["abort"]
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
            stream = client.submit(request("r"))
            await anext(stream)
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
            await stream.aclose()
            await until(lambda: client.busy_since is None)
        finally:
            await client.stop()

    asyncio.run(run())
