"""The parser of tool calls alone: every split, every malformation, in linear time."""

import itertools
import json
import random

import pytest

from pageserve.api.tool_parser import Text, ToolParser, held_prefix

OPEN, CLOSE = "<tool_call>", "</tool_call>"


def block(name, arguments):
    return f'{OPEN}\n{{"name": "{name}", "arguments": {arguments}}}\n{CLOSE}'


def pieces_of(text, cuts=None, *, incremental=True, cut=False, single=False, exclusive=False):
    """Feed ``text`` cut at the given places and return the parser and all it said."""
    options = {"incremental": incremental, "single": single, "exclusive": exclusive}
    parser = ToolParser(OPEN, CLOSE, **options)
    edges = [0, *(range(1, len(text)) if cuts is None else cuts), len(text)]
    pieces = []
    for start, end in itertools.pairwise(edges):
        pieces += parser.feed(text[start:end])
    return parser, pieces + parser.finish(cut=cut)


def fold(text, cuts=None, **options):
    """Return (content, [(name, arguments)], broken), checking the form of each delta."""
    parser, pieces = pieces_of(text, cuts, **options)
    content, calls = "", []
    for piece in pieces:
        if isinstance(piece, Text):
            assert piece.text and text[piece.start :].startswith(piece.text)
            content += piece.text
        elif piece.name is not None:
            assert piece.index == len(calls)
            assert piece.arguments == ""
            calls.append((piece.name, ""))
        else:
            assert piece.index == len(calls) - 1 and piece.arguments
            name, arguments = calls[-1]
            calls[-1] = (name, arguments + piece.arguments)
    return content, calls, parser.broken


NESTED = '{"x": {"y": [1, {"z": "} ] { </tool_call> \\" \\\\"}], "é": "👧\\u00e9"}}'
GOOD = {
    "one call": (block("f", '{"x": 1}'), "", [("f", '{"x": 1}')]),
    "two calls": (
        block("f", '{"x": 1}') + "\n" + block("g", "{}"),
        "",
        [("f", '{"x": 1}'), ("g", "{}")],
    ),
    "text before": ("Sure. \n" + block("f", "{}"), "Sure.", [("f", "{}")]),
    "text between": (block("f", "{}") + "\nand\n" + block("g", "{}") + "\n", "and", None),
    "text behind": ("a\n" + block("f", "{}") + "\n b \n", "a\n b", [("f", "{}")]),
    "nested": (block("f", NESTED), "", [("f", NESTED)]),
    "odd white space": (
        block("f", '{ "x" :1,\n\t"y":[ ] }'),
        "",
        [("f", '{ "x" :1,\n\t"y":[ ] }')],
    ),
    "arguments first": (
        f'{OPEN}{{"arguments": {NESTED}, "name": "f"}}{CLOSE}',
        "",
        [("f", NESTED)],
    ),
    "no arguments": (f'{OPEN}{{"name": "f"}}{CLOSE}', "", [("f", "{}")]),
    "other members": (
        f'{OPEN}{{"id": "a,}}", "n": -1.5e3, "q": [{{"name": 1}}], "name": "f"}}{CLOSE}',
        "",
        [("f", "{}")],
    ),
    "Llama's word": (f'{OPEN}{{"name": "f", "parameters": {{}}}}{CLOSE}', "", [("f", "{}")]),
    "escaped name": (f'{OPEN}{{"name": "f\\u005f1"}}{CLOSE}', "", [("f_1", "{}")]),
    "no closing tag": (f'{OPEN}{{"name": "f", "arguments": {{}}}}', "", [("f", "{}")]),
    "no closing brace": (block("f", '{"x": 1}').replace("}}", "}"), "", [("f", '{"x": 1}')]),
    "plain text": (" a <tool b <tool_cal \n", " a <tool b <tool_cal \n", []),
    "nearly a tag": ("<<tool_call<tool_call>x", "<<tool_call<tool_call>x", []),
    "white space only": (" \n ", " \n ", []),
    "nothing": ("", "", []),
}


@pytest.mark.parametrize("incremental", [True, False])
@pytest.mark.parametrize("name", GOOD)
def test_what_a_text_holds(name, incremental):
    text, content, calls = GOOD[name]
    got = fold(text, [], incremental=incremental)
    assert (got[0], got[2]) == (content, False)
    assert [n for n, _ in got[1]] == (["f", "g"] if calls is None else [n for n, _ in calls])
    if calls is not None:
        assert got[1] == calls


MALFORMED = {
    "no object": f"{OPEN}nope{CLOSE}",
    "no name": f'{OPEN}{{"arguments": {{}}}}{CLOSE}',
    "name is no string": f'{OPEN}{{"name": 1}}{CLOSE}',
    "a list": f'{OPEN}[{{"name": "f"}}]{CLOSE}',
    "bad escape": f'{OPEN}{{"name": "\\x"}}{CLOSE}',
    "half a surrogate pair": f'{OPEN}{{"name": "\\ud83d", "arguments": {{}}}}{CLOSE}',
    "the other half": f'{OPEN}{{"name": "f\\ude00", "arguments": {{}}}}{CLOSE}',
    "arguments are text, and first": f'{OPEN}{{"arguments": "{{}}", "name": "f"}}{CLOSE}',
    "nothing inside": f"{OPEN}{CLOSE}",
    "ends in the head": f'{OPEN}{{"na',
    "ends in a string": f'{OPEN}{{"name": "f\\',
    "missing comma": f'{OPEN}{{"a": 1 "name": "f"}}{CLOSE}',
}


@pytest.mark.parametrize("incremental", [True, False])
@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_block_is_text(name, incremental):
    text = "Well: " + MALFORMED[name]
    assert fold(text, [], incremental=incremental) == (text, [], False)
    assert fold(text, incremental=incremental) == (text, [], False)


def test_a_call_behind_a_malformed_block_is_found():
    text = f"{OPEN}{OPEN}oops{CLOSE}\n" + block("f", "{}")
    assert fold(text) == (f"{OPEN}{OPEN}oops{CLOSE}", [("f", "{}")], False)


def test_a_call_that_the_model_breaks_off():
    """A stream has said its beginning and leaves it so; a whole answer shows it as text."""
    text = "x " + block("f", '{"x": [1, 2')[: -len(CLOSE) - 2]
    assert fold(text) == ("x", [("f", '{"x": [1, 2')], True)
    assert fold(text, incremental=False) == (text, [], True)
    text = f'{OPEN}{{"name": "f", oops'
    assert fold(text) == ("oops", [("f", "")], True)
    assert fold(text, incremental=False) == (text, [], True)


@pytest.mark.parametrize("incremental", [True, False])
def test_a_call_that_the_limit_cuts(incremental):
    """The part that is there is shown, from the name on."""
    text = "x " + block("f", '{"x": [1, 2]}')
    known = text.index('", ') + 1
    whole = text.index("}}") + 1
    for end in range(3, len(text)):
        content, calls, broken = fold(text[:end], cut=True, incremental=incremental)
        assert not broken
        if end < known:
            assert (content, calls) == (text[:end], [])
        else:
            start = text.index('{"x"')
            assert (content, calls) == ("x", [("f", text[start : min(end, whole)])])


@pytest.mark.parametrize("cuts", [None, []])
def test_a_tag_in_an_answer_that_has_a_form_is_text(cuts):
    answer = f"see {block('f', '{}')} for the syntax"
    assert fold(answer, cuts, exclusive=True) == (answer, [], False)
    call = block("f", "{}")
    assert fold(call, cuts, exclusive=True) == ("", [("f", "{}")], False)


def test_single_drops_what_follows_the_first_call():
    text = "x " + block("f", "{}") + " y " + block("g", "{}")
    for cuts in (None, []):
        parser, _ = pieces_of(text, cuts, single=True)
        assert parser.ended
        assert fold(text, cuts, single=True) == ("x", [("f", "{}")], False)
    parser, _ = pieces_of("x " + block("f", "{}")[:-1], single=True)
    assert not parser.ended


@pytest.mark.parametrize("name", [*GOOD, *MALFORMED])
def test_all_splits_say_the_same(name):
    text = GOOD[name][0] if name in GOOD else MALFORMED[name]
    expected = fold(text, [])
    assert fold(text, [], incremental=False) == expected
    for size in (1, 2, 3, 5, 8):
        assert fold(text, range(size, len(text), size)) == expected
        assert fold(text, range(size, len(text), size), incremental=False) == expected
    for place in range(1, len(text)):
        assert fold(text, [place]) == expected
    shuffle = random.Random(0)
    for _ in range(20):
        cuts = sorted(shuffle.sample(range(len(text)), min(len(text), 4)))
        assert fold(text, cuts) == expected


def test_nothing_certain_is_held_back():
    """Text goes out at once but for what may begin the tag, and white space before it; arguments
    go out at once."""
    parser = ToolParser(OPEN, CLOSE)
    steps = [
        ("Sure", "Sure"),
        (". <to", "."),
        ("ols>", " <tools>"),
        ("<tool_call>", ""),
        ('{"name": "f', ""),
        ('", ', ("f", "")),
        ('"arguments": {"a', '{"a'),
        ('": "<', '": "<'),
        ("}", "}"),
        ('"}}', '"}'),
    ]
    for fed, said in steps:
        pieces = parser.feed(fed)
        texts = [p.text if isinstance(p, Text) else p.arguments for p in pieces]
        if isinstance(said, tuple):
            assert [(p.name, p.arguments) for p in pieces] == [said]
        else:
            assert texts == ([said] if said else []), fed


def test_held_prefix():
    assert held_prefix("a<tool", OPEN) == 5
    assert held_prefix("a<<", OPEN) == 1
    assert held_prefix(OPEN, OPEN) == 0
    assert held_prefix("<tool", OPEN, 2) == 0


@pytest.mark.parametrize(
    "shape",
    [
        OPEN,
        OPEN + '{"k":[',
        OPEN + '{"',
        OPEN + '{"name":"f","arguments":{"a":[',
        OPEN + '{"arguments":{"\\',
        "<tool_cal",
        " ",
        block("f", "{}"),
    ],
)
@pytest.mark.parametrize("size", [1, 7, None])
def test_reads_each_character_once(shape, size):
    """Text made of openings without ends is the worst case of a parser that looks again.

    Counts what is searched and copied rather than time.
    """
    work = 0

    class Counted(str):
        """Text that counts the characters that are taken out of it or searched in it."""

        def __getitem__(self, key):
            nonlocal work
            part = str.__getitem__(self, key)
            work += len(part)
            return Counted(part)

        def __add__(self, other):
            nonlocal work
            work += len(self) + len(other)
            return Counted(str.__add__(self, other))

        def find(self, sub, start=0):
            nonlocal work
            found = str.find(self, sub, start)
            work += (len(self) if found < 0 else found) - start
            return found

    def cost(length):
        nonlocal work
        work = 0
        text = Counted((shape * (length // len(shape) + 1))[:length])
        parser = ToolParser(OPEN, CLOSE)
        parser._buffer = Counted()
        for start in range(0, length, size or length):
            parser.feed(text[start : start + (size or length)])
        parser.finish(cut=False)
        return work

    assert cost(40_000) < 2.5 * cost(20_000)


def test_arguments_are_the_models_own_bytes():
    _, calls, _ = fold(block("f", NESTED))
    assert calls[0][1] == NESTED and json.loads(calls[0][1])
