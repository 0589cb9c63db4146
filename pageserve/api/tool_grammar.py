"""Grammars that hold tool calls to their tools: the name is one of them, arguments fit its schema.

A model that may call freely is held from the opening tag to the closing one; where the tag is no
token of its own, text is part of the grammar. One that must call, or else answer in a given form,
is held from the start.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass

import orjson

from pageserve.api import reasoning, tools
from pageserve.api.errors import bad_request
from pageserve.api.grammars import MAX_BYTES, ONE_SPACE, nest
from pageserve.api.json_schema import Budget, SchemaError, normalize_schema
from pageserve.api.tool_protocol import Tool, ToolChoice
from pageserve.tokenizer import Tokenizer

ANY_OBJECT = {"type": "object", "additionalProperties": True}
NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
TEXT = "TEXT: /(?s:.*)/"


@dataclass(frozen=True)
class ToolGrammar:
    """Lark source, and the ids of the tokens behind which it is in force (none: from the start).
    ``free`` says that it also takes, or leaves out, any text. ``relaxed`` has a note on each tool
    whose schema cannot be enforced."""

    source: str
    free: bool
    trigger_ids: tuple[int, ...] = ()
    relaxed: tuple[str, ...] = ()


def tool_grammar(
    tokenizer: Tokenizer,
    given: Sequence[Tool],
    choice: ToolChoice,
    *,
    parallel: bool,
    free: bool,
) -> ToolGrammar:
    """Return the grammar of an output that calls tools: whenever it likes among ``free`` text, or
    from the start.

    Raises :class:`APIError` if a strict tool has a schema that cannot be enforced.
    """
    rules, relaxed = _calls(given, choice)
    opening, closing = _tag(tokenizer, tools.OPEN), _tag(tokenizer, tools.CLOSE)
    body = f'"\\n" call "\\n" {closing}'
    trigger_ids: tuple[int, ...] = ()
    if free:
        token_id = tokenizer.token_id(tools.OPEN)
        if token_id is not None:
            start, trigger_ids = [f"start: {body}"], (token_id,)
        else:
            start = [
                f"start: (before {body})* TEXT",
                f'before[suffix="{tools.OPEN}"]: TEXT',
                TEXT,
            ]
    else:
        one_only = choice.mode == "named" or not parallel
        calls = "block" if one_only else 'block ("\\n" block)*'
        start = [f"start: {calls}", f"block: {opening} {body}"]
    return ToolGrammar("\n".join([*start, *rules]), free, trigger_ids, tuple(relaxed))


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


def _calls(given: Sequence[Tool], choice: ToolChoice) -> tuple[list[str], list[str]]:
    """Return the rule of a call, with one for each tool allowed, and notes on those relaxed."""
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
        head = json.dumps(f'{{"name": "{function["name"]}", "arguments": ')
        names.append(f"call_{i}")
        rules.append(f'call_{i}: {head} %json {json.dumps(schema)} "}}"')
    return [f"call: {' | '.join(names)}", *rules], relaxed


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
    """Return a tag as a grammar spells it: special tokens have names, all others are text."""
    return tag if tokenizer.token_id(tag) in tokenizer.special_ids else json.dumps(tag)
