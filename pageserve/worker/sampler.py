"""From logits to token ids: masks, penalties, filters and one reproducible draw per row.

    raw logits ─ edits ─ penalties ─ temperature ─ min-p, top-k, top-p ─ draw
        └ log probabilities are of these

A draw depends on the request's seed, the token's place in the output and the logits, never on the
batch: Gumbel-max with noise ``-log(-log(u))``, ``u = ((w >> 8) + 0.5) / 2**24``, ``w`` the first
word of Philox4x32-10 with key ``seed`` and counter ``(token id, output position, 0, 0)``. Ties go
to the lowest id everywhere. On CUDA the filters and the draw are Triton kernels and nothing waits
for the device; elsewhere they run here, on the host.

No full sort: min-p, top-k and top-p each keep a prefix of the ranking, a cutoff below which no
survivor can lie comes from the maxima of groups of tokens, and only what lies above it is ranked.
"""

import math
from dataclasses import dataclass

import torch

from pageserve.worker.sampling_metadata import (
    Draws,
    LogitChanges,
    Penalties,
    RowSampling,
    SamplingMetadata,
    build_sampling_metadata,
)

__all__ = ["RowSampling", "Sampler", "SamplerOutput", "SamplingMetadata", "build_sampling_metadata"]

NOISE_MIN = -math.log(-math.log(2.0**-25))  # -2.852…
NOISE_MAX = -math.log(-math.log1p(-(2.0**-25)))  # 17.328…
GROUP_SIZE = 64  # tokens whose maximum stands for them
NOISE_CHUNK = 65536  # draws at a time, to stay in cache
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
        """Choose a token for every row of ``logits`` [n, vocab] float32, which stay as they are."""
        home = logits.device
        logits = logits[:, : metadata.vocab_limit].to(metadata.device)
        changed = logits
        if metadata.changes is not None:
            changed = apply_changes(logits.clone(), metadata.changes)
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
    norm = logits.logsumexp(-1, keepdim=True)
    chosen = logits.gather(1, token_ids.clamp_min(0)[:, None]) - norm
    k = min(k, logits.shape[1])
    top_ids = (_top_ids_on_gpu if logits.is_cuda else _top_ids)(logits, k)
    return chosen[:, 0], top_ids, logits.gather(1, top_ids) - norm


def _top_ids(logits: torch.Tensor, k: int) -> torch.Tensor:
    if k == 0:
        return torch.empty(len(logits), 0, dtype=torch.int64)
    logits = logits.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    maxima = _group_maxima(logits, at_least=k)
    ranking = _rank(logits, maxima.topk(k).values[:, -1])
    return ranking.token_ids[ranking.places < k].view(len(logits), k)


def _top_ids_on_gpu(logits: torch.Tensor, k: int) -> torch.Tensor:
    """One int64 key per token, value first and lower ids before higher: no ties, no waiting."""
    bits = (logits + 0.0).view(torch.int32)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    ids = torch.arange(logits.shape[1], device=logits.device)
    return ((ordered.long() << 32) - ids).topk(k).indices


# --- changes --------------------------------------------------------------------------


def apply_changes(logits: torch.Tensor, changes: LogitChanges) -> torch.Tensor:
    """Change ``logits`` [n, v] in place: allow-lists, bans, biases, then penalties."""
    if (allowed := changes.allowed) is not None:
        kept = logits[allowed.pair_rows, allowed.pair_ids]
        logits[allowed.rows] += -torch.inf  # adding keeps a NaN, which must not go unseen
        logits[allowed.pair_rows, allowed.pair_ids] = kept
    if (words := changes.bad_words) is not None:
        complete = ((words.outputs == words.endings) | ~words.in_word).all(1)
        ban = torch.where(complete, -torch.inf, 0.0)
        logits.index_put_((words.rows, words.last_ids), ban, accumulate=True)
    if (edits := changes.edits) is not None:
        logits.index_put_((edits.rows, edits.token_ids), edits.values, accumulate=True)
    if changes.penalties is not None:
        _apply_penalties(logits, changes.penalties)
    return logits


def _apply_penalties(logits: torch.Tensor, penalties: Penalties) -> None:
    x = logits[penalties.rows]
    vocab = x.shape[1]
    position = torch.arange(penalties.token_ids.shape[1], device=x.device)
    ids = penalties.token_ids
    # Places that do not count go to a column of their own, which is cut off.
    known = (position < penalties.num_tokens[:, None]) & (ids >= 0) & (ids < vocab)
    output = known & (position >= penalties.num_prompt_tokens[:, None])

    def count(places: torch.Tensor) -> torch.Tensor:
        columns = torch.where(places, ids, vocab)
        counts = torch.zeros(len(x), vocab + 1, device=x.device)
        return counts.scatter_add_(1, columns, torch.ones_like(columns, dtype=counts.dtype))[:, :-1]

    repetition = penalties.repetition[:, None]
    x = torch.where(count(known) > 0, torch.where(x > 0, x / repetition, x * repetition), x)
    counts = count(output)
    x -= penalties.frequency[:, None] * counts + penalties.presence[:, None] * (counts > 0)
    logits[penalties.rows] = x


# --- the choice -----------------------------------------------------------------------------------


def _choose_on_gpu(logits: torch.Tensor, draws: Draws | None) -> torch.Tensor:
    from pageserve.kernels import sampling

    if draws is None:
        token_ids = sampling.greedy_sample(logits)
    else:
        token_ids = sampling.sample(
            logits,
            draws.temperature,
            draws.top_k,
            draws.top_p,
            draws.min_p,
            draws.seeds,
            draws.output_positions,
        )
    chosen = logits.gather(1, token_ids.clamp_min(0)[:, None])[:, 0]
    return token_ids.masked_fill(chosen == torch.inf, NO_TOKEN)


def _choose(logits: torch.Tensor, draws: Draws | None) -> torch.Tensor:
    best, token_ids = logits.max(-1)  # NaN if the row holds one; ties: the first
    usable = best.isfinite()
    if draws is not None:
        for rows, draw in ((draws.free_rows, _draw), (draws.filtered_rows, _draw_filtered)):
            if rows is not None and len(rows := rows[usable[rows]]):
                token_ids[rows] = draw(logits, best, rows, draws)
    return token_ids.masked_fill_(~usable, NO_TOKEN)


def _scale(
    logits: torch.Tensor, best: torch.Tensor, rows: torch.Tensor, draws: Draws
) -> tuple[torch.Tensor, torch.Tensor]:
    """Divide ``rows`` of the logits and of their maxima by the temperature."""
    temperature = draws.temperature[rows]
    chosen = logits if len(rows) == len(logits) else logits[rows]
    return chosen / temperature[:, None], best[rows] / temperature


def _draw(
    logits: torch.Tensor, best: torch.Tensor, rows: torch.Tensor, draws: Draws
) -> torch.Tensor:
    """Draw from all tokens; noise is made only for those that can win."""
    scaled, scaled_best = _scale(logits, best, rows, draws)
    # First the likeliest tokens: what they reach, with the largest noise there is, sets the bar
    # for all others (the margin covers rounding).
    _, reached = _perturbed_best(scaled, scaled_best - 3, rows, draws)
    bar = torch.minimum(scaled_best, (reached - NOISE_MAX).float() - 1e-3 - 1e-6 * reached.abs())
    return _perturbed_best(scaled, bar.float(), rows, draws)[0]


def _perturbed_best(
    scaled: torch.Tensor, floor: torch.Tensor, rows: torch.Tensor, draws: Draws
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return, per row, the id and the value of the best perturbed token from ``floor`` up."""
    row, token_ids = (scaled >= floor[:, None]).nonzero(as_tuple=True)
    return _pick(row, token_ids, scaled[row, token_ids], rows, draws)


def _draw_filtered(
    logits: torch.Tensor, best: torch.Tensor, rows: torch.Tensor, draws: Draws
) -> torch.Tensor:
    """Draw from what min-p, top-k and top-p leave, in this order."""
    scaled, scaled_best = _scale(logits, best, rows, draws)
    row, token_ids, values = filter_tokens(
        scaled,
        scaled_best,
        draws.top_k[rows],
        draws.top_p[rows],
        draws.min_p[rows],
        draws.max_top_k,
    )
    return _pick(row, token_ids, values, rows, draws)[0]


def _pick(
    row: torch.Tensor,  # [m], index into rows
    token_ids: torch.Tensor,  # [m]
    values: torch.Tensor,  # [m]
    rows: torch.Tensor,
    draws: Draws,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Perturb the candidates; return the winner's id and its value for each of ``rows``."""
    batch_row = rows[row]
    noise = gumbel_noise(draws.seeds[batch_row], token_ids, draws.output_positions[batch_row])
    perturbed = values.double() + noise
    best = torch.full((len(rows),), -torch.inf, dtype=torch.float64)
    best.scatter_reduce_(0, row, perturbed, "amax")
    winners = torch.where(perturbed == best[row], token_ids, torch.iinfo(torch.int64).max)
    ids = torch.full((len(rows),), torch.iinfo(torch.int64).max)
    return ids.scatter_reduce_(0, row, winners, "amin"), best


# --- filters --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ranking:
    """The tokens of all rows from their cutoff up, row by row, best first, ties by id."""

    rows: torch.Tensor  # [m] int64
    token_ids: torch.Tensor  # [m] int64
    values: torch.Tensor  # [m]
    places: torch.Tensor  # [m] int64: 0, 1, … within the row
    starts: torch.Tensor  # [n] int64: where a row begins


def _rank(values: torch.Tensor, cutoff: torch.Tensor) -> Ranking:
    """Rank the tokens of ``values`` [n, v] that reach ``cutoff`` [n]."""
    rows, token_ids = (values >= cutoff[:, None]).nonzero(as_tuple=True)
    selected = values[rows, token_ids]
    order = selected.argsort(descending=True, stable=True)
    order = order[rows[order].argsort(stable=True)]
    counts = rows.bincount(minlength=len(values))
    starts = counts.cumsum(0) - counts
    rows = rows[order]
    places = torch.arange(len(rows)) - starts[rows]
    return Ranking(rows, token_ids[order], selected[order], places, starts)


def _group_maxima(values: torch.Tensor, at_least: int) -> torch.Tensor:
    """Return the maxima of disjoint groups that cover ``values`` [n, v], ``at_least`` of them:
    if g of them reach a value, so do g tokens."""
    num_groups = values.shape[1] // GROUP_SIZE
    if num_groups < max(at_least, GROUP_SIZE):
        return values
    whole = values[:, : num_groups * GROUP_SIZE].view(-1, GROUP_SIZE, num_groups).amax(1)
    return torch.cat([whole, values[:, num_groups * GROUP_SIZE :]], dim=1)


def filter_tokens(
    scaled: torch.Tensor,  # [n, v]
    best: torch.Tensor,  # [n], the maxima
    top_k: torch.Tensor,  # [n], 0 or less: off
    top_p: torch.Tensor,  # [n]
    min_p: torch.Tensor,  # [n]
    max_top_k: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (rows, ids, values) of the tokens that survive min-p, top-k and top-p.

    Of the tokens with at least ``min_p`` of the best one's probability the ``top_k`` best are
    kept, and of these the shortest prefix that has ``top_p`` of their mass, but at least one."""
    vocab = scaled.shape[1]
    top_k = torch.where((top_k > 0) & (top_k < vocab), top_k.long(), vocab)
    by_mass = (top_p < 1) & (top_k == vocab)
    total = torch.zeros(len(scaled), dtype=torch.int64)
    if by_mass.any():
        weight = _weight(scaled[by_mass], best[by_mass, None])
        total[by_mass] = _mass(weight.masked_fill_(weight < min_p[by_mass, None], 0)).sum(-1)
    cutoff = best + min_p.log() - 1e-3  # -inf without min-p
    if max_top_k:
        cutoff = torch.maximum(cutoff, _top_k_cutoff(scaled, top_k, max_top_k))
    if by_mass.any():
        bound = _top_p_cutoff(scaled, best, top_p.double() * total, total)
        cutoff = torch.where(by_mass, torch.maximum(cutoff, bound), cutoff)
    cutoff.clamp_min_(torch.finfo(cutoff.dtype).min)  # banned tokens are not ranked
    ranking = _rank(scaled, cutoff)
    rows = ranking.rows
    weight = _weight(ranking.values, best[rows])
    keep = (ranking.places < top_k[rows]) & (weight >= min_p[rows])
    mass = _mass(weight.masked_fill_(~keep, 0))
    # Without top-k the cutoff dropped tokens that still count in the whole.
    total = torch.where(by_mass, total, torch.zeros_like(total).index_add_(0, rows, mass))
    before = mass.cumsum(0) - mass
    before -= before[ranking.starts][rows]
    target = torch.where(top_p < 1, top_p.double() * total, torch.inf)
    keep &= (before < target[rows]) | (ranking.places == 0)
    return rows[keep], ranking.token_ids[keep], ranking.values[keep]


def _weight(scaled: torch.Tensor, best: torch.Tensor) -> torch.Tensor:
    """Return probabilities relative to the best token's, float64."""
    return (scaled.double() - best).exp_()


def _mass(weight: torch.Tensor) -> torch.Tensor:
    """Return weights in fixed point, int64: sums are exact in any order and batch."""
    return weight.mul(2.0**44).long()


def _top_k_cutoff(scaled: torch.Tensor, top_k: torch.Tensor, max_top_k: int) -> torch.Tensor:
    """Return [n] values that the ``top_k`` [n] best of ``scaled`` [n, v] reach; v: -inf."""
    ranked = _group_maxima(scaled, at_least=max_top_k).topk(max_top_k).values
    kth = ranked.gather(1, (top_k[:, None] - 1).clamp_max(max_top_k - 1))[:, 0]
    return kth.masked_fill(top_k == scaled.shape[1], -torch.inf)


def _top_p_cutoff(
    scaled: torch.Tensor, best: torch.Tensor, target: torch.Tensor, total: torch.Tensor
) -> torch.Tensor:
    """Return [n] values that the likeliest tokens with mass ``target`` [n] reach. ``total`` [n] is
    the mass of all tokens that count."""
    # Once the groups' maxima alone have the mass, so have the tokens that reach the last of them.
    ranked = _group_maxima(scaled, at_least=1).sort(-1, descending=True).values
    mass = _mass(_weight(ranked, best[:, None])).cumsum(-1).double()
    place = torch.searchsorted(mass, target[:, None])
    last = ranked.gather(1, place.clamp_max(ranked.shape[1] - 1))
    last = last.masked_fill(place >= ranked.shape[1], -torch.inf)[:, 0]
    # All tokens below this together weigh less than what may be dropped.
    spare = (total - target).clamp_min(1) / (scaled.shape[1] * 2.0**44)
    return torch.maximum(last, (best + spare.log()).to(last.dtype) - 1e-3)


# --- noise ----------------------------------------------------------------------------------------


def gumbel_noise(
    seeds: torch.Tensor, token_ids: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """Return the draw's noise, float64 [m], for int64 ``seeds``, ``token_ids`` and
    ``positions`` [m]."""
    noise = torch.empty(len(token_ids), dtype=torch.float64)
    for first in range(0, len(token_ids), NOISE_CHUNK):
        part = slice(first, first + NOISE_CHUNK)
        zero = torch.zeros_like(token_ids[part])
        counter = (token_ids[part], positions[part].long(), zero, zero)
        word = philox4x32(counter, (seeds[part] & _MASK, (seeds[part] >> 32) & _MASK))
        noise[part] = (word >> 8).double().add_(0.5).mul_(2.0**-24)
    return noise.log_().neg_().log_().neg_()


_MASK = 0xFFFFFFFF


def philox4x32(
    counter: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    key: tuple[torch.Tensor, torch.Tensor],
) -> torch.Tensor:
    """Return the first output word of Philox4x32-10; all words are int64 tensors below 2**32."""
    c0, c1, c2, c3 = counter
    k0, k1 = key[0].clone(), key[1].clone()
    for _ in range(10):
        # 64-bit products wrap to signed, which leaves their bits right. Only the factors c0 and
        # c2 need clean upper halves; the low halves pass on as they are and are masked later.
        low0, low1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0 = (low1 >> 32).bitwise_xor_(c1).bitwise_xor_(k0).bitwise_and_(_MASK)
        c2 = (low0 >> 32).bitwise_xor_(c3).bitwise_xor_(k1).bitwise_and_(_MASK)
        c1, c3 = low1, low0
        k0.add_(0x9E3779B9)
        k1.add_(0xBB67AE85)
    return c0
