"""A terminal chat client: streams from any OpenAI-compatible server, keeps the conversation."""

import json
import sys
from collections.abc import Iterator
from typing import Any

import httpx


def run_chat(
    *,
    url: str,
    model: str | None,
    api_key: str | None,
    system: str | None,
    max_tokens: int | None,
    temperature: float | None,
) -> int:
    """Read lines from the terminal and stream the answers until end of input; 0 if all went well.

    An empty line or Ctrl-D leaves, Ctrl-C ends an answer. Errors of the server are printed and the
    turn is dropped.
    """
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    options = {"model": model, "max_tokens": max_tokens, "temperature": temperature}
    messages = [{"role": "system", "content": system}] if system else []
    timeout = httpx.Timeout(10, read=None)
    with httpx.Client(base_url=url.rstrip("/"), headers=headers, timeout=timeout) as http:
        while (line := _read_line()) is not None:
            messages.append({"role": "user", "content": line})
            body = {k: v for k, v in options.items() if v is not None}
            body |= {"messages": messages, "stream": True}
            answer = ""
            try:
                for piece in stream_answer(http, body):
                    answer += piece
                    print(piece, end="", flush=True)
                print()
                messages.append({"role": "assistant", "content": answer})
            except KeyboardInterrupt:  # ends the answer, not the conversation
                print(" …")
                messages.append({"role": "assistant", "content": answer})
            except (httpx.HTTPError, ChatError) as error:
                print(f"\nchat: {error}", file=sys.stderr)
                messages.pop()
                if isinstance(error, httpx.ConnectError):
                    print(f"chat: is a server running at {url}?", file=sys.stderr)
                    return 1
    return 0


class ChatError(RuntimeError):
    """The server answered with an error, or ended the stream without saying it was done."""


def stream_answer(http: httpx.Client, body: dict[str, Any]) -> Iterator[str]:
    """POST a streaming chat request and yield the text; raise :class:`ChatError`."""
    with http.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.status_code != 200:
            raise ChatError(_error_message(response.read()))
        for line in response.iter_lines():
            if not line.startswith("data: "):
                continue
            if line == "data: [DONE]":
                return
            event = json.loads(line[6:])
            if "error" in event:
                raise ChatError(event["error"]["message"])
            for choice in event["choices"]:
                yield choice["delta"].get("content") or ""
    raise ChatError("the stream ended early")


def _error_message(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body[:200].decode(errors="replace")


def _read_line() -> str | None:
    try:
        line = input("> ").strip()
    except (EOFError, KeyboardInterrupt):
        print()
        return None
    return line or None
