"""A chat model's text as the API shows it: reasoning, answer and tool calls, piece by piece."""

from codecs import getincrementaldecoder
from collections import deque
from collections.abc import Iterable

import msgspec
from msgspec.structs import astuple

from pageserve.api.reasoning import CLOSE, Reasoning, ReasoningParser
from pageserve.api.tool_parser import CallDelta, Text, ToolParser
from pageserve.api.tool_parser import Piece as ToolPiece
from pageserve.engine.output_processor import ChatFinishReason, LogprobEntry, TextOutput
from pageserve.tokenizer import Tokenizer

Piece = Reasoning | Text | CallDelta


class ChatOutput(TextOutput, gc=False):
    """A step's output taken apart. ``text`` is the model's own; ``logprobs`` are those of tokens
    that begin in the answer; ``begins_call`` says that what comes next is, or may be, a call."""

    # Behind those of TextOutput, in this order: parse() fills them by place.
    pieces: list[Piece] = msgspec.field(default_factory=list)
    begins_call: bool = False


class ChatParser:
    """Takes the outputs of one choice apart.

    ``calls_finish`` is the finish reason of an answer with calls. With ``include_reasoning`` false
    the reasoning is dropped.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        reasoning: ReasoningParser | None = None,
        tools: ToolParser | None = None,
        include_reasoning: bool = True,
        calls_finish: ChatFinishReason = "tool_calls",
    ) -> None:
        self._reasoning = reasoning
        self._tools = tools
        self._include_reasoning = include_reasoning
        self._calls_finish = calls_finish
        self._close_id = tokenizer.token_id(CLOSE) or -1
        self._counting = True  # the block is not over
        self._num_counted = 0
        self._entries = _Entries()
        self._num_read = 0

    def parse(self, output: TextOutput) -> ChatOutput:
        """Return the output with its pieces. It may end the choice: after the only call allowed."""
        pieces = self._feed(output.text)
        self._count_reasoning(output.token_ids)
        finish_reason = output.finish_reason
        if finish_reason is not None:
            pieces += self._finish(cut=finish_reason != "stop")
        tools = self._tools
        if tools is not None:
            if tools.ended and finish_reason is None:
                finish_reason = "stop"
            if finish_reason == "stop" and tools.num_calls and not tools.broken:
                finish_reason = self._calls_finish
        logprobs = output.logprobs
        if logprobs is not None:
            self._entries.add(logprobs)
            logprobs = self._entries.take([p for p in pieces if isinstance(p, Text)])
        begins_call = tools is not None and tools.may_call
        begins_call = begins_call and not any(isinstance(p, Text) for p in pieces)
        chat = ChatOutput(*astuple(output), pieces, begins_call)  # type: ignore[call-arg]
        chat.logprobs, chat.finish_reason = logprobs, finish_reason
        return chat

    def _feed(self, text: str) -> list[Piece]:
        return self._split(*(self._reasoning.feed(text) if self._reasoning else ("", text)))

    def _finish(self, *, cut: bool) -> list[Piece]:
        pieces = self._split(*self._reasoning.finish()) if self._reasoning else []
        if self._tools is not None:
            pieces += self._move(self._tools.finish(cut=cut))
        return pieces

    def _split(self, reasoning: str, answer: str) -> list[Piece]:
        pieces: list[Piece] = []
        if reasoning and self._include_reasoning:
            pieces.append(Reasoning(reasoning))
        if answer and self._tools is not None:
            pieces += self._move(self._tools.feed(answer))
        elif answer:
            pieces += self._move([Text(answer, self._num_read)])
            self._num_read += len(answer)
        return pieces

    def _move(self, pieces: Iterable[ToolPiece]) -> list[Piece]:
        """Let text count from the beginning of the output, not of the answer."""
        offset = self._reasoning.content_start if self._reasoning else 0
        return [Text(p.text, p.start + offset) if isinstance(p, Text) else p for p in pieces]

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens of the block so far, its tags included, whether it is shown or not."""
        return self._num_counted if self._reasoning and self._reasoning.has_block else 0

    def _count_reasoning(self, token_ids: list[int]) -> None:
        if self._counting and self._reasoning is not None:
            self._counting = self._reasoning.state in ("start", "inside")
            if self._close_id in token_ids:
                self._counting = False
                token_ids = token_ids[: token_ids.index(self._close_id) + 1]
            self._num_counted += len(token_ids)


class _Entries:
    """Log probabilities of tokens whose text has not become an answer yet."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[int, LogprobEntry]] = deque()
        self._decoder = getincrementaldecoder("utf-8")("replace")
        self._num_chars = 0

    def add(self, entries: Iterable[LogprobEntry]) -> None:
        """Note tokens and where in the text each begins."""
        for entry in entries:
            if entry.bytes is not None:
                self._waiting.append((self._num_chars, entry))
                self._num_chars += len(self._decoder.decode(bytes(entry.bytes)))

    def take(self, texts: Iterable[Text]) -> list[LogprobEntry]:
        """Return the tokens that begin in these texts; those before them are forgotten."""
        taken = []
        for text in texts:
            while self._waiting and self._waiting[0][0] < text.start + len(text.text):
                start, entry = self._waiting.popleft()
                if start >= text.start:
                    taken.append(entry)
        return taken
