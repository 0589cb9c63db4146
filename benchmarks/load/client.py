"""One streamed request: what is sent, when each chunk came, how it ended."""

import time
from collections.abc import AsyncIterable, AsyncIterator
from dataclasses import dataclass, field
from typing import Any, Literal

import aiohttp
import orjson

from load.workloads import Prompt

SHED = (429, 503)  # refused for load, which an overloaded server should do
LINE_LIMIT = 2**20  # bytes; a chunk with log probabilities can be long


@dataclass(frozen=True)
class Target:
    """A server and how to ask it. ``extra_body`` is merged into every request."""

    url: str  # without /v1
    model: str
    endpoint: Literal["completions", "chat"] = "completions"
    api_key: str | None = None
    extra_body: dict[str, Any] = field(default_factory=dict)
    timeout: float = 300.0  # seconds for a whole request

    @property
    def path(self) -> str:
        """The URL to post to."""
        return f"{self.url}/v1/{'chat/' if self.endpoint == 'chat' else ''}completions"

    @property
    def headers(self) -> dict[str, str]:
        """Headers of every request."""
        return {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}

    def body(self, prompt: Prompt) -> dict[str, Any]:
        """The request's JSON. Token ids can only go to the completions endpoint."""
        if self.endpoint == "chat":
            asked: dict[str, Any] = {"messages": [{"role": "user", "content": prompt.content}]}
        else:
            asked = {"prompt": prompt.content}
        return {
            "model": self.model,
            **asked,
            "max_tokens": prompt.max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.extra_body,
        }


@dataclass(slots=True)
class Record:
    """What became of a request. Times are ``time.monotonic()`` seconds."""

    due: float  # when it should be sent
    sent: float = 0.0
    times: list[float] = field(default_factory=list)  # of each chunk that carries output
    status: int = 0  # of HTTP; 0 if there was no answer
    error: str | None = None
    finish_reason: str | None = None
    prompt_tokens: int | None = None  # by the server's count
    completion_tokens: int | None = None  # by the server's count

    @property
    def ok(self) -> bool:
        """Whether the whole answer came."""
        return self.error is None

    @property
    def output_tokens(self) -> int:
        """Tokens of the answer, by the server's count or, without one, one per chunk."""
        return len(self.times) if self.completion_tokens is None else self.completion_tokens

    def read(self, data: str, now: float) -> None:
        """Take in the data of one event that arrived at ``now``; raises ValueError if it is not
        what a completion streams."""
        chunk = orjson.loads(data)
        if not isinstance(chunk, dict):
            raise ValueError(f"not a chunk: {data[:80]}")
        if chunk.get("error"):
            self.error = f"in the stream: {chunk['error']}"[:200]
        if usage := chunk.get("usage"):
            self.prompt_tokens = usage["prompt_tokens"]
            self.completion_tokens = usage["completion_tokens"]
        for choice in chunk.get("choices") or ():
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
            # A token may have no text yet (half a character); the end then stands for it.
            if _carries_output(choice) or (choice.get("finish_reason") and not self.times):
                self.times.append(now)


def _carries_output(choice: dict[str, Any]) -> bool:
    """Whether a chunk brings tokens; the first of a chat only names the role."""
    if choice.get("text"):
        return True
    delta = choice.get("delta") or {}
    names = ("content", "reasoning_content", "reasoning", "tool_calls", "refusal")
    return any(delta.get(name) for name in names)


async def events(lines: AsyncIterable[bytes]) -> AsyncIterator[str]:
    """Yield the data of each server-sent event up to ``[DONE]``; comments and other fields are
    passed over. ``lines`` are whole lines, however they were cut in transport."""
    data: list[str] = []
    async for raw in lines:
        line = raw.decode().rstrip("\r\n")
        if line.startswith("data:"):
            data.append(line.removeprefix("data:").removeprefix(" "))
        elif not line and data:
            text = "\n".join(data)
            data.clear()
            if text == "[DONE]":
                return
            yield text


async def ask(session: aiohttp.ClientSession, target: Target, prompt: Prompt, due: float) -> Record:
    """Send one request now and read its stream to the end. Failures are in the record."""
    record = Record(due, sent=time.monotonic())
    try:
        async with session.post(target.path, json=target.body(prompt)) as response:
            record.status = response.status
            if response.status != 200:
                record.error = (await response.text())[:200] or f"HTTP {response.status}"
                return record
            async for data in events(response.content):
                record.read(data, time.monotonic())
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError, KeyError) as error:
        record.error = f"{type(error).__name__}: {error}"[:200]
    if record.ok and record.finish_reason is None:
        record.error = "the stream ended before its finish_reason"
    return record


def open_session(target: Target) -> aiohttp.ClientSession:
    """A session without a limit of connections; a request may take ``target.timeout``."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=target.timeout),
        headers=target.headers,
        read_bufsize=LINE_LIMIT,
        json_serialize=lambda body: orjson.dumps(body).decode(),
    )
