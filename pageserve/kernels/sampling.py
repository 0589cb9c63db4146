"""Choosing tokens on the device: no sort, no host synchronisation, one draw per seed and position.

Seven launches, each over all rows; a row leaves a stage at once if it has no use for it.

1. statistics   maximum, its lowest id and the sum of exponentials of every chunk of a row; maximum
                and noise of the luckiest token of every group of 64
2. bounds       a row's totals; greedy rows are done. Filtered rows get a bracket: tokens above it
                survive, tokens below do not, tokens in it are undecided. It comes from the maxima
                of groups of 64 tokens, and from min-p
3. narrow       twice: where top-p stands alone and many tokens are left, the mass above eight
                marks within the bracket makes it nine times as narrow
4. gather       the tokens in the bracket are gathered, a few dozen as a rule
5. draw         the best perturbed token above the bracket
6. pick         the survivors among the gathered tokens, by comparing all pairs if there are few
                and by bisection for the threshold if not; the best perturbed token of all

The draw is Gumbel-max with noise that is drawn for groups of 64 tokens first, as
``worker/sampler.py`` defines it: a group is drawn token by token only if its highest logit with the
noise of its luckiest token could win. It is added to logits less the row's maximum, as float32 has
no room for it in the sum with a large one. Ties go to the lowest id everywhere. Probability mass is
summed in fixed point, so no order of summation can change a result. A bracket is a range of depths:
steps of 2**-16 below the row's maximum, whole numbers, so that every stage places a token alike.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from pageserve.kernels.launch import launch, pdl_options, pdl_wait

# Tokens that are drawn together, as GROUP_SIZE in worker/sampler.py; their maximum is kept.
GROUP = tl.constexpr(64)
LANES = tl.constexpr(16)  # groups that are drawn token by token at once
GREEDY_EPS = tl.constexpr(1e-5)
# No token this far below a row's maximum can win a draw: the noise spans [-2.87, 21.49].
NOISE_SPAN = tl.constexpr(24.5)
BOUND_MARGIN = tl.constexpr(1e-4)  # by which rounding may lift a token above its group's bound
FIXED_POINT = tl.constexpr(float(2**40))
PAIRWISE = tl.constexpr(512)  # gathered tokens that are ranked by comparing all pairs
MARKS = tl.constexpr(8)  # within a bracket, where mass is measured
DEPTHS = tl.constexpr(65536.0)  # depths per unit of scaled logit
DEEPEST = tl.constexpr(2**31 - 1)  # deeper than any token
# Columns of small tables, one number per row: how they are aligned depends on the number of rows,
# and each combination would be compiled on its own.
PER_ROW = [
    f"{name}_ptr"
    for name in ("temperature", "top_k", "top_p", "min_p", "penalty", "positions", "targets")
]


@triton.jit
def _ordered(x):
    """Map float32 to int32 of the same order."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _exponential(word):
    """Return a word's exponential variable, accurate where it matters: for u near 1."""
    n = (word >> 8).to(tl.int32)
    # 1 - u, exact in the upper half, where u itself has no room for the last bit.
    v = ((0xFFFFFF - n).to(tl.float32) + 0.5) * (2.0**-24)
    u = tl.where(n >= 0x800000, 1 - v, (n.to(tl.float32) + 0.5) * (2.0**-24))
    series = v * (1 + v * (0.5 + v * (0.33333334 + v * (0.25 + v * 0.2))))
    return tl.where(v < 2.0**-6, series, -tl.log(u))


@triton.jit
def _group_draws(seed, groups, position):
    """Return the least exponential variable of ``groups`` (int32), and which token has it."""
    first, second, _, _ = tl.philox(seed, groups, position, 1, 0)
    return _exponential(first) / GROUP, (second & (GROUP - 1)).to(tl.int32)


@triton.jit
def _gumbel(seed, ids, position, least, firsts):
    """Return the noise of ``ids`` (int32), given what was drawn for their groups."""
    word, _, _, _ = tl.philox(seed, ids, position, 0, 0)
    more = tl.where(ids % GROUP == firsts, 0.0, _exponential(word))
    return -tl.log(least + more)


@triton.jit
def _gumbel_of_any(seed, ids, position):
    """Return the noise of ``ids`` (int32) of any groups."""
    least, firsts = _group_draws(seed, ids // GROUP, position)
    return _gumbel(seed, ids, position, least, firsts)


@triton.jit
def _best(values, ids, V):
    """Return the maximum and its lowest id (V where all is -inf or NaN)."""
    best = tl.max(values, 0)
    hit = (values == best) & (values > float("-inf"))
    return best, tl.min(tl.where(hit, ids, V), 0)


@triton.jit
def _depth(x, row_max):
    """Return how far scaled logits lie below the row's maximum, in whole steps."""
    return tl.minimum((row_max - x) * DEPTHS, 2147483520.0).to(tl.int32)


@triton.jit
def _usable(x, row_max, min_p):
    """Return which scaled logits min-p leaves."""
    return (x > float("-inf")) & (tl.exp(x - row_max) >= min_p)


@triton.jit
def _penalised(
    x, ids, mask, row, seen_ptr, slots_ptr, penalty_ptr, seen_stride, PENALISED: tl.constexpr,
):  # fmt: skip
    """Return float32 logits ``x`` of ``ids``, those of seen tokens penalised."""
    x = x.to(tl.float32)
    if PENALISED:
        penalty = tl.load(penalty_ptr + row)
        if penalty != 1:
            words = seen_ptr + tl.load(slots_ptr + row).to(tl.int64) * seen_stride + ids // 32
            seen = (tl.load(words, mask=mask, other=0) >> (ids % 32)) & 1
            lowered = tl.where(x > 0, tl.div_rn(x, tl.zeros_like(x) + penalty), x * penalty)
            x = tl.where(seen != 0, lowered, x)
    return x


@triton.jit
def _load_logits(
    logits_ptr, ids, end, V, row, seen_ptr, slots_ptr, penalty_ptr, seen_stride,
    PENALISED: tl.constexpr,
):  # fmt: skip
    """Return float32 logits at ``ids``, all below ``end``; -inf past the vocabulary. Those of seen
    tokens are penalised."""
    if end <= V:  # without a mask the loads are wide whatever V divides by
        x = tl.load(logits_ptr + ids)
    else:
        x = tl.load(logits_ptr + ids, mask=ids < V, other=float("-inf"))
    return _penalised(
        x, ids, ids < V, row, seen_ptr, slots_ptr, penalty_ptr, seen_stride, PENALISED
    )


@triton.jit
def _mass(x, row_max):
    """Return the probability mass of scaled logits relative to the row's best, in fixed point."""
    return (tl.exp(x - row_max) * FIXED_POINT).to(tl.int64)


@triton.jit(do_not_specialize_on_alignment=PER_ROW)
def _statistics_kernel(
    logits_ptr,  # [B, V]
    temperature_ptr,  # [B], read if SCALED
    maxima_ptr,  # [B, S]: the chunk's maximum, NaN if it holds one
    best_ptr,  # [B, S] int32
    sums_ptr,  # [B, S], written if SUMS
    group_maxima_ptr,  # [B, S * CHUNK / GROUP], written if SCALED, and so is the next
    group_noise_ptr,  # of the group's luckiest token
    seeds_ptr,  # [B], read if SCALED
    positions_ptr,  # [B], read if SCALED
    seen_ptr,  # [slots, V / 32] int32, a bit for every token that the request has
    slots_ptr,  # [B]
    penalty_ptr,  # [B]
    logits_stride,
    seen_stride,
    V,
    S,
    SCALED: tl.constexpr,
    SUMS: tl.constexpr,
    CHUNK: tl.constexpr,
    PENALISED: tl.constexpr,
    PDL: tl.constexpr,
):
    GROUPS: tl.constexpr = CHUNK // GROUP
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    groups = tl.arange(0, GROUPS)
    ids = chunk * CHUNK + groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    pdl_wait(PDL)
    x = _load_logits(
        logits_ptr + row * logits_stride, ids, chunk * CHUNK + CHUNK, V, row, seen_ptr, slots_ptr,
        penalty_ptr, seen_stride, PENALISED,
    )  # fmt: skip
    if SCALED:
        temperature = tl.load(temperature_ptr + row)
        temperature = tl.where(temperature < GREEDY_EPS, 1.0, temperature)
        x = tl.div_rn(x, tl.zeros_like(x) + temperature)
    group_maxima = tl.max(x, 1)
    if SCALED:
        places = (row * S + chunk) * GROUPS + groups
        tl.store(group_maxima_ptr + places, group_maxima)
        seed, position = tl.load(seeds_ptr + row), tl.load(positions_ptr + row)
        least, _ = _group_draws(seed, chunk * GROUPS + groups, position)
        tl.store(group_noise_ptr + places, -tl.log(least))
    best = tl.max(group_maxima, 0)
    hit = (x == best) & (x > float("-inf"))
    best_id = tl.min(tl.min(tl.where(hit, ids, V), 1), 0)
    has_nan = tl.sum(tl.sum((x != x).to(tl.int32), 1), 0) > 0
    tl.store(maxima_ptr + row * S + chunk, tl.where(has_nan, float("nan"), best))
    tl.store(best_ptr + row * S + chunk, best_id)
    if SUMS:
        safe_best = tl.where(best == float("-inf"), 0.0, best)
        total = tl.sum(tl.sum(tl.exp(x - safe_best), 1), 0)
        tl.store(sums_ptr + row * S + chunk, total)


@triton.jit
def _row_totals(maxima_ptr, best_ptr, sums_ptr, row, S, V, S_PAD: tl.constexpr):
    """Return a row's maximum, its id and its sum; (NaN, -1, _) where it holds NaN or no finite
    maximum."""
    s = tl.arange(0, S_PAD)
    mask = s < S
    maxima = tl.load(maxima_ptr + row * S + s, mask=mask, other=float("-inf"))
    has_nan = tl.sum((maxima != maxima).to(tl.int32), 0) > 0
    ids = tl.load(best_ptr + row * S + s, mask=mask, other=V)
    sums = tl.load(sums_ptr + row * S + s, mask=mask, other=0.0)
    best, best_id = _best(maxima, ids, V)
    safe_best = tl.where(best == float("-inf"), 0.0, best)
    total = tl.sum(sums * tl.exp(maxima - safe_best), 0)
    unusable = has_nan | (tl.abs(best) == float("inf"))
    return tl.where(unusable, float("nan"), best), tl.where(unusable, -1, best_id), total


@triton.jit
def _greedy_kernel(
    maxima_ptr, best_ptr, sums_ptr, sampled_ptr, S, V, S_PAD: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    pdl_wait(PDL)
    _, best_id, _ = _row_totals(maxima_ptr, best_ptr, sums_ptr, row, S, V, S_PAD)
    tl.store(sampled_ptr + row, best_id.to(tl.int64))


@triton.jit(do_not_specialize_on_alignment=PER_ROW)
def _bounds_kernel(
    maxima_ptr,
    best_ptr,
    sums_ptr,
    group_maxima_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    row_max_ptr,  # [B]: NaN if there is nothing left to do
    totals_ptr,  # [B] int64, the mass of the row
    brackets_ptr,  # [3, B, 2] int32: depths [first, end) that are undecided, now and narrowed
    above_ptr,  # [3, B] int64, the mass above the bracket
    targets_ptr,  # [B] int64: the mass top-p keeps, 0 if the bracket is not to be narrowed
    counts_ptr,  # [B] int32, zeroed
    sampled_ptr,  # [B] int64: greedy rows and -1 for unusable ones
    S,
    V,
    num_groups,
    S_PAD: tl.constexpr,
    GROUPS_PAD: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    pdl_wait(PDL)
    temperature = tl.load(temperature_ptr + row)
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    min_p = tl.load(min_p_ptr + row)
    best, best_id, total = _row_totals(maxima_ptr, best_ptr, sums_ptr, row, S, V, S_PAD)
    mass = (total.to(tl.float64) * FIXED_POINT).to(tl.int64)
    greedy = temperature < GREEDY_EPS
    tl.store(sampled_ptr + row, best_id.to(tl.int64))
    tl.store(counts_ptr + row, 0)
    tl.store(totals_ptr + row, mass)
    tl.store(row_max_ptr + row, tl.where(greedy, float("nan"), best))
    has_k = (top_k > 0) & (top_k < V)
    first = DEEPEST  # unfiltered and min-p alone: all tokens are above
    end = DEEPEST
    target = tl.zeros([], tl.int64)
    if has_k | (top_p < 1):
        first = 0
        bound = float("-inf")
        if has_k | (min_p <= 0):
            # The largest t such that enough group maxima reach it: then so do enough tokens.
            g = tl.arange(0, GROUPS_PAD)
            maxima = tl.load(
                group_maxima_ptr + row * num_groups + g, mask=g < num_groups, other=float("-inf")
            )
            keys = _ordered(maxima).to(tl.int64)
            weights = tl.exp(maxima - best)
            wanted = top_p * total * 1.0001
            low = _ordered(best - 88.0).to(tl.int64)
            high = _ordered(best).to(tl.int64)
            while low < high:
                middle = low + (high - low + 1) // 2
                hit = keys >= middle
                if has_k:
                    enough = tl.sum(hit.to(tl.int32), 0) >= top_k
                else:
                    enough = tl.sum(tl.where(hit, weights, 0.0), 0) >= wanted
                low = tl.where(enough, middle, low)
                high = tl.where(enough, high, middle - 1)
            bound = tl.min(tl.where(keys >= low, maxima, float("inf")), 0)
            reached = tl.sum((keys >= low).to(tl.int32), 0) >= top_k
            if not has_k:
                reached = tl.sum(tl.where(keys >= low, weights, 0.0), 0) >= wanted
                if not reached:
                    # All tokens below this together weigh less than what top-p drops.
                    rest = V / (tl.maximum(1 - top_p, 1e-7) * total)
                    bound = best - tl.log(rest) - 1e-3
                    target = tl.maximum(
                        (top_p.to(tl.float64) * mass.to(tl.float64)).to(tl.int64), 1
                    )
            elif not reached:
                bound = float("-inf")
        if min_p > 0:
            bound = tl.maximum(bound, best + tl.log(min_p) - 1e-3)
        end = _depth(bound, best) + 1
    tl.store(brackets_ptr + row * 2, first)
    tl.store(brackets_ptr + row * 2 + 1, end)
    tl.store(above_ptr + row, tl.zeros([], tl.int64))
    tl.store(targets_ptr + row, target)


@triton.jit
def _mark(first, end, i):
    """Return the i-th of MARKS depths within [first, end)."""
    return first + ((end - first).to(tl.int64) * (i + 1) // (MARKS + 1)).to(tl.int32)


@triton.jit
def _narrowed(marks_ptr, first, end, above, target, S, S_PAD: tl.constexpr):
    """Return the ninth of a bracket in which the mass reaches ``target``, and the mass above it."""
    i = tl.arange(0, MARKS)
    s = tl.arange(0, S_PAD)
    parts = tl.load(marks_ptr + s[:, None] * MARKS + i[None, :], mask=(s < S)[:, None], other=0)
    masses = tl.sum(parts, 0)  # above each mark
    marks = _mark(first, end, i)
    below = masses < target
    new_first = tl.maximum(first, tl.max(tl.where(below, marks, 0), 0))
    new_end = tl.minimum(end, tl.min(tl.where(below, DEEPEST, marks), 0))
    new_above = tl.maximum(above, tl.max(tl.where(below, masses, 0), 0))
    return new_first, new_end, new_above


@triton.jit(do_not_specialize=["B"], do_not_specialize_on_alignment=PER_ROW)
def _narrow_kernel(
    logits_ptr,
    temperature_ptr,
    row_max_ptr,
    brackets_ptr,  # [3, B, 2]
    above_ptr,  # [3, B]
    targets_ptr,
    marks_ptr,  # [2, B, S, MARKS] int64
    seen_ptr,  # [slots, V / 32] int32, a bit for every token that the request has
    slots_ptr,  # [B]
    penalty_ptr,  # [B]
    logits_stride,
    seen_stride,
    B,
    V,
    S,
    ROUND: tl.constexpr,  # 0: measure; 1: narrow by round 0 and measure again
    S_PAD: tl.constexpr,
    CHUNK: tl.constexpr,
    PENALISED: tl.constexpr,
    PDL: tl.constexpr,
):
    BLOCK: tl.constexpr = 512
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    pdl_wait(PDL)
    row_max = tl.load(row_max_ptr + row)
    target = tl.load(targets_ptr + row)
    if (row_max == row_max) & (target > 0):
        first = tl.load(brackets_ptr + row * 2)
        end = tl.load(brackets_ptr + row * 2 + 1)
        if ROUND == 1:
            above = tl.load(above_ptr + row)
            first, end, above = _narrowed(
                marks_ptr + row * S * MARKS, first, end, above, target, S, S_PAD
            )
            if chunk == 0:
                tl.store(brackets_ptr + (B + row) * 2, first)
                tl.store(brackets_ptr + (B + row) * 2 + 1, end)
                tl.store(above_ptr + B + row, above)
        i = tl.arange(0, MARKS)
        marks = _mark(first, end, i)
        temperature = tl.zeros([BLOCK], tl.float32) + tl.load(temperature_ptr + row)
        masses = tl.zeros([MARKS, BLOCK], tl.int64)
        for begin in range(0, CHUNK, BLOCK):
            start = chunk * CHUNK + begin
            ids = start + tl.arange(0, BLOCK)
            x = _load_logits(
                logits_ptr + row * logits_stride, ids, start + BLOCK, V, row, seen_ptr, slots_ptr,
                penalty_ptr, seen_stride, PENALISED,
            )  # fmt: skip
            x = tl.div_rn(x, temperature)
            hit = _depth(x, row_max)[None, :] < marks[:, None]
            masses += tl.where(hit, _mass(x, row_max)[None, :], 0)
        out = marks_ptr + ((ROUND * B + row) * S + chunk) * MARKS + i
        tl.store(out, tl.sum(masses, 1))


@triton.jit(do_not_specialize=["B"], do_not_specialize_on_alignment=PER_ROW)
def _gather_kernel(
    logits_ptr,
    temperature_ptr,
    min_p_ptr,
    row_max_ptr,
    brackets_ptr,
    above_ptr,
    targets_ptr,
    marks_ptr,
    counts_ptr,
    gathered_ptr,  # [B, V] float32, scaled logits
    gathered_ids_ptr,  # [B, V] int32
    seen_ptr,  # [slots, V / 32] int32, a bit for every token that the request has
    slots_ptr,  # [B]
    penalty_ptr,  # [B]
    logits_stride,
    seen_stride,
    B,
    V,
    S,
    S_PAD: tl.constexpr,
    CHUNK: tl.constexpr,
    PENALISED: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    pdl_wait(PDL)
    row_max = tl.load(row_max_ptr + row)
    if row_max == row_max:
        target = tl.load(targets_ptr + row)
        state = row
        if target > 0:
            state += B
        first = tl.load(brackets_ptr + state * 2)
        end = tl.load(brackets_ptr + state * 2 + 1)
        above = tl.load(above_ptr + state)
        if target > 0:
            marks = marks_ptr + (B + row) * S * MARKS
            first, end, above = _narrowed(marks, first, end, above, target, S, S_PAD)
        if chunk == 0:
            tl.store(brackets_ptr + (2 * B + row) * 2, first)
            tl.store(brackets_ptr + (2 * B + row) * 2 + 1, end)
            tl.store(above_ptr + 2 * B + row, above)
        if first < end:
            x = _load_logits(
                logits_ptr + row * logits_stride, ids, chunk * CHUNK + CHUNK, V, row, seen_ptr,
                slots_ptr, penalty_ptr, seen_stride, PENALISED,
            )  # fmt: skip
            x = tl.div_rn(x, tl.zeros([CHUNK], tl.float32) + tl.load(temperature_ptr + row))
            depth = _depth(x, row_max)
            keep = _usable(x, row_max, tl.load(min_p_ptr + row)) & (depth >= first) & (depth < end)
            count = tl.sum(keep.to(tl.int32), 0)
            if count > 0:
                rank = tl.cumsum(keep.to(tl.int32), 0)
                place = row * V + tl.atomic_add(counts_ptr + row, count, sem="relaxed") + rank - 1
                tl.store(gathered_ptr + place, x, mask=keep)
                tl.store(gathered_ids_ptr + place, ids, mask=keep)


@triton.jit(do_not_specialize=["B"], do_not_specialize_on_alignment=PER_ROW)
def _draw_kernel(
    logits_ptr,
    temperature_ptr,
    min_p_ptr,
    seeds_ptr,
    positions_ptr,
    row_max_ptr,
    brackets_ptr,
    group_maxima_ptr,
    group_noise_ptr,
    best_value_ptr,  # [B], written for rows that are drawn
    best_id_ptr,  # [B]
    seen_ptr,  # [slots, V / 32] int32, a bit for every token that the request has
    slots_ptr,  # [B]
    penalty_ptr,  # [B]
    logits_stride,
    seen_stride,
    B,
    V,
    num_groups,
    GROUPS_PAD: tl.constexpr,
    PENALISED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Of every LANES-th group the most promising is drawn token by token, all LANES at once, until
    no group left can do better. In a flat row of 152K tokens some seven can: it takes a turn or
    two."""
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, LANES)
    across = tl.arange(0, GROUPS_PAD // LANES)
    groups = across[None, :] * LANES + lanes[:, None]
    there = groups < num_groups
    pdl_wait(PDL)
    row_max = tl.load(row_max_ptr + row)
    if row_max == row_max:
        first = tl.load(brackets_ptr + (2 * B + row) * 2)
        temperature = tl.load(temperature_ptr + row)
        min_p = tl.load(min_p_ptr + row)
        seed = tl.load(seeds_ptr + row)
        position = tl.load(positions_ptr + row)
        places = row * num_groups + groups
        maxima = tl.load(group_maxima_ptr + places, mask=there, other=float("-inf"))
        noise = tl.load(group_noise_ptr + places, mask=there, other=0.0)
        hopeful = (_depth(maxima, row_max) < first) & (maxima >= row_max - NOISE_SPAN)
        # A hair below min-p, as no one says that exp() is monotone to the last bit.
        hopeful = hopeful & _usable(maxima, row_max, 0.999 * min_p)
        bounds = tl.where(hopeful, maxima - row_max + noise, float("-inf"))
        best = tl.full([], float("-inf"), tl.float32)
        best_id = V
        bound = tl.max(tl.max(bounds, 1), 0)
        while (bound > float("-inf")) & (bound >= best - BOUND_MARGIN):
            lane_bounds, chosen = tl.max(bounds, 1, return_indices=True)
            lane_groups = chosen * LANES + lanes
            drawn = (lane_bounds > float("-inf")) & (lane_bounds >= best - BOUND_MARGIN)
            ids = lane_groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
            inside = drawn[:, None] & (ids < V)
            x = tl.load(logits_ptr + row * logits_stride + ids, mask=inside, other=float("-inf"))
            x = _penalised(
                x, ids, inside, row, seen_ptr, slots_ptr, penalty_ptr, seen_stride, PENALISED
            )
            x = tl.div_rn(x, tl.zeros_like(x) + temperature)
            candidate = _usable(x, row_max, min_p) & (_depth(x, row_max) < first)
            least, firsts = _group_draws(seed, lane_groups, position)
            perturbed = x - row_max + _gumbel(seed, ids, position, least[:, None], firsts[:, None])
            values = tl.where(candidate, perturbed, float("-inf"))
            value, value_id = _best(
                tl.reshape(values, (LANES * GROUP,)), tl.reshape(ids, (LANES * GROUP,)), V
            )
            better = (value > best) | ((value == best) & (value_id < best_id))
            best_id = tl.where(better, value_id, best_id)
            best = tl.where(better, value, best)
            bounds = tl.where(across[None, :] == chosen[:, None], float("-inf"), bounds)
            bound = tl.max(tl.max(bounds, 1), 0)
        tl.store(best_value_ptr + row, best)
        tl.store(best_id_ptr + row, best_id)


@triton.jit
def _measure(
    values_ptr, ids_ptr, count, key, last_id, row_max,
    WEIGHTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the mass (or number) of gathered tokens ranked down to (``key``, ``last_id``)."""
    offsets = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.int64)
    for begin in range(0, count, BLOCK):
        mask = begin + offsets < count
        x = tl.load(values_ptr + begin + offsets, mask=mask, other=float("-inf"))
        ids = tl.load(ids_ptr + begin + offsets, mask=mask, other=0)
        keys = _ordered(x).to(tl.int64)
        hit = mask & ((keys > key) | ((keys == key) & (ids <= last_id)))
        weight = _mass(x, row_max) if WEIGHTED else tl.full([BLOCK], 1, tl.int64)
        total += tl.where(hit, weight, 0)
    return tl.sum(total, 0)


@triton.jit
def _threshold(
    values_ptr, ids_ptr, count, target, row_max, V, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return (key, last id) of the shortest ranking whose measure reaches ``target``."""
    low = _ordered(tl.full([], -3.4e38, tl.float32)).to(tl.int64)
    high = _ordered(row_max).to(tl.int64)
    while low < high:
        middle = low + (high - low + 1) // 2
        measure = _measure(values_ptr, ids_ptr, count, middle, V, row_max, WEIGHTED, BLOCK)
        reached = measure >= target
        low = tl.where(reached, middle, low)
        high = tl.where(reached, high, middle - 1)
    first_id = 0
    last_id = V
    if _measure(values_ptr, ids_ptr, count, low, V, row_max, WEIGHTED, BLOCK) > target:
        while first_id < last_id:
            middle_id = (first_id + last_id) // 2
            measure = _measure(values_ptr, ids_ptr, count, low, middle_id, row_max, WEIGHTED, BLOCK)
            reached = measure >= target
            last_id = tl.where(reached, middle_id, last_id)
            first_id = tl.where(reached, first_id, middle_id + 1)
    return low, last_id


@triton.jit
def _ranked(values_ptr, ids_ptr, offsets, count):
    """Return (scaled logits, ids, unique keys in rank order, which exist) of gathered tokens."""
    mask = offsets < count
    x = tl.load(values_ptr + offsets, mask=mask, other=float("-inf"))
    ids = tl.load(ids_ptr + offsets, mask=mask, other=0)
    return x, ids, _ordered(x).to(tl.int64) * 4294967296 - ids, mask


@triton.jit
def _pick_of_few(
    values_ptr, ids_ptr, count, top_k, top_p, min_p, total, above, row_max, seed, position, V,
):  # fmt: skip
    """Return the best perturbed survivor of at most PAIRWISE gathered tokens."""
    STEP: tl.constexpr = 8
    x, ids, keys, kept = _ranked(values_ptr, ids_ptr, tl.arange(0, PAIRWISE), count)
    rank = tl.zeros([PAIRWISE], tl.int32)
    mass_before = tl.zeros([PAIRWISE], tl.int64) + above
    for begin in range(0, count, STEP):
        other_x, _, other_keys, exists = _ranked(
            values_ptr, ids_ptr, begin + tl.arange(0, STEP), count
        )
        higher = (other_keys[:, None] > keys[None, :]) & exists[:, None]
        rank += tl.sum(higher.to(tl.int32), 0)
        mass_before += tl.sum(tl.where(higher, _mass(other_x, row_max)[:, None], 0), 0)
    has_k = (top_k > 0) & (top_k < V)
    kept = kept & (rank < tl.where(has_k, top_k, V))
    if has_k | (min_p > 0):
        total = tl.sum(tl.where(kept, _mass(x, row_max), 0), 0)
    if top_p < 1:
        target = (top_p.to(tl.float64) * total.to(tl.float64)).to(tl.int64)
        kept = kept & (mass_before < tl.maximum(target, 1))
    perturbed = x - row_max + _gumbel_of_any(seed, ids, position)
    return _best(tl.where(kept, perturbed, float("-inf")), ids, V)


@triton.jit
def _pick_of_many(
    values_ptr, ids_ptr, count, top_k, top_p, min_p, total, above, row_max, seed, position, V,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the best perturbed survivor of any number of gathered tokens."""
    key = _ordered(tl.full([], -3.4e38, tl.float32)).to(tl.int64)
    last_id = V
    has_k = (top_k > 0) & (top_k < V)
    if has_k:
        key, last_id = _threshold(
            values_ptr, ids_ptr, count, top_k.to(tl.int64), row_max, V, False, BLOCK
        )
    if has_k | (min_p > 0):
        total = _measure(values_ptr, ids_ptr, count, key, last_id, row_max, True, BLOCK)
    if top_p < 1:
        target = (top_p.to(tl.float64) * total.to(tl.float64)).to(tl.int64)
        p_key, p_last_id = _threshold(
            values_ptr, ids_ptr, count, tl.maximum(target, 1) - above, row_max, V, True, BLOCK
        )
        last_id = tl.where(p_key > key, p_last_id, tl.minimum(last_id, p_last_id))
        key = tl.maximum(key, p_key)
    offsets = tl.arange(0, BLOCK)
    best_value = float("-inf")
    best_id = V
    for begin in range(0, count, BLOCK):
        x, ids, _, exists = _ranked(values_ptr, ids_ptr, begin + offsets, count)
        keys = _ordered(x).to(tl.int64)
        kept = exists & ((keys > key) | ((keys == key) & (ids <= last_id)))
        perturbed = x - row_max + _gumbel_of_any(seed, ids, position)
        value, value_id = _best(tl.where(kept, perturbed, float("-inf")), ids, V)
        better = (value > best_value) | ((value == best_value) & (value_id < best_id))
        best_id = tl.where(better, value_id, best_id)
        best_value = tl.where(better, value, best_value)
    return best_value, best_id


@triton.jit(do_not_specialize=["B"], do_not_specialize_on_alignment=PER_ROW)
def _pick_kernel(
    seeds_ptr,
    positions_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    row_max_ptr,
    totals_ptr,
    above_ptr,
    counts_ptr,
    best_value_ptr,
    best_id_ptr,
    gathered_ptr,
    gathered_ids_ptr,
    sampled_ptr,
    B,
    V,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    pdl_wait(PDL)
    row_max = tl.load(row_max_ptr + row)
    if row_max == row_max:
        best = tl.load(best_value_ptr + row)
        best_id = tl.load(best_id_ptr + row)
        count = tl.load(counts_ptr + row)
        if count > 0:
            values_ptr = gathered_ptr + row * V
            ids_ptr = gathered_ids_ptr + row * V
            top_k = tl.load(top_k_ptr + row)
            top_p = tl.load(top_p_ptr + row)
            min_p = tl.load(min_p_ptr + row)
            total = tl.load(totals_ptr + row)
            above = tl.load(above_ptr + 2 * B + row)
            seed = tl.load(seeds_ptr + row)
            position = tl.load(positions_ptr + row)
            if count <= PAIRWISE:
                value, value_id = _pick_of_few(
                    values_ptr, ids_ptr, count, top_k, top_p, min_p, total, above, row_max, seed,
                    position, V,
                )  # fmt: skip
            else:
                value, value_id = _pick_of_many(
                    values_ptr, ids_ptr, count, top_k, top_p, min_p, total, above, row_max, seed,
                    position, V, BLOCK,
                )  # fmt: skip
            better = (value > best) | ((value == best) & (value_id < best_id))
            best_id = tl.where(better, value_id, best_id)
        tl.store(sampled_ptr + row, best_id.to(tl.int64))


@triton.jit
def _logsumexp_kernel(
    maxima_ptr, best_ptr, sums_ptr, out_ptr, S, V, S_PAD: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    pdl_wait(PDL)
    best, _, total = _row_totals(maxima_ptr, best_ptr, sums_ptr, row, S, V, S_PAD)
    tl.store(out_ptr + row, best + tl.log(total))


class RepetitionPenalties(NamedTuple):
    """What divides (or, below 0, multiplies) the logits of tokens that a request has already."""

    penalty: torch.Tensor  # [B] float32, 1: none
    slots: torch.Tensor  # [B] int32, each row's in `seen`
    seen: torch.Tensor  # [slots, at least V / 32] int32, bit i of word w for token 32 * w + i


def _penalty_arguments(
    logits: torch.Tensor, penalties: RepetitionPenalties | None
) -> tuple[list[Any], list[Any], dict[str, Any]]:
    """Return the kernels' arguments: pointers, stride and flag."""
    if penalties is None:
        return [logits] * 3, [0], {"PENALISED": False}
    penalty, slots, seen = penalties
    return [seen, slots, penalty], [seen.stride(0)], {"PENALISED": True}


class _Statistics:
    """The first stage's results for ``logits`` [B, V]; for those to be drawn from, ``draw`` gives
    (temperature, seeds, positions), [B] each, and they may be penalised. Without ``sums`` those of
    the exponentials are left out."""

    def __init__(
        self,
        logits: torch.Tensor,
        draw: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
        penalties: RepetitionPenalties | None = None,
        sums: bool = True,
    ) -> None:
        rows, self.vocab = logits.shape
        # Fixed by the vocabulary alone, so a row's sums do not depend on the batch around it.
        self.chunk = 4096 if self.vocab > 4096 else max(512, triton.next_power_of_2(self.vocab))
        self.splits = triton.cdiv(self.vocab, self.chunk)
        self.splits_pad = triton.next_power_of_2(self.splits)
        self.num_groups = self.splits * self.chunk // GROUP.value
        shape, device = (rows, self.splits), logits.device
        self.maxima = torch.empty(shape, dtype=torch.float32, device=device)
        self.best = torch.empty(shape, dtype=torch.int32, device=device)
        self.sums = torch.empty(shape, dtype=torch.float32, device=device)
        groups = (rows, self.num_groups) if draw is not None else (0, 0)
        self.group_maxima, self.group_noise = torch.empty(
            2, *groups, dtype=torch.float32, device=device
        )
        temperature, seeds, positions = draw or (self.maxima, self.best, self.best)
        pointers, stride, flag = _penalty_arguments(logits, penalties)
        launch(
            _statistics_kernel,
            (rows, self.splits),
            logits,
            temperature,
            self.maxima,
            self.best,
            self.sums,
            self.group_maxima,
            self.group_noise,
            seeds,
            positions,
            *pointers,
            logits.stride(0),
            *stride,
            self.vocab,
            self.splits,
            SCALED=draw is not None,
            SUMS=sums,
            CHUNK=self.chunk,
            **flag,
            num_warps=8 if self.chunk >= 4096 else 4,
            **pdl_options(device),
        )


@triton.jit
def _bitmask_kernel(
    logits_ptr,  # [B, V]
    index_ptr,  # [B] int32: the row's mask, -1 for none
    bitmasks_ptr,  # [M, W] int32
    logits_stride,
    V,
    W,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    mask = tl.load(index_ptr + row).to(tl.int64)
    if mask < 0:
        return
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = ids < V
    words = tl.load(bitmasks_ptr + mask * W + ids // 32, mask=inside, other=-1)
    banned = ((words >> (ids % 32)) & 1) == 0
    places = logits_ptr + row * logits_stride + ids
    # Adding keeps a NaN, which must not go unseen.
    x = tl.load(places, mask=inside & banned, other=0.0)
    tl.store(places, x.to(tl.float32) + float("-inf"), mask=inside & banned)


def apply_bitmasks(logits: torch.Tensor, index: torch.Tensor, bitmasks: torch.Tensor) -> None:
    """Forbid tokens in ``logits`` [B, V], in place: row i keeps those whose bit is set in mask
    ``index[i]`` (int32, -1: all) of ``bitmasks`` [M, W] int32, bit i % 32 of word i // 32 for
    token i, 32 * W at least V."""
    num_rows, vocab = logits.shape
    grid = (num_rows, triton.cdiv(vocab, 4096))
    launch(
        _bitmask_kernel,
        grid,
        logits,
        index,
        bitmasks,
        logits.stride(0),
        vocab,
        bitmasks.shape[1],
        BLOCK=4096,
    )


def greedy_sample(logits: torch.Tensor) -> torch.Tensor:
    """Return the lowest id of the highest logit per row of ``logits`` [B, V] as int64 [B].

    -1 for rows that hold NaN or whose highest logit is infinite.
    """
    rows = logits.shape[0]
    sampled = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows == 0:
        return sampled
    stats = _Statistics(logits, sums=False)
    launch(
        _greedy_kernel,
        (rows,),
        stats.maxima,
        stats.best,
        stats.sums,
        sampled,
        stats.splits,
        stats.vocab,
        S_PAD=stats.splits_pad,
        num_warps=1,
        **pdl_options(logits.device),
    )
    return sampled


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    penalties: RepetitionPenalties | None = None,
) -> torch.Tensor:
    """Return one id per row of ``logits`` [B, V] as int64 [B]; -1 as in :func:`greedy_sample`.

    Per row: ``temperature`` float32 (below 1e-5: greedy), ``top_k`` int32 (0 or less: off),
    ``top_p`` and ``min_p`` float32, ``seeds`` int64 (the 64 bits of the key), ``positions`` int32
    (index of the token among the outputs). ``penalties`` come first of all; then min-p applies,
    then top-k, then top-p to what is left, renormalised.
    """
    rows, vocab = logits.shape
    device = logits.device
    sampled = torch.empty(rows, dtype=torch.int64, device=device)
    if rows == 0:
        return sampled
    stats = _Statistics(logits, (temperature, seeds, positions), penalties)
    pointers, stride, flag = _penalty_arguments(logits, penalties)
    row_max = torch.empty(rows, dtype=torch.float32, device=device)
    totals, targets = torch.empty(2, rows, dtype=torch.int64, device=device)
    brackets = torch.empty(3, rows, 2, dtype=torch.int32, device=device)
    above = torch.empty(3, rows, dtype=torch.int64, device=device)
    marks = torch.empty(2, rows, stats.splits, MARKS.value, dtype=torch.int64, device=device)
    counts = torch.empty(rows, dtype=torch.int32, device=device)
    gathered = torch.empty(rows, vocab, dtype=torch.float32, device=device)
    gathered_ids = torch.empty(rows, vocab, dtype=torch.int32, device=device)
    best_value = torch.empty(rows, dtype=torch.float32, device=device)
    best_id = torch.empty(rows, dtype=torch.int32, device=device)
    groups_pad = max(LANES.value, triton.next_power_of_2(stats.num_groups))
    pdl = pdl_options(device)
    launch(
        _bounds_kernel,
        (rows,),
        stats.maxima,
        stats.best,
        stats.sums,
        stats.group_maxima,
        temperature,
        top_k,
        top_p,
        min_p,
        row_max,
        totals,
        brackets,
        above,
        targets,
        counts,
        sampled,
        stats.splits,
        vocab,
        stats.num_groups,
        S_PAD=stats.splits_pad,
        GROUPS_PAD=groups_pad,
        num_warps=8,
        **pdl,
    )
    for narrowing in range(2):
        launch(
            _narrow_kernel,
            (rows, stats.splits),
            logits,
            temperature,
            row_max,
            brackets,
            above,
            targets,
            marks,
            *pointers,
            logits.stride(0),
            *stride,
            rows,
            vocab,
            stats.splits,
            ROUND=narrowing,
            S_PAD=stats.splits_pad,
            CHUNK=stats.chunk,
            num_warps=4,
            **flag,
            **pdl,
        )
    launch(
        _gather_kernel,
        (rows, stats.splits),
        logits,
        temperature,
        min_p,
        row_max,
        brackets,
        above,
        targets,
        marks,
        counts,
        gathered,
        gathered_ids,
        *pointers,
        logits.stride(0),
        *stride,
        rows,
        vocab,
        stats.splits,
        S_PAD=stats.splits_pad,
        CHUNK=stats.chunk,
        num_warps=8 if stats.chunk >= 4096 else 4,
        **flag,
        **pdl,
    )
    launch(
        _draw_kernel,
        (rows,),
        logits,
        temperature,
        min_p,
        seeds,
        positions,
        row_max,
        brackets,
        stats.group_maxima,
        stats.group_noise,
        best_value,
        best_id,
        *pointers,
        logits.stride(0),
        *stride,
        rows,
        vocab,
        stats.num_groups,
        GROUPS_PAD=groups_pad,
        num_warps=8,
        **flag,
        **pdl,
    )
    launch(
        _pick_kernel,
        (rows,),
        seeds,
        positions,
        top_k,
        top_p,
        min_p,
        row_max,
        totals,
        above,
        counts,
        best_value,
        best_id,
        gathered,
        gathered_ids,
        sampled,
        rows,
        vocab,
        BLOCK=1024,
        num_warps=8,  # in fewer, each with more numbers, it is the slowest kernel to compile
        **pdl,
    )
    return sampled


def logsumexp(logits: torch.Tensor) -> torch.Tensor:
    """Return the logarithm of each row's sum of exponentials, for ``logits`` [B, V] float32 [B].

    NaN for rows that :func:`greedy_sample` has no token for.
    """
    rows = logits.shape[0]
    out = torch.empty(rows, dtype=torch.float32, device=logits.device)
    if rows == 0:
        return out
    stats = _Statistics(logits)
    launch(
        _logsumexp_kernel,
        (rows,),
        stats.maxima,
        stats.best,
        stats.sums,
        out,
        stats.splits,
        stats.vocab,
        S_PAD=stats.splits_pad,
        num_warps=1,
        **pdl_options(logits.device),
    )
    return out
