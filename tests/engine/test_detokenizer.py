"""Incremental decoding: half characters, invalid bytes, special tokens, cost per token."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as Backend

from pageserve.engine.detokenizer import Detokenizer
from pageserve.tokenizer import Tokenizer

TEXT = "ok 🧭 是 é e\u0301 👩‍🚀 \u00a0終わり end"


def byte_tokenizer(*pieces: bytes, special: tuple[str, ...] = ("<sp>",)) -> Tokenizer:
    """A byte-level tokenizer: ids 0-255 are the bytes, then ``pieces``, then special tokens."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [b for b in range(256) if b not in printable]
    alphabet = {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(rest)}
    vocab = {alphabet[b]: b for b in range(256)}
    for piece in pieces:
        vocab["".join(alphabet[b] for b in piece)] = len(vocab)
    backend = Backend(models.BPE(vocab, []))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True) for text in special])
    return Tokenizer(backend)


def sentencepiece_tokenizer() -> Tokenizer:
    vocab = {"<unk>": 0, "<s>": 1, "▁the": 2, "▁cat": 3, "▁": 4, "s": 5}
    vocab |= {f"<0x{b:02X}>": 6 + b for b in range(256)}
    backend = Backend(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens([AddedToken("<s>", special=True)])
    return Tokenizer(backend)


def chars_by_byte(data: bytes) -> list[tuple[str, int, int]]:
    """Return (character, first byte, end byte) of the text of ``data``, a dangling tail left out.

    The longest byte strings that begin a valid character are found by trying, not by decoding."""
    chars, begin = [], 0
    while begin < len(data):
        for size in range(1, 5):
            piece = data[begin : begin + size]
            try:
                chars.append((piece.decode(), begin, begin + size))
                break
            except UnicodeDecodeError as error:
                if error.reason != "unexpected end of data":
                    size = max(1, size - 1)
                    chars.append(("\ufffd", begin, begin + size))
                    break
                if begin + size >= len(data):
                    return chars
        begin += size
    return chars


BYTES = byte_tokenizer()
SPECIAL = 256


def stream(tokenizer: Tokenizer, token_ids: list[int], **options: bool) -> list[str]:
    detokenizer = Detokenizer(tokenizer, **options)
    return [detokenizer.decode([token_id]) for token_id in token_ids]


def test_half_characters_wait_for_the_token_that_completes_them():
    data = TEXT.encode()
    deltas = stream(BYTES, list(data))
    assert "".join(deltas) == TEXT == BYTES.decode(data, skip_special_tokens=True)
    assert "\ufffd" not in "".join(deltas)
    compass = data.index("🧭".encode())
    assert deltas[compass : compass + 4] == ["", "", "", "🧭"]


def test_replacement_only_after_proof():
    assert stream(BYTES, [0xF0, 0x9F, ord("a")]) == ["", "", "\ufffda"]
    assert stream(BYTES, [0xFF, ord("a")]) == ["\ufffd", "a"]
    assert stream(BYTES, [0xED, 0xA0]) == ["", "\ufffd\ufffd"]  # would begin a surrogate
    assert stream(BYTES, list("\ud7ff".encode())) == ["", "", "\ud7ff"]
    assert stream(BYTES, list("\ufffd".encode())) == ["", "", "\ufffd"]


def test_dangling_tail_is_dropped():
    assert "".join(stream(BYTES, [ord("a"), *"🧭".encode()[:3]])) == "a"


@given(
    st.lists(
        st.sampled_from(
            [*"aé是🧭\u0301\ufffd", b"\xff", b"\xf0\x9f", b"\x80", b"\xed\xa0", b"\xed"]
        ),
        max_size=20,
    ),
    st.randoms(use_true_random=False),
)
def test_any_split_gives_the_text_of_the_whole(parts, random):
    data = b"".join(p.encode() if isinstance(p, str) else p for p in parts)
    expected = data.decode("utf-8", "replace")
    for size in range(1, 4):  # the whole text ends where a character is not complete
        try:
            data[-size:].decode()
        except UnicodeDecodeError as error:
            if error.start == 0 and error.reason == "unexpected end of data":
                expected = data[:-size].decode("utf-8", "replace")
    detokenizer, text, rest = Detokenizer(BYTES), "", list(data)
    while rest:
        size = random.randint(1, 4)
        text += detokenizer.decode(rest[:size])
        rest = rest[size:]
    assert text == expected


@given(
    st.lists(
        st.one_of(st.integers(0, 255), st.sampled_from(b"\xf0\x9f\x80\xe0\xed\xa0\xef\xbf\xbda"))
    )
)
@settings(max_examples=500)
def test_decode_token_finds_the_first_character_of_a_token(data):
    chars = chars_by_byte(bytes(data))
    owner = [index for index, (_, begin, end) in enumerate(chars) for _ in range(begin, end)]
    owner += [len(chars)] * (len(data) - len(owner))  # a dangling tail
    detokenizer, position = Detokenizer(BYTES), 0
    for index, byte in enumerate(data):
        delta, start = detokenizer.decode_token(byte)
        assert position + start == owner[index]
        position += len(delta)
    assert position == len(chars)


def test_special_tokens_are_hidden_or_shown_and_never_flush():
    script = [ord("a"), SPECIAL, ord("b")]
    assert stream(BYTES, script) == ["a", "", "b"]
    assert stream(BYTES, script, skip_special_tokens=False) == ["a", "<sp>", "b"]
    compass = "🧭".encode()
    assert "".join(stream(BYTES, [*compass[:2], SPECIAL, *compass[2:]])) == "🧭"


def test_ids_beyond_the_tokenizer_have_no_text():
    assert stream(BYTES, [ord("a"), BYTES.size + 5, ord("b")]) == ["a", "", "b"]
    assert Detokenizer(BYTES).decode_token(BYTES.size) == ("", -1)


def test_leading_space_of_sentencepiece():
    tokenizer = sentencepiece_tokenizer()
    assert tokenizer.strips_leading_space and not BYTES.strips_leading_space
    assert tokenizer.decode([1, 2, 3], skip_special_tokens=True) == "the cat"
    # After visible prompt text the space is part of the output, at the very start it is not.
    assert "".join(stream(tokenizer, [2, 3])) == " the cat"
    assert stream(tokenizer, [2, 3], strip_leading_space=True) == ["the", " cat"]
    assert stream(tokenizer, [4, 5, 4], strip_leading_space=True) == ["", "s", " "]
    compass = [6 + b for b in "🧭".encode()]
    assert stream(tokenizer, compass) == ["", "", "", "🧭"]


def test_invalid_bytes_flow_and_do_not_slow_down():
    script = [0x80] * 4000 + list(b"done")
    detokenizer = Detokenizer(BYTES)
    assert "".join(stream(BYTES, script)) == "\ufffd" * 4000 + "done"

    def cost(count: int) -> float:
        begin = time.perf_counter()
        for _ in range(count):
            assert detokenizer.decode([0x80]) == "\ufffd"
        return time.perf_counter() - begin

    cost(100)
    early = min(cost(100) for _ in range(20))
    cost(20_000)
    assert min(cost(100) for _ in range(20)) < 3 * early


@pytest.mark.parametrize("skip", [True, False])
def test_several_tokens_at_once_equal_one_by_one(skip):
    script = [*TEXT.encode(), SPECIAL, *TEXT.encode()]
    whole = Detokenizer(BYTES, skip).decode(script)
    assert whole == "".join(stream(BYTES, script, skip_special_tokens=skip))
