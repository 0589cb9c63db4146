"""Token ids of one sequence to text, as they come, without ever showing half a character."""

from codecs import utf_8_decode
from collections.abc import Sequence

from pageserve.tokenizer import Tokenizer


class Detokenizer:
    """Incremental decoder of one sequence; the work per token does not depend on its length.

    Bytes that may still become a character are held back (at most three); U+FFFD comes only after
    the next bytes have proved a sequence invalid, so a dangling tail at the end is simply never
    shown. ``strip_leading_space`` drops one space at the very start.
    """

    __slots__ = ("_bytes", "_strip", "_tail", "_texts")

    def __init__(
        self,
        tokenizer: Tokenizer,
        skip_special_tokens: bool = True,
        strip_leading_space: bool = False,
    ) -> None:
        self._texts, self._bytes = tokenizer.decode_tables(skip_special_tokens)
        self._strip = strip_leading_space
        self._tail = b""

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text that these next tokens complete."""
        if len(token_ids) == 1 and not self._tail and not self._strip:
            token_id = token_ids[0]
            text = self._texts[token_id] if token_id < len(self._texts) else ""
            if text is not None:
                return text
        return self._feed(b"".join([self._bytes_of(token_id) for token_id in token_ids]))

    def decode_token(self, token_id: int) -> tuple[str, int]:
        """Return the text that the next token completes, and the index in it of the first character
        that the token's own bytes are part of (the length of the text if that one is incomplete,
        -1 for a token without bytes)."""
        data = self._bytes_of(token_id)
        if not data:
            return "", -1
        start = 0
        if self._tail:
            # Count the characters that the first byte finishes off without being part of them.
            text, used = _decode(self._tail + data[:1])
            start = len(text) - (used > len(self._tail))
        return self._feed(data), start

    def _bytes_of(self, token_id: int) -> bytes:
        # A model's head may have more rows than its tokenizer has ids; those have no text.
        return self._bytes[token_id] if token_id < len(self._bytes) else b""

    def _feed(self, data: bytes) -> str:
        if self._tail:
            data = self._tail + data
        text, used = _decode(data)
        self._tail = data[used:]
        if self._strip and text:
            self._strip = False
            return text[1:] if text[0] == " " else text
        return text


def _decode(data: bytes) -> tuple[str, int]:
    """Return the text of ``data`` and the number of bytes used; the rest may become a character."""
    text, used = utf_8_decode(data, "replace", False)
    if used != len(data) and b"\xed\xa0" <= data[used:] <= b"\xed\xbf":
        # The codec waits for the third byte of a surrogate, but UTF-8 has no surrogates.
        return text + "\ufffd\ufffd", len(data)
    return text, used
