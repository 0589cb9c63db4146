"""Jinja templates of models, in a sandbox.

Light to import: a process that renders a single template does.
"""

import functools
import json
import time
from collections.abc import Mapping
from datetime import datetime
from typing import Any

import jinja2
import jinja2.nodes
import jinja2.parser
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

RENDER_LIMIT = 5.0  # seconds


class TemplateError(ValueError):
    """A prompt cannot be rendered; ``param`` is the request field to blame."""

    def __init__(self, message: str, param: str = "messages") -> None:
        super().__init__(message)
        self.param = param


class _GenerationBlocks(Extension):
    """``{% generation %}`` marks the assistant's text for training; here it is transparent."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML characters, which models have not been trained on.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


@functools.cache
def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationBlocks, "jinja2.ext.loopcontrols"],
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
    return environment


def names_in(source: str) -> set[str]:
    """Return the names that a template uses, nothing if it cannot be read. It is not parsed, as
    that already computes constant expressions, however large."""
    try:
        return {text for _, kind, text in _environment().lex(source) if kind == "name"}
    except jinja2.TemplateError:
        return set()


@functools.lru_cache(maxsize=32)
def _compile(source: str) -> jinja2.Template:
    return _environment().from_string(source)


# What running a template on unexpected data raises; the sandbox adds OverflowError for huge ranges.
_TEMPLATE_FAILURES = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)


def render_template(source: str, variables: Mapping[str, Any]) -> str:
    """Render within the time limit, which is checked at each piece of output: a thread cannot be
    stopped from outside, so a loop that writes nothing runs to its end (the sandbox bounds ranges).
    Raises :class:`TemplateError`.
    """
    deadline = time.monotonic() + RENDER_LIMIT
    pieces: list[str] = []
    try:
        for piece in _compile(source).generate(variables):
            pieces.append(piece)
            if time.monotonic() > deadline:
                raise TemplateError(f"Rendering the messages took more than {RENDER_LIMIT:g} s")
    except TemplateError:
        raise
    except _TEMPLATE_FAILURES as error:
        raise TemplateError(f"The chat template cannot render these messages: {error}") from error
    return "".join(pieces)
