"""Checks of ``tools`` and ``tool_choice``, in OpenAI's shapes."""

import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from pageserve.api.errors import APIError, bad_request, invalid, quote

MAX_TOOLS = 128
MAX_NAME = 64
_NAME = re.compile(r"[A-Za-z0-9_.-]+")

Tool = dict[str, Any]


@dataclass(frozen=True)
class ToolChoice:
    """How tools may be used: not at all, freely, in any case, or one of them once. ``names`` are
    the tools allowed, with the request's path of each; None means all of them."""

    mode: Literal["none", "auto", "required", "named"]
    names: dict[str, str] | None = None


def check_tools(value: Any) -> list[Tool]:
    """Return the tools without null members; fails for the first bad one."""
    if not isinstance(value, list):
        invalid("invalid_type", f"tools: must be an array, got {quote(value)}")
    if len(value) > MAX_TOOLS:
        invalid("array_above_max_length", f"tools takes at most {MAX_TOOLS} items")
    tools = [_check_tool(tool, f"[{i}]") for i, tool in enumerate(value)]
    seen = set()
    for i, tool in enumerate(tools):
        name = tool["function"]["name"]
        if name in seen:
            text = f"two tools have the name {quote(name)}"
            invalid("invalid_value", text, f"[{i}].function.name")
        seen.add(name)
    return tools


def check_tool_choice(value: Any) -> ToolChoice:
    """Return what a ``tool_choice`` asks for; fails if it is not one of OpenAI's shapes."""
    if isinstance(value, str):
        if value not in ("none", "auto", "required"):
            text = f"tool_choice: must be none, auto, required or an object, got {quote(value)}"
            invalid("invalid_value", text)
        return ToolChoice(value)  # type: ignore[arg-type]
    if not isinstance(value, dict):
        invalid("invalid_type", f"tool_choice: must be a string or an object, got {quote(value)}")
    kind = _member(value, "type", str, "")
    if kind == "function":
        return ToolChoice("named", {_function_name(value, ""): ".function.name"})
    if kind == "allowed_tools":
        return _allowed_tools(_member(value, "allowed_tools", dict, ""))
    code = "unsupported_value" if kind == "custom" else "invalid_value"
    invalid(
        code, f"tool_choice.type: must be function or allowed_tools, got {quote(kind)}", ".type"
    )


Tools = Annotated[list[Tool], BeforeValidator(check_tools)]
Choice = Annotated[ToolChoice, BeforeValidator(check_tool_choice)]


def resolve_choice(tools: list[Tool] | None, choice: ToolChoice | None) -> ToolChoice:
    """Return the choice in force for these tools; raises :class:`APIError` if they contradict."""
    if tools == [] and choice is not None and choice.mode != "none":
        raise bad_request("empty_array", "tools must not be empty if tool_choice is set", "tools")
    if not tools:
        if choice is not None and choice.mode != "none":
            raise bad_request("invalid_value", "tool_choice needs tools", "tool_choice")
        return ToolChoice("none")
    if choice is None:
        return ToolChoice("auto")
    known = {tool["function"]["name"] for tool in tools}
    for name, path in (choice.names or {}).items():
        if name not in known:
            raise _unknown_tool(name, path)
    return choice


def _unknown_tool(name: str, path: str) -> APIError:
    text = f"tool_choice names {quote(name)}, which is not one of the tools"
    return bad_request("invalid_value", text, "tool_choice" + path)


def _check_tool(value: Any, path: str) -> Tool:
    if not isinstance(value, dict):
        invalid("invalid_type", f"a tool must be an object, got {quote(value)}", path)
    kind = _member(value, "type", str, path)
    if kind != "function":
        code = "unsupported_value" if kind == "custom" else "invalid_value"
        invalid(code, f"a tool's type must be function, got {quote(kind)}", path + ".type")
    function = _member(value, "function", dict, path)
    path += ".function"
    _check_name(_member(function, "name", str, path), path + ".name")
    for name, cls in (("description", str), ("parameters", dict), ("strict", bool)):
        if function.get(name) is not None:
            _member(function, name, cls, path)
    if function.get("parameters", {}) and function["parameters"].get("type", "object") != "object":
        text = "the parameters of a tool must be a schema of type object"
        invalid("invalid_json_schema", text, path + ".parameters")
    function = {k: v for k, v in function.items() if v is not None}
    return {**{k: v for k, v in value.items() if v is not None}, "function": function}


def _check_name(name: str, path: str) -> None:
    if not name:
        invalid("string_below_min_length", "the name of a tool must not be empty", path)
    if len(name) > MAX_NAME:
        text = f"the name of a tool has at most {MAX_NAME} characters"
        invalid("string_above_max_length", text, path)
    if not _NAME.fullmatch(name):
        text = f"the name of a tool has letters, digits, _, . and - only, got {quote(name)}"
        invalid("invalid_value", text, path)


def _allowed_tools(value: dict[str, Any]) -> ToolChoice:
    path = ".allowed_tools"
    mode = _member(value, "mode", str, path)
    if mode not in ("auto", "required"):
        invalid(
            "invalid_value", f"mode: must be auto or required, got {quote(mode)}", f"{path}.mode"
        )
    tools = _member(value, "tools", list, path)
    path += ".tools"
    if not tools:
        invalid("empty_array", "allowed_tools.tools must not be empty", path)
    names = {}
    for i, tool in enumerate(tools):
        if not isinstance(tool, dict):
            invalid("invalid_type", f"a tool must be an object, got {quote(tool)}", f"{path}[{i}]")
        kind = _member(tool, "type", str, f"{path}[{i}]")
        if kind != "function":
            text = f"only tools of type function are supported, got {quote(kind)}"
            invalid("unsupported_value", text, f"{path}[{i}].type")
        names[_function_name(tool, f"{path}[{i}]")] = f"{path}[{i}].function.name"
    return ToolChoice(mode, names)


def _function_name(value: dict[str, Any], path: str) -> str:
    function = _member(value, "function", dict, path)
    name: str = _member(function, "name", str, path + ".function")
    return name


_KINDS = {str: "a string", dict: "an object", list: "an array", bool: "true or false"}


def _member(value: dict[str, Any], name: str, cls: type, path: str) -> Any:
    member = value.get(name)
    path = f"{path}.{name}"
    if member is None:
        invalid("missing_required_parameter", f"missing required field {name}", path)
    if not isinstance(member, cls):
        invalid("invalid_type", f"{name}: must be {_KINDS[cls]}, got {quote(member)}", path)
    return member
