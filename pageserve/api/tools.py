"""What a request's tools mean for its prompt: shown by the model's template, or by our own text.

A template that reads ``tools`` and writes calls in a form that is known is used as it is. Any other
(it knows no tools, or writes calls in another way), and one that refuses the calls of the past or
would show them as words of the user, gets the tools as system text in Qwen's words, and past calls
and results as text of the same form. Where it takes no system message, the text stands before the
first message of the user.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pageserve.api.chat import content_text, parse_arguments
from pageserve.api.tool_formats import HERMES, ToolFormat, tool_format
from pageserve.api.tool_protocol import Tool

_INSTRUCTIONS = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
%s
</tools>

For each function call, return a json object with function name and arguments within \
<tool_call></tool_call> XML tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call>"""


Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Shown:
    """What a chat template is given, and the form of calls that the prompt asks for then."""

    messages: Messages
    tools: Sequence[Tool] | None
    tool_format: ToolFormat = HERMES


def prepare_messages(
    template: str, messages: Messages, tools: Sequence[Tool] | None
) -> Iterator[Shown]:
    """Yield what to give to a chat template, and then what else to try while it refuses that."""
    form = tool_format(template)
    if form is not None and not (form.tools_at_user and tools and _begins_otherwise(messages)):
        native = _shorten_ids(messages) if form.short_ids else messages
        yield Shown(native, tools, form)
        if form.one_at_once and any(len(m.get("tool_calls") or ()) > 1 for m in messages):
            yield Shown(_one_by_one(native), tools, form)
        if not tools and not any(m["role"] == "tool" or m.get("tool_calls") for m in messages):
            return
    messages = _rewrite(messages)
    if not tools:
        yield Shown(messages, None)
        return
    text = _INSTRUCTIONS % "\n".join(json.dumps(t, ensure_ascii=False) for t in tools)
    first, *rest = messages
    content = first.get("content", "")  # a refusal may come without
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if first["role"] in ("system", "developer"):
        extended = {**first, "content": [*parts, {"type": "text", "text": "\n" + text}]}
        yield Shown([extended, *rest], None)
        return
    yield Shown([{"role": "system", "content": text}, *messages], None)
    if first["role"] == "user":
        extended = {**first, "content": [{"type": "text", "text": text + "\n"}, *parts]}
        yield Shown([extended, *rest], None)


def _begins_otherwise(messages: Messages) -> bool:
    """Whether the first message behind a system's is not the user's."""
    has_system = messages[0]["role"] in ("system", "developer")
    return any(m["role"] != "user" for m in messages[has_system : has_system + 1])


def _shorten_ids(messages: Messages) -> Messages:
    """Give calls ids of nine letters and digits, the same for the same call in every request."""

    def short(call_id: str) -> str:
        if re.fullmatch("[A-Za-z0-9]{9}", call_id):
            return call_id
        return hashlib.sha256(call_id.encode("utf-8", "surrogatepass")).hexdigest()[:9]

    result: list[Mapping[str, Any]] = []
    for message in messages:
        if message.get("tool_calls"):
            calls = [{**call, "id": short(call["id"])} for call in message["tool_calls"]]
            message = {**message, "tool_calls": calls}
        if message["role"] == "tool":  # elsewhere the id is an unknown member, and unchecked
            message = {**message, "tool_call_id": short(message["tool_call_id"])}
        result.append(message)
    return result


def _one_by_one(messages: Messages) -> Messages:
    """Let the calls of one message follow each other, each with its results behind it."""
    groups: list[list[Mapping[str, Any]]] = []
    group_of_call: dict[str, list[Mapping[str, Any]]] = {}
    for message in messages:
        if message["role"] == "tool" and message["tool_call_id"] in group_of_call:
            group_of_call[message["tool_call_id"]].append(message)
            continue
        said = message
        for call in message.get("tool_calls") or ():
            groups.append([{**said, "tool_calls": [call]}])
            group_of_call[call["id"]] = groups[-1]
            said = {**message, "content": ""}
        if not message.get("tool_calls"):
            groups.append([message])
    return [message for group in groups for message in group]


def _rewrite(messages: Messages) -> list[Mapping[str, Any]]:
    """Turn calls into text of the assistant, and results that follow each other into one message
    of the user."""
    result: list[Mapping[str, Any]] = []
    in_results = False
    for message in messages:
        if message["role"] == "tool":
            answer = content_text(message["content"])
            text = f"<tool_response>\n{answer}\n</tool_response>"
            parts = [{"type": "text", "text": text}]
            if in_results:
                parts = [*result.pop()["content"], *parts]
            result.append({"role": "user", "content": parts})
        elif message.get("tool_calls"):
            said = [content_text(message["content"])] if message.get("content") else []
            content = "\n".join(said + [_call_text(call) for call in message["tool_calls"]])
            rest = {k: v for k, v in message.items() if k != "tool_calls"}
            result.append({**rest, "content": content})
        else:
            result.append(message)
        in_results = message["role"] == "tool"
    return result


def _call_text(call: Mapping[str, Any]) -> str:
    function = call["function"]
    arguments = parse_arguments(function["arguments"])
    call = {"name": function["name"], "arguments": arguments}
    return f"{HERMES.open}\n{json.dumps(call, ensure_ascii=False)}\n{HERMES.close}"
