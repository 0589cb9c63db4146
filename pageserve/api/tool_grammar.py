"""Grammars that hold tool calls to their tools: the name is one of them, arguments fit its schema.

A model that may call freely is held from the token that opens calls to their end; where that is no
token of its own, or may be left out, text is part of the grammar. One that must call, or else
answer in a given form, is held from the start.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass

import orjson

from pageserve.api import reasoning
from pageserve.api.errors import bad_request
from pageserve.api.grammars import MAX_BYTES, ONE_SPACE, nest
from pageserve.api.json_schema import Budget, SchemaError, normalize_schema
from pageserve.api.tool_formats import ToolFormat
from pageserve.api.tool_protocol import Tool, ToolChoice
from pageserve.tokenizer import Tokenizer

ANY_OBJECT = {"type": "object", "additionalProperties": True}
NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
TEXT = "TEXT: /(?s:.*)/"


@dataclass(frozen=True)
class ToolGrammar:
    """Lark source, and the ids of the tokens behind which it is in force (none: from the start).
    ``anywhere`` says that calls may begin anywhere in an output, any text before them. ``relaxed``
    has a note on each tool whose schema cannot be enforced."""

    source: str
    anywhere: bool
    trigger_ids: tuple[int, ...] = ()
    relaxed: tuple[str, ...] = ()


def tool_grammar(
    tokenizer: Tokenizer,
    form: ToolFormat,
    given: Sequence[Tool],
    choice: ToolChoice,
    *,
    parallel: bool,
    free: bool,
    may_think: bool = False,
) -> ToolGrammar:
    """Return the grammar of an output that calls tools: whenever it likes among ``free`` text, or
    from the start. ``may_think`` says that :func:`behind_reasoning` is to put a block before it
    that the model may leave out.

    Raises :class:`APIError` if a strict tool has a schema that cannot be enforced.
    """
    as_objects = bool(form.bare) and not free
    names, rules, relaxed = _calls(form, given, choice, as_objects)
    one_only = choice.mode == "named" or not parallel

    def several(item: str) -> str:
        return item if one_only else f"{item} (SEPARATOR {item})*"

    opening, token_id = _tag(tokenizer, form.open), tokenizer.token_id(form.open)
    closing = _tag(tokenizer, form.close) if form.close else ""
    calls = "call" if form.close else several("call")
    rules += [
        f"calls: {_terminal(form.start)} {calls} {_terminal(form.end)} {closing}",
        f"block: {opening} calls",
        f"SEPARATOR: {_terminal(form.separator)}",
    ]
    trigger_ids: tuple[int, ...] = ()
    if form.bare:
        is_token = token_id in tokenizer.special_ids
        start = ["start: calls | block" if is_token else "start: calls"]
        if free:
            start[0] += " | ANSWER | ANSWER block" if is_token else " | ANSWER"
            # A block is no answer: what stands behind it would be held to nothing.
            others = [_named(form.bare, *names), *([rf"\s*{reasoning.OPEN}"] if may_think else [])]
            start.append(f"ANSWER: /(?s:.*)/ & ~/({'|'.join(others)})(?s:.*)/")
    elif not free:
        start = [f"start: {several('block') if form.close else 'block'}"]
    elif token_id is not None:
        start, trigger_ids = ["start: calls"], (token_id,)
    else:
        start = ["start: (before calls)* TEXT", f'before[suffix="{form.open}"]: TEXT', TEXT]
    anywhere = free and not form.bare
    return ToolGrammar("\n".join([*start, *rules]), anywhere, trigger_ids, tuple(relaxed))


def behind_reasoning(tokenizer: Tokenizer, block: str, grammar: str) -> str:
    """Return a grammar of ``grammar`` behind a reasoning block: the rest of one that the prompt has
    opened, or one that the model may write (see :func:`pageserve.api.reasoning.place`)."""
    close_id = tokenizer.token_id(reasoning.CLOSE)
    if close_id in tokenizer.special_ids:
        thought = f"thought: TEXT {reasoning.CLOSE}"
    else:
        thought = f'thought[suffix="{reasoning.CLOSE}"]: TEXT'
    before = "thought GAP"
    if block == "before":
        before = f"({_tag(tokenizer, reasoning.OPEN)} {before})?"
    source = "\n".join([f"start: {before} @answer", thought, "GAP: /[ \\n]{0,4}/", TEXT])
    return nest(source, {"answer": grammar})


def _calls(
    form: ToolFormat, given: Sequence[Tool], choice: ToolChoice, as_objects: bool
) -> tuple[list[str], list[str], list[str]]:
    """Return the names of the tools allowed, the rule of a call with one for each of them, and
    notes on those relaxed.

    A call that may begin like an answer must be read in the same pieces as that, as nothing is read
    twice. Beside free text it is a head that ends where the text can no longer be any other; beside
    an answer in a form it is, as that may be, a JSON value: ``as_objects``.
    """
    rules, names, relaxed = [], [], []
    limits = _Limits()
    for i, tool in enumerate(given):
        function = tool["function"]
        if choice.names is not None and function["name"] not in choice.names:
            continue
        schema, problem = _schema(function, limits)
        if problem is not None:
            param = f"tools[{i}].function.parameters"
            if function.get("strict"):
                raise bad_request("invalid_json_schema", f"{param}: {problem}", param)
            relaxed.append(f"{param}: {problem}")
        names.append(function["name"])
        if as_objects:
            call = f"%json {json.dumps(_whole_call(form, function['name'], schema))}"
        else:
            head = _named(form.head, function["name"])
            call = f"/{head}/ %json {json.dumps(schema)} /{form.tail}/"
        rules.append(f"call_{i}: {call}")
    alternatives = " | ".join(rule.partition(":")[0] for rule in rules)
    return names, [f"call: {alternatives}", *rules], relaxed


def _whole_call(form: ToolFormat, name: str, schema: dict[str, object]) -> dict[str, object]:
    """Return the schema of a whole call, from that of the tool's arguments."""
    schema = dict(schema)
    outer = {k: schema.pop(k) for k in ("$defs", "x-guidance") if k in schema}
    members = {"type": {"const": "function"}, "name": {"const": name}, form.arguments_key: schema}
    required = ["name", form.arguments_key]
    return NO_ARGUMENTS | {"properties": members, "required": required} | outer


def _named(pattern: str, *names: str) -> str:
    """Return a pattern of a form with the names of tools in it."""
    return pattern.replace("NAME", f"({'|'.join(names)})".replace(".", r"\."))


def _terminal(pattern: str) -> str:
    return f"/{pattern}/" if pattern else ""


class _Limits:
    """What the schemas of one request may take together."""

    def __init__(self) -> None:
        self.budget = Budget()
        self._bytes = 0

    def add(self, schema: object) -> None:
        """Count a schema; raises :class:`SchemaError` if it does not fit in."""
        size = len(orjson.dumps(schema))
        if self._bytes + size > MAX_BYTES:
            raise SchemaError("", f"more than {MAX_BYTES} bytes of all tools are not supported")
        self._bytes += size


def _schema(function: Tool, limits: _Limits) -> tuple[dict[str, object], str | None]:
    """Return the schema of a tool's arguments, and why it is not the tool's own if it is not."""
    spaces = {"x-guidance": ONE_SPACE}
    parameters = function.get("parameters")
    if parameters is None:
        return NO_ARGUMENTS | spaces, None
    try:
        limits.add(parameters)
        schema = normalize_schema({**parameters, "type": "object"}, budget=limits.budget)
    except SchemaError as error:
        return ANY_OBJECT | spaces, str(error)
    return schema | spaces, None


def _tag(tokenizer: Tokenizer, tag: str) -> str:
    """Return a tag as a grammar spells it: special tokens by their ids, all others as text."""
    token_id = tokenizer.token_id(tag)
    return f"<[{token_id}]>" if token_id in tokenizer.special_ids else json.dumps(tag)
