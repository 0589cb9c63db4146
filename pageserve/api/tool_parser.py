"""Tool calls in a model's text, as it comes: JSON in one of the forms of ``tool_formats``.

Each character is looked at once, whatever the text: nothing is searched again when more arrives,
and what turns out to be no call is passed on as text without being read a second time.
"""

import re
from collections.abc import Callable, Collection, Generator, Iterable
from dataclasses import dataclass
from typing import Literal

import orjson

from pageserve.api.tool_formats import ToolFormat

ARGUMENT_KEYS = ("arguments", "parameters")  # the second is Llama's word
BARE_KEYS = ("type", "name")  # that may stand before the arguments if no opening says what it is

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
    """What stands where a call should is none."""


class _End(Exception):
    """The text is over."""


class ToolParser:
    """Splits a text into answer and calls.

    ``state`` is text until calls are opened, head until a call's name is known, args while its
    arguments are copied, tail up to what follows it. White space around calls is dropped. With
    ``incremental``, calls are passed on as they come, else when they are complete, so that a block
    that turns out to be no call can still become text. With ``single`` whatever follows the first
    call is dropped. With ``exclusive`` a text is an answer or calls, so the beginning of a call
    that was cut off is no answer and is dropped.

    Where a form needs no opening, a text that begins as an object is one of calls if that has the
    name of a tool, one of ``names``, and behind it arguments or nothing: as long as it may be, it
    is held back.
    """

    def __init__(
        self,
        form: ToolFormat,
        names: Collection[str] = (),
        *,
        incremental: bool = True,
        single: bool = False,
        exclusive: bool = False,
    ) -> None:
        self.state: Literal["text", "head", "args", "tail"] = "text"
        self.num_calls = 0  # begun: name known
        self.broken = False  # the model ended a call in its middle by itself
        self.ended = False  # the end of a ``single`` call was read
        self._form, self._names = form, names
        self._bare = False  # the calls being read have no opening
        self._closed = False  # the object of a call was read to its end
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
        undecided = self.state in ("text", "head") and not self._has_text and not self._bare
        if self.ended or (cut and self._exclusive and undecided):
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
            if self._form.bare:
                yield from self._read_bare()
            while not self.ended:
                yield from self._read_text()
                yield from self._read_block()
        except _End:
            return

    def _read_bare(self) -> Reading:
        """Read the calls that the text begins with, if it does."""
        self._bare = True
        self.state = "head"
        if (yield from self._peek()) == "{":
            yield from self._read_block()
        else:
            self._give_up()
        self._bare = False

    def _read_text(self) -> Reading:
        opening = self._form.open
        while True:
            found = -1 if self._is_answer else self._buffer.find(opening, self._place)
            if found >= 0:
                self._say(self._take(found))
                if not self._is_answer:
                    break
                continue
            held = 0 if self._is_answer else held_prefix(self._buffer, opening, self._place)
            self._say(self._take(len(self._buffer) - held))
            yield from self._wait()
        self._begin_raw(self._space)
        self._space = []
        self._keep(found + len(opening))
        self.state = "head"

    def _read_block(self) -> Reading:
        """Read the calls of one opening."""
        try:
            if self._form.listed:
                yield from self._expect("[")
            more = True
            while more:
                yield from self._read_call()
                yield from self._read_tail()
                more = not self.ended and (yield from self._read_separator())
        except _Malformed:
            self._give_up()

    def _read_call(self) -> Reading:
        """Read the object up to where both name and arguments are known."""
        self._early, self._closed = [], False
        name: str | None = None
        yield from self._expect("{")
        while (yield from self._expect('"' if self._bare else '"}')) == '"':
            key = yield from self._read_string(BARE_KEYS if name is None else ARGUMENT_KEYS)
            yield from self._expect(":")
            if key == "name":
                yield from self._expect('"')
                if name is not None:
                    raise _Malformed
                name = yield from self._read_string(self._names)
                if not self._bare:
                    self._begin(name)
                if self._early:
                    self._pass_on("".join(self._early))
                    return
            elif key in ARGUMENT_KEYS:
                if (yield from self._peek()) != "{":
                    raise _Malformed
                if name is None:
                    yield from self._read_value(self._early.append)
                else:
                    if self._bare:
                        self._begin(name)
                    yield from self._read_value(self._pass_on)
                    return
            elif self._bare:
                yield from self._expect('"')
                yield from self._read_string(("function",))
            else:
                yield from self._skip_value()
            if (yield from self._expect(",}")) == "}":
                break
        if name is None:
            raise _Malformed
        if self._bare:
            self._begin(name)
        self._pass_on("{}")
        self._closed = True

    def _read_tail(self) -> Reading:
        """Drop the rest of a call whose arguments are complete."""
        self._pieces += self._pending
        self._pending = []
        self.state = "tail"
        self._begin_raw()
        if close := self._form.close:
            while (found := self._buffer.find(close, self._place)) < 0:
                self._take(len(self._buffer) - held_prefix(self._buffer, close, self._place))
                yield from self._wait()
            self._take(found + len(close))
        elif not self._closed:
            while (yield from self._expect(",}")) == ",":
                yield from self._expect('"')
                yield from self._read_string()
                yield from self._expect(":")
                yield from self._skip_value()
        self.ended = self._single

    def _read_separator(self) -> Generator[None, None, bool]:
        """Read what stands behind a call, and return whether another of the same opening follows.
        What is neither a call nor the end of all is text."""
        if self._form.close:
            self.state = "text"
            return False
        self._begin_raw()
        if (yield from self._peek()) in self._form.separators:
            self._keep(self._place + 1)
        follows = yield from self._peek()
        if follows == "{":
            self.state = "head"
            return True
        if not (self._form.listed and follows == "]"):
            raise _Malformed
        self._keep(self._place + 1)
        self.state = "text"
        return False

    def _begin(self, name: str) -> None:
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

    def _begin_raw(self, space: Iterable[str] = ()) -> None:
        """Note what comes next, in case that it turns out to be text with ``space`` before it."""
        self._raw = [*space]
        self._raw_start = self._base + self._place - sum(map(len, self._raw))

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

    def _read_string(self, bare: Collection[str] = ()) -> Generator[None, None, str]:
        """Read a string behind its opening quote and return its value: one of those in ``bare``,
        letter by letter, if only they make a call of a text without opening."""
        raw = ['"']

        def note(text: str) -> None:
            raw.append(text)
            if self._bare and bare:
                written = "".join(raw)
                if not any(f'"{value}"'.startswith(written) for value in bare):
                    raise _Malformed

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
