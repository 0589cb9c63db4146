"""Tool calls in a model's text, as it comes: JSON between an opening and a closing tag.

Each character is looked at once, whatever the text: nothing is searched again when more arrives,
and what turns out to be no call is passed on as text without being read a second time.
"""

import re
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Literal

import orjson

ARGUMENT_KEYS = ("arguments", "parameters")  # the second is Llama's word

_SPACE = re.compile(r"[ \t\r\n]*")
_SCALAR = re.compile(r'[^ \t\r\n,:{}\[\]"]+')
_STRING_STOP = re.compile(r'["\\]')
_STRUCTURE = re.compile(r'["{}\[\]]')


@dataclass(slots=True)
class Text:
    """Text of the answer; ``start`` is the index of its first character in what was fed."""

    text: str
    start: int


@dataclass(slots=True)
class CallDelta:
    """A part of call ``index``: its ``name`` comes first, and once; then pieces of the arguments,
    as the model wrote them."""

    index: int
    arguments: str
    name: str | None = None


Piece = Text | CallDelta
Reading = Generator[None]  # runs until it needs more text


def held_prefix(text: str, tag: str, start: int = 0) -> int:
    """Return the length of the longest end of ``text`` (from ``start``) that is a proper beginning
    of ``tag``."""
    for length in range(min(len(tag) - 1, len(text) - start), 0, -1):
        if text.endswith(tag[:length], start):
            return length
    return 0


class _Malformed(Exception):
    """What stands behind an opening tag is no call."""


class _End(Exception):
    """The text is over."""


class ToolParser:
    """Splits a text into answer and calls.

    ``state`` is text until the opening tag, head until a call's name is known, args while its
    arguments are copied, tail up to the closing tag. White space around calls is dropped. With
    ``incremental``, calls are passed on as they come, else when they are complete, so that a block
    that turns out to be no call can still become text. With ``single`` whatever follows the first
    closing tag is dropped. With ``exclusive`` a text is an answer or calls, so the beginning of a
    call that was cut off is no answer and is dropped.
    """

    def __init__(
        self,
        open_tag: str,
        close_tag: str,
        *,
        incremental: bool = True,
        single: bool = False,
        exclusive: bool = False,
    ) -> None:
        self.state: Literal["text", "head", "args", "tail"] = "text"
        self.num_calls = 0  # begun: name known
        self.broken = False  # the model ended a call in its middle by itself
        self.ended = False  # the closing tag of a ``single`` call was read
        self._open, self._close = open_tag, close_tag
        self._incremental, self._single, self._exclusive = incremental, single, exclusive
        self._buffer = ""
        self._place = 0  # in the buffer: everything before it has been dealt with
        self._base = 0  # characters fed before the buffer
        self._over = False
        self._pieces: list[Piece] = []
        self._space: list[str] = []  # white space that is dropped if a call follows
        self._has_text = False
        self._raw: list[str] = []  # the block so far, with the white space before it
        self._raw_start = 0
        self._pending: list[CallDelta] = []  # of a call that is not passed on yet
        self._early: list[str] = []  # arguments that came before the name
        self._reading = self._read()
        next(self._reading)

    @property
    def may_call(self) -> bool:
        """Whether the text so far ends in a call, or in what may become its tag."""
        return self.state != "text" or self._place < len(self._buffer)

    @property
    def _is_answer(self) -> bool:
        """Whether the text has turned out to be an answer, in which a tag is text as well."""
        return self._exclusive and self._has_text

    def feed(self, text: str) -> list[Piece]:
        """Return what this further text makes certain."""
        if not self.ended:
            self._base += self._place
            self._buffer = self._buffer[self._place :] + text
            self._place = 0
            next(self._reading, None)
        return self._drain()

    def finish(self, *, cut: bool) -> list[Piece]:
        """Return the rest at the end of the text. ``cut`` says that the model had not finished, so
        that its last call may be incomplete."""
        self._over = True
        next(self._reading, None)
        if self.ended or (
            cut and self._exclusive and not self._has_text and self.state in ("text", "head")
        ):
            self._space = []
        elif self.state == "text":
            self._say(self._take(len(self._buffer)))
        elif self.state == "args" and cut:
            self._pieces += self._pending
        elif self.state != "tail":
            self._give_up()
        if self._space and not self.num_calls:
            space = "".join(self._space)
            self._pieces.append(Text(space, self._base + self._place - len(space)))
        return self._drain()

    def _drain(self) -> list[Piece]:
        pieces, self._pieces = self._pieces, []
        return pieces

    # --- the grammar of the output ---

    def _read(self) -> Reading:
        yield
        try:
            while not self.ended:
                yield from self._read_text()
                try:
                    yield from self._read_call()
                except _Malformed:
                    self._give_up()
                else:
                    yield from self._read_tail()
        except _End:
            return

    def _read_text(self) -> Reading:
        while True:
            found = -1 if self._is_answer else self._buffer.find(self._open, self._place)
            if found >= 0:
                self._say(self._take(found))
                if not self._is_answer:
                    break
                continue
            held = 0 if self._is_answer else held_prefix(self._buffer, self._open, self._place)
            self._say(self._take(len(self._buffer) - held))
            yield from self._wait()
        self._raw, self._space = self._space, []
        self._raw_start = self._base + self._place - sum(map(len, self._raw))
        self._keep(found + len(self._open))
        self._early = []
        self.state = "head"

    def _read_call(self) -> Reading:
        """Read the object up to where both name and arguments are known."""
        yield from self._expect("{")
        while (yield from self._expect('"}')) == '"':
            key = yield from self._read_string()
            yield from self._expect(":")
            if key == "name":
                yield from self._expect('"')
                self._begin((yield from self._read_string()))
                if self._early:
                    self._pass_on("".join(self._early))
                    return
            elif key in ARGUMENT_KEYS:
                if (yield from self._peek()) != "{":
                    raise _Malformed
                yield from self._read_value(
                    self._pass_on if self.state == "args" else self._early.append
                )
                if self.state == "args":
                    return
            else:
                yield from self._skip_value()
            if (yield from self._expect(",}")) == "}":
                break
        if self.state == "head":
            raise _Malformed
        self._pass_on("{}")

    def _read_tail(self) -> Reading:
        self._pieces += self._pending
        self._pending = []
        self.state = "tail"
        while (found := self._buffer.find(self._close, self._place)) < 0:
            self._take(len(self._buffer) - held_prefix(self._buffer, self._close, self._place))
            yield from self._wait()
        self._take(found + len(self._close))
        self.state = "text"
        self.ended = self._single

    def _begin(self, name: str) -> None:
        if self.state == "args":
            raise _Malformed  # a second name
        self.state = "args"
        self._pending = [CallDelta(self.num_calls, "", name)]
        self.num_calls += 1
        self._pass_on("")

    def _pass_on(self, arguments: str) -> None:
        if arguments:
            self._pending.append(CallDelta(self.num_calls - 1, arguments))
        if self._incremental:
            self._pieces += self._pending
            self._pending = []

    def _give_up(self) -> None:
        """Pass a block on as text: it is no call. What of it is out already stays out."""
        if self.state == "args":
            self.broken = True
            if self._incremental:
                self.state = "text"
                return
            self.num_calls -= 1
        self._pending = []
        self.state = "text"
        self._say("".join(self._raw), self._raw_start)

    def _say(self, text: str, start: int | None = None) -> None:
        """Pass text on, but for white space that a call may still swallow."""
        if start is None:
            start = self._base + self._place - len(text)
        body = text.rstrip()
        if not body:
            self._space += [text] if text else []
            return
        space = "".join(self._space)
        self._space = [text[len(body) :]] if len(body) < len(text) else []
        said = space + body
        if self.num_calls and not self._has_text:
            said = said.lstrip()
        self._has_text = True
        self._pieces.append(Text(said, start + len(body) - len(said)))

    # --- JSON ---

    def _expect(self, chars: str) -> Generator[None, None, str]:
        """Read white space and one of these characters, and return that."""
        char = yield from self._peek()
        if char not in chars:
            raise _Malformed
        self._keep(self._place + 1)
        return char

    def _peek(self) -> Generator[None, None, str]:
        """Read white space and return the character behind it."""
        while True:
            self._keep(_match_end(_SPACE, self._buffer, self._place))
            if self._place < len(self._buffer):
                return self._buffer[self._place]
            yield from self._wait()

    def _read_string(self) -> Generator[None, None, str]:
        """Read a string behind its opening quote and return its value."""
        raw = ['"']

        def note(text: str) -> None:
            raw.append(text)

        yield from self._read_value(note, in_string=True)
        try:
            # Unlike json it refuses half a surrogate pair, which no answer could hold.
            value: str = orjson.loads("".join(raw))
        except orjson.JSONDecodeError:
            raise _Malformed from None
        return value

    def _skip_value(self) -> Reading:
        char = yield from self._peek()
        if char in '{["':
            yield from self._read_value(lambda text: None)
            return
        if not _SCALAR.match(char):
            raise _Malformed
        while True:
            self._keep(_match_end(_SCALAR, self._buffer, self._place))
            if self._place < len(self._buffer):
                return
            yield from self._wait()

    def _read_value(self, sink: Callable[[str], None], in_string: bool = False) -> Reading:
        """Copy an object, array or string, or the rest of a string, to ``sink`` as it comes."""
        depth, escaped, start = 0, False, self._place
        while True:
            if self._place == len(self._buffer):
                self._copy(start, sink)
                yield from self._wait()
                start = self._place
                continue
            if escaped:
                self._place += 1
                escaped = False
                continue
            stop = _STRING_STOP if in_string else _STRUCTURE
            found = stop.search(self._buffer, self._place)
            self._place = found.end() if found else len(self._buffer)
            if found is None:
                continue
            if found[0] == "\\":
                escaped = True
            elif found[0] == '"':
                in_string = not in_string
            else:
                depth += 1 if found[0] in "{[" else -1
            if depth == 0 and not in_string:
                self._copy(start, sink)
                return

    def _copy(self, start: int, sink: Callable[[str], None]) -> None:
        text = self._buffer[start : self._place]
        self._raw.append(text)
        sink(text)

    # --- the buffer ---

    def _wait(self) -> Reading:
        if self._over:
            raise _End
        yield

    def _take(self, end: int) -> str:
        text = self._buffer[self._place : end]
        self._place = end
        return text

    def _keep(self, end: int) -> str:
        """Take a part of a block."""
        text = self._take(end)
        self._raw.append(text)
        return text


def _match_end(pattern: re.Pattern[str], text: str, start: int) -> int:
    found = pattern.match(text, start)
    return found.end() if found else start
