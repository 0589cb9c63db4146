"""Schemas from easy to recursive, and random texts that a grammar allows."""

import random
from typing import Any

import numpy as np
from llguidance import LLMatcher

from pageserve.grammar import compile_grammar, llguidance_tokenizer
from pageserve.tokenizer import Tokenizer

NODE = {
    "type": "object",
    "properties": {
        "value": {"type": "integer"},
        "children": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2},
    },
    "required": ["value", "children"],
    "additionalProperties": False,
}


def closed(properties: dict[str, Any], required: list[str] | None = None) -> dict[str, Any]:
    """An object with these properties and no others, all required unless said otherwise."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties) if required is None else required,
        "additionalProperties": False,
    }


SCHEMAS: dict[str, Any] = {
    "boolean": {"type": "boolean"},
    "null": {"type": "null"},
    "integer": {"type": "integer"},
    "number": {"type": "number"},
    "string": {"type": "string", "maxLength": 20},
    "type list": {"type": ["integer", "null", "boolean"]},
    "small range": {"type": "integer", "minimum": -3, "exclusiveMaximum": 4},
    "number range": {"type": "number", "exclusiveMinimum": 0, "maximum": 0.3},
    "wide range": {"type": "integer", "minimum": -(2**63), "maximum": 20_000_000_000},
    "beyond floats": {"type": "integer", "minimum": 2**53 + 1, "maximum": 2**53 + 9},
    "multiple of one": {"type": "number", "multipleOf": 1, "minimum": 5},
    "lengths": {"type": "string", "minLength": 2, "maxLength": 4},
    "pattern": {"type": "string", "pattern": "^[a-z]{2,4}-\\d\\w$"},
    "pattern inside": {"type": "string", "pattern": "ab", "maxLength": 6},
    "pattern and format": {"type": "string", "format": "date", "pattern": "^20"},
    "enum": {"enum": ["a", 'quote "', "line\nbreak", 1, 1.5, None, True, {"k": [1, "é"]}]},
    "enum of a type": {"type": "string", "enum": ["red", "green", 3]},
    "enum and keywords": {"type": "string", "enum": ["a", "abc", "abcd"], "minLength": 2},
    "const": {"const": {"b": 1, "a": ["x"]}},
    "formats": closed(
        {
            f: {"type": "string", "format": f}
            for f in ("date", "time", "date-time", "uuid", "email", "ipv4", "ipv6", "duration")
        }
    ),
    "array": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
    "tuple": {
        "type": "array",
        "prefixItems": [{"type": "integer"}, {"type": "boolean"}],
        "items": False,
        "minItems": 2,
    },
    "tuple and more": {"prefixItems": [{"const": 1}], "items": {"const": 2}, "maxItems": 4},
    "object": closed({"name": {"type": "string", "maxLength": 9}, "age": {"type": "integer"}}),
    "optional": closed({"a": {"const": 1}, "b": {"const": 2}, "c": {"const": 3}}, ["b"]),
    "map": {"type": "object", "additionalProperties": {"enum": [1, 2]}, "maxLength": 3},
    "odd names": closed({'é"\\ \n': {"const": 1}, "": {"const": 2}, "a/b~c%": {"const": 3}}),
    "forbidden": {
        "type": "object",
        "properties": {"a": False, "b": {"const": 1}},
        "required": ["b"],
        "additionalProperties": False,
    },
    "any of": {"anyOf": [{"type": "integer"}, closed({"a": {"type": "null"}})]},
    "any of with siblings": {
        "type": "object",
        "properties": {"kind": {"type": "string"}, "size": {"type": "integer"}},
        "required": ["kind"],
        "anyOf": [
            {"properties": {"kind": {"const": "box"}}, "required": ["size"]},
            {"properties": {"kind": {"enum": ["dot", "line"]}}},
        ],
        "additionalProperties": False,
    },
    "one of": {"oneOf": [{"type": "integer"}, {"type": "boolean"}]},
    "all of": {
        "allOf": [{"$ref": "#/$defs/base"}, {"properties": {"b": {"const": 2}}, "required": ["b"]}],
        "$defs": {
            "base": {
                "type": "object",
                "properties": {"a": {"const": 1}, "b": {"type": "integer"}},
                "required": ["a"],
            },
        },
    },
    "all of scalars": {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 6}]},
    "ref": closed({"a": {"$ref": "#/$defs/a~1b"}, "b": {"$ref": "#/properties/a"}})
    | {"$defs": {"a/b": {"enum": ["x", "y"]}}},
    "ref with siblings": {
        "$ref": "#/definitions/n",
        "maximum": 5,
        "definitions": {"n": {"type": "integer", "minimum": 3}},
    },
    "linked list": {
        "$ref": "#/$defs/n",
        "$defs": {
            "n": closed({"v": {"const": 1}, "n": {"anyOf": [{"$ref": "#/$defs/n"}, {"const": 0}]}})
        },
    },
    "tree": {"$ref": "#/$defs/node", "$defs": {"node": NODE}},
    "recursive root": closed({"next": {"$ref": "#"}, "v": {"type": "boolean"}}, ["v"]),
    "mutual": {
        "$ref": "#/$defs/a",
        "$defs": {
            "a": closed({"b": {"anyOf": [{"$ref": "#/$defs/b"}, {"type": "null"}]}}),
            "b": closed({"a": {"anyOf": [{"$ref": "#/$defs/a"}, {"type": "null"}]}}),
        },
    },
    "any value": {},
    "true": True,
}


LITERALS = [0, 1, 2, 3.5, -1, "a", "b", "ab", "x y", None, True, False, [], [1], {}, {"a": 1}]
LEAVES: list[Any] = [
    True,
    {},
    {"type": "boolean"},
    {"type": "null"},
    {"type": "string", "maxLength": 3},
    {"type": "integer", "minimum": 0, "maximum": 5},
]


def random_schema(rng: random.Random, depth: int) -> Any:
    """A schema of up to ``depth`` levels, about one in three of which nothing can match."""

    def below() -> Any:
        return random_schema(rng, depth - 1)

    def several() -> list[Any]:
        return [below() for _ in range(rng.randint(1, 3))]

    if depth <= 0 or rng.random() < 0.15:
        return rng.choice([*LEAVES, {"enum": rng.sample(LITERALS, 4)}])
    schema: dict[str, Any] = {}
    kind = rng.choice(["object", "object", "array", "number", "string", "anyOf", "allOf", "$ref"])
    if kind == "object":
        schema["properties"] = {name: below() for name in rng.sample("abcd", rng.randint(0, 3))}
        schema["required"] = [name for name in schema["properties"] if rng.random() < 0.5]
        if rng.random() < 0.7:
            schema["additionalProperties"] = rng.choice([False, below()])
    elif kind == "array":
        schema = {"items": below(), "maxItems": rng.randint(0, 3), "minItems": rng.randint(0, 1)}
        if rng.random() < 0.4:
            schema["prefixItems"] = several()
    elif kind == "number":
        words = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
        schema = {w: rng.choice([0, 1, -1, 3.5, 0.25, -10, 1e6]) for w in rng.sample(words, 2)}
    elif kind == "string":
        pattern = rng.choice(["^[a-c]+$", "b", "^a", "x?$"])
        schema = {"pattern": pattern, "maxLength": rng.randint(0, 4)}
    elif kind in ("anyOf", "allOf"):
        schema[kind] = several()
        extra = random_schema(rng, 0)
        schema |= extra if rng.random() < 0.3 and isinstance(extra, dict) else {}
    else:
        schema["$ref"] = rng.choice(["#/$defs/x", "#/$defs/y"])
    if rng.random() < 0.8 and kind in ("object", "array", "string", "number"):
        schema["type"] = rng.choice([kind, kind, [kind, "null"]])
    if rng.random() < 0.07:
        schema["enum"] = rng.sample(LITERALS, 6)
    return schema


def sample(grammar: str, tokenizer: Tokenizer, seed: int, steps: int = 400) -> tuple[str, bool]:
    """Return a random text of the grammar, and whether it is complete.

    Behind half of the steps, tokens that close something come first, so that texts end.
    """
    rng = random.Random(seed)
    matcher: LLMatcher = compile_grammar(grammar, llguidance_tokenizer(tokenizer))
    ids: list[int] = []
    while len(ids) < steps and not matcher.is_stopped():
        legal = allowed(matcher, tokenizer.size)
        assert legal, f"no legal token behind {tokenizer.decode(ids, False)!r}"
        if tokenizer.eos_token_id in legal and (len(legal) == 1 or rng.random() < 0.5):
            return tokenizer.decode(ids, False), True
        closing = [i for i in legal if (tokenizer.token_bytes(i) or b"")[:1] in b'"]}']
        if len(ids) > steps // 8 and closing and rng.random() < 0.7:
            legal = closing
        token = rng.choice([i for i in legal if i != tokenizer.eos_token_id])
        assert matcher.consume_token(token), matcher.get_error()
        ids.append(token)
    return tokenizer.decode(ids, False), matcher.is_stopped() or matcher.is_accepting()


def allowed(matcher: LLMatcher, size: int) -> list[int]:
    """Return the ids that may come next."""
    mask = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
    assert not matcher.is_error(), matcher.get_error()
    ids: list[int] = np.flatnonzero(mask[:size]).tolist()
    return ids
