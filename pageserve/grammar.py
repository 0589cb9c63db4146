"""Grammars as llguidance runs them: its view of a tokenizer, and grammars compiled for it.

The front-end compiles a grammar to find out whether it is good, the engine to mask logits with it;
both do it here, so what the one has accepted the other takes. A grammar is text that
``llguidance.LLMatcher`` reads: what its ``grammar_from_json_schema``, ``grammar_from_regex`` and
``grammar_from_lark`` return.
"""

import functools

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from pageserve.tokenizer import Tokenizer

SPECIAL = b"\xff"  # how llguidance tells a special token from text that looks like it
MAX_LEXER_STATES = 1_000_000


class GrammarError(ValueError):
    """llguidance cannot use a grammar; the message says where it is wrong."""


class _Vocabulary:
    """A :class:`Tokenizer` in the shape that llguidance asks for.

    Special tokens are no text: a grammar reaches them by name (``<|im_end|>`` in lark) and by
    nothing else. Tokens that are added but not special are text. Ids in gaps are never legal.
    """

    def __init__(self, tokenizer: Tokenizer, eos_token_ids: tuple[int, ...]) -> None:
        special = tokenizer.special_ids.union(eos_token_ids)
        self._tokenizer = tokenizer
        self.tokens = [
            SPECIAL + data if i in special else data
            for i in range(tokenizer.size)
            for data in [tokenizer.token_bytes(i) or b""]
        ]
        self.bos_token_id = tokenizer.bos_token_id
        # A model without an end gets one outside of its vocabulary.
        self.eos_token_id = eos_token_ids[0] if eos_token_ids else tokenizer.size
        if not eos_token_ids:
            self.tokens.append(SPECIAL + b"<end>")
        self.special_token_ids: list[int] = []
        self.greedy: LLTokenizer | None = None  # splits what the tokenizer will not give back

    def __call__(self, text: str | bytes) -> list[int]:
        data = text if isinstance(text, bytes) else text.encode()
        ids = self._tokenizer.encode(data.decode(), add_special_tokens=False)
        if self.greedy is None or b"".join([self.tokens[i] for i in ids]) == data:
            return ids
        return self.greedy.greedy_tokenize(data.decode())


@functools.lru_cache(maxsize=4)
def llguidance_tokenizer(tokenizer: Tokenizer, eos_token_ids: tuple[int, ...] = ()) -> LLTokenizer:
    """Return llguidance's view of ``tokenizer``, made once (it takes a fraction of a second).

    ``eos_token_ids`` are the ids that may end a text where its grammar may end; none given means
    the tokenizer's own. To validate a grammar they do not matter. Threads may share the result.
    """
    if not eos_token_ids and tokenizer.eos_token_id is not None:
        eos_token_ids = (tokenizer.eos_token_id,)
    eos_token_ids = tuple(i for i in eos_token_ids if i < tokenizer.size)
    vocabulary = _Vocabulary(tokenizer, eos_token_ids)
    result = LLTokenizer(
        TokenizerWrapper(vocabulary),
        n_vocab=len(vocabulary.tokens),
        eos_token=list(eos_token_ids) or vocabulary.eos_token_id,
    )
    vocabulary.greedy = result
    return result


def compile_grammar(text: str, tokenizer: LLTokenizer) -> LLMatcher:
    """Compile a grammar for a tokenizer; raises :class:`GrammarError` if it is not usable.

    Takes from a fraction of a millisecond to seconds, and lets other threads run meanwhile.
    """
    limits = LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)
    matcher = LLMatcher(tokenizer, text, log_level=0, limits=limits)
    if matcher.is_error():
        raise GrammarError(matcher.get_error())
    return matcher
