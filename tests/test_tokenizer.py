"""Loading tokenizers of both file kinds, and what they say about ids, bytes and lengths."""

import itertools
import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from pageserve.checkpoint import ModelError
from pageserve.hub import resolve_model
from pageserve.tokenizer import PLAIN_MARK, Tokenizer, build_gguf_tokenizer, load_tokenizer

TEXTS = [
    "Hello world, it's 2024: 1234567 tokens!",
    "  leading\n\n\n  and\ttabs \r\n trailing  ",
    "是 the 終わり 👩‍🚀🧭 é e\u0301 ½²³ Ⅷ ٣٤ \U000f0000",
    "a\x00b\x04c\x1d <|im_start|>user\nhi<|im_end|>\n <|unknown|>",
    "",
]


@pytest.fixture(scope="module")
def demo() -> Tokenizer:
    """The embedded model's tokenizer, from its GGUF file."""
    return load_tokenizer(resolve_model("SmolLM2-135M-Instruct", None))


@pytest.fixture
def directory(tmp_path: Path, demo: Tokenizer) -> Path:
    """A Hugging Face directory with the embedded model's tokenizer."""
    demo._backend.save(str(tmp_path / "tokenizer.json"))
    write_config(tmp_path)
    return tmp_path


def write_config(path: Path, **changes: object) -> None:
    config = {
        "bos_token": "<|im_start|>",
        "eos_token": {"content": "<|im_end|>", "__type": "AddedToken"},
        "pad_token": None,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(config | changes))


# --- the embedded model ---------------------------------------------------------------------------


def test_embedded_model(demo):
    assert (demo.size, demo.bos_token_id, demo.eos_token_id) == (49152, 1, 2)
    assert demo.special_ids == frozenset(range(17))
    assert demo.special_tokens_map["eos_token"] == "<|im_end|>"
    assert demo.encode("Hello", add_special_tokens=True) == demo.encode("Hello", False)
    assert demo.encode("<|im_start|>", add_special_tokens=False) == [1]
    assert "<|im_start|>" in demo.chat_template
    assert not demo.strips_leading_space


def test_digits_are_single_tokens(demo):
    assert [demo.token_text(i) for i in demo.encode("a 123½", False)] == [
        "a",
        " ",
        "1",
        "2",
        "3",
        "½",
    ]


@given(st.text(st.sampled_from([*" \n\t'sS1٣½Ⅷé是🧭_-.a", "\u0301", "\u00a0"]), max_size=30))
@settings(max_examples=300, deadline=None)
def test_splits_like_the_published_pre_tokenizer(demo, text):
    published = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    ours = demo._backend.pre_tokenizer.pre_tokenize_str(text)
    assert [piece for piece, _ in ours] == [p for p, _ in published.pre_tokenize_str(text)]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("skip", [True, False])
def test_decode_equals_the_library(demo, text, skip):
    ids = demo.encode(text, add_special_tokens=False)
    assert demo.decode(ids, skip) == demo._backend.decode(ids, skip_special_tokens=skip)


def test_token_bytes(demo):
    ids = demo.encode("是 the<|im_end|>", add_special_tokens=False)
    assert b"".join(map(demo.token_bytes, ids)) == "是 the<|im_end|>".encode()
    assert demo.token_bytes(demo.size) is None and demo.token_bytes(-1) is None
    compass = demo.encode("🧭", add_special_tokens=False)
    assert demo.token_text(compass[0]) == "\\xf0\\x9f"
    assert demo.token_text(demo.encode(" the", False)[0]) == " the"
    assert demo.decode([compass[0], demo.size + 7], skip_special_tokens=True) == "\ufffd"


@given(st.text(max_size=60))
@settings(max_examples=300, deadline=None)
def test_length_bound_never_exceeds_the_truth(demo, text):
    assert demo.min_num_tokens(text) <= len(demo.encode(text, add_special_tokens=False))


def test_length_bound_refuses_what_is_absurd(demo):
    assert demo.min_num_tokens("x" * 2_000_000) > 8192
    assert demo.min_num_tokens("\x04" * 2_000_000) == 0  # the vocabulary cannot spell this byte
    longest = "#" * 80
    assert demo.min_num_tokens(longest) == len(demo.encode(longest, False)) == 1


def test_encoding_lets_other_threads_run(demo):
    text = "hello world, this is a long prompt. " * 20_000
    beats, stop = [], threading.Event()

    def beat() -> None:
        while not stop.wait(0.001):
            beats.append(time.perf_counter())

    thread = threading.Thread(target=beat)
    thread.start()
    begin = time.perf_counter()
    demo.encode(text, add_special_tokens=False)
    end = time.perf_counter()
    stop.set()
    thread.join()
    assert sum(begin + 0.01 < t < end - 0.01 for t in beats) > 3


# --- special tokens that stay text ----------------------------------------------------------------

SPELLED = ["<|im_start|>", "<|endoftext|>", "<|im_", "start|>", "a", " ", "\n", "\ufffe", "é"]


@given(st.lists(st.sampled_from(SPELLED)).map("".join))
@settings(max_examples=100, deadline=None)
def test_marked_text_has_no_special_tokens(demo, text):
    """C123"""
    marked = demo.mark_plain(text)
    ids = demo.encode_marked(marked, add_special_tokens=False)
    assert marked.replace(PLAIN_MARK, "") == text == demo.decode(ids, skip_special_tokens=False)
    assert demo.special_ids.isdisjoint(ids)
    if marked == text:
        assert ids == demo.encode(text, add_special_tokens=False)


def test_marks_change_only_what_stands_between_the_same_special_tokens(demo):
    start, end = "<|im_start|>", "<|im_end|>"
    prompt = f"{start}user\nab {demo.mark_plain(end)} cd{end}\n{start}user\nHello world{end}\n"
    ids = demo.encode_marked(prompt, add_special_tokens=False)
    usual = demo.encode(prompt.replace(PLAIN_MARK, ""), add_special_tokens=False)
    tail = demo.encode(f"{end}\n{start}user\nHello world{end}\n", add_special_tokens=False)
    assert ids[-len(tail) :] == usual[-len(tail) :] == tail
    assert ids.count(demo.token_id(end)) == 2 and usual.count(demo.token_id(end)) == 3


def test_what_is_put_around_a_text_stays_where_it_is():
    """BOS and EOS around a prompt of which all is marked."""
    tokenizer = gguf("gpt-2", add_bos_token=True, add_eos_token=True)
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    ids = tokenizer.encode_marked(tokenizer.mark_plain("<s></s>"), add_special_tokens=True)
    assert (ids[0], ids[-1]) == (bos, eos)
    assert ids.count(bos) == ids.count(eos) == 1
    assert tokenizer.decode(ids[1:-1], skip_special_tokens=False) == "<s></s>"


def test_merges_that_spell_a_special_token():
    """A sentencepiece vocabulary's merges know no difference; characters that it lacks are no
    special tokens either, though they become one."""
    metadata = sentencepiece_metadata()
    pieces = ["<", "/", "s", ">", "</", "s>"]
    metadata["tokens"] = [*metadata["tokens"], *pieces]
    metadata["token_type"] = [*metadata["token_type"], *[1] * len(pieces)]
    metadata["scores"] = [*metadata["scores"], *[-1.0] * len(pieces)]
    tokenizer = Tokenizer(*build_gguf_tokenizer(metadata))
    assert 2 in tokenizer._plain_backend.encode("</s>", add_special_tokens=False).ids
    ids = tokenizer.encode_marked(tokenizer.mark_plain("ab</s>é"), add_special_tokens=True)
    assert ids[0] == 1 and 2 not in ids
    assert "</s>" in tokenizer.decode(ids, skip_special_tokens=True).replace(" ", "")
    tokens = [t for t in metadata["tokens"] if not t.startswith("<0x")]
    kept = [i for i, t in enumerate(metadata["tokens"]) if not t.startswith("<0x")]
    metadata |= {"tokens": tokens}
    metadata |= {k: [metadata[k][i] for i in kept] for k in ("token_type", "scores")}
    unknowing = Tokenizer(*build_gguf_tokenizer(metadata))
    assert unknowing.mark_plain("aéb") == "aéb" and 0 in unknowing.encode("aéb", False)
    assert unknowing.mark_plain("<unk>é") == f"<{PLAIN_MARK}unk>é"


def test_loading_imports_neither_torch_nor_transformers():
    code = (
        "import sys, pageserve.tokenizer, pageserve.api.chat, pageserve.engine.output_processor;"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# --- Hugging Face directories ---------------------------------------------------------------------


def test_directory_equals_transformers(directory):
    transformers = pytest.importorskip("transformers")
    expected = transformers.AutoTokenizer.from_pretrained(directory)
    ours = load_tokenizer(directory)
    assert (ours.bos_token_id, ours.eos_token_id) == (expected.bos_token_id, expected.eos_token_id)
    assert ours.size == len(expected)
    assert ours.special_ids == set(expected.all_special_ids) | set(range(17))
    for text in TEXTS:
        assert ours.encode(text, True) == expected.encode(text)
        ids = expected.encode(text)
        assert ours.decode(ids, True) == expected.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("in_file", [True, False])
def test_bos_comes_from_the_file_and_not_from_the_config(directory, in_file):
    transformers = pytest.importorskip("transformers")
    backend = Backend.from_file(str(directory / "tokenizer.json"))
    if in_file:
        backend.post_processor = processors.TemplateProcessing(
            single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
        )
    backend.save(str(directory / "tokenizer.json"))
    write_config(directory, add_bos_token=not in_file)
    ids = load_tokenizer(directory).encode("hi", add_special_tokens=True)
    assert (ids[0] == 1) == in_file
    assert ids == transformers.AutoTokenizer.from_pretrained(directory).encode("hi")


def test_tokens_that_only_the_config_declares(directory):
    entry = {
        "content": "<tool_call>",
        "special": False,
        "normalized": False,
        "__type": "AddedToken",
    }
    named = {"content": "<|extra|>", "special": True, "normalized": False}
    write_config(directory, added_tokens_decoder={"49152": entry, "49153": named})
    tokenizer = load_tokenizer(directory)
    assert tokenizer.encode("a<tool_call><|extra|>", False)[1:] == [49152, 49153]
    assert tokenizer.size == 49154
    assert tokenizer.decode([49152, 49153], skip_special_tokens=True) == "<tool_call>"
    write_config(directory, added_tokens_decoder={"50000": entry})
    with pytest.raises(ModelError, match="50000"):
        load_tokenizer(directory)


def test_named_special_token_that_the_file_holds_as_a_plain_one(directory):
    write_config(directory, eos_token="Ġthe")
    tokenizer = load_tokenizer(directory)
    assert tokenizer.eos_token_id in tokenizer.special_ids
    assert tokenizer.encode("Ġthe", False) == [tokenizer.eos_token_id]


def test_truncation_and_padding_of_the_file_are_off(directory):
    backend = Backend.from_file(str(directory / "tokenizer.json"))
    backend.enable_truncation(2)
    backend.enable_padding(length=50)
    backend.save(str(directory / "tokenizer.json"))
    assert load_tokenizer(directory).encode("1 2 3", False) == load_tokenizer(directory).encode(
        "1 2", False
    ) + load_tokenizer(directory).encode(" 3", False)


def test_template_file_wins_over_the_config(directory):
    assert load_tokenizer(directory).chat_template is None
    write_config(directory, chat_template="from config")
    assert load_tokenizer(directory).chat_template == "from config"
    (directory / "chat_template.jinja").write_text("from file é", encoding="utf-8")
    assert load_tokenizer(directory).chat_template == "from file é"
    option = directory / "mine.jinja"
    option.write_text("from option")
    assert load_tokenizer(directory, str(option)).chat_template == "from option"
    with pytest.raises(ModelError, match="nowhere"):
        load_tokenizer(directory, str(directory / "nowhere.jinja"))


def test_named_templates(directory):
    names = [{"name": n, "template": f"{n} text"} for n in ("default", "tool_use", "rag")]
    write_config(directory, chat_template=names)
    tokenizer = load_tokenizer(directory)
    assert tokenizer.get_chat_template(tools=False) == "default text"
    assert tokenizer.get_chat_template(tools=True) == "tool_use text"
    (directory / "additional_chat_templates").mkdir()
    (directory / "additional_chat_templates" / "tool_use.jinja").write_text("tools from file")
    (directory / "chat_template.jinja").write_text("default from file")
    tokenizer = load_tokenizer(directory)
    assert tokenizer.get_chat_template(tools=False) == "default from file"
    assert tokenizer.get_chat_template(tools=True) == "tools from file"


def test_refusals_name_the_reason(tmp_path):
    with pytest.raises(ModelError, match=r"no tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)
    backend = Backend(models.WordLevel({"a": 0}, unk_token="a"))
    backend.decoder = decoders.WordPiece()
    with pytest.raises(ModelError, match="WordPiece"):
        Tokenizer(backend)


# --- lengths --------------------------------------------------------------------------------------


def test_no_bound_where_text_can_vanish():
    vocab = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}

    def tokenizer(**options: object) -> Tokenizer:
        backend = Backend(models.BPE(vocab, [], **options))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        return backend

    assert Tokenizer(tokenizer()).max_token_chars == 1
    stripping = tokenizer()
    stripping.normalizer = normalizers.Strip()
    swallowing = tokenizer()
    swallowing.add_special_tokens([AddedToken("<x>", rstrip=True)])
    for backend in (stripping, swallowing):
        assert Tokenizer(backend).max_token_chars == sys.maxsize
        assert Tokenizer(backend).min_num_tokens("a" * 1000) == 0
    composing = tokenizer()
    composing.normalizer = normalizers.NFC()
    accents = "e\u0301" * 100
    assert Tokenizer(composing).min_num_tokens(accents) == 100
    assert len(Tokenizer(composing).encode(accents, False)) == 200


# --- GGUF -----------------------------------------------------------------------------------------


def gguf_metadata(pre: str, *words: str, **changes: object) -> dict:
    tokens = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = []
    for word in words:
        for size in range(2, len(word) + 1):
            if word[:size] not in tokens:
                tokens.append(word[:size])
                merges.append(f"{word[: size - 1]} {word[size - 1]}")
    types = [1] * len(tokens)
    tokens += ["<s>", "</s>", "<tool_call>", "[PAD1]", "[PAD2]"]
    types += [3, 3, 4, 5, 5]
    ids = {"bos_token_id": len(tokens) - 5, "eos_token_id": len(tokens) - 4}
    base = {"model": "gpt2", "pre": pre, "tokens": tokens, "token_type": types, "merges": merges}
    return base | ids | changes


def gguf(pre: str, *words: str, **changes: object) -> Tokenizer:
    return Tokenizer(*build_gguf_tokenizer(gguf_metadata(pre, *words, **changes)))


def pieces(tokenizer: Tokenizer, text: str) -> list[str]:
    return [p for p, _ in tokenizer._backend.pre_tokenizer.pre_tokenize_str(text)]


def test_gguf_token_types():
    tokenizer = gguf("gpt-2")
    assert tokenizer.size == 259  # padding rows are no tokens
    assert tokenizer.special_ids == {256, 257}
    assert tokenizer.encode("a<s><tool_call>", False)[1:] == [256, 258]
    assert tokenizer.decode([256, 258], skip_special_tokens=True) == "<tool_call>"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (256, 257)
    assert tokenizer.special_tokens_map == {"bos_token": "<s>", "eos_token": "</s>"}


def test_gguf_bos_and_eos():
    assert gguf("gpt-2").encode("a", True) == gguf("gpt-2").encode("a", False)
    assert gguf("llama-bpe").encode("a", True)[0] == 256
    assert gguf("llama-bpe", add_bos_token=False).encode("a", True)[0] != 256
    assert gguf("gpt-2", add_bos_token=True, add_eos_token=True).encode("a", True)[::2] == [
        256,
        257,
    ]


def test_gguf_splits():
    text = "it's IT'S 12345 a\n\n b"
    assert pieces(gguf("gpt-2"), text) == [
        *("it", "'s", "ĠIT", "'", "S", "Ġ12345", "Ġa", "ĊĊ", "Ġb")
    ]
    assert pieces(gguf("smollm"), "a 12") == ["a", "Ġ", "1", "2"]
    assert pieces(gguf("qwen2"), text) == [
        *("it", "'s", "ĠIT", "'S", "Ġ", *"12345", "Ġa", "ĊĊ", "Ġb")
    ]
    assert pieces(gguf("llama-bpe"), "12345") == ["123", "45"]
    assert pieces(gguf("tekken"), "helloWorld12") == ["hello", "World", "1", "2"]
    assert pieces(gguf("default"), "a+b 12") == ["a", "+", "b", "Ġ", "12"]
    with pytest.raises(ModelError, match="deepseek-llm"):
        gguf("deepseek-llm")


def test_gguf_qwen2_composes_characters():
    assert gguf("qwen2").encode("e\u0301", False) == gguf("qwen2").encode("é", False)
    assert gguf("gpt-2").encode("e\u0301", False) != gguf("gpt-2").encode("é", False)


def test_gguf_whole_words_before_merges():
    assert gguf("gpt-2", "ab").encode("ab", False) == [256]
    changes = {"merges": []}
    assert len(gguf("gpt-2", "ab", **changes).encode("ab", False)) == 2
    assert len(gguf("llama-bpe", "ab", **changes).encode("ab", False)) == 1


def test_gguf_of_another_kind():
    for metadata in ({"model": "bert", "tokens": ["a"]}, {}, {"model": "gpt2"}):
        with pytest.raises(ModelError, match="not supported"):
            build_gguf_tokenizer(metadata)


# --- sentencepiece in GGUF ------------------------------------------------------------------------

PIECES = {"▁": -9.0, "a": -8.0, "b": -7.5, "c": -7.2, "ab": -3.0, "bc": -2.0, "▁a": -4.0}
PIECES |= {"abc": -5.0, "▁ab": -1.0, "cc": -2.5, "▁▁": -6.0, "ca": -6.5, "bca": -0.5}


def sentencepiece_metadata(**changes: object) -> dict:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *PIECES]
    types = [2, 3, 3, *[6] * 256, *[1] * len(PIECES)]
    scores = [0.0] * 259 + list(PIECES.values())
    ids = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    base = {"model": "llama", "tokens": tokens, "token_type": types, "scores": scores}
    return base | ids | changes


def sentencepiece_reference(text: str) -> list[str]:
    """Merge the neighbours with the best score, leftmost first, until none merge."""
    symbols = list("▁" + text.replace(" ", "▁"))
    while True:
        pairs = [
            (-PIECES[left + right], i)
            for i, (left, right) in enumerate(itertools.pairwise(symbols))
            if left + right in PIECES
        ]
        if not pairs:
            break
        _, i = min(pairs)
        symbols[i : i + 2] = ["".join(symbols[i : i + 2])]
    return [
        t for s in symbols for t in ([s] if s in PIECES else map("<0x{:02X}>".format, s.encode()))
    ]


@given(st.text(st.sampled_from("aabbcc é🧭"), min_size=1, max_size=20))
@settings(max_examples=400, deadline=None)
def test_sentencepiece_merges_by_score(text):
    tokenizer = Tokenizer(*build_gguf_tokenizer(sentencepiece_metadata()))
    ids = tokenizer.encode(text, add_special_tokens=False)
    tokens = sentencepiece_metadata()["tokens"]
    assert [tokens[i] for i in ids] == sentencepiece_reference(text)
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert tokenizer.min_num_tokens(text) <= len(ids)


def test_sentencepiece_options():
    tokenizer = Tokenizer(*build_gguf_tokenizer(sentencepiece_metadata()))
    assert tokenizer.strips_leading_space
    assert tokenizer.encode("ab", add_special_tokens=True)[0] == 1
    assert tokenizer.token_bytes(3 + 0xE6) == b"\xe6"
    assert tokenizer.token_text(259) == " "
    bare = Tokenizer(*build_gguf_tokenizer(sentencepiece_metadata(add_space_prefix=False)))
    assert not bare.strips_leading_space
    assert bare.decode(bare.encode(" ab", False), True) == " ab"
