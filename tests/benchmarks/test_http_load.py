"""The load client: when it asks, what it asks, how it reads streams and what it makes of them."""

import asyncio
import json
import math
import random
import statistics

import pytest
from fakes import ScriptedEngine, byte_tokenizer, scripted
from load import cli
from load.arrivals import arrival_times
from load.client import Record, Target, events
from load.pool import deal
from load.summary import meets, parse_slo, summarise
from load.workloads import Prompt, Shape, parse_lengths, random_prompts, sharegpt_prompts

from pageserve.config import ServerArgs


def gaps_of(times):
    return [b - a for a, b in zip([0.0, *times], times, strict=False)]


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_have_the_mean_and_spread_that_were_asked_for(burstiness):
    gaps = gaps_of(arrival_times(5, 20_000, burstiness=burstiness, seed=3))
    assert min(gaps) >= 0
    assert statistics.mean(gaps) == pytest.approx(1 / 5, rel=0.05)
    variation = statistics.stdev(gaps) / statistics.mean(gaps)
    assert variation == pytest.approx(burstiness**-0.5, rel=0.05)


def test_arrivals_are_seeded_even_or_at_once():
    assert arrival_times(5, 9, seed=1) == arrival_times(5, 9, seed=1) != arrival_times(5, 9, seed=2)
    assert arrival_times(4, 3, burstiness=math.inf) == [0, 0.25, 0.5]
    assert arrival_times(math.inf, 3) == [0, 0, 0]
    with pytest.raises(ValueError, match="positive"):
        arrival_times(0, 1)


def test_a_run_is_dealt_out_whole():
    prompts = [Prompt(str(i), 1) for i in range(10)]
    times = [i / 2 for i in range(10)]
    for shares in (deal(prompts, times, None, 3), deal(prompts, None, 5, 3)):
        assert sorted(p.content for s in shares for p in s.prompts) == list("0123456789")
    assert sorted(t for s in deal(prompts, times, None, 3) for t in s.times) == times
    assert [s.concurrency for s in deal(prompts, None, 5, 3)] == [2, 2, 1]
    few = deal(prompts, None, 2, 3)
    assert [(s.concurrency, len(s.prompts)) for s in few] == [(1, 5), (1, 5), (0, 0)]


# --- workloads ------------------------------------------------------------------------------------


def test_lengths():
    rng = random.Random(0)
    assert {parse_lengths("7")(rng) for _ in range(9)} == {7}
    assert {parse_lengths("2-4")(rng) for _ in range(99)} == {2, 3, 4}
    drawn = [parse_lengths("lognormal:100:0.5:20:300")(rng) for _ in range(5000)]
    assert statistics.median(drawn) == pytest.approx(100, rel=0.05)
    assert (min(drawn), max(drawn)) == (20, 300)
    for bad in ("", "x", "0", "5-4", "lognormal:5", "lognormal:5:1:9:2"):
        with pytest.raises(ValueError):
            parse_lengths(bad)


def shape(**options):
    return Shape(**{"input_len": lambda _: 10, "output_len": lambda _: 4, **options})


def test_random_prompts_have_exact_ids_or_as_many_words():
    ids = random_prompts(5, shape(), vocab_size=300)
    assert (
        ids
        == random_prompts(5, shape(), vocab_size=300)
        != random_prompts(5, shape(), vocab_size=300, seed=1)
    )
    assert all(len(p.content) == 10 and p.max_tokens == 4 for p in ids)
    assert all(100 <= i < 300 for p in ids for i in p.content)
    text = random_prompts(5, shape(), vocab_size=None)
    assert all(len(p.content.split(" ")) == 10 for p in text)


def test_groups_share_a_prefix_and_a_mix_has_its_share_of_long_prompts():
    prompts = random_prompts(50, shape(prefix_len=20, num_prefixes=2), vocab_size=30_000)
    assert len({tuple(p.content[:20]) for p in prompts}) == 2
    assert len({tuple(p.content[20:]) for p in prompts}) == 50
    mixed = random_prompts(2000, shape(long_share=0.25, long_len=lambda _: 90), vocab_size=30_000)
    assert {len(p.content) for p in mixed} == {10, 90}
    assert sum(len(p.content) == 90 for p in mixed) == pytest.approx(500, rel=0.1)


def test_sharegpt_keeps_what_begins_with_question_and_answer(tmp_path):
    def entry(*turns):
        return {"conversations": [{"from": who, "value": what} for who, what in turns]}

    file = tmp_path / "s.json"
    entries = [
        entry(("human", "How are you?"), ("gpt", "x" * 400), ("human", "And now?")),
        entry(("system", "Be kind."), ("user", "Who are you?"), ("gpt", "me")),
        entry(("gpt", "Welcome to the show."), ("human", "Thank you.")),
        entry(("human", "Only a question?")),
        entry(("human", "hi"), ("gpt", "too short")),
        entry(("human", "y" * 20_000), ("gpt", "too long")),
        {"id": "empty"},
    ]
    file.write_text(json.dumps(entries))
    found = sharegpt_prompts(file, 10)
    assert {p.content: p.max_tokens for p in found} == {"How are you?": 100, "Who are you?": 1}
    assert {p.max_tokens for p in sharegpt_prompts(file, 10, output_len=lambda _: 7)} == {7}
    assert len(sharegpt_prompts(file, 1)) == 1
    file.write_text("[]")
    with pytest.raises(ValueError, match="no conversation"):
        sharegpt_prompts(file, 1)


# --- reading streams ------------------------------------------------------------------------------

STREAM = (
    b": keep-alive\r\n\r\n"
    b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\r\n\r\n'
    b'event: message\ndata:{"choices":[{"delta":{"content":"h\xc3\xa9"}}]}\n\n'
    b'data: {"choices":[{"delta":\ndata: {"content":"!"}}]}\n\n'
    b'data: {"choices":[{"delta":{},"finish_reason":"length"}],"usage":null}\n\n'
    b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":5}}\n\n'
    b"data: [DONE]\n\ndata: past the end\n\n"
)


def read(stream, size):
    """Feed ``stream`` to an aiohttp reader in pieces of ``size`` bytes and return the events."""
    from aiohttp import StreamReader
    from aiohttp.base_protocol import BaseProtocol

    async def main():
        loop = asyncio.get_running_loop()
        reader = StreamReader(BaseProtocol(loop), 2**16, loop=loop)
        for i in range(0, len(stream), size):
            reader.feed_data(stream[i : i + size])
        reader.feed_eof()
        return [data async for data in events(reader)]

    return asyncio.run(main())


def test_events_do_not_depend_on_how_the_stream_is_cut():
    whole = read(STREAM, len(STREAM))
    assert len(whole) == 5
    assert all(read(STREAM, size) == whole for size in range(1, 40))


def test_a_record_counts_by_usage_and_marks_only_chunks_with_output():
    record = Record(due=0.0)
    for now, data in enumerate(read(STREAM, 7)):
        record.read(data, float(now))
    assert record.times == [1.0, 2.0]  # neither the role nor the end
    assert (record.output_tokens, record.prompt_tokens) == (5, 3)
    assert record.finish_reason == "length" and record.ok
    record.completion_tokens = None
    assert record.output_tokens == 2


def test_errors_in_a_stream_are_failures():
    record = Record(due=0.0)
    record.read('{"error": {"message": "engine died"}}', 1.0)
    assert not record.ok and "engine died" in record.error
    for wrong in ("[]", "nonsense"):
        with pytest.raises(ValueError):
            Record(due=0.0).read(wrong, 1.0)


# --- figures --------------------------------------------------------------------------------------


def trace():
    """Four answers of 11 tokens in 11 chunks, 10 to 40 ms apart, after 100 to 400 ms; one shed,
    one cut off."""
    records = []
    for i in (1, 2, 3, 4):
        due = 10.0 + i
        times = [due + 0.1 * i + 0.01 * i * k for k in range(11)]
        records.append(Record(due, due + 0.001, times, 200, None, "length", 20, 11))
    records.append(Record(11.0, 11.0, [], 503, "busy"))
    records.append(Record(11.0, 11.0, [11.5], 200, "cut"))
    return records


def test_figures_of_a_known_trace():
    run = summarise(trace(), parse_slo(["ttft:250", "tpot:25"]))
    assert (run["requests"], run["completed"], run["shed"], run["failed"]) == (6, 4, 1, 1)
    assert run["seconds"] == pytest.approx(14.8 - 11.0)
    assert run["output_tokens"] == 44 and run["prompt_tokens"] == 80
    assert run["output_tokens_per_s"] == pytest.approx(44 / 3.8)
    assert run["total_tokens_per_s"] == pytest.approx(124 / 3.8)
    assert run["ttft_ms"]["mean"] == pytest.approx(250)
    assert run["ttft_ms"]["max"] == pytest.approx(400)
    assert run["tpot_ms"]["p50"] == pytest.approx(run["itl_ms"]["p50"]) == pytest.approx(30)
    assert run["e2e_ms"]["p99"] == pytest.approx(800)
    assert run["lag_ms"]["p99"] == pytest.approx(1)
    assert run["goodput"]["requests_per_s"] == pytest.approx(2 / 3.8)
    assert run["goodput"]["share"] == pytest.approx(2 / 6)
    assert sum(run["output_tokens_each_second"]) == pytest.approx(44)
    assert run["errors"] == {"503: busy": 1, "200: cut": 1}
    assert run["counted_by"] == "usage"


def test_tokens_of_merged_chunks_count_in_tpot_but_not_in_gaps():
    record = Record(0.0, 0.0, [1.0, 1.5], 200, None, "stop", 3, 11)
    run = summarise([record], {})
    assert run["tpot_ms"]["p50"] == pytest.approx(50)
    assert run["itl_ms"]["p50"] == pytest.approx(500)
    assert "goodput" not in run


def test_a_late_client_does_not_shorten_latencies():
    record = Record(due=1.0, sent=3.0, times=[3.5], status=200, finish_reason="stop")
    run = summarise([record], {})
    assert run["ttft_ms"]["p50"] == pytest.approx(2500)
    assert run["lag_ms"]["p50"] == pytest.approx(2000)
    assert run["counted_by"] == "chunks" and "total_tokens_per_s" not in run
    assert run["tpot_ms"] is None and meets(record, {"tpot": 1.0})


def test_limits():
    assert parse_slo(["ttft:500", "e2el:9"]) == {"ttft": 500, "e2e": 9}
    for bad in ("ttft", "ttft:x", "ttft:0", "speed:3"):
        with pytest.raises(ValueError):
            parse_slo([bad])


def test_nothing_came_back():
    run = summarise([Record(1.0, 1.0, [], 0, "refused")], parse_slo(["ttft:1"]))
    assert (run["completed"], run["failed"], run["ttft_ms"]) == (0, 1, None)
    assert run["goodput"]["share"] == 0


def test_bodies():
    ids = Target("http://x", "m", extra_body={"ignore_eos": True})
    assert ids.path == "http://x/v1/completions"
    assert ids.body(Prompt([1, 2], 3))["prompt"] == [1, 2]
    assert ids.body(Prompt([1, 2], 3))["ignore_eos"] is True
    chat = Target("http://x", "m", "chat", "key")
    assert chat.path == "http://x/v1/chat/completions"
    assert chat.body(Prompt("hi", 3))["messages"] == [{"role": "user", "content": "hi"}]
    assert chat.headers == {"Authorization": "Bearer key"}


# --- the command ----------------------------------------------------------------------------------


@pytest.fixture
def server(serve):
    """The URL of a server that wants a key, and its engine."""
    engine = ScriptedEngine(byte_tokenizer(), scripted("a" * 2000), step_delay=0.001)
    return serve(engine, ServerArgs(api_key=("secret",))), engine


def test_a_run_against_a_server(server, tmp_path, capsys):
    url, engine = server
    file = tmp_path / "run.json"
    flags = [
        *("--url", url + "/v1/", "--api-key", "secret", "--rate", "200", "inf", "--requests", "12"),
        *("--input-len", "5-9", "--output-len", "4", "--vocab-size", "250", "--processes", "2"),
        *("--warmup", "2", "--goodput", "ttft:60000", "--json", str(file)),
        *("--plot", str(tmp_path / "load")),
    ]
    assert cli.main(None, flags) == 0
    result = json.loads(file.read_text())
    assert result["server"]["model"] == "tiny" and not result["server"]["text"]
    assert [r["load"]["rate"] for r in result["runs"]] == [200, "inf"]
    for run in result["runs"]:
        assert (run["completed"], run["shed"], run["failed"]) == (12, 0, 0), run["errors"]
        assert (run["output_tokens"], run["counted_by"]) == (48, "usage")
        assert 60 <= run["prompt_tokens"] <= 108
        assert run["goodput"]["share"] == 1
    asked = [r.prompt_token_ids for r in engine.requests]
    assert len(asked) == 1 + 2 + 24  # the probe, the warm-up, two runs
    assert all(5 <= len(ids) <= 9 for ids in asked)
    assert len({tuple(ids) for ids in asked}) == len(asked), "no prompt is asked twice"
    assert (tmp_path / "load.png").exists() and (tmp_path / "load.svg").exists()
    assert "goodput" in capsys.readouterr().out


def test_users_of_a_closed_loop_chat_in_text_and_see_refusals(server, tmp_path):
    url, engine = server
    file = tmp_path / "run.json"
    flags = [
        *("--url", url, "--api-key", "secret", "--endpoint", "chat", "--concurrency", "3"),
        *("--requests", "9", "--input-len", "4", "--output-len", "6", "--processes", "1"),
        *("--warmup", "0", "--json", str(file)),
    ]
    assert cli.main(None, flags) == 0
    run = json.loads(file.read_text())["runs"][0]
    assert (run["completed"], run["output_tokens"]) == (9, 54)
    engine.fail_at = 2
    assert cli.main(None, flags) == 1
    run = json.loads(file.read_text())["runs"][0]
    assert (run["completed"], run["failed"]) == (0, 9)


def test_flags_that_cannot_work_are_refused(server, capsys):
    url, _ = server
    for flags, message in (
        ([], "--rate"),
        (["--rate", "1", "--concurrency", "1"], "--rate"),
        (["--rate", "0"], "positive"),
        (["--concurrency", "0"], "--concurrency"),
        (["--rate", "1", "--goodput", "x:1"], "limit"),
        (["--rate", "1", "--workload", "sharegpt"], "FILE"),
        (["--rate", "1", "--extra-body", "[]"], "--extra-body"),
        (["--rate", "1", "--url", url], "401"),
    ):
        with pytest.raises(SystemExit):
            cli.main(None, flags)
        assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "lengths"),
    [
        (["--input-len", "7"], {7}),
        (["--workload", "shared-prefix", "--input-len", "7", "--prefix-len", "20"], {27}),
        (["--workload", "mixed", "--input-len", "7", "--long-len", "50", "--long-share", "0.5"],
         {7, 50}),
    ],
    ids=["random", "shared-prefix", "mixed"],
)  # fmt: skip
def test_flags_shape_the_workload(flags, lengths):
    args = cli.make_parser(None).parse_args(flags)
    for text in (False, True):
        prompts = cli.make_prompts(args, cli.shape_of(args), 30, text=text, seed=0)
        assert {len(p.content.split() if text else p.content) for p in prompts} == lengths
        assert all(8 <= p.max_tokens <= 1024 for p in prompts)


def test_a_sharegpt_file_is_asked_as_text(tmp_path):
    file = tmp_path / "s.json"
    turns = [{"from": "human", "value": "How are you?"}, {"from": "gpt", "value": "x" * 40}]
    file.write_text(json.dumps([{"conversations": turns}]))
    args = cli.make_parser(None).parse_args(["--workload", "sharegpt", "--sharegpt", str(file)])
    assert cli.make_prompts(args, cli.shape_of(args), 5, text=True, seed=0) == [
        Prompt("How are you?", 10)
    ]
