"""What a request's tools mean for its prompt: shown by the model's template, or by our own text.

Calls are ``<tool_call>`` blocks as Hermes and Qwen write them. A template that reads ``tools`` and
writes these blocks is used as it is. Any other (it knows no tools, or writes calls in another way)
gets the tools as system text in Qwen's words, and past calls and results as text of the same form.
Where it takes no system message, the text stands before the first message of the user.
"""

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from pageserve.api.chat import content_text, parse_arguments
from pageserve.api.template import names_in
from pageserve.api.tool_protocol import Tool

OPEN, CLOSE = "<tool_call>", "</tool_call>"
# Special tokens that open calls in the forms of Llama and Mistral, which nobody asks for here.
FOREIGN = ("<|python_tag|>", "[TOOL_CALLS]")

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


@lru_cache(maxsize=4)
def template_has_tools(source: str) -> bool:
    """Whether a chat template shows tools and writes their calls as ``<tool_call>`` JSON."""
    return (
        "tools" in names_in(source)
        and OPEN in source
        and "<function=" not in source  # Qwen3-Coder: XML inside of the same tags
    )


Shown = tuple[Sequence[Mapping[str, Any]], Sequence[Tool] | None]


def prepare_messages(
    template: str, messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool] | None
) -> list[Shown]:
    """Return the messages and tools to give to a chat template, and others to try if it refuses
    them."""
    if template_has_tools(template):
        return [(messages, tools)]
    messages = _rewrite(messages)
    if not tools:
        return [(messages, None)]
    text = _INSTRUCTIONS % "\n".join(json.dumps(t, ensure_ascii=False) for t in tools)
    first, *rest = messages
    content = first["content"]
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if first["role"] in ("system", "developer"):
        extended = {**first, "content": [*parts, {"type": "text", "text": "\n" + text}]}
        return [([extended, *rest], None)]
    shown: list[Shown] = [([{"role": "system", "content": text}, *messages], None)]
    if first["role"] == "user":
        extended = {**first, "content": [{"type": "text", "text": text + "\n"}, *parts]}
        shown.append(([extended, *rest], None))
    return shown


def _rewrite(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
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
    return f"{OPEN}\n{json.dumps(call, ensure_ascii=False)}\n{CLOSE}"
