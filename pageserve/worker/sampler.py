"""From logits to token ids: masks, penalties, filters and one reproducible draw per row.

    raw logits ─ masks, edits ─ penalties ─ temperature ─ min-p, top-k, top-p ─ draw
        └ log probabilities are of these

A draw depends on the request's seed, the token's place in the output and the logits, never on the
batch: Gumbel-max with noise ``-log(e)`` for an exponential variable ``e`` of every token. They are
drawn top-down (Maddison et al., A* Sampling, 2014): of each group of 64 ids first the least ``e``
and who has it, then what the others have more, which is exponential again. So a group's best is
bounded by one number, and of a vocabulary only a few groups are drawn token by token. With ``w``
the words of Philox4x32-10, key ``seed``, and ``E(w) = -log(((w >> 8) + 0.5) / 2**24)``:

    group g, counter (g, output position, 1, 0):    least e = E(w[0]) / 64, of token w[1] % 64
    another token, counter (id, position, 0, 0):    e = least e + E(w[0])

Ties go to the lowest id everywhere. On CUDA the filters and the draw are Triton kernels and nothing
waits for the device; elsewhere they run here, on the host.

No full sort: min-p, top-k and top-p each keep a prefix of the ranking, a cutoff below which no
survivor can lie comes from the maxima of groups of tokens, and only what lies above it is ranked.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from typing import NamedTuple

import torch
from torch.nn import functional

from pageserve.worker.sampling_metadata import (
    Draws,
    LogitChanges,
    Penalties,
    SamplingMetadata,
    TokenMasks,
)

GROUP_SIZE = 64  # tokens that are drawn together, and whose maximum stands for them
DENSE_SHARE = 8  # look at all tokens if more than one group in so many is wanted
NOISE_CHUNK = 32768  # counters at a time, to stay in cache
MARGIN = 1e-9  # by which rounding may lift a token above the bound of its group
NO_TOKEN = -1


@dataclass(frozen=True)
class SamplerOutput:
    """``token_ids`` [n] int64, -1 for a row without a usable logit. Log probabilities of the raw
    logits, if any row wants them: the chosen token's [n] and the k best, ids and values [n, k]."""

    token_ids: torch.Tensor
    logprobs: torch.Tensor | None = None
    top_token_ids: torch.Tensor | None = None
    top_logprobs: torch.Tensor | None = None


class Sampler:
    """Stateless; an object so that a runner can be given another one."""

    def __call__(self, logits: torch.Tensor, metadata: SamplingMetadata) -> SamplerOutput:
        """Choose a token for every row of ``logits`` [n, vocab] float32, which may be changed."""
        home = logits.device
        logits = logits[:, : metadata.vocab_limit].to(metadata.device)
        changed = logits
        if metadata.changes is not None:
            raw_needed = metadata.max_logprobs >= 0
            changed = apply_changes(logits.clone() if raw_needed else logits, metadata.changes)
        token_ids = (_choose_on_gpu if logits.is_cuda else _choose)(changed, metadata.draws)
        output = [token_ids.to(home)]
        if metadata.max_logprobs >= 0:
            parts = raw_logprobs(logits, token_ids, metadata.max_logprobs)
            output += [part.to(home) for part in parts]
        return SamplerOutput(*output)


# --- log probabilities ----------------------------------------------------------------------------


def raw_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, k: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return log_softmax(``logits`` [n, v]) at ``token_ids`` [n] as [n], and the ids and values
    of the ``k`` best as [n, k], best first, ties by id. Rows that hold NaN come back as NaN."""
    norm = _logsumexp(logits)[:, None]
    chosen = logits.gather(1, token_ids.clamp_min(0)[:, None]) - norm
    k = min(k, logits.shape[1])
    top_ids = (_top_ids_on_gpu if logits.is_cuda else _top_ids)(logits, k)
    return chosen[:, 0], top_ids, logits.gather(1, top_ids) - norm


def _logsumexp(logits: torch.Tensor) -> torch.Tensor:
    if not logits.is_cuda:
        return logits.logsumexp(-1)
    from pageserve.kernels import sampling

    return sampling.logsumexp(logits)


def _top_ids(logits: torch.Tensor, k: int) -> torch.Tensor:
    if k == 0:
        return torch.empty(len(logits), 0, dtype=torch.int64)
    logits = logits.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    scores = Scores(logits, _group_maxima(logits), torch.ones(len(logits)))
    cutoff = _top_k_cutoff(scores, torch.full((len(logits),), k), k)
    ranked, places, _ = _rank(scores.reaching(cutoff), len(logits))
    return ranked.token_ids[places < k].view(len(logits), k)


def _top_ids_on_gpu(logits: torch.Tensor, k: int) -> torch.Tensor:
    """One int64 key per token, value first and lower ids before higher: no ties, no waiting."""
    ids = torch.arange(logits.shape[1], device=logits.device)
    return ((_ordered_bits(logits) << 32) - ids).topk(k).indices


def _ordered_bits(values: torch.Tensor) -> torch.Tensor:
    """Map float32 to int64 of 32 significant bits and the same order."""
    bits = (values + 0.0).view(torch.int32)  # -0.0 becomes 0.0
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()


# --- changes --------------------------------------------------------------------------


def apply_changes(logits: torch.Tensor, changes: LogitChanges) -> torch.Tensor:
    """Change ``logits`` [n, v] in place: masks, bans, biases, then penalties."""
    if changes.masks is not None:
        _apply_bitmasks(logits, changes.masks)
    if (words := changes.bad_words) is not None:
        complete = ((words.outputs == words.endings) | ~words.in_word).all(1)
        ban = torch.where(complete, -torch.inf, 0.0)
        logits.index_put_((words.rows, words.last_ids), ban, accumulate=True)
    if (edits := changes.edits) is not None:
        logits.index_put_((edits.rows, edits.token_ids), edits.values, accumulate=True)
    if changes.penalties is not None:
        _apply_penalties(logits, changes.penalties)
    return logits


def _apply_bitmasks(logits: torch.Tensor, masks: TokenMasks) -> None:
    """Forbid tokens whose bit is not set. Ids beyond the last word are left to the caller."""
    places = masks.bitmasks.view(torch.uint8).int()
    biases = functional.embedding(places, _byte_biases(logits.device)).flatten(1)
    size = min(logits.shape[1], biases.shape[1])
    # Adding keeps a NaN, which must not go unseen.
    logits[:, :size].index_add_(0, masks.rows, biases[:, :size])


@cache
def _byte_biases(device: torch.device) -> torch.Tensor:
    """Return [256, 8]: what each byte of a bitmask adds to the logits of its eight tokens."""
    allowed = (torch.arange(256)[:, None] >> torch.arange(8)) & 1
    return torch.where(allowed == 1, 0.0, -torch.inf).to(device)


def _apply_penalties(logits: torch.Tensor, penalties: Penalties) -> None:
    """Change the logits of the tokens that occur, and touch no others."""
    vocab = logits.shape[1]
    ids = penalties.token_ids
    position = torch.arange(ids.shape[1], device=ids.device)
    known = (position < penalties.num_tokens[:, None]) & (ids < vocab)
    # Places without a token repeat the first one: a token is written as often as it occurs,
    # always the same value.
    tokens = torch.where(known, ids, ids[:, :1]).clamp_max(vocab - 1)
    rows = penalties.rows[:, None]
    x = logits[rows, tokens]
    repetition = penalties.repetition[:, None]
    x = torch.where(x > 0, x / repetition, x * repetition)
    if penalties.counts_outputs:
        output = known & (position >= penalties.num_prompt_tokens[:, None])
        counts = torch.zeros(len(ids), vocab, device=ids.device)
        counts.scatter_add_(1, tokens, output.float())
        count = counts.gather(1, tokens)
        x -= penalties.frequency[:, None] * count + penalties.presence[:, None] * (count > 0)
    logits[rows, tokens] = x


# --- the choice -----------------------------------------------------------------------------------


def _choose_on_gpu(logits: torch.Tensor, draws: Draws | None) -> torch.Tensor:
    from pageserve.kernels import sampling

    if draws is None:
        return sampling.greedy_sample(logits)
    return sampling.sample(
        logits,
        draws.temperature,
        draws.top_k,
        draws.top_p,
        draws.min_p,
        draws.seeds,
        draws.output_positions,
    )


def _choose(logits: torch.Tensor, draws: Draws | None) -> torch.Tensor:
    if draws is None:
        return _choose_best(logits)
    token_ids = torch.empty(len(logits), dtype=torch.int64)
    if (rows := draws.greedy_rows) is not None:
        token_ids[rows] = _choose_best(logits[rows])
    if (rows := draws.free_rows) is not None:
        token_ids[rows] = _draw(logits, rows, draws, _pick_of_all)
    if (rows := draws.filtered_rows) is not None:
        token_ids[rows] = _draw(logits, rows, draws, _pick_of_filtered)
    return token_ids


def _choose_best(logits: torch.Tensor) -> torch.Tensor:
    best, token_ids = logits.max(-1)  # NaN if the row holds one; ties: the first
    return token_ids.masked_fill_(~best.isfinite(), NO_TOKEN)


def _draw(
    logits: torch.Tensor,
    rows: torch.Tensor,
    draws: Draws,
    pick: Callable[["Scores", Draws], torch.Tensor],
) -> torch.Tensor:
    """Draw for ``rows`` of the batch; ``pick`` does it for those that are usable."""
    if len(rows) < len(logits):
        logits = logits[rows]
    maxima = _group_maxima(logits)
    usable = maxima.amax(-1).isfinite()
    if not usable.all():
        rows, logits, maxima = rows[usable], logits[usable], maxima[usable]
    draws = draws.select(rows)
    token_ids = torch.full((len(usable),), NO_TOKEN)
    if len(rows):
        token_ids[usable] = pick(Scores(logits, maxima, draws.temperature), draws)
    return token_ids


def _pick_of_all(scores: "Scores", draws: Draws) -> torch.Tensor:
    """Draw among all tokens, of which those of most groups cannot win."""
    n, num_groups = scores.maxima.shape
    vocab = scores.logits.shape[1]
    groups = torch.arange(num_groups).repeat(n)
    seeds = draws.seeds.repeat_interleave(num_groups)
    positions = draws.output_positions.repeat_interleave(num_groups)
    least, firsts = (x.view(n, num_groups) for x in group_draws(seeds, groups, positions))
    noise = least.log().neg_()
    bounds = noise + scores.maxima / scores.temperature[:, None]
    first_ids = torch.arange(0, num_groups * GROUP_SIZE, GROUP_SIZE) + firsts
    of_first = scores.logits.gather(1, first_ids.clamp_max(vocab - 1))
    of_first.masked_fill_(first_ids >= vocab, -torch.inf)  # the last group may be short
    reached = (noise + of_first / scores.temperature[:, None]).amax(-1, keepdim=True)
    contend = (bounds >= reached - MARGIN) & (bounds > -torch.inf)
    rows, contenders = contend.nonzero(as_tuple=True)
    token_ids = (contenders[:, None] * GROUP_SIZE + torch.arange(GROUP_SIZE)).flatten()
    rows, least, firsts = (
        x.repeat_interleave(GROUP_SIZE) for x in (rows, least[contend], firsts[contend])
    )
    values = scores.logits[rows, token_ids.clamp_max(vocab - 1)] / scores.temperature[rows]
    values.masked_fill_(token_ids >= vocab, -torch.inf)
    return _pick(Candidates(rows, token_ids, values), draws, least, firsts)


def _pick_of_filtered(scores: "Scores", draws: Draws) -> torch.Tensor:
    """Draw among the tokens that survive the filters."""
    candidates = filter_tokens(scores, draws.top_k, draws.top_p, draws.min_p, draws.max_top_k)
    rows, groups = candidates.rows, candidates.token_ids // GROUP_SIZE
    drawn = group_draws(draws.seeds[rows], groups, draws.output_positions[rows])
    return _pick(candidates, draws, *drawn)


def _pick(
    candidates: "Candidates",  # at least one of every row
    draws: Draws,
    least: torch.Tensor,  # [m], of the candidates' groups, see group_draws
    firsts: torch.Tensor,  # [m]
) -> torch.Tensor:
    """Perturb the candidates and return every row's winner."""
    rows, token_ids, values = candidates
    bounds = values - least.log()
    reached = torch.full((len(draws.seeds),), -torch.inf, dtype=torch.float64)
    of_first = torch.where(token_ids % GROUP_SIZE == firsts, bounds, -torch.inf)
    reached.scatter_reduce_(0, rows, of_first, "amax")
    contends = (bounds >= reached[rows] - MARGIN).nonzero()[:, 0]
    rows, token_ids, values, least, firsts = (
        x.index_select(0, contends) for x in (rows, token_ids, values, least, firsts)
    )
    seeds, positions = draws.seeds[rows], draws.output_positions[rows]
    perturbed = values + gumbel_noise(seeds, token_ids, positions, least, firsts)
    best = torch.full_like(reached, -torch.inf)
    best.scatter_reduce_(0, rows, perturbed, "amax")
    ties = perturbed == best[rows]
    winners = torch.full((len(best),), torch.iinfo(torch.int64).max)
    return winners.scatter_reduce_(0, rows[ties], token_ids[ties], "amin")


# --- filters --------------------------------------------------------------------------------------


class Candidates(NamedTuple):
    """Some tokens of some rows, row by row."""

    rows: torch.Tensor  # [m] int64
    token_ids: torch.Tensor  # [m] int64
    values: torch.Tensor  # [m]


@dataclass(frozen=True)
class Scores:
    """Logits to be divided by the temperature, which is done for the few tokens that matter.

    ``maxima`` are those of groups of tokens: if g groups reach a value, so do at least g tokens.
    """

    logits: torch.Tensor  # [n, v]
    maxima: torch.Tensor  # [n, groups]
    temperature: torch.Tensor  # [n]

    @cached_property
    def best(self) -> torch.Tensor:
        """The highest score per row, [n]."""
        return self.maxima.amax(-1) / self.temperature

    def reaching(self, cutoff: torch.Tensor) -> Candidates:
        """The tokens of every row whose score is at least ``cutoff`` [n], ids ascending."""
        # Division may round a little lower logit to the same score.
        logit_cutoff = cutoff * self.temperature
        logit_cutoff -= logit_cutoff.abs() * 1e-6 + 1e-30
        groups = self.maxima >= logit_cutoff[:, None]
        if int(groups.sum()) * DENSE_SHARE > groups.numel():
            rows, token_ids = (self.logits >= logit_cutoff[:, None]).nonzero(as_tuple=True)
        else:
            group_rows, group_ids = groups.nonzero(as_tuple=True)
            rows = group_rows.repeat_interleave(GROUP_SIZE)
            token_ids = (group_ids[:, None] * GROUP_SIZE + torch.arange(GROUP_SIZE)).flatten()
            token_ids.clamp_max_(self.logits.shape[1] - 1)  # the last group may be short …
        values = self.logits[rows, token_ids] / self.temperature[rows]
        hits = values >= cutoff[rows]
        hits[1:] &= (token_ids[1:] != token_ids[:-1]) | (rows[1:] != rows[:-1])  # … and repeat
        return Candidates(rows[hits], token_ids[hits], values[hits])


def _group_maxima(logits: torch.Tensor) -> torch.Tensor:
    """Return the maxima of consecutive groups of ``logits`` [n, v]; NaN if the group holds one."""
    whole = logits.shape[1] // GROUP_SIZE * GROUP_SIZE
    maxima = logits[:, :whole].view(len(logits), -1, GROUP_SIZE).amax(-1)
    if whole < logits.shape[1]:
        maxima = torch.cat([maxima, logits[:, whole:].amax(-1, keepdim=True)], dim=1)
    return maxima


def _rank(candidates: Candidates, num_rows: int) -> tuple[Candidates, torch.Tensor, torch.Tensor]:
    """Order the candidates of each row, best first, ties by id. Also return every candidate's
    place, 0, 1, … within its row, and where each row begins, [num_rows]."""
    rows, token_ids, values = candidates
    order = ((rows << 32) - _ordered_bits(values)).argsort(stable=True)
    counts = rows.bincount(minlength=num_rows)
    starts = counts.cumsum(0) - counts
    rows = rows[order]
    places = torch.arange(len(rows)) - starts[rows]
    return Candidates(rows, token_ids[order], values[order]), places, starts


def filter_tokens(
    scores: Scores,
    top_k: torch.Tensor,  # [n], 0 or less: off
    top_p: torch.Tensor,  # [n]
    min_p: torch.Tensor,  # [n]
    max_top_k: int,
) -> Candidates:
    """Return the tokens that survive min-p, top-k and top-p, best first.

    Of the tokens with at least ``min_p`` of the best one's probability the ``top_k`` best are
    kept, and of these the shortest prefix that has ``top_p`` of their mass, but at least one."""
    n, vocab = scores.logits.shape
    top_k = torch.where((top_k > 0) & (top_k < vocab), top_k.long(), vocab)
    by_mass = (top_p < 1) & (top_k == vocab)
    cutoff = scores.best + min_p.log() - 1e-3  # -inf without min-p
    if max_top_k:
        cutoff = torch.maximum(cutoff, _top_k_cutoff(scores, top_k, max_top_k))
    total = torch.zeros(n, dtype=torch.int64)
    if len(heavy := by_mass.nonzero()[:, 0]):
        total[heavy] = _total_mass(scores, heavy, min_p)
        bound = _top_p_cutoff(scores, top_p.double() * total, total)
        cutoff = torch.where(by_mass, torch.maximum(cutoff, bound), cutoff)
    cutoff.clamp_min_(torch.finfo(cutoff.dtype).min)  # banned tokens are not ranked
    (rows, token_ids, values), places, starts = _rank(scores.reaching(cutoff), n)
    weight = _weight(values, scores.best[rows])
    keep = (places < top_k[rows]) & (weight >= min_p[rows])
    mass = _mass(weight.masked_fill_(~keep, 0))
    # Without top-k the cutoff dropped tokens that still count in the whole.
    total = torch.where(by_mass, total, torch.zeros_like(total).index_add_(0, rows, mass))
    before = mass.cumsum(0) - mass
    before -= before[starts][rows]
    target = torch.where(top_p < 1, top_p.double() * total, torch.inf)
    keep &= (before < target[rows]) | (places == 0)
    return Candidates(rows[keep], token_ids[keep], values[keep])


def _weight(values: torch.Tensor, best: torch.Tensor) -> torch.Tensor:
    """Return probabilities relative to the best token's, float64."""
    return (values.double() - best).exp_()


def _mass(weight: torch.Tensor) -> torch.Tensor:
    """Return weights in fixed point, int64: sums are exact in any order and batch."""
    return weight.mul(2.0**44).long()


def _total_mass(scores: Scores, rows: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """Return the mass of all tokens of ``rows`` that min-p leaves; row by row, to stay in cache."""
    totals = []
    for row in rows.tolist():
        weight = _weight(scores.logits[row] / scores.temperature[row], scores.best[row])
        totals.append(_mass(weight.masked_fill_(weight < min_p[row], 0)).sum())
    return torch.stack(totals)


def _top_k_cutoff(scores: Scores, top_k: torch.Tensor, max_top_k: int) -> torch.Tensor:
    """Return [n] scores that the ``top_k`` [n] best tokens reach; -inf where that is not known."""
    ranked = scores.maxima.topk(min(max_top_k, scores.maxima.shape[1])).values
    kth = ranked.gather(1, (top_k[:, None] - 1).clamp_max(ranked.shape[1] - 1))[:, 0]
    return (kth / scores.temperature).masked_fill(top_k > ranked.shape[1], -torch.inf)


def _top_p_cutoff(scores: Scores, target: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """Return [n] scores that the likeliest tokens with mass ``target`` [n] reach. ``total`` [n]
    is the mass of all tokens that count."""
    # Once the groups' maxima alone have the mass, so have the tokens that reach the last of them.
    ranked = scores.maxima.sort(-1, descending=True).values / scores.temperature[:, None]
    mass = _mass(_weight(ranked, scores.best[:, None])).cumsum(-1).double()
    place = torch.searchsorted(mass, target[:, None])
    last = ranked.gather(1, place.clamp_max(ranked.shape[1] - 1))
    last = last.masked_fill(place >= ranked.shape[1], -torch.inf)[:, 0]
    # All tokens below this together weigh less than what may be dropped.
    spare = (total - target).clamp_min(1) / (scores.logits.shape[1] * 2.0**44)
    return torch.maximum(last, (scores.best + spare.log()).float() - 1e-3)


# --- noise ----------------------------------------------------------------------------------------


def gumbel_noise(
    seeds: torch.Tensor,
    token_ids: torch.Tensor,
    positions: torch.Tensor,
    least: torch.Tensor,
    firsts: torch.Tensor,
) -> torch.Tensor:
    """Return the draw's noise, float64 [m], for int64 ``seeds``, ``token_ids`` and ``positions``
    [m], and what :func:`group_draws` says of the tokens' groups."""
    words, _ = _words(seeds, token_ids, positions, 0)
    more = _exponential(words).masked_fill_(token_ids % GROUP_SIZE == firsts, 0)
    return more.add_(least).log_().neg_()


def group_draws(
    seeds: torch.Tensor, groups: torch.Tensor, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the least exponential variable, float64 [m], of each of ``groups`` [m], and the place
    within the group of the token that has it, int64 [m]."""
    first, second = _words(seeds, groups, positions, 1)
    return _exponential(first).div_(GROUP_SIZE), second % GROUP_SIZE


def _words(
    seeds: torch.Tensor, numbers: torch.Tensor, positions: torch.Tensor, kind: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the first two words [m] of the counters (number, position, kind, 0)."""
    words = torch.empty(2, len(numbers), dtype=torch.int64)
    for start in range(0, len(numbers), NOISE_CHUNK):
        part = slice(start, start + NOISE_CHUNK)
        zero = torch.zeros_like(numbers[part])
        counter = (numbers[part], positions[part].long(), zero + kind, zero)
        key = (seeds[part] & _MASK, (seeds[part] >> 32) & _MASK)
        words[0, part], words[1, part], _, _ = philox4x32(counter, key)
    return words[0], words[1]


def _exponential(words: torch.Tensor) -> torch.Tensor:
    """Return the exponential variables, float64, of ``words``."""
    return (words >> 8).double().add_(0.5).mul_(2.0**-24).log_().neg_()


_MASK = 0xFFFFFFFF
_FACTORS = torch.tensor([[0xD2511F53], [0xCD9E8D57]])
_STEPS = torch.tensor([[0x9E3779B9], [0xBB67AE85]])


def philox4x32(
    counter: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    key: tuple[torch.Tensor, torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the output words of Philox4x32-10; all words are int64 tensors below 2**32."""
    # The two halves of a round are two rows: one operation serves both. They change places every
    # round, so the constants and keys exist in both orders.
    keys = torch.stack(key)
    in_order = ((_FACTORS, keys + _STEPS), (_FACTORS.flip(0), keys.flip(0)))
    even = torch.stack((counter[0], counter[2]))
    odd = torch.stack((counter[1], counter[3]))
    product = torch.empty_like(even)
    for i in range(10):
        # 64-bit products wrap to signed, which leaves their bits right. Only the factors need
        # clean upper halves; the low halves pass on as they are and are masked later.
        torch.mul(even, in_order[i % 2][0], out=product)
        torch.bitwise_right_shift(product, 32, out=even)
        even[0].bitwise_xor_(odd[1])
        even[1].bitwise_xor_(odd[0])
        round_keys = in_order[1 - i % 2][1]
        even.bitwise_xor_(round_keys).bitwise_and_(_MASK)
        round_keys += 2 * (_STEPS if i % 2 else _STEPS.flip(0))
        odd, product = product, odd
    odd.bitwise_and_(_MASK)
    return even[0], odd[0], even[1], odd[1]
