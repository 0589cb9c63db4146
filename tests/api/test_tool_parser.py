"""The parser of tool calls alone: every split, every malformation, in linear time."""

import itertools
import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pageserve.api.tool_formats import FORMATS, HERMES, LLAMA_3, MISTRAL
from pageserve.api.tool_parser import Text, ToolParser, held_prefix

OPEN, CLOSE = "<tool_call>", "</tool_call>"
TAG, CALLS = "<|python_tag|>", "[TOOL_CALLS]"
NAMES = ("f", "g")


def block(name, arguments):
    return f'{OPEN}\n{{"name": "{name}", "arguments": {arguments}}}\n{CLOSE}'


def pieces_of(text, cuts=None, *, form=HERMES, cut=False, **options):
    """Feed ``text`` cut at the given places and return the parser and all it said."""
    parser = ToolParser(form, NAMES, **options)
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


def bare(name, arguments, key="parameters"):
    return f'{{"name": "{name}", "{key}": {arguments}}}'


def member(name, arguments, more=""):
    return f'{{"name": "{name}", "arguments": {arguments}{more}}}'


ID = ', "id": "abcdefghi"'
F, G = ("f", '{"x": 1}'), ("g", "{}")
# What the forms of Llama 3 and Mistral hold: the text, its content, its calls.
NATIVE = {
    "bare": (LLAMA_3, bare(*F), "", [F]),
    "bare, several": (LLAMA_3, bare(*F) + "; " + bare(*G) + "\n" + bare(*F) + ";", "", [F, G, F]),
    "bare, spaced": (LLAMA_3, '\n{\n "name" : "f",\n "parameters" : {"x": 1}\n}\n', "", [F]),
    "bare, with its type": (LLAMA_3, '{"type": "function", ' + bare(*F)[1:], "", [F]),
    "bare, OpenAI's word": (LLAMA_3, bare(*F, "arguments"), "", [F]),
    "bare, nested": (LLAMA_3, bare("f", NESTED), "", [("f", NESTED)]),
    "bare, no arguments": (LLAMA_3, '{"name": "g"}', "", [G]),
    "bare, no closing brace": (LLAMA_3, bare(*F)[:-1], "", [F]),
    "bare, more members": (LLAMA_3, bare(*F)[:-1] + ', "id": {"x": "}"}}; ' + bare(*G), "", [F, G]),
    "bare, text behind": (LLAMA_3, bare(*F) + "\n done ", "done", [F]),
    "bare, another name behind": (LLAMA_3, bare(*F) + ";" + bare("h", "{}"), None, [F]),
    "bare, then tagged": (LLAMA_3, bare(*F) + " and " + TAG + bare(*G), "and", [F, G]),
    "tagged": (LLAMA_3, TAG + bare(*F) + ";" + bare(*G), "", [F, G]),
    "tagged, text before": (LLAMA_3, "So:\n" + TAG + "\n" + bare(*F), "So:", [F]),
    "tagged, arguments first": (LLAMA_3, TAG + '{"parameters": {"x": 1}, "name": "f"}', "", [F]),
    "tagged, another name": (LLAMA_3, TAG + bare("h", "{}"), "", [("h", "{}")]),
    "JSON": (LLAMA_3, ' {"a": [1, {"name": "f"}]} ', None, []),
    "JSON with another name": (LLAMA_3, bare("h", "{}"), None, []),
    "JSON with a tool's name": (LLAMA_3, '{"name": "f", "x": {"parameters": {}}}', None, []),
    "JSON with a name and text": (LLAMA_3, '{"name": "f", "parameters": "{}"}', None, []),
    "no JSON": (LLAMA_3, '{"name": "f",}', None, []),
    "JSON, arguments first": (LLAMA_3, '{"parameters": {"x": 1}, "name": "f"}', None, []),
    "JSON of another type": (LLAMA_3, '{"type": "tool", "name": "f", "parameters": {}}', None, []),
    "JSON with an odd spelling": (LLAMA_3, '{"n\\u0061me": "f", "parameters": {}}', None, []),
    "JSON that begins with a name": (LLAMA_3, '{"name": "f', None, []),
    "a list": (LLAMA_3, "[" + bare(*F) + "]", None, []),
    "an object in text": (LLAMA_3, "see " + bare(*F), None, []),
    "Python": (LLAMA_3, TAG + "print(1)", None, []),
    "Llama's space": (LLAMA_3, " \n", None, []),
    "Llama's silence": (LLAMA_3, "", None, []),
    "list of one": (MISTRAL, CALLS + "[" + member(*F) + "]", "", [F]),
    "list of two": (MISTRAL, f"{CALLS} [{member(*F)}, {member(*G)}]\n", "", [F, G]),
    "list with ids": (MISTRAL, f"{CALLS}[{member(*F, ID)},{member(*G, ID)}]", "", [F, G]),
    "list, text around": (MISTRAL, f"So: {CALLS}[{member(*F)}] b\n", "So: b", [F]),
    "list, nested": (MISTRAL, f"{CALLS}[{member('f', NESTED)}]", "", [("f", NESTED)]),
    "two lists": (MISTRAL, f"{CALLS}[{member(*F)}]{CALLS}[{member(*G)}]", "", [F, G]),
    "list without an end": (MISTRAL, f"{CALLS}[{member(*F)}", "", [F]),
    "list with text in it": (MISTRAL, f"{CALLS}[{member(*F)}, no]", ", no]", [F]),
    "no list": (MISTRAL, CALLS + member(*F), None, []),
    "an empty list": (MISTRAL, CALLS + "[]", None, []),
    "a list alone": (MISTRAL, f"[{member(*F)}]", None, []),
}  # fmt: skip


@pytest.mark.parametrize("incremental", [True, False])
@pytest.mark.parametrize("name", NATIVE)
def test_what_a_text_of_another_form_holds(name, incremental):
    """Where no content is given, it is the text itself, or what stands behind the calls of it."""
    form, text, content, calls = NATIVE[name]
    if content is None:
        content = text if not calls else text.removeprefix(bare(*F))
    assert fold(text, [], form=form, incremental=incremental) == (content, calls, False)


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


TEXTS = {name: (HERMES, text) for name, (text, *_) in GOOD.items()}
TEXTS |= {name: (HERMES, text) for name, text in MALFORMED.items()}
TEXTS |= {name: (form, text) for name, (form, text, *_) in NATIVE.items()}


@pytest.mark.parametrize("name", TEXTS)
def test_all_splits_say_the_same(name):
    form, text = TEXTS[name]
    expected = fold(text, [], form=form)
    assert fold(text, [], form=form, incremental=False) == expected
    for size in (1, 2, 3, 5, 8):
        assert fold(text, range(size, len(text), size), form=form) == expected
        cuts = range(size, len(text), size)
        assert fold(text, cuts, form=form, incremental=False) == expected
    for place in range(1, len(text)):
        assert fold(text, [place], form=form) == expected
    shuffle = random.Random(0)
    for _ in range(20):
        cuts = sorted(shuffle.sample(range(len(text)), min(len(text), 4)))
        assert fold(text, cuts, form=form) == expected


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
some_arguments = st.builds(
    json.dumps, st.dictionaries(st.text(), json_values, max_size=3), ensure_ascii=st.booleans()
)


def written(form, calls):
    """Calls as a model of the form writes them."""
    if form is HERMES:
        return "\n".join(block(*call) for call in calls)
    if form is MISTRAL:
        return f"{CALLS}[{', '.join(member(*call) for call in calls)}]"
    return "; ".join(bare(*call) for call in calls)


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
@given(st.data())
def test_random_calls_in_random_pieces(form, data):
    """What is said in pieces adds up to what is said at once, and to what the model meant."""
    some_calls = st.lists(st.tuples(st.sampled_from(NAMES), some_arguments), min_size=1, max_size=3)
    calls = data.draw(some_calls)
    before = data.draw(st.sampled_from(["", "So.\n"]) if form is not LLAMA_3 else st.just(""))
    text = before + written(form, calls)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)))))
    end = data.draw(st.just(len(text)) | st.integers(0, len(text)))
    if end == len(text):
        assert fold(text, [], form=form) == (before.strip(), calls, False)
    options = {"form": form, "cut": end < len(text)}
    expected = fold(text[:end], [], incremental=False, **options)
    assert fold(text[:end], [c for c in cuts if c < end], **options) == expected


SCRAPS = [OPEN, CLOSE, TAG, CALLS, '{"name": "f"', '"parameters": {}', ', "arguments": {"a": "']


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
@given(st.lists(st.sampled_from([*SCRAPS, *'"}[];, \n:x\\'])), st.data())
def test_scraps_of_calls_lose_nothing_in_pieces(form, scraps, data):
    """Whatever the text, it says the same however it comes; unless a call breaks off, of which
    pieces are out already."""
    text = "".join(scraps)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)))))
    expected = fold(text, [], form=form, incremental=False)
    assert fold(text, cuts, form=form, incremental=False) == expected
    streamed = fold(text, cuts, form=form)
    assert streamed == fold(text, [], form=form)
    assert streamed == expected or streamed[2]
    if not expected[1] and not expected[2]:
        assert expected[0] == text


def test_nothing_certain_is_held_back():
    """Text goes out at once but for what may begin the tag, and white space before it; arguments
    go out at once."""
    parser = ToolParser(HERMES)
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


def test_an_answer_in_json_is_not_held_longer_than_needed():
    """A text that may be a call without its opening waits until it is one, or cannot be."""
    for steps in (
        [("{", ""), ('"', ""), ("n", ""), ("ext", '{"next'), ('": ', '":'), ("4", " 4")],
        [(' {"name": "', ""), ("f", ""), ("oo", ' {"name": "foo'), ('"', '"')],
        [('{"name": "f", ', ""), ('"param', ""), ('s": {', '{"name": "f", "params": {')],
        [('{"name": "f"', ""), (', "', ""), ("weight", '{"name": "f", "weight')],
        [('{"name": "f", ', ""), ('"parameters": ', ""), ("{", ("f", "{")), ('"x', '"x')],
        [("[", "["), ('{"name": "f"', '{"name": "f"')],
    ):
        parser = ToolParser(LLAMA_3, NAMES)
        for fed, said in steps:
            pieces = parser.feed(fed)
            if isinstance(said, tuple):
                name, *rest = pieces
                assert (name.name, [p.arguments for p in rest]) == (said[0], [said[1]])
            else:
                parts = [p.text if isinstance(p, Text) else p.arguments for p in pieces]
                assert "".join(parts) == said, fed


def test_a_call_without_opening_that_the_limit_cuts():
    text = bare("f", '{"x": [1, 2]}')
    known, whole = text.index(': {"x') + 3, text.index("}}") + 1
    for end in range(1, len(text)):
        for incremental in (True, False):
            for exclusive in (True, False):
                options = {"form": LLAMA_3, "cut": True, "exclusive": exclusive}
                content, calls, _ = fold(text[:end], incremental=incremental, **options)
                if end < known:
                    assert (content, calls) == (text[:end], [])
                else:
                    assert (content, calls) == ("", [("f", text[known - 1 : min(end, whole)])])


@pytest.mark.parametrize("cuts", [None, []])
@pytest.mark.parametrize("name", ["bare, several", "tagged", "list of two", "two lists"])
def test_single_ends_behind_the_first_call_of_a_list(name, cuts):
    form, text, _, calls = NATIVE[name]
    parser, _ = pieces_of(text, cuts, form=form, single=True)
    assert parser.ended and fold(text, cuts, form=form, single=True) == ("", calls[:1], False)
    first = text[: text.index("}}") + 1]
    parser, _ = pieces_of(first, form=form, single=True)
    assert not parser.ended


def test_held_prefix():
    assert held_prefix("a<tool", OPEN) == 5
    assert held_prefix("a<<", OPEN) == 1
    assert held_prefix(OPEN, OPEN) == 0
    assert held_prefix("<tool", OPEN, 2) == 0


SHAPES = [
    OPEN,
    OPEN + '{"k":[',
    OPEN + '{"',
    OPEN + '{"name":"f","arguments":{"a":[',
    OPEN + '{"arguments":{"\\',
    "<tool_cal",
    " ",
    block("f", "{}"),
]


@pytest.mark.parametrize(
    ("form", "shape"),
    [
        (LLAMA_3, TAG),
        (LLAMA_3, bare(*F) + ";"),
        (LLAMA_3, '{"name": "f",'),
        (LLAMA_3, '{"type": "function",'),
        (LLAMA_3, " "),
        (MISTRAL, CALLS + "["),
        (MISTRAL, f"{CALLS}[{member(*F)}"),
        *((HERMES, shape) for shape in SHAPES),
    ],
)
@pytest.mark.parametrize("size", [1, 7, None])
def test_reads_each_character_once(form, shape, size):
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
        parser = ToolParser(form, NAMES)
        parser._buffer = Counted()
        for start in range(0, length, size or length):
            parser.feed(text[start : start + (size or length)])
        parser.finish(cut=False)
        return work

    assert cost(40_000) < 2.5 * cost(20_000)


def test_arguments_are_the_models_own_bytes():
    _, calls, _ = fold(block("f", NESTED))
    assert calls[0][1] == NESTED and json.loads(calls[0][1])
