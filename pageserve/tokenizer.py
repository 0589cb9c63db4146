"""Text to token ids and back, from a Hugging Face directory or a GGUF file.

Encoding is the ``tokenizers`` library's. Decoding is ours: a table gives the true bytes of every
id, so that a character split over tokens, a stop string or a logprob entry can be cut exactly.
"""

import functools
import json
import sys
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from pageserve.checkpoint import ModelError, read_gguf_header, read_json
from pageserve.utils import cdiv

SPECIAL_TOKEN_NAMES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
FIM_TOKENS = (  # what stands before the prefix, the suffix and the middle
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
)
# Stands behind the first character of a special token's text that is to stay text. As a lone
# surrogate it occurs in no text that came as UTF-8; the library sees a noncharacter in its place.
PLAIN_MARK = "\ud800"
_READABLE_MARK = "\ufffe"
WORD_START = "▁"  # sentencepiece's spelling of a space

DecodeTables = tuple[list[str | None], list[bytes]]


class Tokenizer:
    """Token ids of text, bytes of token ids, and the model's chat templates.

    ``size`` is the highest id defined plus one. ``special_ids`` are hidden from text unless asked
    for. ``special_tokens_map`` holds the named special tokens (``bos_token`` …) as text.
    ``chat_templates`` maps names to Jinja source. ``strips_leading_space`` says that decoding drops
    a space at the very start, as sentencepiece models do. ``max_token_chars`` is the most
    characters that one token can stand for (``sys.maxsize`` if there is no limit). ``fim_tokens``
    mark prefix, suffix and middle for models that fill gaps, None for others. Threads may share it.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special_tokens_map: Mapping[str, str] | None = None,
        chat_templates: Mapping[str, str] | None = None,
    ) -> None:
        """Wrap a ``tokenizers`` tokenizer; raises :class:`ModelError` if its decoder is of a kind
        whose tokens have no bytes of their own (WordPiece and the like)."""
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.special_tokens_map = dict(special_tokens_map or {})
        self.chat_templates = dict(chat_templates or {})
        named = {n: backend.token_to_id(t) for n, t in self.special_tokens_map.items()}
        self.bos_token_id: int | None = named.get("bos_token")
        self.eos_token_id: int | None = named.get("eos_token")
        added = backend.get_added_tokens_decoder()
        self._added_ids = {token.content: i for i, token in added.items()}
        self.special_ids = frozenset(
            [i for i, token in added.items() if token.special]
            + [i for i in named.values() if i is not None]
        )
        self._control_tokens = {i: t.content for i, t in added.items() if t.special}
        self._unk_token_id = named.get("unk_token")
        self.fim_tokens = next(
            (
                names
                for names in FIM_TOKENS
                if all(backend.token_to_id(n) is not None for n in names)
            ),
            None,
        )
        spelling = _Spelling(backend)
        self.strips_leading_space = spelling.strips_leading_space
        self._token_bytes = spelling.byte_table()
        self.size = len(self._token_bytes)
        self._tables = {
            True: _decode_tables(self._token_bytes, self.special_ids),
            False: _decode_tables(self._token_bytes, frozenset()),
        }
        self._vanishing = spelling.vanishing()
        self.max_token_chars = (
            sys.maxsize
            if self._vanishing is None
            else max((len(data) for data in self._token_bytes if data), default=1)
        )

    @property
    def chat_template(self) -> str | None:
        """Source of the default chat template, None if the model defines none."""
        return self.get_chat_template()

    def get_chat_template(self, tools: bool = False) -> str | None:
        """Return the template for a request with or without tools, None if there is none."""
        if tools and "tool_use" in self.chat_templates:
            return self.chat_templates["tool_use"]
        return self.chat_templates.get("default")

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Return the ids of ``text``; special tokens spelled in it become their ids.

        ``add_special_tokens`` adds what the model puts around a prompt (a BOS, often nothing).
        """
        # A batch of one: only the batch call lets other threads run meanwhile.
        encodings = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encodings[0].ids
        return ids

    def mark_plain(self, text: str) -> str:
        """Return ``text`` with :data:`PLAIN_MARK` in each special token that it spells."""
        while places := [start + 1 for _, start, _, is_control in self._read(text) if is_control]:
            bounds = zip([0, *places], [*places, len(text)], strict=True)
            text = PLAIN_MARK.join(text[start:end] for start, end in bounds)
        return text  # the next round finds tokens that overlapped with those of the last

    def encode_marked(self, text: str, add_special_tokens: bool) -> list[int]:
        """Return the ids of ``text``, in which marked special tokens stay text.

        What stands between two special tokens is read as ever if nothing in it is marked.
        """
        if PLAIN_MARK not in text:
            return self.encode(text, add_special_tokens)
        ids: list[int] = []
        part, part_start = list[int](), 0  # since the last special token

        def end_part(end: int) -> None:
            piece = text[part_start:end]
            ids.extend(self._encode_plain(piece) if PLAIN_MARK in piece else part)
            part.clear()

        for token_id, start, end, is_control in self._read(text, add_special_tokens):
            if is_control:
                end_part(start)
                ids.append(token_id)
                part_start = end
            else:
                part.append(token_id)
        end_part(len(text))
        return ids

    def _read(
        self, text: str, add_special_tokens: bool = False
    ) -> Iterator[tuple[int, int, int, bool]]:
        """Yield (id, start, end, whether it is a special token without a mark) of the tokens."""
        readable = text.replace(PLAIN_MARK, _READABLE_MARK)
        # One that gives offsets; a batch of one, as in encode.
        encoding = self._backend.encode_batch([readable], add_special_tokens=add_special_tokens)[0]
        place = 0
        for token_id, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            content = self._control_tokens.get(token_id)
            if content is not None and start == end:  # put around the text, and nowhere in it
                yield token_id, place, place, add_special_tokens
                continue
            place = end
            # Characters that the model does not know become a special token too, spelling nothing.
            is_spelled = token_id != self._unk_token_id or content == text[start:end]
            is_marked = PLAIN_MARK in text[start : end + 1]
            yield token_id, start, end, content is not None and is_spelled and not is_marked

    def _encode_plain(self, marked: str) -> list[int]:
        """Return the ids of text alone, whatever it spells."""
        text = marked.replace(PLAIN_MARK, "")
        ids: list[int] = self._plain_backend.encode(text, add_special_tokens=False).ids
        control = self._control_tokens.keys() - {self._unk_token_id}
        if control.isdisjoint(ids):
            return ids
        # A vocabulary whose merges spell special tokens; no character alone does.
        encodings = self._plain_backend.encode_batch_fast(list(text), add_special_tokens=False)
        return [token_id for encoding in encodings for token_id in encoding.ids]

    @functools.cached_property
    def _plain_backend(self) -> tokenizers.Tokenizer:
        backend = tokenizers.Tokenizer.from_str(self._backend.to_str())
        backend.encode_special_tokens = True  # "as ordinary text"
        return backend

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool) -> str:
        """Return the text of a whole sequence, U+FFFD where its bytes are not valid UTF-8."""
        _, table = self.decode_tables(skip_special_tokens)
        text = b"".join([table[i] for i in token_ids if i < self.size]).decode("utf-8", "replace")
        return text[1:] if self.strips_leading_space and text.startswith(" ") else text

    def token_bytes(self, token_id: int) -> bytes | None:
        """Return the bytes that a token stands for, None for an id that is not defined."""
        return self._token_bytes[token_id] if 0 <= token_id < self.size else None

    def token_text(self, token_id: int) -> str:
        r"""Return a token as text, every byte as ``\xNN`` if it alone is not valid UTF-8."""
        data = self.token_bytes(token_id) or b""
        text = _utf8_or_none(data)
        return "".join(f"\\x{byte:02x}" for byte in data) if text is None else text

    def token_id(self, text: str) -> int | None:
        """Return the id of the added token that ``text`` always becomes, None if there is none."""
        return self._added_ids.get(text)

    def decode_tables(self, skip_special_tokens: bool) -> DecodeTables:
        """Return (texts, bytes) by id: the text is None where the bytes alone are not valid UTF-8;
        undefined ids, and special ones if they are to be skipped, are empty."""
        return self._tables[skip_special_tokens]

    def min_num_tokens(self, text: str) -> int:
        """Return a lower bound of the number of tokens of ``text`` without tokenising it."""
        if self._vanishing is None:
            return 0
        text = unicodedata.normalize("NFC", text).translate(self._vanishing)
        return cdiv(len(text), self.max_token_chars)


def _decode_tables(token_bytes: list[bytes | None], hidden: frozenset[int]) -> DecodeTables:
    table = [b"" if data is None or i in hidden else data for i, data in enumerate(token_bytes)]
    return [_utf8_or_none(data) for data in table], table


def _utf8_or_none(data: bytes) -> str | None:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None


# --- how a vocabulary spells bytes ----------------------------------------------------------------


@functools.cache
def _byte_alphabet() -> dict[str, int]:
    """Byte-level BPE's printable stand-in of each byte, reversed: character → byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(0x100) if byte not in set(printable)]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(rest)}


class _Spelling:
    """How a tokenizer writes bytes in its vocabulary, read from its decoder."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        self._vocab: dict[str, int] = backend.get_vocab(with_added_tokens=True)
        steps = _steps(backend.decoder, "decoders")
        kinds = {step["type"] for step in steps}
        self._byte_level = "ByteLevel" in kinds
        self._byte_fallback = "ByteFallback" in kinds
        if not self._byte_level and not kinds & {"Metaspace", "ByteFallback", "Replace"}:
            raise ModelError(
                f"the tokenizer's decoder ({', '.join(sorted(kinds)) or 'none'}) is not supported; "
                "byte-level BPE and sentencepiece tokenizers are"
            )
        self.strips_leading_space = any(
            step["type"] == "Strip"
            or (step["type"] == "Metaspace" and step.get("prepend_scheme") != "never")
            for step in steps
        )

    def byte_table(self) -> list[bytes | None]:
        """Return the bytes of every id, None for ids in gaps of the vocabulary."""
        table: list[bytes | None] = [None] * (max(self._vocab.values(), default=-1) + 1)
        for token, token_id in self._vocab.items():
            table[token_id] = self._bytes_of(token)
        for token_id, added in self._backend.get_added_tokens_decoder().items():
            table[token_id] = added.content.encode()
        return table

    def _bytes_of(self, token: str) -> bytes:
        if self._byte_level:
            try:
                return bytes([_byte_alphabet()[char] for char in token])
            except KeyError:  # not written in the alphabet, so it stands for itself
                return token.encode()
        if self._byte_fallback and len(token) == 6 and token.startswith("<0x") and token[5] == ">":
            return bytes.fromhex(token[3:5])
        return token.replace(WORD_START, " ").encode()

    def vanishing(self) -> dict[int, None] | None:
        """Return the characters that encoding may drop (a translation table), or None if text can
        shrink without limit, so that its length says nothing about its number of tokens."""
        model = self._backend.model
        added = self._backend.get_added_tokens_decoder().values()
        if (
            not isinstance(model, models.BPE)
            or any(token.lstrip or token.rstrip for token in added)
            or not all(map(_keeps_length, _steps(self._backend.normalizer, "normalizers")))
        ):
            return None
        unknown_kept = model.unk_token is not None and not model.fuse_unk
        if not self._byte_level:
            return {} if model.byte_fallback or unknown_kept else None
        missing = [b for c, b in _byte_alphabet().items() if c not in self._vocab]
        if not missing or unknown_kept:
            return {}
        # A character of several bytes leaves a token behind if its last byte does.
        if model.unk_token is not None or any(0x80 <= byte < 0xC0 for byte in missing):
            return None
        return {byte: None for byte in missing if byte < 0x80}


def _steps(component: Any, plural: str) -> list[dict[str, Any]]:
    """Return the settings of a normalizer or decoder, one entry per step of a sequence."""
    if component is None:
        return []
    state = json.loads(component.__getstate__())
    return state[plural] if state["type"] == "Sequence" else [state]


def _keeps_length(step: dict[str, Any]) -> bool:
    """Whether a normalizer never shortens text that is in NFC already."""
    if step["type"] == "Replace":
        return len(step["pattern"].get("String", "  ")) <= len(step["content"])
    return step["type"] in ("NFC", "Prepend")


# --- loading --------------------------------------------------------------------------------------


def load_tokenizer(path: Path, chat_template_file: str | None = None) -> Tokenizer:
    """Load the tokenizer of a Hugging Face directory or a ``.gguf`` file.

    ``chat_template_file`` replaces all templates that the model brings. Raises :class:`ModelError`
    with a message for the user if files are missing or of a kind that is not supported.
    """
    backend, special_tokens_map, templates = (
        _read_directory(path) if path.is_dir() else _read_gguf(path)
    )
    if chat_template_file is not None:
        templates = {"default": _read_text(Path(chat_template_file))}
    return Tokenizer(backend, special_tokens_map, templates)


_Parts = tuple[tokenizers.Tokenizer, dict[str, str], dict[str, str]]


def _read_directory(path: Path) -> _Parts:
    file = path / "tokenizer.json"
    if not file.is_file():
        raise ModelError(
            f"{path} has no tokenizer.json; write one with transformers: "
            "AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)"
        )
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception for a file it cannot read
        raise ModelError(f"cannot read {file}: {error}") from error
    config: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        if (path / name).is_file():
            config |= read_json(path / name)
    special_tokens_map = {
        f"{name}_token": text
        for name in SPECIAL_TOKEN_NAMES
        if (text := _token_content(config.get(f"{name}_token"))) is not None
    }
    _add_missing_tokens(backend, config, special_tokens_map)
    # add_bos_token in the configuration is ignored, as in transformers: the file's own
    # post-processor says what goes around a prompt.
    return backend, special_tokens_map, _directory_templates(path, config)


def _add_missing_tokens(
    backend: tokenizers.Tokenizer, config: dict[str, Any], special_tokens_map: dict[str, str]
) -> None:
    """Make tokens that only tokenizer_config.json declares known to the encoder."""
    declared = config.get("added_tokens_decoder") or {}
    for token_id, entry in sorted(((int(k), v) for k, v in declared.items()), key=lambda kv: kv[0]):
        if backend.token_to_id(entry["content"]) is None:
            backend.add_tokens([AddedToken(**{k: v for k, v in entry.items() if k != "__type"})])
        if backend.token_to_id(entry["content"]) != token_id:
            raise ModelError(
                f"tokenizer_config.json gives {entry['content']!r} the id {token_id}, "
                f"tokenizer.json {backend.token_to_id(entry['content'])}"
            )
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    for text in special_tokens_map.values():
        if text not in known and backend.token_to_id(text) is not None:
            backend.add_special_tokens([AddedToken(text, special=True, normalized=False)])


def _surround(
    backend: tokenizers.Tokenizer, bos: str | None, eos: str | None
) -> processors.TemplateProcessing:
    """Return the post-processor that puts ``bos`` before and ``eos`` behind a prompt."""
    tokens = [token for token in (bos, eos) if token is not None]
    return processors.TemplateProcessing(
        single=[*([bos] if bos else []), "$A", *([eos] if eos else [])],
        special_tokens=[(token, backend.token_to_id(token)) for token in tokens],
    )


def _directory_templates(path: Path, config: dict[str, Any]) -> dict[str, str]:
    """Return chat templates by name; files win over tokenizer_config.json."""
    templates = {
        file.stem: _read_text(file)
        for file in sorted(path.glob("additional_chat_templates/*.jinja"))
    }
    if (path / "chat_template.jinja").is_file():
        templates["default"] = _read_text(path / "chat_template.jinja")
    if templates:
        return templates
    given = config.get("chat_template")
    if isinstance(given, list):
        return {entry["name"]: entry["template"] for entry in given}
    return {} if given is None else {"default": given}


def _token_content(value: Any) -> str | None:
    return value.get("content") if isinstance(value, dict) else value


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"cannot read {file}: {error}") from error


# --- GGUF -----------------------------------------------------------------------------------------

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# What tokenizer.ggml.pre names: regular expressions that split the text one after the other.
_GGUF_SPLITS: dict[str, tuple[str, ...]] = {
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais"), (_GPT2,)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "exaone"), (r"\p{N}", _GPT2)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2"), (_CL100K % "",)),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3"), (_CL100K % "{1,3}",)),
    "tekken": (_TEKKEN,),
}
_WHOLE_WORDS_FIRST = frozenset({"llama-bpe", "llama3", "llama-v3", "tekken"})  # also start with BOS
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)  # token types


def _read_gguf(path: Path) -> _Parts:
    metadata = {
        name.removeprefix("tokenizer.ggml."): value
        for name, value in read_gguf_header(path).metadata.items()
        if name.startswith("tokenizer.")
    }
    backend, special_tokens_map = build_gguf_tokenizer(metadata)
    templates = {
        name.removeprefix("tokenizer.chat_template."): text
        for name, text in metadata.items()
        if name.startswith("tokenizer.chat_template.")
    }
    if "tokenizer.chat_template" in metadata:
        templates["default"] = metadata["tokenizer.chat_template"]
    return backend, special_tokens_map, templates


def build_gguf_tokenizer(
    metadata: Mapping[str, Any],
) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    """Build a tokenizer and its special tokens map from the ``tokenizer.ggml.*`` values of a GGUF
    file, named without that prefix. Raises :class:`ModelError` for kinds that are not supported."""
    builders = {"gpt2": _byte_level_bpe, "llama": _sentencepiece_bpe}
    kind = metadata.get("model")
    if kind not in builders or "tokens" not in metadata:
        raise ModelError(
            f"the GGUF file's tokenizer ({kind or 'none'}) is not supported; "
            f"these are: {', '.join(builders)}"
        )
    tokens: list[str] = metadata["tokens"]
    types: list[int] = metadata.get("token_type") or [_NORMAL] * len(tokens)
    while tokens and types[-1] == _UNUSED:  # rows that only pad the embedding matrix
        tokens, types = tokens[:-1], types[:-1]
    backend = builders[kind](metadata, tokens)
    special = (_CONTROL, _UNKNOWN)
    backend.add_tokens(
        [
            AddedToken(token, special=type_ in special, normalized=False)
            for token, type_ in zip(tokens, types, strict=True)
            if type_ in (*special, _USER_DEFINED)
        ]
    )
    ids = {
        "unk_token": metadata.get("unknown_token_id"),
        "pad_token": metadata.get("padding_token_id"),
        "sep_token": metadata.get("seperator_token_id"),  # the format's own spelling
    } | {f"{n}_token": metadata.get(f"{n}_token_id") for n in ("bos", "eos", "cls", "mask")}
    names = {n: tokens[i] for n, i in ids.items() if i is not None and i < len(tokens)}
    starts_with_bos = kind == "llama" or metadata.get("pre") in _WHOLE_WORDS_FIRST
    bos = names.get("bos_token") if metadata.get("add_bos_token", starts_with_bos) else None
    eos = names.get("eos_token") if metadata.get("add_eos_token", False) else None
    backend.post_processor = _surround(backend, bos, eos)
    return backend, names


def _byte_level_bpe(metadata: Mapping[str, Any], tokens: Sequence[str]) -> tokenizers.Tokenizer:
    pre = metadata.get("pre", "default")
    if pre not in _GGUF_SPLITS:
        raise ModelError(
            f"the GGUF file's pre-tokenizer {pre!r} is not supported; "
            f"these are: {', '.join(_GGUF_SPLITS)}"
        )
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["merges"]]
    model = models.BPE(
        {token: i for i, token in enumerate(tokens)},
        merges,
        ignore_merges=pre in _WHOLE_WORDS_FIRST,
    )
    backend = tokenizers.Tokenizer(model)
    if _GGUF_SPLITS[pre] == _GGUF_SPLITS["qwen2"]:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(regex), "isolated") for regex in _GGUF_SPLITS[pre]]
        + [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece_bpe(metadata: Mapping[str, Any], tokens: Sequence[str]) -> tokenizers.Tokenizer:
    vocab = {token: i for i, token in enumerate(tokens)}
    unknown = metadata.get("unknown_token_id", 0)
    model = models.BPE(
        vocab,
        _merges_from_scores(vocab, metadata["scores"]),
        unk_token=tokens[unknown],
        fuse_unk=True,
        byte_fallback="<0x00>" in vocab,
    )
    backend = tokenizers.Tokenizer(model)
    prefix = metadata.get("add_space_prefix", True)
    backend.normalizer = normalizers.Sequence(
        ([normalizers.Prepend(WORD_START)] if prefix else [])
        + [normalizers.Replace(" ", WORD_START)]
    )
    backend.decoder = decoders.Sequence(
        [decoders.Replace(WORD_START, " "), decoders.ByteFallback(), decoders.Fuse()]
        + ([decoders.Strip(" ", 1, 0)] if prefix else [])
    )
    return backend


def _merges_from_scores(vocab: Mapping[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Return the merges that make BPE pick pairs as sentencepiece does: best score of the merged
    piece first."""
    merges = [
        (-scores[piece_id], vocab[piece[:cut]], vocab[piece[cut:]], piece[:cut], piece[cut:])
        for piece, piece_id in vocab.items()
        for cut in range(1, len(piece))
        if piece[:cut] in vocab and piece[cut:] in vocab
    ]
    return [(left, right) for *_, left, right in sorted(merges)]
