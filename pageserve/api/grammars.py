"""Constraints as grammars: written for llguidance, and compiled to see that they are good.

:func:`grammar_of` writes a grammar, :class:`GrammarCompiler` makes sure off the event loop that it
compiles, so that the engine never meets one that does not.
"""

import asyncio
import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import orjson
from llguidance import LLTokenizer, regex_to_lark
from llguidance.gbnf_to_lark import any_to_lark

from pageserve.api.body import depth_exceeds
from pageserve.api.errors import unavailable
from pageserve.api.json_schema import SchemaError, normalize_schema, too_big
from pageserve.api.structured_output import Constraint
from pageserve.grammar import GrammarError, compile_grammar, llguidance_tokenizer
from pageserve.tokenizer import Tokenizer

MAX_BYTES = 256 * 1024  # of a schema, a list of choices
MAX_VALUE_DEPTH = 128
MAX_GRAMMAR_CHARS = 16 * 1024  # reading one takes time that grows faster than its length
COMPILE_LIMIT = 5.0  # seconds
COMPILE_THREADS = 2
CACHE_SIZE = 256
TRIAL_STEPS = 8  # tokens
NO_SPACES = {"whitespace_flexible": False, "key_separator": ":", "item_separator": ","}
ONE_SPACE = {"whitespace_flexible": False, "key_separator": ": ?", "item_separator": ", ?"}


def grammar_of(constraint: Constraint) -> str:
    """Return the grammar in the form that :mod:`pageserve.grammar` reads.

    Raises :class:`APIError` for a constraint that is malformed, too big or not supported.
    """
    match constraint.kind:
        case "json":
            return _json_grammar(constraint)
        case "regex":
            return _lark(f"start: /{_regex(constraint)}/")
        case "choice":
            # JSON's escapes of a string are Lark's.
            return _lark("start: " + " | ".join(map(json.dumps, constraint.value)))
        case "tools":
            return _lark(constraint.value)
        case "either":
            return _either(constraint.value)
    return _lark(_lark_source(constraint))


def nest(source: str, grammars: Mapping[str, str]) -> str:
    """Return the grammar of Lark source that calls others by name, as in ``@answer``."""
    parts: list[dict[str, Any]] = [{"lark_grammar": source}]
    for name, grammar in grammars.items():
        first, *rest = orjson.loads(grammar)["grammars"]
        parts += [first | {"name": name}, *rest]
    return orjson.dumps({"grammars": parts}).decode()


def _lark(source: str) -> str:
    return orjson.dumps({"grammars": [{"lark_grammar": source}]}).decode()


def _either(grammars: Sequence[str]) -> str:
    names = [f"either_{i}" for i in range(len(grammars))]
    start = "start: " + " | ".join(f"@{name}" for name in names)
    return nest(start, dict(zip(names, grammars, strict=True)))


def _json_grammar(constraint: Constraint) -> str:
    try:
        schema = normalize_schema(_parsed_schema(constraint), closed=constraint.closed)
    except SchemaError as error:
        raise constraint.error(str(error)) from None
    spaces: dict[str, Any] = NO_SPACES if constraint.no_whitespace else ONE_SPACE
    if constraint.whitespace_pattern is not None:
        spaces = {"whitespace_flexible": True, "whitespace_pattern": constraint.whitespace_pattern}
    return orjson.dumps({"grammars": [{"json_schema": schema | {"x-guidance": spaces}}]}).decode()


def _parsed_schema(constraint: Constraint) -> Any:
    value = constraint.value
    if not isinstance(value, str):
        return value
    try:
        value = orjson.loads(value)
    except orjson.JSONDecodeError as error:
        raise constraint.error(f"the schema's text is not valid JSON: {error}") from None
    if depth_exceeds(value, MAX_VALUE_DEPTH):
        raise constraint.error(f"values nest deeper than {MAX_VALUE_DEPTH} levels")
    return value


def _regex(constraint: Constraint) -> str:
    pattern = constraint.value
    if not pattern:
        raise constraint.error("a regular expression must not be empty")
    if problem := too_big(pattern):
        raise constraint.error(f"the regular expression {problem}")
    # \d and \w are ASCII, as in JSON Schema and in other servers.
    return regex_to_lark(pattern, use_ascii="dw")


def _lark_source(constraint: Constraint) -> str:
    text = constraint.value
    if not text.strip():
        raise constraint.error("a grammar must not be empty")
    if len(text) > MAX_GRAMMAR_CHARS:
        raise constraint.error(f"a grammar has more than {MAX_GRAMMAR_CHARS} characters")
    try:
        return any_to_lark(text)
    except RecursionError:
        raise constraint.error("the grammar nests too deeply") from None
    except Exception as error:  # the library raises bare ones for what it cannot read
        raise constraint.error(_brief(str(error))) from None


def _check(grammar: str, constraint: Constraint, tokenizer: LLTokenizer) -> None:
    """Compile a grammar and take its first steps; raises :class:`APIError` if either fails.

    Expressions are built when they are first used, and may turn out too big only then.
    """
    try:
        matcher = compile_grammar(grammar, tokenizer)
    except GrammarError as error:
        raise constraint.error(_brief(str(error))) from None
    for _ in range(TRIAL_STEPS):
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        if mask:
            matcher.consume_token(mask.bit_length() - 1)  # any will do; late ones are long
        if matcher.is_error():
            raise constraint.error(_brief(matcher.get_error()))
        if not mask:
            raise constraint.error("nothing can match")
        if matcher.is_stopped():
            break


def _brief(error: str) -> str:
    """Return the part of llguidance's message that says what is wrong."""
    if "NoExtension" in error:
        return "nothing can match"
    text = error[error.rfind("\nerror: ") + 1 :].removeprefix("error: ")
    return text.split("\n")[0][:200] or "it does not compile"


class GrammarCompiler:
    """Grammars that are known to compile for a tokenizer, the latest 256 remembered.

    Compiling runs in threads of its own. Limits on sizes, on the work that schemas make
    (:class:`pageserve.api.json_schema.Budget`) and llguidance's own bound it, so an overrun
    compilation ends by itself; until then its thread counts as taken.
    """

    def __init__(self) -> None:
        self._known: OrderedDict[bytes, str] = OrderedDict()
        self._pool = ThreadPoolExecutor(COMPILE_THREADS, thread_name_prefix="grammar")
        self._free = asyncio.Semaphore(COMPILE_THREADS)

    async def compile(self, constraint: Constraint, tokenizer: Tokenizer) -> str:
        """Return the constraint's grammar; raises :class:`APIError` if it is not usable, if
        compiling takes longer than 5 s, or if all threads are taken for that long."""
        key = _canonical(constraint)
        if key in self._known:
            self._known.move_to_end(key)
            return self._known[key]
        loop = asyncio.get_running_loop()
        vocabulary = await loop.run_in_executor(None, llguidance_tokenizer, tokenizer)
        try:
            async with asyncio.timeout(COMPILE_LIMIT):
                await self._free.acquire()
        except TimeoutError:
            raise unavailable("server_is_overloaded", "too many grammars are compiling") from None
        future = loop.run_in_executor(self._pool, _compiled, constraint, vocabulary)
        future.add_done_callback(self._release)
        done, _ = await asyncio.wait([future], timeout=COMPILE_LIMIT)
        if not done:
            raise constraint.error(f"compiling takes longer than {COMPILE_LIMIT:g} s")
        grammar = self._known[key] = future.result()
        if len(self._known) > CACHE_SIZE:
            self._known.popitem(last=False)
        return grammar

    def _release(self, future: "asyncio.Future[str]") -> None:
        self._free.release()
        if not future.cancelled():
            future.exception()  # taken, so that asyncio does not report one nobody waits for


def _canonical(constraint: Constraint) -> bytes:
    """Return what tells constraints apart; raises :class:`APIError` for one that is too big."""
    value = constraint.value
    text = value.encode() if isinstance(value, str) else orjson.dumps(value)
    if len(text) > MAX_BYTES and constraint.kind != "either":  # whose parts have been checked
        raise constraint.error(f"more than {MAX_BYTES} bytes are not supported")
    options = (
        constraint.kind,
        isinstance(value, str),
        constraint.whitespace_pattern,
        constraint.no_whitespace,
        constraint.closed,
    )
    return orjson.dumps(options) + text


def _compiled(constraint: Constraint, tokenizer: LLTokenizer) -> str:
    grammar = grammar_of(constraint)
    _check(grammar, constraint, tokenizer)
    return grammar
