"""What a request wants its output to look like: one constraint among many spellings.

OpenAI's ``response_format``, vLLM's ``structured_outputs`` and its older ``guided_*``, llama.cpp's
and SGLang's ``json_schema``, ``regex``, ``grammar`` and ``ebnf``. What a constraint means as a
grammar is in :mod:`pageserve.api.grammars`.
"""

import re
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from pageserve.api.errors import APIError, bad_request, invalid, quote

MAX_CHOICES = 1024
MAX_CHOICE_CHARS = 4096
MAX_SPACES = 100  # characters of a whitespace_pattern

Kind = Literal["json", "regex", "choice", "grammar", "tools", "either"]
_CODES: dict[Kind, str] = {
    "json": "invalid_json_schema",
    "regex": "invalid_regex",
    "choice": "invalid_value",
    "grammar": "invalid_grammar",
    "tools": "invalid_json_schema",
    "either": "invalid_json_schema",
}
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_SPACE = r"(?:[ \n\r\t]|\\[nrt])"
_SPACES = re.compile(rf"(?:(?:{_SPACE}|\[{_SPACE}+\])(?:[*+?]|\{{\d{{1,3}}(?:,\d{{0,3}})?\}})?)+")
_JSON_OBJECT = {"type": "object", "additionalProperties": True}


@dataclass(frozen=True)
class Constraint:
    """What the output must match: a schema, a regular expression, one of some texts, a grammar
    (Lark or GBNF), calls of tools (Lark of ours), or either of two such grammars as compiled.
    ``param`` is the request field it came from. The last three are for JSON."""

    kind: Kind
    value: Any
    param: str
    whitespace_pattern: str | None = None
    no_whitespace: bool = False
    closed: bool = False  # objects have no properties that their schema does not name

    def error(self, message: str) -> APIError:
        """Return the 400 of a constraint that is no good."""
        return bad_request(_CODES[self.kind], f"{self.param}: {message}", self.param)


# --- request fields -------------------------------------------------------------------------------


def _whitespace(value: Any) -> Any:
    if isinstance(value, str) and not (len(value) <= MAX_SPACES and _SPACES.fullmatch(value)):
        text = r"must be a regular expression of spaces, \n, \r and \t, as in [ \n]{0,2}, got "
        invalid("invalid_regex", text + quote(value))
    return value


def _schema_value(value: Any) -> Any:
    if not isinstance(value, dict | bool | str):
        invalid("invalid_type", f"must be a JSON schema or its text, got {quote(value)}")
    return value


def drop_nulls(value: Any) -> Any:
    """Return an object without its nulls, which mean "not given"; anything else as it is."""
    if isinstance(value, dict):
        return {k: v for k, v in value.items() if v is not None}
    return value


SchemaField = Annotated[Any, BeforeValidator(_schema_value)]
Choices = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=MAX_CHOICE_CHARS)]],
    Field(min_length=1, max_length=MAX_CHOICES),
]


class StructuredOutputs(BaseModel):
    """vLLM's ``structured_outputs``: exactly one constraint, and options for JSON."""

    model_config = ConfigDict(strict=True, extra="ignore")

    json_: SchemaField | None = Field(None, alias="json")
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    json_object: bool = False
    structural_tag: Any = None
    whitespace_pattern: Annotated[str, BeforeValidator(_whitespace)] | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False


class ConstrainedFields(BaseModel):
    """The fields of a request that can constrain its output."""

    response_format: dict[str, Any] | None = None
    structured_outputs: Annotated[StructuredOutputs, BeforeValidator(drop_nulls)] | None = None
    guided_json: SchemaField | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None
    json_schema: SchemaField | None = None
    regex: str | None = None
    grammar: str | None = None
    ebnf: str | None = None


_FIELDS: dict[str, Kind] = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "json_schema": "json",
    "regex": "regex",
    "grammar": "grammar",
    "ebnf": "grammar",
}


def constraint_of(request: ConstrainedFields) -> Constraint | None:
    """Return the one constraint of a request, None if its output is free.

    Raises :class:`APIError` for more than one and for a field of the wrong shape.
    """
    found = [
        Constraint(kind, getattr(request, name), name)
        for name, kind in _FIELDS.items()
        if getattr(request, name) is not None
    ]
    if request.response_format is not None:
        constraint = _of_response_format(request.response_format)
        found += [constraint] if constraint is not None else []
    if request.structured_outputs is not None:
        found.append(_of_structured_outputs(request.structured_outputs))
    if len(found) > 1:
        raise bad_request(
            "invalid_value",
            f"{found[0].param} and {found[1].param} both constrain the output; give one of them",
            found[0].param.split(".")[0],
        )
    return found[0] if found else None


def deprecation(request: ConstrainedFields) -> str | None:
    """Return what the x-pageserve-warning header says of old field names, None if none is used."""
    for name, kind in _FIELDS.items():
        if name.startswith("guided_") and getattr(request, name) is not None:
            return f"{name} is deprecated, use structured_outputs.{kind}"
    return None


def _of_response_format(value: dict[str, Any]) -> Constraint | None:
    kind = value.get("type")
    if kind is None:
        raise _missing("response_format.type")
    if kind == "text":
        return None
    if kind == "json_object":
        schema = value.get("schema")
        return Constraint("json", _JSON_OBJECT if schema is None else schema, "response_format")
    if kind == "json_schema":
        return Constraint("json", _named_schema(value.get("json_schema")), "response_format")
    raise bad_request(
        "invalid_value",
        f"response_format.type: must be text, json_object or json_schema, got {quote(kind)}",
        "response_format.type",
    )


def _named_schema(value: Any) -> Any:
    """Check the ``json_schema`` member of a response format and return its schema."""
    path = "response_format.json_schema"
    if value is None:
        raise _missing(path)
    if not isinstance(value, dict):
        raise _mistyped(path, "an object", value)
    name = value.get("name")
    if name is None:
        raise _missing(f"{path}.name")
    if not isinstance(name, str):
        raise _mistyped(f"{path}.name", "a string", name)
    if not _NAME.fullmatch(name):
        raise bad_request(
            "invalid_value",
            f"{path}.name takes 1 to 64 letters, digits, _ and -, got {quote(name)}",
            f"{path}.name",
        )
    for key, kind, word in (("strict", bool, "a boolean"), ("description", str, "a string")):
        if value.get(key) is not None and not isinstance(value[key], kind):
            raise _mistyped(f"{path}.{key}", word, value[key])
    if value.get("schema") is None:
        raise _missing(f"{path}.schema")
    return value["schema"]


def _of_structured_outputs(value: StructuredOutputs) -> Constraint:
    path = "structured_outputs"
    if value.structural_tag is not None:
        name = f"{path}.structural_tag"
        raise bad_request("unsupported_value", f"{name} is not supported", name)
    fields: list[tuple[Kind, str, Any]] = [
        ("json", "json", value.json_),
        ("regex", "regex", value.regex),
        ("choice", "choice", value.choice),
        ("grammar", "grammar", value.grammar),
        ("json", "json_object", _JSON_OBJECT if value.json_object else None),
    ]
    given = [field for field in fields if field[2] is not None]
    if len(given) != 1:
        raise bad_request(
            "invalid_value",
            f"{path} takes exactly one of json, regex, choice, grammar and json_object, "
            f"got {len(given)}",
            path,
        )
    kind, name, content = given[0]
    constraint = Constraint(
        kind,
        content,
        f"{path}.{name}",
        value.whitespace_pattern,
        value.disable_any_whitespace,
        value.disable_additional_properties,
    )
    if constraint.kind != "json" and constraint != replace(
        constraint, whitespace_pattern=None, no_whitespace=False, closed=False
    ):
        raise bad_request("invalid_value", f"{path}: these options are for JSON only", path)
    if constraint.no_whitespace and constraint.whitespace_pattern is not None:
        text = f"{path}: whitespace_pattern contradicts disable_any_whitespace"
        raise bad_request("invalid_value", text, path)
    return constraint


def _missing(name: str) -> APIError:
    return bad_request("missing_required_parameter", f"missing required field {name}", name)


def _mistyped(name: str, kind: str, value: Any) -> APIError:
    return bad_request("invalid_type", f"{name}: must be {kind}, got {quote(value)}", name)
