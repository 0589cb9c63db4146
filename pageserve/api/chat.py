"""Chat messages to a prompt, by the model's Jinja template.

Text is tokenised as it was rendered, so special tokens spelled in a user's message become the
tokens themselves, as with Hugging Face and vLLM. With --escape-special-in-content they are marked
before rendering (:func:`mark_messages`), and what is marked stays text.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from pageserve.api.template import TemplateError, render_template
from pageserve.api.template_process import render_apart
from pageserve.tokenizer import Tokenizer

SERVER_OWNED = frozenset(
    {"messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template"}
)
# The trailing space shows whether the template trims the message.
_CONTINUE_TAG = "\ue000continue\ue000 "


def render_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    chat_template: str | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> str:
    """Return the prompt text of a conversation in OpenAI's message format.

    ``chat_template`` replaces the model's and is rendered in a process of its own, as nobody
    vouches for it; ``chat_template_kwargs`` are further variables. May take seconds: call it in a
    thread. Raises :class:`TemplateError`.
    """
    variables = dict(chat_template_kwargs or {})
    if owned := sorted(SERVER_OWNED & variables.keys()):
        raise TemplateError(
            f"{owned[0]} is set by the server and cannot be given here", "chat_template_kwargs"
        )
    source = chat_template
    if source is None:
        source = tokenizer.get_chat_template(tools=bool(tools))
    if source is None:
        raise TemplateError(
            "The model defines no chat template. Start the server with --chat-template FILE, or "
            "use /v1/completions."
        )
    rendered = [_render_message(index, message) for index, message in enumerate(messages)]
    if continue_final_message:
        _check_continuation(rendered, add_generation_prompt)
        rendered[-1]["content"] += _CONTINUE_TAG
    run = render_template if chat_template is None else render_apart
    prompt = run(
        source,
        tokenizer.special_tokens_map
        | {"documents": documents or None}
        | variables
        | {
            "messages": rendered,
            "tools": list(tools) if tools else None,
            "add_generation_prompt": add_generation_prompt,
        },
    )
    return _cut_at_tag(prompt) if continue_final_message else prompt


def mark_plain(tokenizer: Tokenizer, value: Any) -> Any:
    """Return JSON with the special tokens marked that its strings spell, keys included."""
    if isinstance(value, str):
        return tokenizer.mark_plain(value)
    if isinstance(value, Mapping):
        return {mark_plain(tokenizer, k): mark_plain(tokenizer, v) for k, v in value.items()}
    if isinstance(value, Sequence):
        return [mark_plain(tokenizer, item) for item in value]
    return value


def mark_messages(
    tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return messages with what they spell marked; arguments of calls are parsed before, as JSON
    may hide a character behind an escape."""
    parsed = [
        {**m, "tool_calls": [_render_tool_call(call) for call in m["tool_calls"]]}
        if m.get("tool_calls")
        else m
        for m in messages
    ]
    marked: list[dict[str, Any]] = mark_plain(tokenizer, parsed)
    return marked


# --- messages -------------------------------------------------------------------------------------


def _render_message(index: int, message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message as templates expect it: text content, parsed arguments, no null keys."""
    result = {key: value for key, value in message.items() if value is not None}
    result.pop("refusal", None)
    if result["role"] == "developer":
        result["role"] = "system"
    if result["role"] != "tool":
        result.pop("name", None)
    result["content"] = content_text(result.get("content", ""), index)
    if "reasoning" in result:
        result.setdefault("reasoning_content", result.pop("reasoning"))
    calls = result.pop("tool_calls", [])
    if calls:  # templates ask whether there is a list, not whether something is in it
        result["tool_calls"] = [_render_tool_call(call) for call in calls]
    return result


def content_text(content: str | Sequence[Mapping[str, Any]], index: int = 0) -> str:
    """Return the text of a message's content, its parts on lines of their own; raises
    :class:`TemplateError` naming message ``index`` for a part that is no text."""
    if isinstance(content, str):
        return content
    for part_index, part in enumerate(content):
        if part["type"] not in ("text", "refusal"):
            raise TemplateError(
                f"Content of type {part['type']!r} is not supported",
                f"messages[{index}].content[{part_index}].type",
            )
    return "\n".join(part[part["type"]] for part in content)


def _render_tool_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = parse_arguments(function.get("arguments", ""))
    # Some templates show the function as it is: models know its name to come first.
    return {**call, "function": {"name": function["name"], **function, "arguments": arguments}}


def parse_arguments(arguments: Any) -> Any:
    """Return the object in ``arguments``, or the text itself: a bad call of the past must not make
    every later turn fail, be it no JSON or JSON of what is no text, as half a surrogate pair is."""
    if not isinstance(arguments, str):
        return arguments
    try:
        orjson.loads(arguments)  # the stricter one; only the other keeps integers of any length
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


def _check_continuation(messages: list[dict[str, Any]], add_generation_prompt: bool) -> None:
    param = "continue_final_message"
    if add_generation_prompt:
        raise TemplateError(
            "continue_final_message and add_generation_prompt cannot both be true", param
        )
    if not messages or messages[-1]["role"] != "assistant":
        raise TemplateError("continue_final_message needs a last message of the assistant", param)


def _cut_at_tag(prompt: str) -> str:
    """Drop what the template puts behind the text of the final message."""
    tag = _CONTINUE_TAG.rstrip()
    place = prompt.rfind(tag)
    if place < 0:
        raise TemplateError(
            "The chat template does not show the final message as it is, so it cannot be continued",
            "continue_final_message",
        )
    head = prompt[:place]
    return head if prompt.startswith(_CONTINUE_TAG, place) else head.rstrip()
