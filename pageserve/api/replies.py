"""Replies of the generating endpoints: one JSON object, or a stream of server-sent events.

Both are made of the same outputs. Nothing here is a pydantic model: a streamed token costs one
``orjson.dumps`` of its text between two prepared byte strings.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pageserve.api.chat_output import ChatOutput, Piece
from pageserve.api.choices import Choice, Fanout, Prompt, prompt_logprobs
from pageserve.api.context import ServingContext
from pageserve.api.errors import APIError, internal_error
from pageserve.api.generation import Generation
from pageserve.api.ids import tool_call_id
from pageserve.api.logprobs import CompletionLogprobs, LogprobFormat
from pageserve.api.progress import report_progress
from pageserve.api.reasoning import Reasoning
from pageserve.api.tool_parser import Text
from pageserve.engine.output_processor import LogprobEntry, TextOutput
from pageserve.messages import TokenLogprobs
from pageserve.tokenizer import Tokenizer

logger = logging.getLogger("pageserve.api")

READ_TIMEOUT = 60.0  # seconds a client may leave its stream unread before it counts as gone
WATCH_INTERVAL = 5.0  # seconds between two looks at a stream that sends no comments
KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True)
class ReplyShape:
    """How an endpoint spells a reply: object names and the pieces of a chunk's choice."""

    object: str
    chunk_object: str
    is_chat: bool
    role: bytes | None  # members of the choice in the chunk that opens a stream
    text_open: bytes
    text_close: bytes
    no_text: bytes


CHAT = ReplyShape(
    object="chat.completion",
    chunk_object="chat.completion.chunk",
    is_chat=True,
    role=b'"delta":{"role":"assistant","content":"","refusal":null}',
    text_open=b'"delta":{"content":',
    text_close=b"}",
    no_text=b'"delta":{}',
)
CALL_ROLE = b'"delta":{"role":"assistant","content":null}'
COMPLETION = ReplyShape(
    object="text_completion",
    chunk_object="text_completion",
    is_chat=False,
    role=None,
    text_open=b'"text":',
    text_close=b"",
    no_text=b'"text":""',
)


@dataclass(frozen=True)
class Reply:
    """What all parts of one reply have in common. ``logprobs`` has a format per choice, or none;
    ``num_prompt_logprobs`` is how many alternatives to the prompt's tokens were asked for;
    ``reasoning_field`` is the key of a message's reasoning."""

    shape: ReplyShape
    id: str
    created: int
    model: str
    fingerprint: str
    fanout: Fanout
    prompts: Sequence[Prompt]
    tokenizer: Tokenizer
    include_usage: bool = False
    continuous_usage: bool = False
    logprobs: Sequence[LogprobFormat] | None = None
    num_logprobs: int = 0
    echo: bool = False
    num_prompt_logprobs: int | None = None
    return_token_ids: bool = False
    return_prompt_text: bool = False
    return_progress: bool = False  # whether a stream tells how far its prompt is
    timings: bool = False  # whether to say how long things took
    reasoning_field: str = "reasoning_content"

    def usage(self, generation: Generation) -> dict[str, Any]:
        """Return the tokens counted so far."""
        num_prompt = generation.num_prompt_tokens
        num_output = generation.num_output_tokens * self.fanout.num_copies
        usage: dict[str, Any] = {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_output,
            "total_tokens": num_prompt + num_output,
            "prompt_tokens_details": {"cached_tokens": generation.num_cached_tokens},
        }
        if self.shape.is_chat:
            usage["completion_tokens_details"] = {
                "reasoning_tokens": generation.num_reasoning_tokens * self.fanout.num_copies
            }
        return usage

    def prompt_of(self, index: int) -> Prompt:
        """Return the prompt of a choice."""
        return self.prompts[index // self.fanout.n]

    def entries_of(self, choice: Choice) -> list[LogprobEntry]:
        """Return the tokens of ``choice`` that its ``logprobs`` list.

        A chat's are those of its content, and with ``return_token_ids`` the ones behind it too.
        A completion's are always all: lm-eval scores a prompt by its echo and one more token, which
        it takes away unseen, be it EOS or not.
        """
        if self.shape.is_chat and not self.return_token_ids:
            return choice.logprobs
        return choice.logprobs + choice.end_logprobs

    def echoed_logprobs(self, index: int, scores: Sequence[TokenLogprobs]) -> Any:
        """Return the ``logprobs`` object of the prompt that choice ``index`` begins with."""
        if self.logprobs is None:
            return None
        format, prompt = self.logprobs[index], self.prompt_of(index)
        assert isinstance(format, CompletionLogprobs)
        entries = prompt.entries(self.tokenizer, scores, self.num_logprobs)
        return format.format_prompt(entries, prompt.text)


# --- one JSON object ------------------------------------------------------------------------------


def whole_reply(reply: Reply, outcomes: Sequence[Choice], generation: Generation) -> bytes:
    """Return the JSON of a finished reply, given what became of each sequence."""
    scores = [x.prompt_logprobs for x in outcomes[:: reply.fanout.sequences_per_prompt]]
    choices = reply.fanout.select(outcomes)
    body: dict[str, Any] = {
        "id": reply.id,
        "object": reply.shape.object,
        "created": reply.created,
        "model": reply.model,
        "choices": [
            _whole_choice(reply, i, choice, scores[i // reply.fanout.n])
            for i, choice in enumerate(choices)
        ],
        "usage": reply.usage(generation),
    }
    if reply.shape.is_chat:
        body["service_tier"] = None
        if reply.return_token_ids:
            body["prompt_token_ids"] = reply.prompts[0].token_ids
        if reply.return_prompt_text:
            body["prompt_text"] = reply.prompts[0].text
        if reply.num_prompt_logprobs is not None:
            body["prompt_logprobs"] = prompt_logprobs(
                reply.tokenizer, scores[0], reply.num_prompt_logprobs
            )
    body["system_fingerprint"] = reply.fingerprint
    if reply.timings:
        body["timings"] = generation.timings()
    return orjson.dumps(body)


def _whole_choice(
    reply: Reply, index: int, choice: Choice, scores: Sequence[TokenLogprobs]
) -> dict[str, Any]:
    echoed = reply.echoed_logprobs(index, scores) if reply.echo else None
    body: dict[str, Any] = {"index": index}
    if reply.shape.is_chat:
        body["message"] = choice.message(reply.reasoning_field)
    else:
        prompt = reply.prompt_of(index).text if reply.echo else ""
        body["text"] = prompt + "".join(choice.text)
    formats = reply.logprobs
    body["logprobs"] = None if formats is None else formats[index].format(reply.entries_of(choice))
    if echoed is not None:
        body["logprobs"] = {k: echoed[k] + v for k, v in body["logprobs"].items()}
    body["finish_reason"] = choice.finish_reason
    body["stop_reason"] = choice.stop_reason
    if reply.return_token_ids:
        body["token_ids"] = choice.token_ids
        if not reply.shape.is_chat:
            body["prompt_token_ids"] = reply.prompt_of(index).token_ids
    if reply.num_prompt_logprobs is not None and not reply.shape.is_chat:
        body["prompt_logprobs"] = prompt_logprobs(
            reply.tokenizer, scores, reply.num_prompt_logprobs
        )
    return body


# --- chunks ---------------------------------------------------------------------------------------


class ChunkEncoder:
    """Turns the outputs of a reply into server-sent events."""

    def __init__(self, reply: Reply, generation: Generation) -> None:
        self._reply = reply
        self._generation = generation
        self._num_choices = reply.fanout.num_choices
        shape = reply.shape
        head = orjson.dumps(
            {
                "id": reply.id,
                "object": shape.chunk_object,
                "created": reply.created,
                "model": reply.model,
                "system_fingerprint": reply.fingerprint,
            }
        )
        self._head = b"data: " + head[:-1]
        self._choice_heads = [
            self._head + b',"choices":[{"index":%d,' % i for i in range(self._num_choices)
        ]
        self._text_heads = [head + shape.text_open for head in self._choice_heads]
        self._tail = b',"usage":null}\n\n' if reply.include_usage else b"}\n\n"
        self._bare_tail = b',"logprobs":null,"finish_reason":null}]' + self._tail
        self._text_tail = shape.text_close + self._bare_tail
        self._plain = (
            reply.logprobs is None
            and not reply.return_token_ids
            and not reply.continuous_usage
            and not reply.echo
        )
        self._opened = False
        self._started: dict[int, int] = {}  # choices of sequences whose rest is nothing but text
        self._num_unfinished = self._num_choices
        self._first = [True] * self._num_choices
        self._echoed = [not reply.echo] * self._num_choices
        self._scores: dict[int, list[TokenLogprobs]] = {}  # of each prompt, as soon as known
        self._held: list[Choice] = [Choice() for _ in range(self._num_choices)]

    def will_echo(self, sequence: int) -> bool:
        """Whether the next output of a sequence comes behind its prompt."""
        return not all(self._echoed[i] for i in self._reply.fanout.choices_of(sequence))

    def encode(self, sequence: int, output: TextOutput) -> bytes:
        """Return the events for an output of a sequence: none, one or several."""
        index = self._started.get(sequence)  # as for nearly every token
        if index is not None and output.finish_reason is None:
            if type(output) is ChatOutput:  # quicker to tell than by isinstance
                head, field = self._choice_heads[index], self._reply.reasoning_field
                return b"".join([head + _delta(p, field) + self._bare_tail for p in output.pieces])
            if not output.text:
                return b""
            return self._text_heads[index] + orjson.dumps(output.text) + self._text_tail
        if output.prompt_logprobs is not None:
            prompt = sequence // self._reply.fanout.sequences_per_prompt
            self._scores[prompt] = output.prompt_logprobs
        indices = self._reply.fanout.choices_of(sequence)
        events = b"".join([self._encode(index, output) for index in indices])
        if self._plain and len(indices) == 1:
            self._started[sequence] = indices[0]
        return events

    def _encode(self, index: int, output: TextOutput) -> bytes:
        events = []
        if not self._opened:
            self._opened = True
            if self._reply.shape.role is not None:
                begins_call = isinstance(output, ChatOutput) and output.begins_call
                silent = self._reply.fanout.copies_of(index) if begins_call else ()
                events += [self._role(i, i in silent) for i in range(self._num_choices)]
        if not self._echoed[index]:
            self._echoed[index] = True
            events.append(self._echo(index))
        held = self._held[index]  # what steps without text left for the next chunk
        held.hold(output)
        shape = self._reply.shape
        if isinstance(output, ChatOutput):
            events += [self._piece(index, piece) for piece in output.pieces]
        elif output.text:
            text = shape.text_open + orjson.dumps(output.text) + shape.text_close
            events.append(self._chunk(index, text, held, b"null"))
            held = self._held[index] = Choice()
        if output.finish_reason is not None:
            stop = b',"stop_reason":' + orjson.dumps(output.stop_reason)
            finish = orjson.dumps(output.finish_reason)
            self._num_unfinished -= 1
            held = self._held[index]
            events.append(self._chunk(index, shape.no_text, held, finish + stop, self._timings()))
        return b"".join(events)

    def _piece(self, index: int, piece: Piece) -> bytes:
        """Return the event of a piece of an answer; log probabilities go with text only."""
        held = self._held[index]
        content = self._held[index] = Choice()
        if not isinstance(piece, Text):
            content.logprobs, held.logprobs = held.logprobs, []
        return self._chunk(index, _delta(piece, self._reply.reasoning_field), held, b"null")

    def _role(self, index: int, silent: bool) -> bytes:
        """Return the event that opens a choice; a ``silent`` one begins with a call."""
        role = CALL_ROLE if silent else self._reply.shape.role
        assert role is not None
        members = role + b',"logprobs":null,"finish_reason":null}]'
        prompt = b""
        if self._reply.return_token_ids and index == 0:
            prompt += b',"prompt_token_ids":' + orjson.dumps(self._reply.prompts[0].token_ids)
        if self._reply.return_prompt_text and index == 0:
            prompt += b',"prompt_text":' + orjson.dumps(self._reply.prompts[0].text)
        return b"".join((self._choice_heads[index], members, prompt, self._usage()))

    def _echo(self, index: int) -> bytes:
        """Return the chunk that a choice begins with if its prompt is part of its text."""
        shape, prompt = self._reply.shape, self._reply.prompt_of(index)
        text = shape.text_open + orjson.dumps(prompt.text) + shape.text_close
        scores = self._scores.get(index // self._reply.fanout.n, [])
        logprobs = orjson.dumps(self._reply.echoed_logprobs(index, scores))
        return self._chunk(index, text, Choice(), b"null", logprobs=logprobs)

    def _timings(self) -> bytes:
        if not self._reply.timings or self._num_unfinished:
            return b""
        return b',"timings":' + orjson.dumps(self._generation.timings())

    def _chunk(
        self,
        index: int,
        text: bytes,
        content: Choice,
        finish: bytes,
        more: bytes = b"",
        logprobs: bytes = b"null",
    ) -> bytes:
        entries = self._reply.entries_of(content)
        if self._reply.logprobs is not None and entries:
            logprobs = orjson.dumps(self._reply.logprobs[index].format(entries))
        return b"".join(
            (
                self._choice_heads[index],
                text,
                b',"logprobs":',
                logprobs,
                b',"finish_reason":',
                finish,
                self._token_ids(index, content),
                b"}]",
                more,
                self._usage(),
            )
        )

    def _token_ids(self, index: int, content: Choice) -> bytes:
        if not self._reply.return_token_ids:
            return b""
        members = b',"token_ids":' + orjson.dumps(content.token_ids)
        if self._first[index] and not self._reply.shape.is_chat:
            ids = self._reply.prompt_of(index).token_ids
            members += b',"prompt_token_ids":' + orjson.dumps(ids)
        self._first[index] = False
        return members

    def _usage(self) -> bytes:
        if not self._reply.continuous_usage:
            return self._tail
        usage = self._reply.usage(self._generation)
        return b',"usage":' + orjson.dumps(usage) + b"}\n\n"

    def progress(self, progress: Mapping[str, Any]) -> bytes:
        """Return the event that tells how far the prompt is."""
        return (
            self._head + b',"choices":[],"prompt_progress":' + orjson.dumps(progress) + self._tail
        )

    def end(self) -> bytes:
        """Return the events that close a stream that went well."""
        if not self._reply.include_usage:
            return DONE
        usage = orjson.dumps(self._reply.usage(self._generation))
        return self._head + b',"choices":[],"usage":' + usage + b"}\n\n" + DONE


def _delta(piece: Piece, reasoning_field: str) -> bytes:
    """Return the ``delta`` member of a choice for a piece of its answer."""
    delta: dict[str, Any]
    if isinstance(piece, Text):
        delta = {"content": piece.text}
    elif isinstance(piece, Reasoning):
        delta = {reasoning_field: piece.text}
    else:
        call: dict[str, Any] = {"index": piece.index}
        function = {"arguments": piece.arguments}
        if piece.name is not None:
            call |= {"id": tool_call_id(), "type": "function"}
            function = {"name": piece.name, **function}
        delta = {"tool_calls": [{**call, "function": function}]}
    return b'"delta":' + orjson.dumps(delta)


# --- responses ------------------------------------------------------------------------------------


class GenerationResponse(Response):
    """Runs a generation and answers with it; a client that leaves ends it."""

    def __init__(
        self,
        context: ServingContext,
        generation: Generation,
        reply: Reply,
        extra_headers: dict[str, str],
    ) -> None:
        super().__init__()
        self.context = context
        self.generation = generation
        self.reply = reply
        self.extra_headers = extra_headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with closing(self.generation):
            # Not in the task, which begins when all other requests that have come are parsed, too.
            self.generation.submit()
            answering = asyncio.create_task(self.answer(scope, receive, send))
            leaving = asyncio.create_task(_disconnect(receive))
            try:
                reads = True
                while reads and not answering.done() and not leaving.done():
                    await asyncio.wait(
                        (answering, leaving),
                        timeout=self.until_watch(),
                        return_when=asyncio.FIRST_COMPLETED,
                    )
                    reads = answering.done() or await self.watch(send)
                if answering.done():
                    answering.result()
                else:
                    self._client_left()
            finally:
                for task in (answering, leaving):
                    task.cancel()
                await asyncio.gather(answering, leaving, return_exceptions=True)

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the generation and send the whole answer."""
        raise NotImplementedError

    def until_watch(self) -> float | None:
        """Return the seconds until :meth:`watch` has something to do, None for never."""
        return None

    async def watch(self, send: Send) -> bool:
        """Look after a quiet stream; return whether its client still reads."""
        return True

    def _client_left(self) -> None:
        self.context.metrics.disconnects.inc()
        logger.info(
            "%s aborted: client_disconnect after %d tokens",
            self.generation.label,
            self.generation.num_output_tokens,
        )


def _leave_unwritten(data: bytes) -> bool:
    """Stand for ``write_body`` where the server offers none: everything is an ASGI message."""
    return False


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class WholeResponse(GenerationResponse):
    """Answers with one JSON object when all choices have finished."""

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the generation and send the whole answer."""
        started = time.monotonic()
        fanout = self.reply.fanout
        outcomes = [Choice() for _ in range(fanout.num_prompts * fanout.sequences_per_prompt)]
        ended = asyncio.Event()

        def take(sequence: int, output: TextOutput) -> bool:
            outcomes[sequence].add(output)
            return True

        try:
            self.generation.start(take, ended.set)
            await ended.wait()
            self.generation.result()
            body = await self._whole_reply(outcomes)
            response = Response(body, media_type="application/json")
        except APIError as error:
            response = error.response()
        milliseconds = round((time.monotonic() - started) * 1000)
        response.headers.update(self.extra_headers)
        response.headers["openai-processing-ms"] = str(milliseconds)
        await response(scope, receive, send)

    async def _whole_reply(self, outcomes: list[Choice]) -> bytes:
        def spell() -> bytes:
            return whole_reply(self.reply, outcomes, self.generation)

        if any(outcome.prompt_logprobs or outcome.logprobs for outcome in outcomes):
            return await self.context.in_thread(spell)  # thousands of entries: not on the loop
        return spell()


class EventStreamResponse(GenerationResponse):
    """Answers with server-sent events: headers at once, then a chunk whenever text is released."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._last_sent = time.monotonic()
        self._writing_since: float | None = self._last_sent  # until the headers are out
        self._encoder = ChunkEncoder(self.reply, self.generation)
        self._write: Callable[[bytes], bool]
        # What could not be written at once, or what will spell it.
        self._unsent: bytes | Callable[[], bytes] | None = None
        self._echoes = self.reply.echo and self.reply.logprobs is not None
        self._news = asyncio.Event()  # there is something unsent, or nothing more to come
        self._reporter: asyncio.Task[None] | None = None

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the generation and send the whole answer."""
        headers = {
            "content-type": "text/event-stream; charset=utf-8",
            "cache-control": "no-cache",
            "x-accel-buffering": "no",
            **self.extra_headers,
        }
        raw = [(k.encode("latin-1"), v.encode("latin-1")) for k, v in headers.items()]
        await send({"type": "http.response.start", "status": 200, "headers": raw})
        self._writing_since = None
        self._write = scope.get("write_body", _leave_unwritten)
        if self.reply.return_progress:
            self._reporter = self._start_reporter(send)
        try:
            self.generation.start(self._take, self._news.set)
            while not self.generation.ended:
                await self._news.wait()
                self._news.clear()
                await self._send_unsent(send)
            self.generation.result()
            last = self._encoder.end()
        except APIError as error:
            last = self._error_event(error)
        except Exception:
            logger.exception("%s failed", self.generation.label)
            last = self._error_event(internal_error())
        finally:
            if self._reporter is not None:
                self._reporter.cancel()
        self._writing_since = time.monotonic()
        await send({"type": "http.response.body", "body": last, "more_body": False})

    def _take(self, sequence: int, output: TextOutput) -> bool:
        """Write the events of an output, or leave them to the task if that has to wait; return
        whether more may come."""
        echoes = self._echoes and self._encoder.will_echo(sequence)
        events = b"" if echoes else self._encoder.encode(sequence, output)
        if not echoes and not events:
            return True
        if self._reporter is not None:
            self._reporter.cancel()
            self._reporter = None
        self._last_sent = time.monotonic()
        if not echoes and self._write(events):
            return True
        # Of an echo there may be thousands of log probabilities, which are spelled in a thread.
        self._unsent = partial(self._encoder.encode, sequence, output) if echoes else events
        self._news.set()
        return False

    async def _send_unsent(self, send: Send) -> None:
        while (unsent := self._unsent) is not None:
            self._unsent = None
            events = unsent if isinstance(unsent, bytes) else await self.context.in_thread(unsent)
            self._writing_since = self._last_sent = time.monotonic()
            await send({"type": "http.response.body", "body": events, "more_body": True})
            self._writing_since = None
            self.generation.resume()

    def _start_reporter(self, send: Send) -> asyncio.Task[None]:
        async def tell(progress: dict[str, Any]) -> None:
            self._last_sent = time.monotonic()
            body = self._encoder.progress(progress)
            await send({"type": "http.response.body", "body": body, "more_body": True})

        client = self.context.client
        return asyncio.create_task(report_progress(client, self.generation, tell))

    def _error_event(self, error: APIError) -> bytes:
        # No [DONE] after it: that is the only in-band mark of success.
        self.context.metrics.stream_error(error.code)
        return b"data: " + error.body() + b"\n\n"

    def until_watch(self) -> float | None:
        """Return the seconds until :meth:`watch` has something to do, None for never."""
        keepalive = self.context.config.sse_keepalive
        if not keepalive or self._writing_since is not None:
            return min(WATCH_INTERVAL, keepalive or WATCH_INTERVAL)
        return max(0.001, self._last_sent + keepalive - time.monotonic())

    async def watch(self, send: Send) -> bool:
        """Send a comment if nothing was sent for a while; return whether the client still reads."""
        now = time.monotonic()
        if self._writing_since is not None:
            return now - self._writing_since < READ_TIMEOUT
        keepalive = self.context.config.sse_keepalive
        if keepalive and now - self._last_sent >= keepalive:
            self._last_sent = now
            try:
                async with asyncio.timeout(READ_TIMEOUT):
                    await send(
                        {"type": "http.response.body", "body": KEEP_ALIVE, "more_body": True}
                    )
            except TimeoutError:
                return False
        return True
