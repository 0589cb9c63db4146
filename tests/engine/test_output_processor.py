"""Scripted outputs through the processor: stop strings, hold-back, counting, logprobs."""

import itertools
import math
import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_detokenizer import byte_tokenizer, chars_by_byte, sentencepiece_tokenizer

from pageserve.engine.output_processor import OutputProcessor, TextOutput
from pageserve.messages import RequestOutput, TokenLogprobs
from pageserve.sampling_params import SamplingParams
from pageserve.tokenizer import Tokenizer

EOS = "<eos>"
SPECIALS = (EOS, "<|im_end|>", "<pad>")


class Script:
    """A tokenizer whose tokens are the given pieces, and their ids."""

    def __init__(self, *pieces: str | bytes) -> None:
        data = [p.encode() if isinstance(p, str) else p for p in pieces]
        known = [s.encode() for s in SPECIALS]
        words = list(dict.fromkeys(d for d in data if len(d) > 1 and d not in known))
        self.tokenizer = byte_tokenizer(*words, special=SPECIALS)
        table = {self.tokenizer.token_bytes(i): i for i in range(self.tokenizer.size)}
        self.ids = [table[d] for d in data]
        self.eos = table[EOS.encode()]


def logprobs_of(token_id: int) -> TokenLogprobs:
    return TokenLogprobs(token_id, -token_id / 10, [token_id, 65], [-token_id / 10, -math.inf])


def steps(
    token_ids: list[int],
    sizes: list[int] | None = None,
    finish: str = "length",
    stop_reason: int | None = None,
    logprobs: bool = False,
) -> list[RequestOutput]:
    """Engine outputs of these tokens, ``sizes`` tokens a step (default: one by one)."""
    outputs, rest = [], list(token_ids)
    for size in [*(sizes or []), *[1] * len(token_ids)]:
        if not rest:
            break
        chunk, rest = rest[:size], rest[size:]
        outputs.append(
            RequestOutput("r", chunk, new_logprobs=[*map(logprobs_of, chunk)] if logprobs else None)
        )
    outputs = outputs or [RequestOutput("r", [])]
    outputs[-1].finish_reason, outputs[-1].stop_reason = finish, stop_reason
    return outputs


def run(
    tokenizer: Tokenizer, outputs: list[RequestOutput], params: SamplingParams, **options: object
) -> list[TextOutput]:
    processor = OutputProcessor(tokenizer, params, **options)
    return [text for output in outputs if (text := processor.process(output)) is not None]


def join(texts: list[TextOutput]) -> str:
    assert all(t.finish_reason is None for t in texts[:-1])
    assert texts[-1].finish_reason is not None
    assert all(t.text for t in texts[:-1]), "an output without text must wait"
    return "".join(t.text for t in texts)


def finish_of(texts: list[TextOutput]) -> tuple:
    return texts[-1].finish_reason, texts[-1].stop_reason, texts[-1].num_output_tokens


def replay(*pieces: str | bytes, finish: str = "length", **params) -> tuple:
    """Return (text, finish_reason, stop_reason, tokens counted) and check every grouping."""
    script = Script(*pieces)
    sampling_params = SamplingParams(**params)
    results = []
    for sizes in ([], [2] * len(pieces), [3] * len(pieces), [len(pieces)]):
        outputs = steps(script.ids, sizes, finish)
        texts = run(script.tokenizer, outputs, sampling_params)
        results.append((join(texts), *finish_of(texts)))
    assert len(set(results)) == 1
    return results[0]


# --- stop strings ---------------------------------------------------------------------------------


def test_no_part_of_a_stop_string_leaks():
    pieces = ["Mon", " Tue", " Wed", "nes", "day", " Thu"]
    assert replay(*pieces, stop=["Tue Wednesday"]) == ("Mon ", "stop", "Tue Wednesday", 5)


def test_stop_need_not_end_on_a_token_edge():
    assert replay("foo", "ba", "r!x", stop=["bar"]) == ("foo", "stop", "bar", 3)


def test_earliest_match_wins_and_a_split_character_completes_it_at_once():
    pieces = ["x=", "1", ";", "終", "わ", "り", *(bytes([b]) for b in "🧭".encode()), " tail"]
    assert replay(*pieces, stop=["tail", "わり🧭", "1;"]) == ("x=", "stop", "1;", 3)
    assert replay(*pieces, stop=["🧭"]) == ("x=1;終わり", "stop", "🧭", 10)
    assert replay(*pieces, stop=["わり🧭", "🧭"]) == ("x=1;終", "stop", "わり🧭", 10)


def test_equal_ends_go_by_list_order():
    assert replay("abc", stop=["bc", "abc"]) == ("a", "stop", "bc", 1)
    assert replay("abc", stop=["abc", "bc"]) == ("", "stop", "abc", 1)


def test_stop_inside_a_longer_one_ends_first():
    assert replay("a", "b", "c", "d", stop=["abcd", "bc"]) == ("a", "stop", "bc", 3)


def test_stop_equal_to_the_first_output():
    assert replay("foo", "bar", stop=["foo"]) == ("", "stop", "foo", 1)


@pytest.mark.parametrize("cut", [(), (3,), (1, 4), (1, 2, 5, 6)])
def test_stop_split_over_tokens(cut):
    stop = "###END"
    places = [0, *cut, len(stop)]
    parts = [stop[a:b] for a, b in itertools.pairwise(places)]
    parts = [p for p in parts if p]
    result = replay("go ", "##", " on ", *parts, " x", stop=[stop])
    assert result == ("go ## on ", "stop", stop, 3 + len(parts))


def test_overlapping_prefixes_fall_back_to_the_longest():
    assert replay(*"aabaabaaab", stop=["aabaaa"]) == ("aab", "stop", "aabaaa", 9)


@pytest.mark.parametrize("finish", ["length", "abort", "error"])
def test_unfinished_stop_string_is_flushed(finish):
    assert replay("go", " ST", "O", finish=finish, stop=["STOP"]) == ("go STO", finish, None, 3)


def test_end_of_text_token_flushes_too():
    assert replay("go", " ST", "O", EOS, finish="stop", stop=["STOP"]) == (
        "go STO",
        "stop",
        None,
        4,
    )


def test_only_a_possible_prefix_is_held_back():
    script = Script("abc", "xST", "Ay", "S", "TO", "P")
    texts = run(script.tokenizer, steps(script.ids), SamplingParams(stop=["STOP"]))
    assert [t.text for t in texts] == ["abc", "x", "STAy", ""]
    assert [len(t.token_ids) for t in texts] == [1, 1, 1, 3]


def test_included_stop_string_is_sent_as_it_comes():
    script = Script("a", "ST", "OP!", "b")
    params = SamplingParams(stop=["STOP"], include_stop_str_in_output=True)
    texts = run(script.tokenizer, steps(script.ids), params)
    assert [t.text for t in texts] == ["a", "ST", "OP"]
    assert finish_of(texts) == ("stop", "STOP", 3)
    assert replay("a", "ST", "OP!", stop=["STOP"], include_stop_str_in_output=True)[0] == "aSTOP"


def test_min_tokens_blocks_matches_that_end_too_early():
    assert replay("a.", "b", "c.", "d", stop=["."], min_tokens=1) == ("a.bc", "stop", ".", 3)
    assert replay("a", "S", "T", "x", stop=["ST"], min_tokens=2) == ("a", "stop", "ST", 3)
    assert replay("a", "S", "T", "x", stop=["ST"], min_tokens=3) == ("aSTx", "length", None, 4)


def test_a_match_that_may_not_stop_is_not_held_back():
    script = Script("a", "ST", "b")
    params = SamplingParams(stop=["ST", "T!"], min_tokens=3)
    texts = run(script.tokenizer, steps(script.ids), params)
    assert [t.text for t in texts] == ["a", "S", "Tb"]
    params = SamplingParams(stop=["ST"], min_tokens=3)
    texts = run(script.tokenizer, steps(script.ids), params)
    assert [t.text for t in texts] == ["a", "ST", "b"]


def test_leading_space_in_a_stop_string():
    assert replay(" the", " cat", " sat", stop=[" cat"]) == (" the", "stop", " cat", 2)
    tokenizer = sentencepiece_tokenizer()
    params = SamplingParams(stop=[" cat"])
    for prompt, text in (None, " the"), ([2, 3], " the"), ([1], "the"):
        texts = run(tokenizer, steps([2, 3]), params, prompt_token_ids=prompt)
        assert (join(texts), texts[-1].stop_reason) == (text, " cat")


def test_outputs_after_a_stop_string_are_ignored():
    script = Script("a", "STOP", "b")
    processor = OutputProcessor(script.tokenizer, SamplingParams(stop=["STOP"]))
    first, second, third = steps(script.ids)
    assert processor.process(first).text == "a"
    assert processor.process(second).finish_reason == "stop"
    assert processor.process(third) is None
    assert processor.num_output_tokens == 2


def test_stop_string_beats_length_and_the_end_token_after_it():
    assert replay("a", "STOP", stop=["STOP"], finish="length")[1:] == ("stop", "STOP", 2)
    assert replay("a", "STOP", EOS, stop=["STOP"], finish="stop")[1:] == ("stop", "STOP", 2)


def test_long_stop_strings_take_linear_time():
    stop = "a" * 1000 + "b"
    script = Script("a" * 100)
    outputs = steps(script.ids * 300)
    processor = OutputProcessor(script.tokenizer, SamplingParams(stop=[stop, "c"]))
    begin = time.perf_counter()
    text = "".join(t.text for o in outputs if (t := processor.process(o)) is not None)
    assert text == "a" * 30_000
    assert time.perf_counter() - begin < 2  # quadratic would be 30 million steps


# --- end tokens -----------------------------------------------------------------------------------


@pytest.mark.parametrize("stop", [{}, {"stop": []}, {"stop": ["zzz"]}])
def test_text_of_the_end_token_is_never_returned(stop):
    for skip in (True, False):
        result = replay("hi", EOS, finish="stop", skip_special_tokens=skip, **stop)
        assert result == ("hi", "stop", None, 2)


@pytest.mark.parametrize("stop", [[], ["zzz"]])
def test_stop_token_ids(stop):
    script = Script("hi", " end")
    outputs = steps(script.ids, finish="stop", stop_reason=script.ids[-1])
    texts = run(script.tokenizer, outputs, SamplingParams(stop=stop))
    assert (join(texts), *finish_of(texts)) == ("hi", "stop", script.ids[-1], 2)
    shown = SamplingParams(stop=stop, include_stop_str_in_output=True)
    assert join(run(script.tokenizer, outputs, shown)) == "hi end"
    special = Script("hi", "<pad>")
    outputs = steps(special.ids, finish="stop", stop_reason=special.ids[-1])
    assert join(run(special.tokenizer, outputs, shown)) == "hi"


def test_stop_token_comes_before_a_stop_string_it_would_complete():
    script = Script("hi", " end")
    outputs = steps(script.ids, finish="stop", stop_reason=script.ids[-1])
    params = SamplingParams(stop=["end"], include_stop_str_in_output=True)
    texts = run(script.tokenizer, outputs, params)
    assert (join(texts), texts[-1].stop_reason) == ("hi end", script.ids[-1])


def test_abort_without_tokens():
    script = Script("go", " ST")
    processor = OutputProcessor(script.tokenizer, SamplingParams(stop=["STOP"]))
    for output in steps(script.ids):
        output.finish_reason = None
        processor.process(output)
    text = processor.process(RequestOutput("r", [], "error", error="NaN logits"))
    assert (text.text, text.finish_reason, text.error) == ("ST", "error", "NaN logits")
    assert text.num_output_tokens == 2


# --- special tokens -------------------------------------------------------------------------------


def test_special_tokens_are_hidden_by_default():
    pieces = ["a", "<pad>", "b"]
    assert replay(*pieces)[0] == "ab"
    assert replay(*pieces, skip_special_tokens=True)[0] == "ab"
    assert replay(*pieces, skip_special_tokens=False)[0] == "a<pad>b"


@pytest.mark.parametrize("skip", [True, False])
def test_stop_string_that_is_a_special_token(skip):
    options = {"stop": ["<|im_end|>"], "skip_special_tokens": skip}
    result = ("stop", "<|im_end|>", 2)
    assert replay("hi", "<|im_end|>", "more", **options) == ("hi", *result)
    options["include_stop_str_in_output"] = True
    assert replay("hi", "<|im_end|>", "more", **options) == ("hi<|im_end|>", *result)


def test_stop_string_around_a_hidden_special_token():
    pieces = ["x", "hi", "<|im_end|>", "\n", "more"]
    stop = ["hi<|im_end|>\n"]
    assert replay(*pieces, stop=stop) == ("x", "stop", stop[0], 4)
    assert replay(*pieces, stop=stop, include_stop_str_in_output=True)[0] == "x" + stop[0]
    assert replay("x", "hi", "<|im_end|>", "more", stop=stop)[0] == "xhimore"
    spelled = ["x", "hi<|im_", "end|>", "\n", "more"]
    assert replay(*spelled, stop=stop) == ("x", "stop", stop[0], 4)


def test_hidden_special_token_is_no_match_for_a_part_of_its_text():
    assert replay("a", "<|im_end|>", "b", stop=["end"]) == ("ab", "length", None, 3)


def test_hidden_special_token_does_not_hide_a_stop_string_around_it():
    assert replay("a", "S", "<pad>", "T", "b", stop=["ST"]) == ("a", "stop", "ST", 4)


# --- logprobs -------------------------------------------------------------------------------------


def entries(texts: list[TextOutput]) -> list:
    return [entry for text in texts for entry in text.logprobs]


def test_entries_carry_true_bytes():
    pieces = ["是", " the", b" \xf0", b"\x9f\xa7", b"\xad"]
    script = Script(*pieces)
    outputs = steps(script.ids, logprobs=True)
    texts = run(script.tokenizer, outputs, SamplingParams(logprobs=2))
    found = entries(texts)
    assert [e.token for e in found] == ["是", " the", "\\x20\\xf0", "\\x9f\\xa7", "\\xad"]
    assert [e.token_id for e in found] == script.ids
    assert b"".join(bytes(e.bytes) for e in found).decode() == join(texts) == "是 the 🧭"
    assert found[0].bytes == [230, 152, 175]
    assert found[0].logprob == pytest.approx(-script.ids[0] / 10)
    assert [(t.token, t.logprob) for t in found[0].top] == [
        ("是", found[0].logprob),
        ("A", -9999.0),
    ]
    assert [len(t.logprobs) for t in texts] == [1, 1, 1, 2]  # " " shows before the compass does


def test_no_logprobs_unless_asked():
    script = Script("a")
    assert run(script.tokenizer, steps(script.ids), SamplingParams())[0].logprobs is None
    outputs = steps(script.ids, logprobs=True)
    assert len(run(script.tokenizer, outputs, SamplingParams(logprobs=0))[0].logprobs) == 1


def test_special_tokens_have_entries():
    script = Script("a", "<pad>", "b")
    for skip, text, data in (True, "ab", None), (False, "a<pad>b", list(b"<pad>")):
        params = SamplingParams(logprobs=0, skip_special_tokens=skip)
        texts = run(script.tokenizer, steps(script.ids, logprobs=True), params)
        assert join(texts) == text
        assert [e.token for e in entries(texts)] == ["a", "<pad>", "b"]
        assert entries(texts)[1].bytes == data


def test_entries_wait_with_their_text_and_leave_with_a_removed_stop_string():
    script = Script("a", "bS", "T", "<pad>", "O", "P", "c")
    params = SamplingParams(logprobs=0, stop=["STOP"])
    texts = run(script.tokenizer, steps(script.ids, logprobs=True), params)
    assert [[e.token for e in t.logprobs] for t in texts] == [["a"], ["bS"], []]
    assert texts[-1].token_ids == script.ids[2:6]
    script = Script("S", "T", "x")
    texts = run(script.tokenizer, steps(script.ids, logprobs=True), params)
    assert [[e.token for e in t.logprobs] for t in texts] == [["S", "T", "x"]]


def test_entries_of_what_no_text_shows_come_at_the_end():
    script = Script("a", "<pad>", b"\xf0\x9f", EOS)
    outputs = steps(script.ids, finish="stop", logprobs=True)
    texts = run(script.tokenizer, outputs, SamplingParams(logprobs=0))
    assert join(texts) == "a"
    assert [e.token for e in entries(texts)] == ["a", "<pad>"]
    assert [e.token_id for e in texts[-1].end_logprobs] == script.ids[2:]
    assert not any(text.end_logprobs for text in texts[:-1])
    assert [i for t in texts for i in t.token_ids] == script.ids


def test_shown_stop_token_has_an_entry():
    script = Script("a", " end")
    outputs = steps(script.ids, finish="stop", stop_reason=script.ids[-1], logprobs=True)
    params = SamplingParams(logprobs=0, include_stop_str_in_output=True)
    texts = run(script.tokenizer, outputs, params)
    assert [e.token for e in entries(texts)] == ["a", " end"]


# --- any text, any split, any grouping ------------------------------------------------------------

ATOMS = [
    *"abc ST\né是終わ🧭\u0301\ufffd",
    b"\xff",
    b"\x80",
    b"\xf0\x9f",
    b"\xed\xa0",
    "ab",
    "STOP",
    "<pad>",
]


def reference(tokenizer: Tokenizer, token_ids: list[int], params: SamplingParams) -> tuple:
    """Search the whole text: return (text, stop, tokens counted, ids of the logprob entries)."""
    pieces = [
        b""
        if i in tokenizer.special_ids and params.skip_special_tokens
        else tokenizer.token_bytes(i)
        for i in token_ids
    ]
    ends = [len(b"".join(pieces[: n + 1])) for n in range(len(pieces))]
    chars = chars_by_byte(b"".join(pieces))
    text = "".join(c for c, _, _ in chars)
    # A character is there when its last byte is; a replaced one when the next byte proves it.
    born = []
    for char, begin, end in chars:
        data = b"".join(pieces)[begin:end]
        incomplete = char == "\ufffd" and data != b"\xef\xbf\xbd" and _is_prefix(data)
        born.append(next(n for n, e in enumerate(ends) if e >= end + incomplete))
    for end in range(1, len(text) + 1):
        for stop in params.stop:
            if text[:end].endswith(stop) and born[end - 1] + 1 > params.min_tokens:
                cut = end if params.include_stop_str_in_output else end - len(stop)
                return text[:cut], stop, born[end - 1] + 1, _entries(pieces, token_ids, chars, cut)
    return text, None, len(token_ids), _entries(pieces, token_ids, chars, len(text))


def _is_prefix(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError as error:
        return error.start == 0 and error.reason == "unexpected end of data"
    return False


def _entries(pieces: list[bytes], token_ids: list[int], chars: list, cut: int) -> list[int]:
    kept_bytes = chars[cut - 1][2] if cut else 0
    shown, begin = [], 0
    for token_id, piece in zip(token_ids, pieces, strict=True):
        if piece and begin < kept_bytes:
            shown.append(token_id)
        begin += len(piece)
    return shown


@st.composite
def scripts(draw):
    parts = draw(st.lists(st.sampled_from(ATOMS), min_size=1, max_size=24))
    pieces: list[str | bytes] = []
    for part in parts:
        if part == "<pad>" or (len(part) > 1 and draw(st.booleans())):
            pieces.append(part)  # as one token
            continue
        data = part.encode() if isinstance(part, str) else part
        joins = pieces and pieces[-1] != "<pad>" and draw(st.booleans())
        if joins:
            last = pieces.pop()
            data = (last.encode() if isinstance(last, str) else last) + data
        cut = draw(st.integers(0, len(data)))
        pieces += [p for p in (data[:cut], data[cut:]) if p]
    stops = st.text(st.sampled_from("abc STOP\né是🧭\u0301\ufffd"), min_size=1, max_size=4)
    params = SamplingParams(
        stop=draw(st.lists(stops, max_size=3)),
        min_tokens=draw(st.integers(0, 4)),
        include_stop_str_in_output=draw(st.booleans()),
        skip_special_tokens=draw(st.booleans()),
        logprobs=draw(st.sampled_from([None, 1])),
    )
    return pieces, params, draw(st.lists(st.integers(1, 5), max_size=24))


@given(scripts())
@settings(max_examples=600, deadline=None)
@example((["a", b"\xf0\x9f", "S", "T"], SamplingParams(stop=["ST"], logprobs=0), [1, 2, 1]))
def test_stream_equals_search_of_the_whole_text(case):
    pieces, params, sizes = case
    script = Script(*pieces)
    text, stop, counted, shown = reference(script.tokenizer, script.ids, params)
    asked = params.logprobs is not None
    for grouping in (sizes, [], [len(pieces)]):
        outputs = steps(script.ids, grouping, logprobs=asked)
        texts = run(script.tokenizer, outputs, params)
        assert join(texts) == text
        assert finish_of(texts) == ("stop" if stop else "length", stop, counted)
        assert [i for t in texts for i in t.token_ids] == script.ids[:counted]
        if asked:
            visible = [e.token_id for e in entries(texts) if e.bytes is not None]
            assert visible == shown
            dangling = [e.token_id for t in texts for e in t.end_logprobs]
            if stop is None:
                assert [e.token_id for e in entries(texts)] + dangling == script.ids
            else:
                assert not dangling


@given(scripts())
@settings(max_examples=100, deadline=None)
def test_never_held_longer_than_a_stop_string_could_need(case):
    pieces, params, _ = case
    script = Script(*pieces)
    processor = OutputProcessor(script.tokenizer, params)
    sent = ""
    for n, token_id in enumerate(script.ids):
        output = processor.process(RequestOutput("r", [token_id]))
        if output is not None and output.finish_reason is not None:
            return
        sent += output.text if output is not None else ""
        prefix = OutputProcessor(
            script.tokenizer, SamplingParams(skip_special_tokens=params.skip_special_tokens)
        )
        whole = prefix.process(RequestOutput("r", script.ids[: n + 1], "length")).text
        held = whole[len(sent) :]
        assert whole.startswith(sent)
        assert not held or any(s.startswith(held) and s != held for s in params.stop)
        if not params.include_stop_str_in_output:
            longest = max(
                (k for s in params.stop for k in range(1, len(s)) if whole.endswith(s[:k])),
                default=0,
            )
            assert len(held) == longest
        else:
            assert held == ""
