"""Token ids of one sequence to what the API sends: text, logprobs, and how it ended."""

import functools
import math
import sys
from collections import deque
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from pageserve.engine.detokenizer import Detokenizer
from pageserve.messages import FinishReason, RequestOutput, TokenLogprobs
from pageserve.sampling_params import SamplingParams
from pageserve.tokenizer import Tokenizer

MIN_LOGPROB = -9999.0  # stands for -inf, which JSON cannot say
NEVER = sys.maxsize  # a character behind every text
ChatFinishReason = FinishReason | Literal["tool_calls"]


@dataclass(slots=True)
class LogprobEntry:
    """A token and its log probability; ``bytes`` is None for a special token that is not shown.
    ``top`` has the most likely tokens in its place, best first."""

    token: str
    bytes: list[int] | None
    token_id: int
    logprob: float
    top: list["LogprobEntry"] = field(default_factory=list)


class TextOutput(msgspec.Struct, gc=False):
    """Text released by a step, with the tokens generated since the last such output.

    ``logprobs`` has the tokens whose text begins in ``text`` (None if not asked for), and
    ``end_logprobs`` the last tokens, which no text shows: half a character, EOS or a stop token.
    (What a stop string took away is in neither.)
    ``num_output_tokens`` counts all tokens so far, the ending EOS or stop token included.
    ``stop_reason`` is the stop string or the stop token id that ended the request, if one did.
    ``prompt_logprobs``, if asked for, come with the first output: one for each prompt token but the
    first. ``cumulative_logprob`` sums those of all tokens so far, if they were asked for.
    """

    text: str
    token_ids: list[int]
    logprobs: list[LogprobEntry] | None
    finish_reason: ChatFinishReason | None
    stop_reason: int | str | None
    num_output_tokens: int
    num_cached_tokens: int
    num_preemptions: int
    scheduled_time: float
    error: str | None
    prompt_logprobs: list[TokenLogprobs] | None = None
    cumulative_logprob: float = 0.0
    end_logprobs: list[LogprobEntry] = msgspec.field(default_factory=list)


class StopMatcher:
    """Aho-Corasick automaton over characters: finds the stop string that ends first in a text.

    A hidden special token can be part of a match too: it is one character, an ``atom`` (a lone
    surrogate, which decoded text never holds), and each stop string that spells such tokens is also
    looked for with atoms in their place. Build one with :func:`stop_matcher`.
    """

    def __init__(self, stops: Sequence[str], hidden_tokens: dict[int, str]) -> None:
        """``hidden_tokens`` are the special tokens (id → text) that the output does not show."""
        self.stops = stops
        named = {i: t for i, t in hidden_tokens.items() if t and any(t in stop for stop in stops)}
        texts = sorted(set(named.values()), key=lambda text: (-len(text), text))
        atoms = {text: chr(0xD800 + i) for i, text in enumerate(texts)}
        self.atoms = {token_id: atoms[text] for token_id, text in named.items()}
        self.hide: dict[int, str | None] = {ord(atom): None for atom in atoms.values()}
        self.reveal: dict[int, str | None] = {ord(atom): text for text, atom in atoms.items()}
        self._children: list[dict[str, int]] = [{}]
        self._match: list[tuple[int, int] | None] = [None]  # (stop index, length), or nothing
        for index, stop in enumerate(stops):
            self._insert(stop, index)
            for text, atom in atoms.items():
                stop = stop.replace(text, atom)
            self._insert(stop, index)
        self._fail = [0] * len(self._children)
        self._hold = [0] * len(self._children)
        self._link()
        self._first = frozenset(self._children[0])

    def _insert(self, pattern: str, index: int) -> None:
        node = 0
        for char in pattern:
            if char not in self._children[node]:
                self._children[node][char] = len(self._children)
                self._children.append({})
                self._match.append(None)
            node = self._children[node][char]
        if self._match[node] is None:  # the first of two equal stop strings
            self._match[node] = (index, len(pattern))

    def _link(self) -> None:
        """Breadth first, point every node to its longest proper suffix, and inherit from it."""
        queue = deque((child, 0, 1) for child in self._children[0].values())
        while queue:
            node, fail, depth = queue.popleft()
            self._fail[node] = fail
            self._hold[node] = depth if self._children[node] else self._hold[fail]
            matches = [m for m in (self._match[node], self._match[fail]) if m is not None]
            self._match[node] = min(matches, default=None)
            for char, child in self._children[node].items():
                queue.append((child, self._next(fail, char), depth + 1))

    def _next(self, node: int, char: str) -> int:
        while node and char not in self._children[node]:
            node = self._fail[node]
        return self._children[node].get(char, 0)

    def held(self, state: int) -> int:
        """Length of the longest suffix of the text that is a proper prefix of a stop string."""
        return self._hold[state]

    def scan(
        self, state: int, text: str, may_stop: bool
    ) -> tuple[int, int, tuple[int, int] | None]:
        """Read ``text`` from ``state`` up to the first match, or all of it without ``may_stop``.

        Returns the new state, the number of characters read, and the match that ends there as
        (index of the stop string, length in characters), if there is one.
        """
        if state == 0 and self._first.isdisjoint(text):
            return 0, len(text), None
        for position, char in enumerate(text):
            state = self._next(state, char)
            if may_stop and self._match[state] is not None:
                return state, position + 1, self._match[state]
        return state, len(text), None


@functools.lru_cache(maxsize=32)
def stop_matcher(
    tokenizer: Tokenizer, stops: tuple[str, ...], skip_special_tokens: bool
) -> StopMatcher:
    """Return the automaton for these stop strings, shared by all requests that use them."""
    hidden = tokenizer.special_ids if skip_special_tokens else ()
    return StopMatcher(stops, {token_id: tokenizer.token_text(token_id) for token_id in hidden})


class OutputProcessor:
    """Turns the outputs of one request into text, up to the first thing that ends it.

    ``prompt_token_ids`` matters to sentencepiece models only: their first word loses its space if
    nothing visible stands before it; None means that something does.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        sampling_params: SamplingParams,
        prompt_token_ids: Sequence[int] | None = None,
    ) -> None:
        params = sampling_params
        self.num_output_tokens = 0
        self._tokenizer = tokenizer
        self._params = params
        self._hidden = tokenizer.special_ids if params.skip_special_tokens else frozenset()
        self._detokenizer = Detokenizer(
            tokenizer,
            params.skip_special_tokens,
            strip_leading_space=tokenizer.strips_leading_space
            and prompt_token_ids is not None
            and tokenizer.special_ids.issuperset(prompt_token_ids),
        )
        self._matcher = (
            stop_matcher(tokenizer, tuple(params.stop), params.skip_special_tokens)
            if params.stop
            else None
        )
        # Nothing is taken back if the stop string is shown, unless it shows a hidden token as well.
        self._holds_back = self._matcher is not None and (
            not params.include_stop_str_in_output or bool(self._matcher.atoms)
        )
        self._by_token = self._matcher is not None or params.logprobs is not None
        self._state = 0  # of the matcher
        self._held = ""  # text read and not yet released, atoms included
        self._reveal_from = NEVER  # where hidden tokens in the held text become visible
        self._num_released = 0  # characters of text released, atoms included
        self._token_ids: list[int] = []  # not yet in an output
        self._waiting: list[tuple[int, TokenLogprobs]] = []  # (first character, logprobs)
        self._prompt_logprobs: list[TokenLogprobs] | None = (
            None if params.prompt_logprobs is None else []
        )
        self._cumulative_logprob = 0.0
        self._finished = False

    def process(self, output: RequestOutput) -> TextOutput | None:
        """Return what the step released, None if nothing was and the request goes on.

        After the output that finishes (by a stop string perhaps before the engine knows), every
        further one is ignored.
        """
        if self._finished:
            return None
        finish_reason = output.finish_reason
        token_ids = output.new_token_ids
        stop_reason: int | str | None = output.stop_reason
        # A stop token is the last one; its text is no part of the output.
        stopped_by_token = finish_reason == "stop" and not output.grammar_ended
        body = token_ids[:-1] if stopped_by_token else token_ids
        stop = None
        if self._by_token:
            stop = self._read(body, output.new_logprobs)
            if stop is not None:
                num_read, stop_reason = stop
                token_ids, finish_reason = token_ids[:num_read], "stop"
            elif stopped_by_token:
                self._read_stop_token(output)
            text = self._release(everything=finish_reason is not None)
        else:
            text = self._detokenizer.decode(body)
            if finish_reason == "stop" and self._shows_stop_token(output):
                text += self._detokenizer.decode(token_ids[-1:])
        self.num_output_tokens += len(token_ids)
        if output.new_logprobs:
            self._cumulative_logprob += sum(
                x.logprob for x in output.new_logprobs[: len(token_ids)]
            )
        if output.prompt_logprobs is not None and self._prompt_logprobs is not None:
            self._prompt_logprobs += output.prompt_logprobs
        if self._token_ids:
            token_ids = self._token_ids + token_ids
        if not text and finish_reason is None:
            self._token_ids = token_ids
            return None
        self._token_ids = []
        self._finished = finish_reason is not None
        prompt_logprobs, self._prompt_logprobs = self._prompt_logprobs, None
        return TextOutput(
            text,
            token_ids,
            self._take_logprobs(self._num_released) if self._params.logprobs is not None else None,
            finish_reason,
            stop_reason,
            self.num_output_tokens,
            output.num_cached_tokens,
            output.num_preemptions,
            output.scheduled_time,
            output.error,
            prompt_logprobs,
            self._cumulative_logprob,
            self._take_logprobs(math.inf) if self._finished and stop is None else [],
        )

    def _shows_stop_token(self, output: RequestOutput) -> bool:
        """Whether the request ended with a token of ``stop_token_ids`` that the text may show."""
        return (
            self._params.include_stop_str_in_output
            and output.stop_reason is not None
            and output.stop_reason not in self._tokenizer.special_ids
        )

    def _read(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs] | None
    ) -> tuple[int, str] | None:
        """Read tokens up to a stop string; return how many were read and the string, if any."""
        for index, token_id in enumerate(token_ids):
            text = self._read_token(token_id, logprobs[index] if logprobs else None)
            generated = self.num_output_tokens + index + 1
            stop = self._match(text, may_stop=generated > self._params.min_tokens)
            if stop is not None:
                return index + 1, stop
        return None

    def _read_token(self, token_id: int, logprobs: TokenLogprobs | None) -> str:
        """Append a token's text to the held text and return it."""
        text, start = self._detokenizer.decode_token(token_id)
        if self._matcher is not None and token_id in self._matcher.atoms:
            text, start = self._matcher.atoms[token_id], 0
        if logprobs is not None:
            self._waiting.append((self._num_released + len(self._held) + start, logprobs))
        self._held += text
        return text

    def _read_stop_token(self, output: RequestOutput) -> None:
        logprobs = output.new_logprobs[-1] if output.new_logprobs else None
        if self._shows_stop_token(output):
            self._read_token(output.new_token_ids[-1], logprobs)
        elif logprobs is not None:
            self._waiting.append((NEVER, logprobs))

    def _match(self, text: str, may_stop: bool) -> str | None:
        """Look for a stop string that ends in ``text``, the tail of the held text; cut there."""
        matcher = self._matcher
        if matcher is None:
            return None
        self._state, num_read, match = matcher.scan(self._state, text, may_stop)
        if match is None:
            return None
        index, length = match
        end = len(self._held) - len(text) + num_read
        if self._params.include_stop_str_in_output:
            self._held = self._held[:end]
            self._reveal_from = end - length
        else:
            self._held = self._held[: end - length]
        return matcher.stops[index]

    def _release(self, everything: bool) -> str:
        """Take the text off the held text that no stop string can cut any more."""
        num_held = 0
        if self._matcher is not None and not everything and self._holds_back:
            num_held = self._matcher.held(self._state)
        num_free = len(self._held) - num_held
        text, self._held = self._held[:num_free], self._held[num_free:]
        self._num_released += num_free
        if self._matcher is not None and self._matcher.atoms:
            shown, stop = text[: self._reveal_from], text[self._reveal_from :]
            text = shown.translate(self._matcher.hide) + stop.translate(self._matcher.reveal)
        return text

    def _take_logprobs(self, before: float) -> list[LogprobEntry]:
        """Return the entries of tokens whose text begins before a character."""
        taken = [entry for start, entry in self._waiting if start < before]
        self._waiting = [item for item in self._waiting if item[0] >= before]
        return [logprob_entry(self._tokenizer, entry, self._hidden) for entry in taken]


def logprob_entry(
    tokenizer: Tokenizer, logprobs: TokenLogprobs, hidden_ids: Container[int] = ()
) -> LogprobEntry:
    """Spell out the engine's log probabilities of one token; tokens of ``hidden_ids`` are not part
    of the text, so they have no bytes."""

    def entry(token_id: int, logprob: float) -> LogprobEntry:
        data = None if token_id in hidden_ids else tokenizer.token_bytes(token_id)
        return LogprobEntry(
            tokenizer.token_text(token_id),
            None if data is None else list(data),
            token_id,
            max(logprob, MIN_LOGPROB),
        )

    result = entry(logprobs.token_id, logprobs.logprob)
    result.top = list(map(entry, logprobs.top_token_ids, logprobs.top_logprobs))
    return result
