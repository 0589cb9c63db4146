"""The tokenizer as llguidance sees it: true bytes, special tokens apart, the right ends."""

import pytest
from fakes import byte_tokenizer
from helpers import make_tokenizer
from llguidance import LLMatcher

from pageserve.grammar import GrammarError, compile_grammar, llguidance_tokenizer
from pageserve.tokenizer import Tokenizer, build_gguf_tokenizer, load_tokenizer


def sentencepiece(**special_tokens: str) -> Tokenizer:
    """The kind of a Llama 2 GGUF file: byte fallback, words that bring their space along."""
    pieces = [*(chr(c) for c in range(33, 127)), "▁", "▁a", "ab", "▁ab"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *pieces]
    backend, names = build_gguf_tokenizer(
        {
            "model": "llama",
            "tokens": tokens,
            "token_type": [2, 3, 3] + [6] * 256 + [1] * len(pieces),
            "scores": [-float(i) for i in range(len(tokens))],
            "bos_token_id": 1,
            "eos_token_id": 2,
            "unknown_token_id": 0,
        }
    )
    return Tokenizer(backend, special_tokens or names)


@pytest.fixture(scope="module", params=["demo", "trained", "bytes", "sentencepiece"])
def tokenizer(request, demo_gguf) -> Tokenizer:
    if request.param == "demo":
        return load_tokenizer(demo_gguf)
    if request.param == "trained":
        return Tokenizer(make_tokenizer().backend_tokenizer, {"eos_token": "<|im_end|>"})
    return byte_tokenizer() if request.param == "bytes" else sentencepiece()


def legal(matcher: LLMatcher) -> set[int]:
    mask = matcher.compute_bitmask()
    return {i for i in range(len(mask) * 8) if mask[i // 8] >> i % 8 & 1}


def test_bytes_and_special_tokens(tokenizer):
    seen = llguidance_tokenizer(tokenizer)
    assert seen.vocab_size == tokenizer.size
    assert seen.eos_tokens == [tokenizer.eos_token_id]
    for i in range(tokenizer.size):
        if tokenizer.token_bytes(i) == b"\xff":  # no part of any UTF-8 text
            continue
        assert seen.is_special_token(i) == (i in tokenizer.special_ids)
        if i not in tokenizer.special_ids:
            assert seen.decode_bytes([i]) == tokenizer.token_bytes(i)


def test_made_once(tokenizer):
    assert llguidance_tokenizer(tokenizer) is llguidance_tokenizer(tokenizer)


@pytest.mark.parametrize("text", ['{"ab": ab}', "ab", " ab", "aé👩‍🚀"])
def test_tokenizing_gives_the_text_back(tokenizer, text):
    """Forced text is split by the tokenizer, which may add a space where a word begins."""
    seen = llguidance_tokenizer(tokenizer)
    assert seen.decode_bytes(seen.tokenize_str(text)) == text.encode()


def test_forced_text_has_no_extra_space(tokenizer):
    matcher = compile_grammar(LLMatcher.grammar_from_regex("abab"), llguidance_tokenizer(tokenizer))
    text = b""
    while not matcher.is_stopped():
        token_id = min(legal(matcher))
        text += tokenizer.token_bytes(token_id) or b""
        assert matcher.consume_token(token_id)
    assert text == b"abab"


def test_every_end_of_the_model_is_legal_where_the_text_may_end(demo_gguf):
    tokenizer = load_tokenizer(demo_gguf)
    seen = llguidance_tokenizer(tokenizer, (2, 0))
    matcher = compile_grammar(LLMatcher.grammar_from_regex("ab*"), seen)
    assert not legal(matcher) & {0, 2}
    assert matcher.consume_tokens(tokenizer.encode("a", add_special_tokens=False))
    assert {0, 2} < legal(matcher)


def test_special_tokens_by_name(tokenizer):
    end = tokenizer.special_tokens_map["eos_token"]
    grammar = LLMatcher.grammar_from_lark(f'start: "a" {end} "b"')
    matcher = compile_grammar(grammar, llguidance_tokenizer(tokenizer))
    assert matcher.consume_tokens(llguidance_tokenizer(tokenizer).tokenize_str("a"))
    assert legal(matcher) == {tokenizer.eos_token_id}
    assert not matcher.is_accepting()


def test_a_model_without_an_end():
    tokenizer = sentencepiece(bos_token="<s>")
    assert tokenizer.eos_token_id is None
    seen = llguidance_tokenizer(tokenizer)
    matcher = compile_grammar(LLMatcher.grammar_from_regex("a"), seen)
    assert matcher.consume_tokens(seen.tokenize_str("a"))
    assert legal(matcher) == {tokenizer.size}, "an id that no model has"


@pytest.mark.parametrize("grammar", ["nonsense", 'start: "a" (")', '{"grammars": []}', ""])
def test_bad_grammars(grammar):
    with pytest.raises(GrammarError):
        compile_grammar(grammar, llguidance_tokenizer(byte_tokenizer()))
