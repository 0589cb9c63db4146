"""Log probabilities of prompt tokens: how likely the model found each one behind those before it.

Logits are made for a slice of the positions at a time, so a long prompt needs no more memory than
a short one. Like all log probabilities these are of the raw logits, in float32.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from pageserve.messages import ScheduledRow, TokenLogprobs
from pageserve.worker.request_states import RequestStates, to_device
from pageserve.worker.sampler import raw_logprobs

MAX_LOGITS = 1 << 23  # at a time: 32 MiB in float32


@dataclass(frozen=True)
class ScoringRow:
    """A row of which ``count`` positions, from its first, precede a token of the prompt."""

    start: int  # of the row in the flat batch
    slot: int
    first_position: int
    count: int
    num_logprobs: int  # alternatives wanted


@dataclass(frozen=True)
class PromptScores:
    """Scores of m tokens, row after row, and how they fall to ``rows``."""

    token_ids: torch.Tensor  # [m]
    logprobs: torch.Tensor  # [m]
    top_token_ids: torch.Tensor  # [m, k]
    top_logprobs: torch.Tensor  # [m, k]
    ranks: torch.Tensor  # [m], from 1
    rows: Sequence[ScoringRow]

    def to_lists(self) -> list[list[TokenLogprobs]]:
        """Return the entries of each row; the tensors are on the host and valid by now."""
        columns = zip(
            self.token_ids.tolist(),
            self.logprobs.tolist(),
            self.top_token_ids.tolist(),
            self.top_logprobs.tolist(),
            self.ranks.tolist(),
            strict=True,
        )
        lists = []
        for row in self.rows:
            k = row.num_logprobs
            entries = [next(columns) for _ in range(row.count)]
            lists.append(
                [TokenLogprobs(i, x, ids[:k], top[:k], r) for i, x, ids, top, r in entries]
            )
        return lists


def scoring_rows(rows: Sequence[ScheduledRow], states: RequestStates) -> list[ScoringRow]:
    """Return the rows whose request wants its prompt scored and that have a part of it to score."""
    if not states.scoring_slots:
        return []
    found, start = [], 0
    for row in rows:
        last = int(states.num_prompt_tokens[row.slot]) - 1
        if row.slot in states.scoring_slots and row.num_computed_tokens < last:
            count = min(row.num_scheduled_tokens, last - row.num_computed_tokens)
            k = states.sampling_params(row.slot).prompt_logprobs
            assert k is not None
            found.append(ScoringRow(start, row.slot, row.num_computed_tokens, count, k))
        start += row.num_scheduled_tokens
    return found


def score_prompts(
    rows: Sequence[ScoringRow],
    hidden: torch.Tensor,  # [num_tokens, hidden_size]
    compute_logits: Callable[[torch.Tensor], torch.Tensor],
    states: RequestStates,
    vocab_limit: int,
) -> PromptScores:
    """Score the prompt token behind each position of ``rows``, on the device."""
    places = [
        np.stack(
            [
                np.arange(row.start, row.start + row.count),
                np.full(row.count, row.slot),
                np.arange(row.first_position + 1, row.first_position + row.count + 1),
            ]
        )
        for row in rows
    ]
    index, slots, positions = to_device(
        torch.from_numpy(np.concatenate(places, axis=1)), states.device
    )
    token_ids = states.token_ids[slots, positions].to(torch.int64)
    k = max(row.num_logprobs for row in rows)
    size = max(1, MAX_LOGITS // vocab_limit)
    parts = [
        _score(compute_logits(hidden[at])[:, :vocab_limit].float(), ids, k)
        for at, ids in zip(index.split(size), token_ids.split(size), strict=True)
    ]
    columns = [torch.cat(column) for column in zip(*parts, strict=True)]
    return PromptScores(token_ids, *columns, rows)


def _score(logits: torch.Tensor, token_ids: torch.Tensor, k: int) -> tuple[torch.Tensor, ...]:
    """Return log probabilities [n], the k best, ids and values [n, k], and ranks [n]."""
    if not logits.is_cuda:  # MPS lacks what ranking needs
        logits, token_ids = logits.cpu(), token_ids.cpu()
    known = token_ids < logits.shape[1]
    token_ids = token_ids.clamp_max(logits.shape[1] - 1)
    chosen, top_ids, top = raw_logprobs(logits, token_ids, k)
    ranks = (logits > logits.gather(1, token_ids[:, None])).sum(1) + 1
    return chosen.masked_fill(~known, -torch.inf), top_ids, top, ranks
