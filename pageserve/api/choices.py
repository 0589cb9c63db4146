"""How the prompts of a request become sequences of the engine, and these the choices of a reply.

prompts      p0                p1
sequences    s0   s1   s2      s3   s4   s5      (one a prompt where sampling is greedy)
choices      c0   c1           c2   c3           (all of them, copies of one, or the n best)
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pageserve.api.chat_output import ChatOutput, Piece
from pageserve.api.ids import tool_call_id
from pageserve.api.reasoning import Reasoning
from pageserve.api.tool_parser import Text
from pageserve.engine.output_processor import (
    MIN_LOGPROB,
    LogprobEntry,
    TextOutput,
    logprob_entry,
)
from pageserve.messages import TokenLogprobs
from pageserve.tokenizer import Tokenizer


@dataclass
class ToolCall:
    """A call of a tool, joined."""

    name: str
    arguments: list[str] = field(default_factory=list)

    def message(self) -> dict[str, Any]:
        """Return the call as a message has it, under an id of its own: choices may be copies."""
        function = {"name": self.name, "arguments": "".join(self.arguments)}
        return {"id": tool_call_id(), "type": "function", "function": function}


@dataclass
class Choice:
    """The outputs of one choice, joined."""

    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[LogprobEntry] = field(default_factory=list)
    end_logprobs: list[LogprobEntry] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    reasoning: list[str] = field(default_factory=list)
    tool_calls: list[ToolCall] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    mean_logprob: float = -math.inf  # of a generated token

    def add(self, output: TextOutput) -> None:
        """Append an output."""
        if isinstance(output, ChatOutput):
            self._add_pieces(output.pieces)
        else:
            self.text.append(output.text)
        self.hold(output)
        self.finish_reason = output.finish_reason
        self.stop_reason = output.stop_reason
        self.prompt_logprobs += output.prompt_logprobs or ()
        if output.num_output_tokens:
            self.mean_logprob = output.cumulative_logprob / output.num_output_tokens

    def hold(self, output: TextOutput) -> None:
        """Append what an output has beside its text."""
        self.token_ids += output.token_ids
        self.logprobs += output.logprobs or ()
        self.end_logprobs += output.end_logprobs

    def _add_pieces(self, pieces: Sequence[Piece]) -> None:
        for piece in pieces:
            if isinstance(piece, Text):
                self.text.append(piece.text)
            elif isinstance(piece, Reasoning):
                self.reasoning.append(piece.text)
            else:
                if piece.name is not None:
                    self.tool_calls.append(ToolCall(piece.name))
                self.tool_calls[piece.index].arguments.append(piece.arguments)

    def message(self, reasoning_field: str) -> dict[str, Any]:
        """Return the choice as a message of the assistant."""
        text = "".join(self.text)
        nothing_said = not text and (self.tool_calls or self.reasoning)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": None if nothing_said else text,
            "refusal": None,
            "annotations": [],
        }
        if self.reasoning:
            message[reasoning_field] = "".join(self.reasoning)
        if self.tool_calls:
            message["tool_calls"] = [call.message() for call in self.tool_calls]
        return message


@dataclass(frozen=True)
class Fanout:
    """``best_of`` sequences are wanted for each of ``num_prompts``, of which ``n`` are returned.
    Greedy ones would all be the same, so one runs and stands for them all."""

    num_prompts: int = 1
    n: int = 1
    best_of: int = 1
    greedy: bool = False

    @property
    def num_choices(self) -> int:
        """Choices of the reply."""
        return self.num_prompts * self.n

    @property
    def sequences_per_prompt(self) -> int:
        """Sequences that run for each prompt."""
        return 1 if self.greedy else self.best_of

    @property
    def num_copies(self) -> int:
        """How many sequences each one that runs stands for."""
        return self.best_of if self.greedy else 1

    def choices_of(self, sequence: int) -> range:
        """Return the choices that a sequence feeds, where all are returned (as in a stream)."""
        copies = self.n if self.greedy else 1
        return range(sequence * copies, (sequence + 1) * copies)

    def copies_of(self, choice: int) -> range:
        """Return the choices that the sequence of this one feeds, itself among them."""
        return self.choices_of(choice // self.n if self.greedy else choice)

    def select(self, outcomes: Sequence[Choice]) -> list[Choice]:
        """Return the choices of the reply, the best of each prompt first if there are more
        sequences than choices."""
        if self.greedy:
            return [outcome for outcome in outcomes for _ in range(self.n)]
        if self.best_of == self.n:
            return list(outcomes)
        chosen: list[Choice] = []
        for start in range(0, len(outcomes), self.best_of):
            group = outcomes[start : start + self.best_of]
            chosen += sorted(group, key=lambda choice: -choice.mean_logprob)[: self.n]
        return chosen


@dataclass(frozen=True)
class Prompt:
    """A prompt and how a reply spells it. ``hidden_ids`` are the special tokens that stand for
    nothing in ``text``: those that the tokenizer has put around it."""

    token_ids: list[int]
    text: str = ""
    hidden_ids: frozenset[int] = frozenset()

    @classmethod
    def of(cls, tokenizer: Tokenizer, token_ids: list[int], text: str | None) -> "Prompt":
        """Return a prompt that will be echoed: as ``text`` if it was given as text."""
        spelled = tokenizer.decode(token_ids, skip_special_tokens=False)
        if text is None:
            return cls(token_ids, spelled)
        return cls(token_ids, text, frozenset() if spelled == text else tokenizer.special_ids)

    def entries(
        self, tokenizer: Tokenizer, scores: Sequence[TokenLogprobs], k: int
    ) -> list[LogprobEntry]:
        """Return an entry for each token with ``k`` alternatives; the first has no score."""
        first = TokenLogprobs(self.token_ids[0], 0.0)
        entries = [logprob_entry(tokenizer, s, self.hidden_ids) for s in (first, *scores)]
        for entry in entries:
            entry.top = entry.top[:k]
        return entries


def prompt_logprobs(
    tokenizer: Tokenizer, scores: Sequence[TokenLogprobs], k: int
) -> list[dict[str, Any] | None]:
    """Spell the scores of a prompt as vLLM does: null for the first token, then for each one
    ``{id: {logprob, rank, decoded_token}}`` of itself and the ``k`` best."""

    def entry(token_id: int, logprob: float, rank: int) -> dict[str, Any]:
        text = tokenizer.token_text(token_id)
        return {"logprob": max(logprob, MIN_LOGPROB), "rank": rank, "decoded_token": text}

    spelled: list[dict[str, Any] | None] = [None]
    for score in scores:
        best = zip(score.top_token_ids[:k], score.top_logprobs[:k], strict=True)
        entries = {str(score.token_id): entry(score.token_id, score.logprob, score.rank)}
        for rank, (token_id, logprob) in enumerate(best, 1):
            entries.setdefault(str(token_id), entry(token_id, logprob, rank))
        spelled.append(entries)
    return spelled
