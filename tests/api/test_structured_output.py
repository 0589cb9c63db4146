"""Structured output as the API sees it: sources, schemas, grammars, refusals, time limits.

Texts are random walks through the grammar that the engine would get, so they show what any model
could be made to say.
"""

import asyncio
import contextlib
import datetime
import json
import random
import re
import time
from typing import Any, Literal

import jsonschema
import pytest
from api_harness import CHAT, CMPL, HI, TOKENIZER, Api, error_of, events_of
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from pydantic import BaseModel
from schema_samples import SCHEMAS, closed, random_schema, sample
from test_api_sdk import Server

from pageserve.api import grammars, json_schema
from pageserve.api.errors import APIError
from pageserve.api.grammars import GrammarCompiler, grammar_of
from pageserve.api.json_schema import MAX_DEPTH, TYPES, Budget, SchemaError, normalize_schema
from pageserve.api.structured_output import Constraint
from pageserve.grammar import GrammarError, compile_grammar, llguidance_tokenizer

AGE = closed({"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer"}})
FORMATS = jsonschema.FormatChecker(("date", "uuid", "email", "ipv4", "ipv6"))


def grammar(kind: Any, value: Any, **options: Any) -> str:
    return grammar_of(Constraint(kind, value, "field", **options))


def texts(text: str, count: int = 8, steps: int = 600) -> list[str]:
    """Complete random texts of a grammar."""
    samples = [sample(text, TOKENIZER, seed, steps) for seed in range(count)]
    return [text for text, complete in samples if complete]


def walk(text: str, prefer: bytes, steps: int = 300) -> tuple[str, bool]:
    """The text of a model that always takes one of the bytes ``prefer`` if it may, the end last."""
    matcher = compile_grammar(text, llguidance_tokenizer(TOKENIZER))
    ids: list[int] = []
    while len(ids) < steps and not matcher.is_stopped():
        mask = matcher.compute_bitmask()
        legal = [i for i in range(256) if mask[i // 8] >> i % 8 & 1]
        best = [i for i in prefer if i in legal]
        if not legal:
            break
        ids.append((best or legal)[0])
        matcher.consume_token(ids[-1])
    return TOKENIZER.decode(ids, False), matcher.is_accepting()


# --- schemas --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCHEMAS)
def test_what_a_schema_allows_validates(name):
    schema = SCHEMAS[name]
    validator = Draft202012Validator(schema, format_checker=FORMATS)
    complete = texts(grammar("json", schema))
    assert len(complete) >= 6
    for text in complete:
        validator.validate(json.loads(text))


def test_random_schemas():
    """What is not refused with a 400 gives texts that validate, whatever the schema is."""
    compiled = 0
    for seed in range(150):
        rng = random.Random(seed)
        defs = {"x": random_schema(rng, 2), "y": random_schema(rng, 1)}
        schema = {"anyOf": [random_schema(rng, 3)], "$defs": defs}
        try:
            text = grammar("json", schema)
            compile_grammar(text, llguidance_tokenizer(TOKENIZER))
        except (APIError, GrammarError):
            continue
        compiled += 1
        for complete in texts(text, 4, 150):
            jsonschema.validate(json.loads(complete), schema, Draft202012Validator)
    assert compiled > 60


def test_formats_are_those_python_reads():
    """llguidance's own formats have a 61st second and fractions without end."""
    schema = closed({f: {"type": "string", "format": f} for f in ("date", "time", "date-time")})
    for text in texts(grammar("json", schema), 30):
        value = json.loads(text)
        datetime.date.fromisoformat(value["date"].replace("0000-", "0004-"))
        datetime.time.fromisoformat(value["time"])
        datetime.datetime.fromisoformat(value["date-time"].replace("0000-", "0004-"))
        assert len(value["time"]) <= 21


@pytest.mark.parametrize("seed", range(40))
def test_bounds_hold(seed):
    """llguidance lets a bare 0 pass exclusiveMinimum: 0."""
    rng = random.Random(seed)
    scale = 10.0 ** rng.randint(-6, 17)
    low, high = sorted(rng.choice([0.0, round(rng.uniform(-scale, scale), 7)]) for _ in range(2))
    schema: dict[str, Any] = {"type": rng.choice(["number", "number", "integer"])}
    if rng.random() < 0.8:
        schema[rng.choice(["minimum", "exclusiveMinimum"])] = low
    if rng.random() < 0.8:
        schema[rng.choice(["maximum", "exclusiveMaximum"])] = high
    try:
        text = grammar("json", schema)
    except APIError as error:
        assert "no number lies between" in error.message
        assert high - low < 2
        return
    for prefer in (b"0.", b"9.", b"-9.", b"1.", b"5"):
        value = json.loads(walk(text, prefer)[0])
        jsonschema.validate(value, schema)


def test_compact_with_at_most_one_space():
    value = {"a": 1, "b": [1, {"c": 2}]}
    for text in texts(grammar("json", {"const": value}), 30):
        assert json.loads(text) == value
        assert "  " not in text
        assert text.replace(": ", ":").replace(", ", ",") == json.dumps(
            value, separators=(",", ":")
        )
    compact = texts(grammar("json", {"const": value}, no_whitespace=True), 5)
    assert set(compact) == {json.dumps(value, separators=(",", ":"))}
    loose = texts(grammar("json", {"const": value}, whitespace_pattern=r"[ \n]{0,3}"), 30)
    assert all(json.loads(text) == value for text in loose)
    assert any("\n" in text for text in loose)


@pytest.mark.parametrize("prefer", [b" \n\t\r", b"0123456789", b"9.", b"0.-", b"-1e+"])
def test_spaces_and_digits_end(prefer):
    """C105, C106: a model that likes blanks or digits closes its JSON all the same."""
    fields = {"a": {"type": "integer"}, "b": {"type": "number"}, "c": {"type": ["null", "number"]}}
    for schema in (closed(fields), {"type": "array", "items": {"type": "number"}, "maxItems": 3}):
        text, complete = walk(grammar("json", schema), prefer)
        assert complete
        jsonschema.validate(json.loads(text), schema)
    text, complete = walk(grammar("json", {"anyOf": [{"type": "number"}, {}]}), b"0123456789.")
    assert complete and len(text) < 40


def test_closed_objects():
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}
    assert set(texts(grammar("json", schema, closed=True))) <= {'{"a":1}', '{"a": 1}'}
    assert any(len(json.loads(t)) > 1 for t in texts(grammar("json", schema), 20))


def test_property_order_is_the_schemas():
    schema = closed({"z": {"const": 1}, "a": {"const": 2}, "m": {"const": 3}}, ["a"])
    seen = {tuple(json.loads(text)) for text in texts(grammar("json", schema), 40)}
    assert seen == {("a",), ("z", "a"), ("a", "m"), ("z", "a", "m")}


def test_annotations_are_no_constraints():
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": "https://example.com/x",
        "$comment": "c",
        "title": "T",
        "description": "d",
        "default": 3,
        "examples": [1],
        "deprecated": True,
        "type": "integer",
        "x-guidance": {"lenient": True, "whitespace_flexible": True},
        "uniqueItems": False,
    }
    assert normalize_schema(schema) == normalize_schema({"type": "integer"})


NOT_SUPPORTED = [
    ({"not": {"type": "null"}}, "/not"),
    ({"if": {}, "then": {}, "else": {}}, "/if"),
    (closed({"a": {"patternProperties": {}}}), "/properties/a/patternProperties"),
    ({"type": "object", "propertyNames": {}}, "/propertyNames"),
    ({"type": "object", "minProperties": 1}, "/minProperties"),
    ({"type": "object", "dependentRequired": {}}, "/dependentRequired"),
    ({"type": "object", "unevaluatedProperties": False}, "/unevaluatedProperties"),
    ({"type": "array", "uniqueItems": True}, "/uniqueItems"),
    ({"type": "array", "contains": {}}, "/contains"),
    ({"type": "array", "items": [{}]}, "/items"),
    ({"type": "number", "multipleOf": 0.5}, "/multipleOf"),
    ({"type": "integer", "multipleOf": 2}, "/multipleOf"),
    ({"type": "integer", "minimum": 10**18 + 1}, "/minimum"),
    ({"type": "number", "exclusiveMaximum": -1e300}, "/exclusiveMaximum"),
    ({"type": "string", "minLength": 10**10}, "/minLength"),
    ({"type": "string", "format": "idn-email"}, "/format"),
    ({"type": "string", "pattern": "(["}, "unclosed character class"),
    ({"type": "string", "pattern": "^(?=a)"}, "look-around"),
    ({"type": "string", "pattern": "a" * 4097}, "4096 characters"),
    ({"type": "string", "pattern": "(a{1000}){1000}"}, "/pattern"),
    ({"$ref": "https://example.com/s"}, "/$ref"),
    ({"$ref": "#anchor"}, "/$ref"),
    ({"const": 2**53 + 1}, "/const"),
    ({"enum": [[0.1 + 0.2]]}, "/enum"),
    ({"allOf": [{"pattern": "a"}, {"pattern": "b"}]}, "/allOf/1/pattern"),
    ({"allOf": [{"anyOf": [{}]}, {"type": "null"}]}, "/allOf/0/anyOf"),
    ({"anyOf": [{}], "oneOf": [{}]}, "anyOf beside oneOf"),
]
MALFORMED = [
    ({"type": "nope"}, "/type"),
    ({"type": 3}, "/type"),
    (closed({"a": "bar"}), "/properties/a"),
    ({"properties": []}, "/properties"),
    ({"type": "object", "required": "a"}, "/required"),
    ({"anyOf": []}, "/anyOf"),
    ({"allOf": {}}, "/allOf"),
    ({"enum": []}, "/enum"),
    ({"type": "integer", "minimum": "3"}, "/minimum"),
    ({"type": "integer", "maximum": True}, "/maximum"),
    ({"type": "string", "maxLength": -1}, "/maxLength"),
    ({"type": "string", "maxLength": 1.5}, "/maxLength"),
    ({"type": "string", "pattern": 1}, "/pattern"),
    ({"$ref": "#/nowhere"}, "#/nowhere"),
    ({"$ref": 3}, "/$ref"),
    ({"$ref": []}, "/$ref"),
    ({"anyOf": [{"$ref": "#/anyOf/" + "9" * 4000}]}, "/anyOf/0/$ref"),
    ({"anyOf": [{"$ref": "#/anyOf/" + "9" * 5000}]}, "/anyOf/0/$ref"),
    ({"type": "string", "format": []}, "/format"),
    ({"$ref": "#"}, "leads back to itself"),
    ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, "leads back to itself"),
    ("a string", "not valid JSON"),
    ("[]", "must be an object or a boolean"),
    ([], "must be an object or a boolean"),
    (3, "must be an object or a boolean"),
]
IMPOSSIBLE = [
    (False, "no value"),
    ({"type": []}, "no value"),
    ({"anyOf": [{"$ref": "#"}]}, "no value"),
    (closed({"a": {"$ref": "#"}}), "no value"),
    (closed({}, ["a"]), "no value"),
    ({"type": "object", "properties": {"a": False}, "required": ["a"]}, "no value"),
    ({"type": "array", "items": False, "minItems": 1}, "no value"),
    ({"allOf": [{"type": "string"}, {"type": "null"}]}, "no value"),
    ({"enum": ["a"], "type": "integer"}, "no value"),
    ({"enum": ["a"], "allOf": [{"enum": ["b"]}]}, "no value"),
    ({"type": "integer", "minimum": 3, "maximum": 2}, "no number"),
    ({"type": "integer", "exclusiveMinimum": 1, "exclusiveMaximum": 2}, "no number"),
    ({"type": "string", "minLength": 3, "maxLength": 2}, "minLength"),
    (
        closed({"a": {"type": "null"}, "e": {"$ref": "#/$defs/e"}}, ["a"])
        | {"$defs": {"e": closed({"e": {"$ref": "#/$defs/e"}})}},
        "#/$defs/e",
    ),
]


@pytest.fixture(scope="module")
def api():
    with asyncio.Runner() as runner:
        yield Api(runner)


@pytest.mark.parametrize(("schema", "words"), NOT_SUPPORTED + MALFORMED + IMPOSSIBLE)
def test_schemas_refused_before_anything_is_sent(api, schema, words):
    """C102, C103: 400 that names the keyword and its place, also for a stream."""
    before = len(api.engine.requests)
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    for stream in (False, True):
        response = api.chat(response_format=wanted, stream=stream)
        error = error_of(response)
        assert response.status_code == 400
        assert (error["code"], error["param"]) == ("invalid_json_schema", "response_format")
        assert words in error["message"]
    assert len(api.engine.requests) == before


def test_depth_and_size(api):
    def nested(levels):
        schema: Any = {"type": "null"}
        for _ in range(levels):
            schema = {"type": "array", "items": schema}
        return schema

    normalize_schema(nested(MAX_DEPTH))
    chain = {f"s{i}": closed({"n": {"$ref": f"#/$defs/s{i + 1}"}}) for i in range(200)}
    normalize_schema({"$ref": "#/$defs/s0", "$defs": chain | {"s200": {"type": "null"}}})
    doubling = {f"s{i}": {"allOf": [{"$ref": f"#/$defs/s{i + 1}"}] * 2} for i in range(40)}
    for schema, words in (
        (nested(MAX_DEPTH + 1), "64 levels"),
        ({"enum": ["x" * 2**18]}, "262144 bytes"),
        (closed({f"p{i}": {"type": "null"} for i in range(5001)}), "5000 subschemas"),
        ({"$ref": "#/$defs/s0", "$defs": doubling | {"s40": {}}}, "5000 subschemas"),
        ("[" * 200 + "]" * 200, "128 levels"),
    ):
        error = error_of(api.cmpl(guided_json=schema))
        assert (error["code"], error["param"]) == ("invalid_json_schema", "guided_json")
        assert words in error["message"]


WRONG: dict[str, list[Any]] = {
    "a schema": [3, "x", [], None],
    "an array of schemas": [3, "x", {}, [], True, None],
    "an array of values": [3, "x", {}, [], True, None],
    "an object": [3, "x", [], [{}], True, None],
    "a string": [3, [], {}, ["x"], [[]], True, None],
    "a number": ["3", [], {}, [3], True, None],
    "a count": ["3", [], {}, [3], True, None, -1, 1.5, -1e300],
    "strings": [3, "x", {}, [3], [[]], [{}], True, None],
    "a type": [3, "x", {}, ["x"], [3], [[]], [{}], True, None],
}
SHAPES = {
    "a schema": ["items", "additionalProperties"],
    "an array of schemas": ["allOf", "anyOf", "oneOf", "prefixItems"],
    "an array of values": ["enum"],
    "an object": ["properties"],
    "a string": ["$ref", "pattern", "format"],
    "a number": [
        "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"
    ],
    "a count": ["minLength", "maxLength", "minItems", "maxItems"],
    "strings": ["required"],
    "a type": ["type"],
}  # fmt: skip


@pytest.mark.parametrize(
    ("word", "value"),
    [(w, v) for shape, words in SHAPES.items() for w in words for v in WRONG[shape]],
)
def test_every_keyword_has_the_right_shape(word, value):
    """Wherever it stands, also beside a type that it says nothing about."""
    schemas = (
        {word: value},
        {"type": "null", word: value},
        {"type": list(TYPES), word: value},
        {"enum": [None], word: value},
        {"allOf": [{word: value}, {"minimum": 1}]},
        {"minimum": 1, "allOf": [{"allOf": [{word: value}]}]},
        {"minLength": 1, "anyOf": [{word: value}, True]},
        {"properties": {"a": {word: value}}},
    )
    for schema in schemas:
        with pytest.raises(SchemaError, match=re.escape(f"/{word}")):
            normalize_schema(schema)


@given(
    st.dictionaries(
        st.sampled_from([w for words in SHAPES.values() for w in words]),
        st.sampled_from([v for values in WRONG.values() for v in values] + [1, "#", ["a"], [{}]]),
        max_size=3,
    ),
    st.sampled_from(["allOf", "anyOf", "properties"]),
)
def test_no_schema_fails_but_as_a_bad_schema(keywords, word):
    inner = {"a": keywords} if word == "properties" else [keywords, {"type": "string"}]
    for schema in (keywords, {word: inner}):
        with contextlib.suppress(SchemaError):
            normalize_schema(schema)


def test_conjunction_of_enums():
    """1 and 1.0 are one number, true is none."""
    left = [1, True, 2.0, 0, "a", [1, {"b": False}], {"x": [2]}, None]
    right = [None, {"x": [2.0]}, [1, {"b": 0}], 2, 1.0, False]
    both = normalize_schema({"allOf": [{"enum": left}, {"enum": right}]})
    assert [type(v) for v in both["enum"]] == [int, float, dict, type(None)]
    assert both["enum"] == [1, 2, {"x": [2]}, None]
    assert normalize_schema({"enum": [True, 1, "a"], "const": 1.0}) == {"enum": [1]}


def small_but_heavy():
    """Schemas of at most 256 KiB that ask for much more."""
    many = list(range(10_000))
    return [
        {"enum": many, "anyOf": [{}] * 5000},
        {"enum": [many], "anyOf": [{}] * 5000},
        {"properties": {f"p{i}": 1 for i in many}, "allOf": [{"minimum": 1}] * 4000},
        {"allOf": [{"required": [f"a{i}"]} for i in range(4900)]},
        {"allOf": [{"properties": {"a": {"minimum": i}}} for i in range(4000)]},
        {"anyOf": [{"$ref": f"#/anyOf/{i + 1}"} for i in range(4900)] + [{}]},
        {"$ref": "#/" + "a" * 5000},
    ]


@pytest.mark.parametrize("schema", small_but_heavy())
def test_work_is_bounded(schema):
    assert len(json.dumps(schema, separators=(",", ":"))) <= 2**18
    spent = []

    class Counted(Budget):
        def spend(self, work):
            spent.append(work)
            super().spend(work)

    with pytest.raises(SchemaError, match=r"too much work|characters|deeper"):
        normalize_schema(schema, budget=Counted())
    assert sum(spent) < 600_000


def test_long_enums_meet_in_linear_time(monkeypatch):
    calls = 0
    key = json_schema._key

    def counted(value):
        nonlocal calls
        calls += 1
        return key(value)

    monkeypatch.setattr(json_schema, "_key", counted)
    monkeypatch.setattr(json_schema, "_equal", lambda left, right: left is right)
    many = list(range(3500))
    both = normalize_schema({"allOf": [{"enum": many}, {"enum": many[::-1]}]})
    assert both == {"enum": many} and calls == 7000


# --- regular expressions, choices, grammars -------------------------------------------------------


def test_regex_is_exact():
    for text in texts(grammar("regex", r"(\d{3}-)+[a-f]{2}/x"), 20):
        groups, _, end = text.rpartition("-")
        assert all(len(g) == 3 and g.isascii() and g.isdigit() for g in groups.split("-"))
        assert len(end) == 4 and end.endswith("/x")


@pytest.mark.parametrize(
    ("pattern", "prefer"),
    [("(a+)+$", b"a"), ("(a|a)*b", b"b"), ("(.*a){20}", b"a"), ("(x+x+)+y", b"yx")],
)
def test_patterns_that_backtracking_engines_choke_on(pattern, prefer):
    """C127"""
    text, complete = walk(grammar("regex", pattern), prefer, 100)
    assert text and complete


@pytest.mark.parametrize(
    "choices",
    [
        ["a", "ab", "abc"],
        ["ja", "nein"],
        ['q"x\\y', "new\nline", "é是😀", "<|im_end|>", "tab\t\x01", "/x/", "\u2028", "\x7f", " a"],
        [str(i) for i in range(8, 12)],
    ],
)
def test_choice_is_exact(choices):
    assert set(texts(grammar("choice", choices), 40 * len(choices), 40)) == set(choices)


def test_lark_and_gbnf():
    lark = 'start: "x" NUMBER ("," NUMBER)*\nNUMBER: /[0-9]{2}/'
    gbnf = 'root ::= "x" number ("," number)*\nnumber ::= [0-9] [0-9]'
    for source in (lark, gbnf):
        for text in texts(grammar("grammar", source)):
            assert text[0] == "x" and all(len(n) == 2 for n in text[1:].split(","))


BAD = [
    ("regex", "([", "invalid_regex"),
    ("regex", "", "invalid_regex"),
    ("regex", "a" * 4097, "invalid_regex"),
    ("regex", "(a{1000}){1000}", "invalid_regex"),
    ("regex", r"(a)\1", "invalid_regex"),
    ("choice", [], "empty_array"),
    ("choice", ["a"] * 1025, "array_above_max_length"),
    ("choice", ["a", ""], "string_below_min_length"),
    ("choice", ["a", 1], "invalid_type"),
    ("choice", "a", "invalid_type"),
    ("grammar", "", "invalid_grammar"),
    ("grammar", 'start: ("a"{1000}){1000}', "invalid_grammar"),
    ("grammar", "start: (", "invalid_grammar"),
    ("grammar", "root ::= nothing", "invalid_grammar"),
    ("grammar", "start: start", "invalid_grammar"),
    ("grammar", "root ::= " + "(" * 3000, "invalid_grammar"),
    ("grammar", "#" * 20000, "invalid_grammar"),
    ("json", "{", "invalid_json_schema"),
    ("json", 3, "invalid_type"),
]


@pytest.mark.parametrize(("kind", "value", "code"), BAD)
def test_bad_constraints(api, kind, value, code):
    """Both spellings give the same 400, each with its own param."""
    for body, param in (
        ({"structured_outputs": {kind: value}}, f"structured_outputs.{kind}"),
        ({f"guided_{kind}": value}, f"guided_{kind}"),
    ):
        for response in (api.chat(**body), api.cmpl(**body)):
            error = error_of(response)
            assert response.status_code == 400
            assert (error["code"], error["param"].split("[")[0]) == (code, param)


# --- requests -------------------------------------------------------------------------------------

REGEX = "[a-z]+"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"guided_json": AGE}, {"structured_outputs": {"json": AGE}}),
        ({"guided_json": json.dumps(AGE)}, {"structured_outputs": {"json": AGE}}),
        ({"guided_regex": REGEX}, {"structured_outputs": {"regex": REGEX}}),
        ({"guided_choice": ["a", "b"]}, {"structured_outputs": {"choice": ["a", "b"]}}),
        ({"guided_grammar": "start: /a/"}, {"structured_outputs": {"grammar": "start: /a/"}}),
        ({"json_schema": AGE}, {"guided_json": AGE}),
        ({"regex": REGEX}, {"guided_regex": REGEX}),
        ({"grammar": 'root ::= "a"'}, {"ebnf": 'root ::= "a"'}),
        (
            {"response_format": {"type": "json_object"}},
            {"structured_outputs": {"json_object": True}},
        ),
        (
            {"response_format": {"type": "json_object", "schema": AGE}},
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "strict": None, "schema": AGE},
                }
            },
        ),
    ],
)
def test_spellings_mean_the_same(api, one, other):
    """The engine gets the same grammar, from both endpoints."""
    start = len(api.engine.requests)
    for body in (one, other):
        for send in (api.chat, api.cmpl):
            response = send(**body)
            assert response.status_code == 200, response.text
            old = next((name for name in body if name.startswith("guided_")), None)
            warning = response.headers.get("x-pageserve-warning")
            assert (warning is None) == (old is None)
            assert old is None or old in warning
            assert "x-pageserve-ignored" not in response.headers
    sent = {request.grammar for request in api.engine.requests[start:]}
    assert len(sent) == 1 and None not in sent


def test_free_output_has_no_grammar(api):
    assert api.chat(response_format={"type": "text"}).status_code == 200
    assert api.engine.requests[-1].grammar is None


def test_every_prompt_gets_the_grammar(api):
    response = api.post(CMPL, {"prompt": ["a", "b"], "guided_choice": ["x", "y"]})
    assert response.status_code == 200
    assert api.engine.requests[-1].grammar == api.engine.requests[-2].grammar is not None


NAMED = {"name": "n", "schema": AGE}
FORMAT = "response_format.json_schema"


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        ({"guided_regex": "a", "guided_choice": ["a"]}, "invalid_value", "guided_regex"),
        (
            {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
            "invalid_value",
            "response_format",
        ),
        ({"structured_outputs": {}}, "invalid_value", "structured_outputs"),
        ({"structured_outputs": {"json_object": False}}, "invalid_value", "structured_outputs"),
        (
            {"structured_outputs": {"regex": "a", "choice": ["a"]}},
            "invalid_value",
            "structured_outputs",
        ),
        (
            {"structured_outputs": {"regex": "a", "disable_any_whitespace": True}},
            "invalid_value",
            "structured_outputs",
        ),
        (
            {
                "structured_outputs": {
                    "json": {},
                    "disable_any_whitespace": True,
                    "whitespace_pattern": " ",
                }
            },
            "invalid_value",
            "structured_outputs",
        ),
        (
            {"structured_outputs": {"json": {}, "whitespace_pattern": "x"}},
            "invalid_regex",
            "structured_outputs.whitespace_pattern",
        ),
        (
            {"structured_outputs": {"structural_tag": "x"}},
            "unsupported_value",
            "structured_outputs.structural_tag",
        ),
        ({"structured_outputs": "x"}, "invalid_type", "structured_outputs"),
        ({"response_format": {"type": "json_schema"}}, "missing_required_parameter", FORMAT),
        (
            {"response_format": {"type": "json_schema", "json_schema": []}},
            "invalid_type",
            FORMAT,
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
            "missing_required_parameter",
            f"{FORMAT}.name",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}},
            "missing_required_parameter",
            f"{FORMAT}.schema",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": NAMED | {"name": "a b"}}},
            "invalid_value",
            f"{FORMAT}.name",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": NAMED | {"name": "n" * 65}}},
            "invalid_value",
            f"{FORMAT}.name",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": NAMED | {"strict": "yes"}}},
            "invalid_type",
            f"{FORMAT}.strict",
        ),
    ],
)
def test_refused_requests(api, body, code, param):
    for send in (api.chat, api.cmpl):
        response = send(**body)
        error = error_of(response)
        assert response.status_code == 400
        assert (error["code"], error["param"]) == (code, param)


def test_prompt_errors_come_first(api):
    error = error_of(api.post(CMPL, {"prompt": "x" * 5000, "guided_regex": "(["}))
    assert error["code"] == "context_length_exceeded"
    error = error_of(api.chat(guided_regex="([", model="nope"))
    assert error["code"] == "model_not_found"


# --- compiling ------------------------------------------------------------------------------------


def test_grammars_are_compiled_once(monkeypatch):
    calls = []
    real = grammars.compile_grammar
    monkeypatch.setattr(
        grammars, "compile_grammar", lambda *args: calls.append(args[0]) or real(*args)
    )
    monkeypatch.setattr(grammars, "CACHE_SIZE", 2)

    async def compile_all():
        compiler = GrammarCompiler()
        for word in ("a", "b", "a", "c", "a", "b"):
            await compiler.compile(Constraint("regex", word, "regex"), TOKENIZER)
        for _ in range(2):
            with pytest.raises(APIError):
                await compiler.compile(Constraint("regex", "([", "regex"), TOKENIZER)

    asyncio.run(compile_all())
    assert len(calls) == 4 + 2  # a, b, c, b again; what failed is not remembered


def test_slow_compilations_end_and_block_nobody(monkeypatch):
    """Overrun: 400 for the request, others go on; all threads taken: 503, and free again later."""
    monkeypatch.setattr(grammars, "COMPILE_LIMIT", 0.2)
    real = grammars.compile_grammar

    def slow(text, tokenizer):
        if "slow" in text:
            time.sleep(1)
        return real(text, tokenizer)

    monkeypatch.setattr(grammars, "compile_grammar", slow)
    with asyncio.Runner() as runner:
        api = Api(runner)

        async def ask(pattern):
            return await api.send("POST", CHAT, json={"messages": HI, "guided_regex": pattern})

        async def ask_all():
            beats = 0

            async def beat():
                nonlocal beats
                while True:
                    await asyncio.sleep(0.01)
                    beats += 1

            await ask("warm")
            heart = asyncio.create_task(beat())
            slow_ones = await asyncio.gather(ask("slow1"), ask("slow2"))
            refused = await ask("fast")
            heart.cancel()
            await asyncio.sleep(1)
            return slow_ones, refused, await ask("fast"), beats

        slow_ones, refused, later, beats = api.run(ask_all())
    for response in slow_ones:
        assert response.status_code == 400
        assert error_of(response)["code"] == "invalid_regex"
        assert "longer" in error_of(response)["message"]
    assert refused.status_code == 503
    assert error_of(refused)["code"] == "server_is_overloaded"
    assert "retry-after" in refused.headers
    assert later.status_code == 200
    assert beats >= 5


def test_compile_bombs(api):
    """Conformance 42: refused or compiled, with the event loop free meanwhile."""
    wide = closed({f"p{i}": {"type": "integer"} for i in range(4900)}, [])
    branches = [
        closed({f"p{i}": {"type": "number", "minimum": 0, "maximum": i}}) for i in range(2000)
    ]
    product = {"allOf": [{"anyOf": [{"type": "object"}] * 50}] * 20}

    async def ask():
        gaps = []

        async def beat():
            last = time.monotonic()
            while True:
                await asyncio.sleep(0.01)
                now = time.monotonic()
                gaps.append(now - last)
                last = now

        heart = asyncio.create_task(beat())
        answers = []
        for schema in (wide, {"anyOf": branches}, product):
            start = time.monotonic()
            body = {"messages": HI, "guided_json": schema}
            answers.append((await api.send("POST", CHAT, json=body), time.monotonic() - start))
        heart.cancel()
        return answers, gaps

    answers, gaps = api.run(ask())
    for response, seconds in answers:
        assert response.status_code in (200, 400)
        assert seconds < 12  # 6 on a machine that does nothing else
    assert answers[2][0].status_code == 400
    assert max(gaps) < 2


# --- the SDK --------------------------------------------------------------------------------------


class Line(BaseModel):
    label: Literal["dot", "dash"] | None
    weights: list[float]


class Drawing(BaseModel):
    title: str
    kind: Literal["sketch", "plan"]
    lines: list[Line]
    frame: Line | None
    size: int | bool


def test_sdk_parse():
    """chat.completions.parse() with a nested pydantic model, from text that the grammar allows."""

    def script(request):
        text, complete = next(
            s for s in (sample(request.grammar, TOKENIZER, i, 800) for i in range(9)) if s[1]
        )
        assert complete
        return TOKENIZER.encode(text, add_special_tokens=False)

    with Server(script=script) as server:
        client = server.client()
        for _ in range(2):
            reply = client.chat.completions.parse(
                model="tiny", messages=HI, response_format=Drawing
            )
            assert isinstance(reply.choices[0].message.parsed, Drawing)
        with client.chat.completions.stream(
            model="tiny", messages=HI, response_format=Drawing
        ) as stream:
            assert isinstance(stream.get_final_completion().choices[0].message.parsed, Drawing)


def test_stream_carries_the_warning(api):
    response = api.chat(guided_choice=["a"], stream=True)
    assert events_of(response.text)[-1] == "[DONE]"
    assert response.headers["x-pageserve-warning"].startswith("guided_choice is deprecated")
