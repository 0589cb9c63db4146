"""Checks of the ``messages`` array: roles, contents, parts and tool calls, in OpenAI's shapes.

The messages pass as they came (without nulls); what the template sees is made in ``chat.py``.
"""

from collections.abc import Callable
from typing import Annotated, Any

from pydantic import BeforeValidator

from pageserve.api.errors import invalid, quote

MAX_MESSAGES = 4096
ASSISTANT_ONLY = ("refusal", "reasoning", "reasoning_content", "tool_calls")
Message = dict[str, Any]


def check_messages(value: Any) -> list[Message]:
    """Return the messages without null members; fails for the first bad one."""
    if not isinstance(value, list):
        invalid("invalid_type", f"messages: must be an array, got {quote(value)}")
    if not value:
        invalid("empty_array", "messages must not be empty")
    if len(value) > MAX_MESSAGES:
        invalid("array_above_max_length", f"messages takes at most {MAX_MESSAGES} items")
    return [_check_message(message, f"[{i}]") for i, message in enumerate(value)]


Messages = Annotated[list[dict[str, Any]], BeforeValidator(check_messages)]


def _check_message(value: Any, path: str) -> Message:
    message = _object(value, path)
    role = _string(message, "role", path)
    if role == "function":
        invalid("unsupported_value", "the role function is not supported, use tool", path + ".role")
    check = _ROLES.get(role)
    if check is None:
        roles = ", ".join(_ROLES)
        invalid("invalid_value", f"role must be one of {roles}, got {quote(role)}", path + ".role")
    if "name" in message:
        _string(message, "name", path)
    if role != "assistant":  # elsewhere they are unknown members, unchecked and without meaning
        message = {k: v for k, v in message.items() if k not in ASSISTANT_ONLY}
    check(message, path)
    return message


def _check_plain(message: Message, path: str) -> None:
    _check_content(message, path, ("text",))


def _check_tool(message: Message, path: str) -> None:
    _string(message, "tool_call_id", path)
    _check_content(message, path, ("text",))


def _check_assistant(message: Message, path: str) -> None:
    for key in ("refusal", "reasoning_content", "reasoning"):
        if key in message:
            _string(message, key, path)
    calls = message.get("tool_calls")
    if calls is not None:
        _check_tool_calls(calls, path + ".tool_calls")
    if "content" in message:
        _check_content(message, path, ("text", "refusal"))
    elif not calls and "refusal" not in message:
        invalid("invalid_value", "an assistant message needs content or tool_calls", path)


_ROLES: dict[str, Callable[[Message, str], None]] = {
    "system": _check_plain,
    "developer": _check_plain,
    "user": _check_plain,
    "assistant": _check_assistant,
    "tool": _check_tool,
}


def _check_content(message: Message, path: str, kinds: tuple[str, ...]) -> None:
    path += ".content"
    content = message.get("content")
    if content is None:
        invalid("missing_required_parameter", "missing required field content", path)
    if isinstance(content, str):
        return
    if not isinstance(content, list):
        invalid("invalid_type", f"content must be a string or an array, got {quote(content)}", path)
    if not content:
        invalid("empty_array", "content must not be an empty array", path)
    for i, value in enumerate(content):
        _check_part(value, f"{path}[{i}]", kinds)


def _check_part(value: Any, path: str, kinds: tuple[str, ...]) -> None:
    part = _object(value, path)
    kind = _string(part, "type", path)
    if kind not in kinds:
        # Never dropped in silence and never fetched: the server reads text only.
        text = f"content parts of type {quote(kind)} are not supported here"
        invalid("unsupported_value", text, path + ".type")
    _string(part, kind, path)


def _check_tool_calls(calls: Any, path: str) -> None:
    if not isinstance(calls, list):
        invalid("invalid_type", f"tool_calls must be an array, got {quote(calls)}", path)
    for i, value in enumerate(calls):
        call = _object(value, f"{path}[{i}]")
        _string(call, "id", f"{path}[{i}]")
        if call.get("type", "function") != "function":
            invalid("unsupported_value", "only function calls are supported", f"{path}[{i}].type")
        function = _object(call.get("function"), f"{path}[{i}].function")
        _string(function, "name", f"{path}[{i}].function")
        _string(function, "arguments", f"{path}[{i}].function")


def _object(value: Any, path: str) -> Message:
    if not isinstance(value, dict):
        invalid("invalid_type", f"messages{path} must be an object, got {quote(value)}", path)
    return {k: v for k, v in value.items() if v is not None}


def _string(value: Message, key: str, path: str) -> str:
    text = value.get(key)
    if text is None:
        invalid("missing_required_parameter", f"missing required field {key}", f"{path}.{key}")
    if not isinstance(text, str):
        invalid("invalid_type", f"{key} must be a string, got {quote(text)}", f"{path}.{key}")
    return text
