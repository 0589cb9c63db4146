"""JSON Schema from a request, reduced to the part of it that the grammar compiler takes exactly.

What comes out is a schema whose every keyword is enforced: references, unions and conjunctions are
resolved into few forms, and a keyword that would not be enforced is refused by name. Keywords that
JSON Schema does not define are annotations, as its standard says. Where a value would have no end
(digits of a number) or the compiler no exact form, the result is narrower than asked, never wider:
a text that matches it always validates against the original.
"""

import re
from collections.abc import Callable, Hashable
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from typing import Any
from urllib.parse import unquote

MAX_DEPTH = 64  # subschemas inside each other
MAX_SUBSCHEMAS = 5000  # after unions and conjunctions are resolved
MAX_WORK = 500_000  # values looked at while conjunctions and references are resolved
SUBSCHEMA_WORK = 10  # what a subschema costs of it
MAX_REF = 4096  # characters of a reference
MAX_PATTERN = 4096  # characters of a regular expression
MAX_REPETITIONS = 20_000  # of its repetitions inside each other
MAX_NUMBER = 10**18  # numbers have at most 18 digits before the point
RESOLUTION = Decimal("1e-10")  # and ten behind it
_WIDE = Context(prec=60)  # for exact arithmetic
MAX_COUNT = 10**9  # of items or characters
MAX_PATH = 150  # characters of a schema's own words in a message
EXACT_INTEGER = 2**53  # beyond it the compiler's own numbers lose digits

Schema = dict[str, Any] | bool

TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")
_KEYWORDS = {
    "object": ("properties", "required", "additionalProperties"),
    "array": ("prefixItems", "items", "minItems", "maxItems"),
    "string": ("minLength", "maxLength", "pattern", "format"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
}
_COMBINING = ("$ref", "allOf", "anyOf", "oneOf")
_CONSTRAINTS = frozenset(
    ["type", "enum", "const", *_COMBINING, *(k for words in _KEYWORDS.values() for k in words)]
)
# fmt: off
_REFUSED = (
    "not", "if", "then", "else", "patternProperties", "propertyNames", "minProperties",
    "maxProperties", "dependencies", "dependentRequired", "dependentSchemas", "contains",
    "minContains", "maxContains", "uniqueItems", "unevaluatedProperties", "unevaluatedItems",
    "additionalItems", "$dynamicRef", "$recursiveRef", "extends", "disallow", "divisibleBy",
)
# fmt: on
# How two values of a keyword become one in a conjunction.
_JOIN: dict[str, Callable[[Any, Any], Any]] = {
    **dict.fromkeys(("minimum", "exclusiveMinimum", "minLength", "minItems"), max),
    **dict.fromkeys(("maximum", "exclusiveMaximum", "maxLength", "maxItems"), min),
}

_MONTH_DAY = (
    "(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    "|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
_DATE = f"(?:[0-9]{{4}}-{_MONTH_DAY}|{_LEAP_YEAR}-02-29)"
_HOUR_MINUTE = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_HOUR_MINUTE}:[0-5][0-9](?:\.[0-9]{{1,6}})?(?:Z|[+-]{_HOUR_MINUTE})"
_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_LABEL = "[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
# Our own, since the compiler's allow fractions without end and the 61st second.
_FORMAT_PATTERNS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "uuid": "[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    "email": rf"[A-Za-z0-9_%+-]{{1,32}}(?:\.[A-Za-z0-9_%+-]{{1,32}}){{0,3}}"
    rf"@(?:{_LABEL}\.){{1,8}}[A-Za-z]{{2,24}}",
    "ipv4": rf"{_BYTE}(?:\.{_BYTE}){{3}}",
}
_COMPILER_FORMATS = ("ipv6", "hostname", "uri", "duration")
_MAX_DURATION = 32  # characters; its numbers could be of any length
_NUMBER_FORMATS = ("int64", "float", "double")  # of OpenAPI; what is generated fits them anyway


class SchemaError(ValueError):
    """A schema cannot be used; the message names the keyword and where it is."""

    def __init__(self, path: str, message: str) -> None:
        super().__init__(f"{path[-MAX_PATH:] or 'the schema'}: {message}")


class Budget:
    """How much work schemas may make, since few bytes can ask for a lot of it. Schemas of one
    request share one."""

    def __init__(self) -> None:
        self._left = MAX_WORK

    def spend(self, work: int) -> None:
        """Take work off; raises :class:`SchemaError` if there is less left."""
        self._left -= work
        if self._left < 0:
            raise SchemaError("", "it takes too much work to resolve")

    def spend_on(self, *values: Any) -> None:
        """Take as much off as there are values inside of these."""
        waiting = list(values)  # no recursion: conjunctions nest without end
        while waiting:
            self.spend(1)
            value = waiting.pop()
            if isinstance(value, dict):
                waiting += value.values()
            elif isinstance(value, list):
                waiting += value


def normalize_schema(
    schema: Any, *, closed: bool = False, budget: Budget | None = None
) -> dict[str, Any]:
    """Return a schema that the grammar compiler takes and that is at most as wide as ``schema``.

    ``closed`` forbids properties that an object's schema does not name unless it says otherwise.
    Raises :class:`SchemaError` for what cannot be enforced, for what nothing can match, and for
    what needs more than is left of ``budget`` (by default its own).
    """
    return _Normalizer(schema, closed, budget or Budget()).run()


class _Normalizer:
    def __init__(self, root: Any, closed: bool, budget: Budget) -> None:
        self._root = root
        self._closed = closed
        self._budget = budget
        self._names: dict[str, str] = {}  # reference → name in the result
        self._defs: dict[str, Schema] = {}
        self._waiting: list[str] = []  # references whose definition is not in the result yet
        self._count = 0

    def run(self) -> dict[str, Any]:
        root = self._schema(self._root, "", 0)
        while self._waiting:
            ref = self._waiting.pop()
            self._defs[self._names[ref]] = self._schema(self._target(ref, ""), ref[1:], 0)
        finite = self._finite_definitions()
        for ref, name in self._names.items():
            if name not in finite:
                raise SchemaError(ref, "no value of finite length can match")
        if isinstance(root, bool) or not _is_finite(root, finite):
            raise SchemaError("", "no value of finite length can match")
        return {**root, "$defs": self._defs} if self._defs else root

    def _finite_definitions(self) -> set[str]:
        finite: set[str] = set()
        unknown = dict(reversed(self._defs.items()))  # what others refer to tends to come later
        while True:
            self._budget.spend(len(unknown))
            for name, node in unknown.items():
                if _is_finite(node, finite):
                    finite.add(name)
            if not finite & unknown.keys():
                return finite
            unknown = {name: node for name, node in unknown.items() if name not in finite}

    # --- one schema ---

    def _schema(self, value: Any, path: str, depth: int) -> Schema:
        """Return the normal form of a schema, False if it forbids every value."""
        self._charge(path, depth)
        if value is False:
            return False
        node = self._checked(value, path)
        used = [word for word in node if word in _CONSTRAINTS]
        if not used:
            return self._any()
        if used == ["$ref"]:
            return self._reference(node["$ref"], path)
        if used == ["allOf"] and len(node["allOf"]) == 1:
            return self._schema(node["allOf"][0], f"{path}/allOf/0", depth + 1)
        return self._combined(node, path, depth)

    def _charge(self, path: str, depth: int) -> None:
        self._count += 1
        self._budget.spend(SUBSCHEMA_WORK)
        if self._count > MAX_SUBSCHEMAS:
            raise SchemaError("", f"it has more than {MAX_SUBSCHEMAS} subschemas")
        if depth > MAX_DEPTH:
            raise SchemaError(path, f"schemas nest deeper than {MAX_DEPTH} levels")

    def _checked(self, value: Any, path: str) -> dict[str, Any]:
        if value is True:
            return {}
        if not isinstance(value, dict):
            raise SchemaError(path, "a schema must be an object or a boolean")
        for word in _REFUSED:
            if word in value and not (word == "uniqueItems" and value[word] is False):
                raise SchemaError(f"{path}/{word}", f"the keyword {word} is not supported")
        if path and "$id" in value:
            raise SchemaError(f"{path}/$id", "the keyword $id is supported at the top only")
        for word in value:
            if word in _SHAPES:
                fits, words = _SHAPES[word]
                if not fits(value[word]):
                    raise SchemaError(f"{path}/{word}", words)
        return value

    def _combined(self, node: dict[str, Any], path: str, depth: int) -> Schema:
        """Resolve $ref and allOf into one schema, then anyOf or oneOf into one for each branch."""
        base = {k: v for k, v in node.items() if k in _CONSTRAINTS and k not in _COMBINING}
        members: list[tuple[Any, str]] = []
        if "$ref" in node:
            members.append(({"$ref": node["$ref"]}, path))
        if "allOf" in node:
            members += [(item, f"{path}/allOf/{i}") for i, item in enumerate(node["allOf"])]
        for member, where in members:
            joined = self._joined(base, member, where, depth)
            if joined is False:
                return False
            base = joined
        if "anyOf" in node and "oneOf" in node:
            raise SchemaError(path, "anyOf beside oneOf is not supported")
        word = next((w for w in ("anyOf", "oneOf") if w in node), None)
        if word is None:
            return self._plain(base, path, depth) if base else self._any()
        branches = []
        for i, branch in enumerate(node[word]):
            where = f"{path}/{word}/{i}"
            joined = self._joined(base, branch, where, depth) if base else branch
            branches.append(self._schema(joined, where, depth + 1))
        return _union([branch for branch in branches if branch is not False])

    def _joined(
        self, left: dict[str, Any], value: Any, path: str, depth: int
    ) -> dict[str, Any] | Any:
        """Return one schema for two that must both hold, False if none can."""
        value, path = self._resolved(value, path)
        if value is False:
            return False
        right = self._checked(value, path)
        self._charge(path, depth)
        self._budget.spend_on(left, right)
        if "allOf" in right and not any(w in right for w in ("$ref", "anyOf", "oneOf")):
            for i, item in enumerate(right["allOf"]):
                joined = self._joined(left, item, f"{path}/allOf/{i}", depth + 1)
                if joined is False:
                    return False
                left = joined
        elif word := next((w for w in _COMBINING if w in right), None):
            raise SchemaError(
                f"{path}/{word}", f"{word} is not supported inside of what must hold together"
            )
        return _conjunction(left, right, path)

    def _resolved(self, value: Any, path: str) -> tuple[Any, str]:
        seen = set()
        while isinstance(value, dict) and [w for w in value if w in _CONSTRAINTS] == ["$ref"]:
            ref = value["$ref"]
            target = self._target(ref, path)
            if ref in seen:
                raise SchemaError(f"{path}/$ref", "the reference leads back to itself")
            seen.add(ref)
            value, path = target, ref.removeprefix("#")
        return value, path

    # --- references ---

    def _reference(self, ref: Any, path: str) -> Schema:
        self._resolved({"$ref": ref}, path)  # must lead somewhere
        if ref not in self._names:
            self._names[ref] = f"d{len(self._names)}"
            self._waiting.append(ref)
        return {"$ref": f"#/$defs/{self._names[ref]}"}

    def _target(self, ref: Any, path: str) -> Any:
        where = f"{path}/$ref"
        if not isinstance(ref, str) or not (ref == "#" or ref.startswith("#/")):
            raise SchemaError(where, "$ref must point into the schema itself: #/…")
        if len(ref) > MAX_REF:
            raise SchemaError(where, f"has more than {MAX_REF} characters")
        self._budget.spend(1 + ref.count("/"))
        target = self._root
        for token in ref.split("/")[1:]:
            key = unquote(token).replace("~1", "/").replace("~0", "~")
            if isinstance(target, list) and _INDEX.fullmatch(key) and int(key) < len(target):
                target = target[int(key)]
            elif isinstance(target, dict) and key in target:
                target = target[key]
            else:
                raise SchemaError(where, f"{ref[:80]} does not exist")
        return target

    def _any(self) -> Schema:
        """Return the schema of any JSON value, whose numbers are bounded too."""
        if "any" not in self._defs:
            self._defs["any"] = False  # ends the recursion
            self._defs["any"] = self._plain(
                {"type": list(TYPES), "additionalProperties": True}, "", 0
            )
        return {"$ref": "#/$defs/any"}

    # --- one schema without references and unions ---

    def _plain(self, node: dict[str, Any], path: str, depth: int) -> Schema:
        types = _types(node)
        values = None
        if "enum" in node or "const" in node:
            values = [v for v in _literals(node, path) if any(_has_type(v, t) for t in types)]
            types = [t for t in types if any(_has_type(v, t) for v in values)]
            if not any(word in node for t in types for word in _keywords(t)):
                return {"enum": values} if values else False
        rest = _union([self._of_type(t, node, path, depth) for t in types])
        return rest if values is None else {"allOf": [{"enum": values}, rest]}

    def _of_type(self, kind: str, node: dict[str, Any], path: str, depth: int) -> dict[str, Any]:
        if kind == "object":
            return self._object(node, path, depth)
        if kind == "array":
            return self._array(node, path, depth)
        if kind == "string":
            return _string(node, path)
        if kind in ("number", "integer"):
            return _number(node, path, integer=kind == "integer")
        return {"type": kind}

    def _object(self, node: dict[str, Any], path: str, depth: int) -> dict[str, Any]:
        result: dict[str, Any] = {"type": "object"}
        result["properties"] = {
            name: self._schema(value, f"{path}/properties/{name}", depth + 1)
            for name, value in node.get("properties", {}).items()
        }
        result["required"] = list(dict.fromkeys(node.get("required", [])))
        more = node.get("additionalProperties", not self._closed)
        result["additionalProperties"] = self._schema(
            more, f"{path}/additionalProperties", depth + 1
        )
        return result

    def _array(self, node: dict[str, Any], path: str, depth: int) -> dict[str, Any]:
        result: dict[str, Any] = {"type": "array"}
        if "prefixItems" in node:
            result["prefixItems"] = [
                self._schema(value, f"{path}/prefixItems/{i}", depth + 1)
                for i, value in enumerate(node["prefixItems"])
            ]
        result["items"] = self._schema(node.get("items", True), f"{path}/items", depth + 1)
        return result | _counts(node, ("minItems", "maxItems"), path)


# --- the shapes of keywords -----------------------------------------------------------------------


def _is_schema(value: Any) -> bool:
    return isinstance(value, dict | bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return _is_number(value) and value >= 0 and value == int(value)


def _is_string(value: Any) -> bool:
    return isinstance(value, str)


def _is_array(value: Any) -> bool:
    return isinstance(value, list) and bool(value)


def _are_strings(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _are_types(value: Any) -> bool:
    return all(name in TYPES for name in (value if isinstance(value, list) else [value]))


# Wherever they stand: one beside a type that it says nothing about must be right as well.
_SHAPES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "type": (_are_types, f"must be of {', '.join(TYPES)}"),
    "items": (_is_schema, "must be a schema; an array of schemas is spelled prefixItems"),
    "additionalProperties": (_is_schema, "must be an object or a boolean"),
    "properties": (lambda value: isinstance(value, dict), "must be an object"),
    "required": (_are_strings, "must be an array of strings"),
    **dict.fromkeys(
        ("enum", "allOf", "anyOf", "oneOf", "prefixItems"), (_is_array, "must be a non-empty array")
    ),
    **dict.fromkeys(("pattern", "format"), (_is_string, "must be a string")),
    **dict.fromkeys(
        ("minLength", "maxLength", "minItems", "maxItems"),
        (_is_count, "must be a non-negative integer"),
    ),
    **dict.fromkeys(_KEYWORDS["number"], (_is_number, "must be a number")),
}


# --- scalars --------------------------------------------------------------------------------------


def _string(node: dict[str, Any], path: str) -> dict[str, Any]:
    result: dict[str, Any] = {"type": "string"} | _counts(node, ("minLength", "maxLength"), path)
    pattern = node.get("pattern")
    if pattern is not None:
        if problem := too_big(pattern):
            raise SchemaError(f"{path}/pattern", problem)
        result["pattern"] = pattern
    form = node.get("format")
    if form is None or form in _NUMBER_FORMATS:
        return result
    if form in _FORMAT_PATTERNS:
        own = f"^{_FORMAT_PATTERNS[form]}$"
        if pattern is None:
            return result | {"pattern": own}
        return {"allOf": [result, {"type": "string", "pattern": own}]}
    if form not in _COMPILER_FORMATS:
        known = ", ".join((*_FORMAT_PATTERNS, *_COMPILER_FORMATS))
        raise SchemaError(f"{path}/format", f"this format is not supported; these are: {known}")
    if form == "duration":
        result["maxLength"] = min(result.get("maxLength", _MAX_DURATION), _MAX_DURATION)
    return result | {"format": form}


_INDEX = re.compile("0|[1-9][0-9]{0,8}")  # of an array, in a reference
_PATTERN_TOKEN = re.compile(
    r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\{(\d+)(?:,(\d*))?\}|(\()|(\))|[?*+]|.", re.DOTALL
)


def too_big(pattern: str) -> str | None:
    """Return what is too big about a regular expression, None if nothing is.

    Its automaton has about as many states as repetitions inside each other multiply to.
    """
    if len(pattern) > MAX_PATTERN:
        return f"has more than {MAX_PATTERN} characters"
    groups = [1]  # the most repetitions inside of each open group
    last = 1  # and inside of the item that a count would repeat
    for match in _PATTERN_TOKEN.finditer(pattern):
        least, most, opening, closing = match.groups()
        if opening:
            groups.append(1)
        elif closing and len(groups) > 1:
            last = groups.pop()
        elif least:
            last *= max(1, int(most or least))
        elif match[0] not in ("?", "*", "+"):
            last = 1
        groups[-1] = max(groups[-1], last)
        if last > MAX_REPETITIONS:
            return f"repeats more than {MAX_REPETITIONS} times"
    return None


def _number(node: dict[str, Any], path: str, *, integer: bool) -> dict[str, Any]:
    """Return a number with no more digits than bounds and resolution leave.

    Exclusive bounds become inclusive ones: the compiler lets a bare 0 pass an exclusive 0.
    """
    step = node.get("multipleOf")
    if step is not None and step != 1:
        raise SchemaError(f"{path}/multipleOf", "multipleOf is supported as 1 only")
    integer = integer or step is not None
    grid = Decimal(1) if integer else RESOLUTION
    low, high = Decimal(-MAX_NUMBER), Decimal(MAX_NUMBER)
    for word in ("minimum", "exclusiveMinimum"):
        if word in node:
            low = max(low, _bound(node, word, path, grid, ROUND_CEILING))
    for word in ("maximum", "exclusiveMaximum"):
        if word in node:
            high = min(high, _bound(node, word, path, grid, ROUND_FLOOR))
    if low > high:
        raise SchemaError(path, "no number lies between the bounds")
    if integer:
        return {"type": "integer", "minimum": int(low), "maximum": int(high)}
    return {
        "type": "number",
        "minimum": float(low),
        "maximum": float(high),
        "multipleOf": float(RESOLUTION),
    }


def _bound(node: dict[str, Any], word: str, path: str, grid: Decimal, inward: str) -> Decimal:
    """Return an inclusive bound on the grid, of at most 15 digits and at least as strict."""
    value = node[word]
    if abs(value) > MAX_NUMBER:
        if (value > 0) == (inward == ROUND_CEILING):
            raise SchemaError(f"{path}/{word}", f"numbers beyond {MAX_NUMBER} are not supported")
        return Decimal(MAX_NUMBER if value > 0 else -MAX_NUMBER)
    exact = _WIDE.divide(Decimal(str(value)), grid)
    steps = exact.to_integral_value(inward)
    if word.startswith("exclusive") and steps == exact:
        steps += 1 if inward == ROUND_CEILING else -1
    return Context(prec=15, rounding=inward).create_decimal(_WIDE.multiply(steps, grid))


def _counts(node: dict[str, Any], words: tuple[str, str], path: str) -> dict[str, int]:
    result = {}
    for word in words:
        if word not in node:
            continue
        value = int(node[word])
        if value > MAX_COUNT and word.startswith("min"):
            raise SchemaError(f"{path}/{word}", f"must be at most {MAX_COUNT}")
        result[word] = min(value, MAX_COUNT)
    return result


def _literals(node: dict[str, Any], path: str) -> list[Any]:
    """Return the values that ``enum`` and ``const`` leave."""
    values = node["enum"] if "enum" in node else [node["const"]]
    if "const" in node:
        values = _common_values(values, [node["const"]])
    word = "enum" if "enum" in node else "const"
    for value in values:
        _check_literal(value, f"{path}/{word}")
    return values


def _check_literal(value: Any, path: str) -> None:
    if isinstance(value, dict | list):
        for child in value.values() if isinstance(value, dict) else value:
            _check_literal(child, path)
    elif _is_number(value):
        plain = abs(value) <= EXACT_INTEGER
        if isinstance(value, float) and value:
            plain = 1e-6 <= abs(value) < 1e15 and float(f"{value:.15g}") == value
        if not plain:
            raise SchemaError(path, "numbers of more than 15 digits are not supported here")


def _types(node: dict[str, Any]) -> list[str]:
    """Return the types a value may have: those named, or those that the keywords are about."""
    if "type" not in node:
        if "enum" in node or "const" in node:
            return list(TYPES)
        return [t for t, words in _KEYWORDS.items() if any(w in node for w in words)]
    types = node["type"] if isinstance(node["type"], list) else [node["type"]]
    if "number" in types:
        types = [t for t in types if t != "integer"]
    return list(dict.fromkeys(types))


def _keywords(kind: str) -> tuple[str, ...]:
    return _KEYWORDS.get("number" if kind == "integer" else kind, ())


def _has_type(value: Any, kind: str) -> bool:
    match value:
        case bool():
            return kind == "boolean"
        case int() | float():
            return kind == "number" or (kind == "integer" and float(value).is_integer())
        case str():
            return kind == "string"
        case None:
            return kind == "null"
        case list():
            return kind == "array"
    return kind == "object"


def _equal(left: Any, right: Any) -> bool:
    """Whether two JSON values are the same (1 and true are not)."""
    if isinstance(left, bool) or isinstance(right, bool):
        return left is right
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(_equal, left, right))
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(_equal(left[k], right[k]) for k in left)
    return bool(left == right)


def _key(value: Any) -> Hashable:
    """Return what is equal for values that :func:`_equal` says are, and only for them."""
    if isinstance(value, list):
        return list, tuple(map(_key, value))
    if isinstance(value, dict):
        return dict, frozenset((name, _key(child)) for name, child in value.items())
    return (bool, value) if isinstance(value, bool) else value


def _common_values(left: list[Any], right: list[Any]) -> list[Any]:
    keys = {_key(value) for value in right}
    return [value for value in left if _key(value) in keys]


# --- combining ------------------------------------------------------------------------------------


def _union(branches: list[Any]) -> Schema:
    if not branches:
        return False
    return branches[0] if len(branches) == 1 else {"anyOf": branches}


def _conjunction(left: dict[str, Any], right: dict[str, Any], path: str) -> dict[str, Any]:
    """Return one schema for two without references and unions that must both hold."""
    result = {k: v for k, v in left.items() if k in _CONSTRAINTS}
    for word, value in right.items():
        if word not in _CONSTRAINTS or word in (*_COMBINING, "properties", "additionalProperties"):
            continue
        if word not in result or _equal(result[word], value):
            result[word] = value
        elif word == "required":
            result[word] = [*left[word], *value]
        elif word == "type":
            result[word] = _common_types(_types(left), _types(right))
        elif word == "enum":
            both = _common_values(left[word], value)
            result |= {word: both} if both else {"type": []}
        elif word in _JOIN:
            result[word] = _JOIN[word](result[word], value)
        else:
            raise SchemaError(f"{path}/{word}", f"two different values of {word} must both hold")
    _join_properties(result, left, right)
    return result


def _common_types(left: list[str], right: list[str]) -> list[str]:
    both = [t for t in left if t in right]
    if ("number" in left and "integer" in right) or ("integer" in left and "number" in right):
        both.append("integer")
    return both


def _join_properties(result: dict[str, Any], left: dict[str, Any], right: dict[str, Any]) -> None:
    mine, theirs = left.get("properties", {}), right.get("properties", {})
    joined: dict[str, Any] = {}
    for name in (*mine, *theirs):
        if name in mine and name in theirs:
            same = _equal(mine[name], theirs[name])
            joined[name] = mine[name] if same else {"allOf": [mine[name], theirs[name]]}
            continue
        other = right if name in mine else left
        more = other.get("additionalProperties", True)
        value = mine[name] if name in mine else theirs[name]
        if more is False:
            joined[name] = False
        else:
            joined[name] = value if more is True else {"allOf": [value, more]}
    if "properties" in left or "properties" in right:
        result["properties"] = joined
    more = [s["additionalProperties"] for s in (left, right) if "additionalProperties" in s]
    if more:
        closed = any(value is False for value in more)
        same = len(more) == 1 or _equal(*more)
        result["additionalProperties"] = False if closed else more[0] if same else {"allOf": more}


def _is_finite(node: Schema, finite: set[str]) -> bool:
    """Whether some value of finite length matches, if of the definitions only ``finite`` have."""
    if isinstance(node, bool):
        return node
    if "$ref" in node:
        return node["$ref"].removeprefix("#/$defs/") in finite
    if "anyOf" in node:
        return any(_is_finite(branch, finite) for branch in node["anyOf"])
    if node.get("type") == "object":
        more = node["additionalProperties"]
        return all(
            _is_finite(node["properties"].get(name, more), finite) for name in node["required"]
        )
    if node.get("type") == "array":
        items = node.get("prefixItems", [])[: node.get("minItems", 0)]
        if len(items) < node.get("minItems", 0):
            items = [*items, node["items"]]
        return all(_is_finite(item, finite) for item in items)
    return True
