"""The ``<think>`` block that reasoning models begin their answer with."""

from dataclasses import dataclass
from typing import Literal

from pageserve.api.tool_parser import held_prefix
from pageserve.tokenizer import Tokenizer

OPEN, CLOSE = "<think>", "</think>"
MAX_INDENT = 64  # white space before the block, in characters


@dataclass(slots=True)
class Reasoning:
    """Text from inside the block."""

    text: str


def thinks(tokenizer: Tokenizer) -> bool:
    """Whether the model writes the block: its template or its vocabulary has the tag."""
    template = tokenizer.chat_template or ""
    return OPEN in template or tokenizer.token_id(OPEN) is not None


def place(prompt: str, *, continued: bool = False) -> Literal["inside", "before"] | None:
    """Return where an output begins: inside of a block that the prompt opens, or before one that
    the model may write. None if the prompt closes it (thinking is off), or ends in an answer that
    is to be ``continued``."""
    prompt = prompt.rstrip()
    if prompt.endswith(OPEN):
        return "inside"
    return None if continued or prompt.endswith(CLOSE) else "before"


class ReasoningParser:
    """Splits a text into the block at its beginning and the answer behind it.

    White space at the edges of both is dropped if there is a block; without one the text stays as
    it is. ``content_start`` is the index of the answer's first character in what was fed,
    ``has_block`` says whether there is a block.
    """

    def __init__(self, *, opened: bool) -> None:
        """``opened`` says that the text begins inside the block."""
        self.state: Literal["start", "inside", "behind", "content"] = "start"
        self.content_start = 0
        self.has_block = opened
        self._buffer = ""
        self._space: list[str] = []  # dropped if the block ends here
        self._said = False
        if opened:
            self.state = "inside"

    def feed(self, text: str) -> tuple[str, str]:
        """Return (reasoning, answer): what this further text makes certain of each."""
        if self.state == "content":
            return "", text
        self._buffer += text
        reasoning = ""
        if self.state == "start":
            self._find_block()
        if self.state == "inside":
            reasoning = self._read_block()
        if self.state == "behind":
            body = self._buffer.lstrip()
            self._skip(len(self._buffer) - len(body))
            if body:
                self.state = "content"
        return reasoning, self._take(len(self._buffer)) if self.state == "content" else ""

    def finish(self) -> tuple[str, str]:
        """Return the rest at the end of the text."""
        rest, self._buffer = self._buffer, ""
        if self.state == "inside":
            return self._say(rest), ""
        return "", rest

    def _find_block(self) -> None:
        body = self._buffer.lstrip()
        indent = len(self._buffer) - len(body)
        if indent > MAX_INDENT or not body.startswith(OPEN[: len(body)]):
            self.state = "content"
        elif body.startswith(OPEN):
            self._skip(indent + len(OPEN))
            self.state = "inside"
            self.has_block = True

    def _read_block(self) -> str:
        found = self._buffer.find(CLOSE)
        if found < 0:
            held = held_prefix(self._buffer, CLOSE)
            return self._say(self._skip(len(self._buffer) - held))
        reasoning = self._say(self._skip(found))
        self._skip(len(CLOSE))
        self.state = "behind"
        return reasoning

    def _say(self, text: str) -> str:
        body = text.rstrip()
        if not body:
            self._space += [text] if text else []
            return ""
        said = "".join(self._space) + body
        self._space = [text[len(body) :]] if len(body) < len(text) else []
        if not self._said:
            said = said.lstrip()
        self._said = True
        return said

    def _skip(self, length: int) -> str:
        taken = self._take(length)
        self.content_start += length
        return taken

    def _take(self, length: int) -> str:
        taken, self._buffer = self._buffer[:length], self._buffer[length:]
        return taken
