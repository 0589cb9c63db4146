"""How the rows of a step sample: parameters turned into tensors, once a step.

Only what some row asks for is built. What depends on the tokens so far is looked up in the request
table on the device, because with a step in flight the host does not know the last one yet.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from pageserve.sampling_params import SamplingParams
from pageserve.utils import cdiv

FORBIDDEN_BIAS = -100.0  # a logit_bias that bans its token


@dataclass(frozen=True)
class RowSampling:
    """What one row that samples in this step brings along. ``num_tokens`` counts the tokens before
    the one to be drawn, ``num_prompt_tokens`` of them prompt; they are in the table at ``slot``."""

    params: SamplingParams
    seed: int  # 0 … 2**64 - 1
    slot: int
    num_prompt_tokens: int
    num_tokens: int
    bitmask: bytes | None = None  # tokens it may choose, as in SchedulerOutput; None: all


@dataclass(frozen=True)
class TokenMasks:
    """Rows whose tokens a grammar or a list restricts."""

    rows: torch.Tensor  # [r] int64
    bitmasks: torch.Tensor  # [r, words] int32: bit i % 32 of word i // 32 is token i


@dataclass(frozen=True)
class TokenEdits:
    """Values added to single logits; -inf bans the token."""

    rows: torch.Tensor  # [m] int64
    token_ids: torch.Tensor  # [m] int64
    values: torch.Tensor  # [m] float32


@dataclass(frozen=True)
class BadWords:
    """Tokens that are banned where the output ends in the rest of their word."""

    rows: torch.Tensor  # [m] int64
    last_ids: torch.Tensor  # [m] int64
    endings: torch.Tensor  # [m, p] int64, right-aligned
    in_word: torch.Tensor  # [m, p] bool: the rest of the row is padding
    outputs: torch.Tensor  # [m, p] int64, the last p tokens known so far


@dataclass(frozen=True)
class Penalties:
    """Rows with penalties and their token history."""

    rows: torch.Tensor  # [m] int64
    token_ids: torch.Tensor  # [m, length] int64
    num_prompt_tokens: torch.Tensor  # [m] int64
    num_tokens: torch.Tensor  # [m] int64
    repetition: torch.Tensor  # [m] float32
    frequency: torch.Tensor  # [m] float32
    presence: torch.Tensor  # [m] float32
    counts_outputs: bool  # whether a row has one of the last two


@dataclass(frozen=True)
class LogitChanges:
    """All that happens to logits before they are sampled, in this order."""

    masks: TokenMasks | None
    bad_words: BadWords | None
    edits: TokenEdits | None
    penalties: Penalties | None


@dataclass(frozen=True)
class Draws:
    """Parameters of all n rows; a filter at its neutral value is off for the row."""

    temperature: torch.Tensor  # [n] float32, below 1e-5: greedy
    top_k: torch.Tensor  # [n] int32, 0 or less: off
    top_p: torch.Tensor  # [n] float32
    min_p: torch.Tensor  # [n] float32
    seeds: torch.Tensor  # [n] int64, the bits of the unsigned seed
    output_positions: torch.Tensor  # [n] int32, of the token to be drawn
    greedy_rows: torch.Tensor | None  # [g] int64
    free_rows: torch.Tensor | None  # [f] int64: draw from all tokens
    filtered_rows: torch.Tensor | None  # [h] int64: draw from what the filters leave
    max_top_k: int  # over the filtered rows, 0: none has top-k

    def select(self, rows: torch.Tensor) -> "Draws":
        """The parameters of ``rows`` only."""
        return Draws(
            self.temperature[rows],
            self.top_k[rows],
            self.top_p[rows],
            self.min_p[rows],
            self.seeds[rows],
            self.output_positions[rows],
            None,
            None,
            None,
            self.max_top_k,
        )


@dataclass(frozen=True)
class SamplingMetadata:
    """How the n rows of a step sample."""

    vocab_limit: int  # ids from here up are padding
    device: torch.device  # where to sample
    max_logprobs: int = -1  # the most alternatives a row wants, -1: no row wants log probabilities
    draws: Draws | None = None  # None: all rows are greedy
    changes: LogitChanges | None = None


def token_bits(token_ids: Sequence[int], vocab_limit: int) -> np.ndarray:
    """Return int32 words with a bit for each id below ``vocab_limit``, set for these."""
    bits = np.zeros(cdiv(vocab_limit, 32) * 32, dtype=bool)
    ids = np.asarray(token_ids)
    bits[ids[ids < vocab_limit]] = True
    return np.packbits(bits, bitorder="little").view("<i4")


def build_sampling_metadata(
    rows: list[RowSampling],
    token_table: torch.Tensor,  # [slots, length]
    vocab_limit: int,
    eos_token_ids: Iterable[int],
    device: torch.device,
) -> SamplingMetadata:
    """Collect how ``rows`` sample. Costs next to nothing if all are plainly greedy."""
    # MPS has no float64, which the draw and the sums behind top-p want.
    device = device if device.type == "cuda" else torch.device("cpu")
    builder = _Builder(rows, token_table, vocab_limit, device)
    drawing = [i for i, row in enumerate(rows) if not row.params.greedy]
    changed = [i for i, row in enumerate(rows) if _changes_logits(row)]
    return SamplingMetadata(
        vocab_limit=vocab_limit,
        device=device,
        max_logprobs=max(-1 if (k := row.params.logprobs) is None else k for row in rows),
        draws=builder.draws(drawing) if drawing else None,
        changes=builder.changes(changed, eos_token_ids) if changed else None,
    )


def _changes_logits(row: RowSampling) -> bool:
    p = row.params
    return bool(
        row.bitmask is not None
        or p.logit_bias
        or p.bad_words_token_ids
        or p.min_tokens > row.num_tokens - row.num_prompt_tokens
        or _has_penalty(p)
    )


def _has_penalty(p: SamplingParams) -> bool:
    return p.repetition_penalty != 1.0 or p.frequency_penalty != 0.0 or p.presence_penalty != 0.0


class _Builder:
    """Turns rows into device tensors, few transfers and none that waits."""

    def __init__(
        self,
        rows: list[RowSampling],
        token_table: torch.Tensor,
        vocab_limit: int,
        device: torch.device,
    ) -> None:
        self.rows = rows
        self.token_table = token_table
        self.vocab_limit = vocab_limit
        self.device = device

    def draws(self, drawing: list[int]) -> Draws:
        """Parameters of all rows, and which of the rows ``drawing`` draw how."""
        params = [row.params for row in self.rows]
        floats = [[getattr(p, name) for p in params] for name in ("temperature", "top_p", "min_p")]
        positions = [row.num_tokens - row.num_prompt_tokens for row in self.rows]
        top_k = [p.top_k if 0 < p.top_k < self.vocab_limit else 0 for p in params]
        temperature, top_p, min_p = self._send(floats, np.float32)
        top_k_column, output_positions = self._send([top_k, positions], np.int32)
        seeds = np.array([row.seed for row in self.rows], dtype=np.uint64).view(np.int64)
        filtered = [i for i in drawing if top_k[i] or params[i].top_p < 1 or params[i].min_p > 0]
        return Draws(
            temperature,
            top_k_column,
            top_p,
            min_p,
            self._send(seeds, np.int64),
            output_positions,
            greedy_rows=self._rows(set(range(len(params))).difference(drawing)),
            free_rows=self._rows(set(drawing).difference(filtered)),
            filtered_rows=self._rows(set(filtered)),
            max_top_k=max((top_k[i] for i in filtered), default=0),
        )

    def changes(self, changed: list[int], eos_token_ids: Iterable[int]) -> LogitChanges:
        """What happens to the logits of the rows ``changed``."""
        edits: list[tuple[int, int, float]] = []
        words: list[tuple[int, list[int]]] = []
        for i in changed:
            row, p = self.rows[i], self.rows[i].params
            num_outputs = row.num_tokens - row.num_prompt_tokens
            if num_outputs < p.min_tokens:
                stops = {*eos_token_ids, *p.stop_token_ids}
                edits += [(i, token_id, -math.inf) for token_id in sorted(stops)]
            for token_id, bias in (p.logit_bias or {}).items():
                edits.append((i, token_id, bias if bias > FORBIDDEN_BIAS else -math.inf))
            for word in p.bad_words_token_ids or ():
                if len(word) == 1:
                    edits.append((i, word[0], -math.inf))
                elif 1 < len(word) <= num_outputs + 1:
                    words.append((i, word))
        penalised = [i for i in changed if _has_penalty(self.rows[i].params)]
        masked = [i for i in changed if self.rows[i].bitmask is not None]
        return LogitChanges(
            masks=self._token_masks(masked) if masked else None,
            bad_words=self._bad_words(words),
            edits=self._token_edits(edits),
            penalties=self._penalties(penalised) if penalised else None,
        )

    def _token_masks(self, masked: list[int]) -> TokenMasks:
        data = b"".join([self.rows[i].bitmask or b"" for i in masked])
        words = np.frombuffer(data, dtype="<i4").reshape(len(masked), -1)
        return TokenMasks(self._send(masked, np.int64), self._send(words.copy(), np.int32))

    def _token_edits(self, edits: list[tuple[int, int, float]]) -> TokenEdits | None:
        edits = [edit for edit in edits if 0 <= edit[1] < self.vocab_limit]
        if not edits:
            return None
        rows, token_ids, values = zip(*edits, strict=True)
        index = self._send([rows, token_ids], np.int64)
        return TokenEdits(index[0], index[1], self._send(values, np.float32))

    def _bad_words(self, words: list[tuple[int, list[int]]]) -> BadWords | None:
        words = [(i, word) for i, word in words if 0 <= word[-1] < self.vocab_limit]
        if not words:
            return None
        width = max(len(word) for _, word in words) - 1
        endings = np.zeros((len(words), width), dtype=np.int64)
        in_word = np.zeros((len(words), width), dtype=np.int64)
        for line, (_, word) in enumerate(words):
            endings[line, width - len(word) + 1 :] = word[:-1]
            in_word[line, width - len(word) + 1 :] = 1
        ends = np.array([self.rows[i].num_tokens for i, _ in words])[:, None]
        index = self._send([[i for i, _ in words], [word[-1] for _, word in words]], np.int64)
        places = self._send(
            np.stack(
                [
                    np.repeat([[self.rows[i].slot] for i, _ in words], width, axis=1),
                    np.maximum(ends + np.arange(-width, 0), 0),
                ]
            ),
            np.int64,
            self.token_table.device,
        )
        outputs = self.token_table[places[0], places[1]].to(self.device, torch.int64)
        masks = self._send(np.stack([endings, in_word]), np.int64)
        return BadWords(index[0], index[1], masks[0], masks[1].bool(), outputs)

    def _penalties(self, penalised: list[int]) -> Penalties:
        rows = [self.rows[i] for i in penalised]
        columns = self._send(
            [penalised, [r.num_prompt_tokens for r in rows], [r.num_tokens for r in rows]],
            np.int64,
        )
        repetition, frequency, presence = self._send(
            [
                [r.params.repetition_penalty for r in rows],
                [r.params.frequency_penalty for r in rows],
                [r.params.presence_penalty for r in rows],
            ],
            np.float32,
        )
        slots = self._send([r.slot for r in rows], np.int64, self.token_table.device)
        length = max(r.num_tokens for r in rows)
        token_ids = self.token_table[:, :length].index_select(0, slots)
        return Penalties(
            columns[0],
            token_ids.to(self.device, torch.int64),
            columns[1],
            columns[2],
            repetition,
            frequency,
            presence,
            counts_outputs=any(
                r.params.frequency_penalty or r.params.presence_penalty for r in rows
            ),
        )

    def _rows(self, rows: set[int]) -> torch.Tensor | None:
        return self._send(sorted(rows), np.int64) if rows else None

    def _send(
        self, values: Any, dtype: type[np.generic], device: torch.device | None = None
    ) -> torch.Tensor:
        host = torch.from_numpy(np.ascontiguousarray(np.asarray(values, dtype=dtype)))
        device = device or self.device
        if device.type == "cuda":
            return host.pin_memory().to(device, non_blocking=True)
        return host.to(device)
