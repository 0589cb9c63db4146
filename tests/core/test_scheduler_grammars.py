"""Grammars in the scheduler: what is sampled, when rows run, when they end, and who waits for whom.

The reference (`fake_worker.generate`) asks a matcher of its own before every token of one request.
"""

import re
import threading
from collections.abc import Callable

import pytest
from fake_worker import (
    EOS,
    VOCAB_SIZE,
    Alphabet,
    Driver,
    compile_grammar,
    create_request,
    create_scheduler,
    next_token,
    text_of,
)
from llguidance import LLMatcher

from pageserve.core import structured_output
from pageserve.core.structured_output import (
    CACHE_SIZE,
    LOOP_MASKS,
    QUICK_MASKS,
    StructuredOutputManager,
)
from pageserve.messages import AddRequest

REGEX = LLMatcher.grammar_from_regex
NUMBER = REGEX("-?[0-9]{2,4}")
WORDS = REGEX("[a-d]+( [a-d]+)*")
OBJECT = LLMatcher.grammar_from_json_schema(
    {
        "type": "object",
        "properties": {"a": {"enum": ["x", "yy", "yyz"]}, "b": {"type": "boolean"}},
        "required": ["a", "b"],
        "additionalProperties": False,
    },
    overrides={"whitespace_flexible": False},
)
CALL = REGEX("[0-9]:[a-c]{2}>")
TRIGGERS = [1 + Alphabet.CHARS.index(c) for c in "<aeimqu"]  # often enough


def constrained(request_id: str, grammar: str, max_tokens: int = 40, **changes) -> AddRequest:
    changes = {"ignore_eos": False} | changes
    return create_request(request_id, 5, max_tokens, grammar=grammar, **changes)


def called(request_id: str, max_tokens: int = 40, **changes) -> AddRequest:
    return constrained(request_id, CALL, max_tokens, grammar_trigger_ids=TRIGGERS, **changes)


def manager(compile: Callable[[str], LLMatcher]) -> StructuredOutputManager:
    return StructuredOutputManager(compile, VOCAB_SIZE, [EOS])


def token_of(char: str) -> int:
    return 1 + Alphabet.CHARS.index(char)


# --- what is sampled ------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("grammar", [NUMBER, WORDS, OBJECT, REGEX("(yes|no|nobody)")])
def test_output_matches_at_any_depth(depth, grammar):
    driver = Driver(create_scheduler(), depth=depth)
    for i in range(6):
        driver.add(constrained(f"r{i}", grammar))
        driver.add(create_request(f"p{i}", 9, 12))
    driver.run()
    driver.check_tokens()
    finished = [i for i in range(6) if driver.final[f"r{i}"].finish_reason == "stop"]
    assert finished
    for i in finished:
        matcher = compile_grammar(grammar)
        tokens = [t for t in driver.tokens[f"r{i}"] if t != EOS]
        assert matcher.consume_tokens(tokens) and matcher.is_accepting(), text_of(tokens)


def test_the_end_of_a_grammar_ends_the_request():
    driver = Driver(create_scheduler())
    driver.add(constrained("r", REGEX("[0-9]{3}")))
    driver.run()
    final = driver.final["r"]
    assert len(driver.tokens["r"]) == 3, "no EOS where nothing else may follow"
    assert (final.finish_reason, final.stop_reason, final.grammar_ended) == ("stop", None, True)


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 4])
def test_length_and_the_end_at_once(max_tokens):
    driver = Driver(create_scheduler())
    driver.add(constrained("r", REGEX("[0-9]{3}"), max_tokens))
    driver.run()
    final = driver.final["r"]
    assert len(driver.tokens["r"]) == min(max_tokens, 3)
    assert final.grammar_ended == (max_tokens >= 3)
    assert final.finish_reason == ("stop" if max_tokens >= 3 else "length")


def test_eos_is_legal_exactly_where_the_text_may_end():
    """A model that wants nothing but EOS gets the shortest text, one that must not, the longest."""
    for ignore_eos, expected in ((False, "xx"), (True, "xxxx")):
        driver = Driver(create_scheduler(), model=lambda tokens: EOS)
        driver.add(constrained("r", REGEX("x{2,4}"), ignore_eos=ignore_eos))
        driver.run()
        assert text_of(driver.tokens["r"]) == expected
        assert driver.final["r"].finish_reason == "stop"
        assert driver.final["r"].grammar_ended == ignore_eos
        assert (driver.tokens["r"][-1] == EOS) != ignore_eos


def test_a_grammar_of_the_empty_text():
    driver = Driver(create_scheduler())
    driver.add(constrained("a", 'start: ""'))
    driver.add(constrained("b", 'start: ""'))
    driver.add(constrained("t", 'start: ""', 5, grammar_trigger_ids=TRIGGERS, ignore_eos=True))
    driver.run()
    driver.check_tokens()
    for name in "ab":
        assert driver.tokens[name] == []
        assert driver.final[name].finish_reason == "stop" and driver.final[name].grammar_ended
    assert len(driver.tokens["t"]) == 5


def test_stop_tokens_still_stop():
    driver = Driver(create_scheduler())
    driver.add(constrained("r", REGEX("[0-9]*"), stop_token_ids=[token_of("7")], max_tokens=200))
    driver.run()
    final = driver.final["r"]
    assert (final.finish_reason, final.grammar_ended) == ("stop", False)
    assert text_of(driver.tokens["r"]).find("7") in (-1, len(text_of(driver.tokens["r"])) - 1)


def test_no_token_left_ends_the_request_as_an_error():
    """A character that no token of the model has."""
    driver = Driver(create_scheduler())
    driver.add(constrained("r", REGEX("a#")))
    driver.add(create_request("p", 4))
    driver.run()
    assert driver.final["r"].finish_reason == "error"
    assert driver.final["p"].finish_reason == "length"


# --- triggers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_free_text_until_a_trigger_and_after_the_call(depth):
    driver = Driver(create_scheduler(), depth=depth)
    for i in range(8):
        driver.add(called(f"r{i}", 60, ignore_eos=True, logprobs=0 if i % 2 else None))
    driver.run()
    driver.check_tokens()
    calls = 0
    for name, tokens in driver.tokens.items():
        assert len(tokens) == 60, f"{name} did not go on after its calls"
        place = 0
        while place < len(tokens):
            place += 1
            if tokens[place - 1] in TRIGGERS and place + 5 <= len(tokens):
                assert re.fullmatch("[0-9]:[a-c]{2}>", text_of(tokens[place : place + 5]))
                place += 5
                calls += 1
    assert calls > 8


def test_a_token_in_flight_behind_a_trigger_is_sampled_again():
    """It was drawn without a mask; its position runs once more and nothing else does."""
    trigger = token_of("<")

    def model(tokens):
        return trigger if len(tokens) == 7 else next_token(tokens)

    steps = {}
    for depth in (1, 2):
        driver = Driver(create_scheduler(), depth=depth, model=model)
        request = constrained("r", CALL, 12, grammar_trigger_ids=[trigger], ignore_eos=True)
        driver.add(request)
        driver.run()
        driver.check_tokens()
        steps[depth] = [row.num_computed_tokens for s in driver.steps for row in s.rows]
        assert len(driver.tokens["r"]) == 12
    position = 7
    assert steps[1].count(position) == 1
    assert steps[2].count(position) == 2
    assert sorted(set(steps[2])) == sorted(steps[1])
    assert len(steps[2]) - len(steps[1]) == 1


def test_dormant_rows_overlap_like_any_other():
    driver = Driver(create_scheduler(), depth=2, model=lambda tokens: token_of("z"))
    driver.add(constrained("r", CALL, 20, grammar_trigger_ids=[token_of("<")]))
    driver.add(create_request("p", 5, 20))
    driver.run()
    driver.check_tokens()
    assert len(driver.steps) == 20
    assert not any(step.bitmasks for step in driver.steps)


def test_triggers_in_the_prompt_do_not_count():
    driver = Driver(create_scheduler(), model=lambda tokens: token_of("z"))
    request = constrained("r", CALL, 5, grammar_trigger_ids=[token_of("<")])
    request.prompt_token_ids[-1] = token_of("<")
    driver.add(request)
    driver.run()
    assert text_of(driver.tokens["r"]) == "zzzzz"


# --- who waits for whom ---------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2])
def test_plain_rows_run_in_every_step(depth):
    driver = Driver(create_scheduler(max_num_seqs=40, num_blocks=400), depth=depth)
    for i in range(32):
        driver.add(create_request(f"p{i}", 1, 30))
    for i in range(8):
        driver.add(constrained(f"r{i}", WORDS, 30, ignore_eos=True))
    while any(f"p{i}" not in driver.final for i in range(32)):
        if len(driver.steps) in (5, 10):  # else threads may be too late for all of the 30 steps
            driver._collect(driver.scheduler.absorb_grammars(timeout=30, idle=True))
        driver.step()
    rows = [{row.slot for row in step.rows} for step in driver.steps[:30]]
    assert all(set(range(32)) <= slots for slots in rows), "a plain row missed a step"
    assert any(len(slots) > 32 for slots in rows[1:])
    driver.run()
    driver.check_tokens()


@pytest.mark.parametrize("depth", [1, 2])
def test_a_slow_grammar_holds_nobody_up(depth):
    release = threading.Event()

    def compile(text):
        assert release.wait(30)
        return compile_grammar(text)

    scheduler = create_scheduler(structured_output=manager(compile), max_num_seqs=2)
    driver = Driver(scheduler, depth=depth)
    driver.add(constrained("slow", NUMBER))
    for i in range(20):  # many more than may overtake a blocked request
        driver.add(create_request(f"p{i}", 4, 3))
    while scheduler.running or scheduler.waiting:
        driver.step()
    assert len(driver.final) == 20 and scheduler.stats().num_waiting == 1
    for i in range(20, 24):
        driver.add(create_request(f"p{i}", 4, 3))
    release.set()
    driver._collect(scheduler.absorb_grammars(timeout=30, idle=True))
    step = driver.launch()
    assert step is not None and set(step.bitmasks) == {0}, "it is back in its place: the first"
    driver.run()
    driver.check_tokens()


def test_a_request_set_aside_has_a_place_in_the_queue():
    release = threading.Event()

    def compile(text):
        assert release.wait(30)
        return compile_grammar(text)

    scheduler = create_scheduler(structured_output=manager(compile), max_num_seqs=2)
    driver = Driver(scheduler)
    slow, other = constrained("slow", NUMBER), constrained("n", NUMBER)
    other.prompt_token_ids = slow.prompt_token_ids
    driver.add(slow)
    driver.add(other, parent_id="slow")
    for i in range(3):
        driver.add(create_request(f"p{i}", 4, 3))
    driver.step()
    assert list(scheduler.awaiting_mask) == ["slow"]
    places = {p.request_id: p.queue_position for p in scheduler.progress()}
    assert places == {"slow": 1, "n": 1, "p0": 0, "p1": 0, "p2": 2}
    stats = scheduler.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_deferred) == (2, 3, 1)
    release.set()
    driver.run()
    driver.check_tokens()
    assert scheduler.stats().num_deferred == 0


@pytest.mark.parametrize("idle", [True, False])
def test_only_who_is_idle_waits_for_a_compilation(idle):
    release, waits = threading.Event(), []

    def compile(text):
        assert release.wait(30)
        return compile_grammar(text)

    grammars = manager(compile)
    grammars._results.wait = lambda count, timeout: waits.append(count)
    grammars.add("r", NUMBER, (), False)
    assert grammars.take(0.01, idle) == []
    release.set()
    assert set(waits) == ({1} if idle else set())


@pytest.mark.parametrize("num_masks", [1, 2, 7])
def test_masks_of_a_step_come_together(num_masks):
    """One thread is woken for all of them, not before the loop has time for it, and the loop once
    when all are there."""
    grammars = manager(compile_grammar)
    live = [grammars.add(str(i), NUMBER, (), False) for i in range(num_masks)]
    grammars.take(30, idle=True)
    woken = []
    put = grammars._mask_jobs.put
    grammars._mask_jobs.put = lambda jobs: (woken.append(len(jobs)), put(jobs))
    for grammar in live:
        grammars.accept(grammar, token_of("7"), 0)
        assert grammar.waits
    assert grammars.take(0.01) == [] and woken == []
    grammars.flush()
    assert grammars.take() == [] and woken == []
    grammars.begin()
    grammars.begin()
    changed = grammars.take(30)
    assert sorted(map(id, changed)) == sorted(map(id, live)) and woken == [num_masks]
    assert not any(grammar.waits for grammar in live)


def test_quick_masks_are_the_loops_own_business(monkeypatch):
    """After a few in a row no thread is asked, but for more than the loop has time for; one that
    takes long sends its grammar back to the threads."""
    grammars = manager(compile_grammar)
    clock = iter(range(10**6))
    monkeypatch.setattr(structured_output.time, "thread_time", lambda: next(clock) * 1e-6)
    handed, put = [], grammars._mask_jobs.put
    grammars._mask_jobs.put = lambda jobs: (handed.append(len(jobs)), put(jobs))
    live = [grammars.add(str(i), WORDS, (), False) for i in range(LOOP_MASKS + 2)]
    while any(grammar.waits for grammar in live):
        grammars.take(30, idle=True)

    def advance(timeout: float = 30) -> None:
        for grammar in live:
            grammars.accept(grammar, token_of("a"), 0)
        grammars.flush()
        while any(grammar.waits for grammar in live):
            assert grammars.take(timeout)

    for _ in range(QUICK_MASKS):
        advance()
    assert handed == [len(live)] * QUICK_MASKS
    advance()
    assert handed[QUICK_MASKS:] == [2]
    del live[3:]
    advance(timeout=0)
    assert handed[QUICK_MASKS:] == [2]
    monkeypatch.setattr(structured_output.time, "thread_time", lambda: next(clock) * 1.0)
    advance()  # the first is slow, and the others are not tried
    assert handed[QUICK_MASKS:] == [2, 2]
    advance()
    assert handed[QUICK_MASKS:] == [2, 2, 3] and {g.num_quick for g in live} == {0}


def test_an_interrupt_is_not_a_grammars_error(monkeypatch):
    """It reaches the caller, and what was under way is forgotten with the requests."""
    grammars = manager(compile_grammar)
    live = [grammars.add(str(i), WORDS, (), False) for i in range(2)]
    while any(grammar.waits for grammar in live):
        grammars.take(30, idle=True)

    def interrupted(matcher: LLMatcher) -> None:
        raise KeyboardInterrupt

    for grammar in live:
        grammar.num_quick = QUICK_MASKS
        grammars.accept(grammar, token_of("a"), 0)
    with monkeypatch.context() as patch:
        patch.setattr(grammars, "_outlook", interrupted)
        with pytest.raises(KeyboardInterrupt):
            grammars.flush()
    grammars.forget_masks()
    assert grammars.take(30) == []
    again = grammars.add("again", WORDS, (), False)
    grammars.accept(again, token_of("b"), 0)
    grammars.flush()
    assert grammars.take(30) == [again] and not again.waits


def test_abort_while_compiling():
    release = threading.Event()

    def compile(text):
        assert release.wait(30)
        return compile_grammar(text)

    scheduler = create_scheduler(structured_output=manager(compile))
    driver = Driver(scheduler)
    driver.add(constrained("r", NUMBER))
    driver.add(constrained("t", NUMBER, grammar_trigger_ids=TRIGGERS, ignore_eos=True))
    driver.step()
    scheduler.check_integrity()
    driver.abort("r")
    driver.step()
    driver.abort("t")
    assert {o.finish_reason for o in driver.final.values()} == {"abort"}
    scheduler.check_integrity()
    release.set()
    driver.absorb() if driver.in_flight else None
    assert scheduler.absorb_grammars(timeout=30, idle=True) == []
    assert not scheduler.has_work()
    driver.add(constrained("again", NUMBER))  # the compiled grammar is of use all the same
    driver.run()
    driver.check_tokens()
    assert scheduler.stats().grammars_compiled_total == 1


def test_abort_while_a_mask_is_computed():
    scheduler = create_scheduler()
    driver = Driver(scheduler, depth=2)
    for i in range(4):
        driver.add(constrained(f"r{i}", WORDS, 30, ignore_eos=True))
    for i in range(4):
        driver.step()
        driver.step()
        driver.abort(f"r{i}")
        scheduler.check_integrity()
    driver.run()
    driver.check_tokens()


@pytest.mark.parametrize("depth", [1, 2])
def test_preemption(depth):
    """Matchers outlive the loss of a request's blocks."""
    scheduler = create_scheduler(num_blocks=14, max_num_seqs=6)
    driver = Driver(scheduler, depth=depth)
    for i in range(6):
        make = called if i % 2 else constrained
        grammar = () if i % 2 else (WORDS,)
        driver.add(make(f"r{i}", *grammar, max_tokens=30, ignore_eos=True))
    driver.run()
    driver.check_tokens()
    assert scheduler.stats().preemptions_total > 0


def test_forks_have_matchers_of_their_own():
    driver = Driver(create_scheduler(), depth=2)
    parent = constrained("r", WORDS, 20, ignore_eos=True)
    driver.add(parent)
    driver.step()
    driver.step()
    for i in range(3):
        child = constrained(f"c{i}", WORDS, 20 - i, ignore_eos=True)
        child.prompt_token_ids = list(parent.prompt_token_ids)
        driver.add(child, parent_id="r")
    driver.run()
    driver.check_tokens()
    assert driver.scheduler.stats().grammars_compiled_total == 1


# --- what goes wrong ------------------------------------------------------------------------------


class Panic(BaseException):
    """What a bug in Rust code is in Python."""


@pytest.mark.parametrize("error", [ValueError("no such rule: start\ncontext"), Panic("oops")])
@pytest.mark.parametrize("triggers", [[], TRIGGERS])
def test_a_bad_grammar_ends_its_requests_only(error, triggers):
    def compile(text):
        if text == "bad":
            raise error
        return compile_grammar(text)

    driver = Driver(create_scheduler(structured_output=manager(compile)), depth=2)
    for i in range(3):
        driver.add(constrained(f"bad{i}", "bad", grammar_trigger_ids=triggers, ignore_eos=True))
        driver.add(constrained(f"good{i}", OBJECT))
        driver.add(create_request(f"p{i}", 4))
    driver.run()
    for i in range(3):
        final = driver.final[f"bad{i}"]
        assert final.finish_reason == "error"
        assert final.error == "grammar_error: " + str(error).partition("\n")[0]
        assert driver.final[f"good{i}"].finish_reason == "stop"
        assert driver.final[f"p{i}"].finish_reason == "length"


def test_without_a_manager_grammars_are_refused():
    driver = Driver(create_scheduler(structured_output=None))
    assert driver.add(constrained("r", NUMBER)).finish_reason == "error"
    driver.run()


def test_a_token_the_grammar_does_not_take_ends_the_request():
    """It cannot happen with a worker that obeys the mask."""
    driver = Driver(create_scheduler())
    driver.worker.execute = disobedient(driver.worker.execute)
    driver.add(constrained("r", NUMBER))
    driver.run()
    assert driver.final["r"].finish_reason == "error"
    assert driver.final["r"].error.startswith("grammar_error")


def disobedient(execute):
    def run(step):
        result = execute(step)
        result.sampled_token_ids = [token_of("z") for _ in result.sampled_token_ids]
        return result

    return run


# --- the cache ------------------------------------------------------------------------------------


def test_equal_grammars_are_compiled_once():
    driver = Driver(create_scheduler())
    for i in range(5):
        driver.add(constrained(f"r{i}", NUMBER))
    driver.run()
    driver.add(constrained("late", NUMBER))
    driver.run()
    driver.check_tokens()
    stats = driver.scheduler.stats()
    assert (stats.grammars_compiled_total, stats.grammar_cache_hits_total) == (1, 5)
    assert stats.grammar_compile_seconds_total > 0


def test_the_least_recently_used_grammars_are_forgotten():
    compiled = []

    def compile(text):
        compiled.append(text)
        return compile_grammar(NUMBER)

    grammars = manager(compile)
    for i in range(CACHE_SIZE):
        grammars.add("", str(i), (), False)
    grammars.add("", "0", (), False)
    grammars.add("", "new", (), False)  # takes the place of 1
    grammars.add("", "0", (), False)
    grammars.add("", "1", (), False)
    while grammars.num_compiling:
        grammars.take(timeout=30, idle=True)
    assert compiled.count("0") == 1 and compiled.count("1") == 2
    assert grammars.num_cache_hits == 2
