"""The sampling pipeline: every step by hand or against a sort, the draw bit by bit."""

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import pytest
import torch

from pageserve.sampling_params import SamplingParams
from pageserve.worker import sampler as sampler_module
from pageserve.worker.sampler import (
    Sampler,
    SamplerOutput,
    Scores,
    filter_tokens,
    group_draws,
    gumbel_noise,
    philox4x32,
)
from pageserve.worker.sampling_metadata import RowSampling, build_sampling_metadata

VOCAB = 20
INF, NAN = math.inf, math.nan
GREEDY = {"temperature": 0.0}


def row(
    *,
    prompt: list[int] = (),
    output: list[int] = (),
    seed: int = 0,
    grammar: Iterable[int] | None = None,
    vocab: int = VOCAB,
    **params: Any,
) -> tuple[RowSampling, list[int]]:
    """A row and its tokens; the slot is filled in by :func:`sample`. ``grammar`` are the ids that
    its mask allows."""
    tokens = [*prompt, *output]
    mask = None if grammar is None else bitmask(grammar, vocab)
    return RowSampling(SamplingParams(**params), seed, 0, len(prompt), len(tokens), mask), tokens


def bitmask(token_ids: Iterable[int], vocab: int) -> bytes:
    return sum(1 << i for i in set(token_ids)).to_bytes(-(-vocab // 32) * 4, "little")


def sample(
    logits: torch.Tensor,
    rows: list[tuple[RowSampling, list[int]]],
    vocab_limit: int | None = None,
    eos_token_ids: tuple[int, ...] = (),
) -> SamplerOutput:
    """Sample with a request table in which the rows stand in reverse order among stale tokens."""
    length = max(len(tokens) for _, tokens in rows) + 3
    table = torch.full((len(rows) + 1, length), 3, dtype=torch.int32)
    placed = []
    for i, (r, tokens) in enumerate(rows):
        slot = len(rows) - i
        table[slot, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
        placed.append(dataclasses.replace(r, slot=slot))
    limit = logits.shape[1] if vocab_limit is None else vocab_limit
    metadata = build_sampling_metadata(placed, table, limit, eos_token_ids, torch.device("cpu"))
    output = Sampler()(logits.clone(), metadata)
    assert output.token_ids.dtype == torch.int64
    return output


def changed_logits(logits: list[float], r: tuple[RowSampling, list[int]], **kw: Any) -> list[float]:
    """The logits as the draw sees them."""
    seen: list[torch.Tensor] = []
    choose = sampler_module._choose

    def spy(changed: torch.Tensor, draws: Any) -> torch.Tensor:
        seen.append(changed.clone())
        return choose(changed, draws)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampler_module, "_choose", spy)
        other = row(**GREEDY)
        batch = torch.tensor([[0.5] * len(logits), logits, [0.5] * len(logits)])
        sample(batch, [other, r, other], **kw)
    assert (seen[0][[0, 2]] == 0.5).all(), "another row was changed"
    return seen[0][1].tolist()


# --- noise ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        (
            (0xFFFFFFFF,) * 4,
            (0xFFFFFFFF,) * 2,
            [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD],
        ),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox_known_answers(counter, key, expected):
    """From the Random123 distribution's kat_vectors, philox4x32-10."""
    words = philox4x32(
        tuple(torch.tensor([c]) for c in counter), tuple(torch.tensor([k]) for k in key)
    )
    assert [word.item() for word in words] == expected


def plain_philox(seed: int, *counter: int) -> list[int]:
    """The same in Python integers."""
    c, k = [*counter, 0], [seed & 0xFFFFFFFF, seed >> 32]
    for _ in range(10):
        p0, p1 = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [
            (p1 >> 32) ^ c[1] ^ k[0],
            p1 & 0xFFFFFFFF,
            (p0 >> 32) ^ c[3] ^ k[1],
            p0 & 0xFFFFFFFF,
        ]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c


def plain_exponential(word: int) -> float:
    return -math.log(((word >> 8) + 0.5) * 2.0**-24)


def noise_of(seeds, token_ids, positions):
    drawn = group_draws(seeds, token_ids // 64, positions)
    return gumbel_noise(seeds, token_ids, positions, *drawn)


def plain_noise(seed: int, token_id: int, position: int) -> float:
    group = plain_philox(seed, token_id // 64, position, 1)
    e = plain_exponential(group[0]) / 64
    if token_id % 64 != group[1] % 64:
        e += plain_exponential(plain_philox(seed, token_id, position, 0)[0])
    return -math.log(e)


@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**32 + 5, 2**63, 2**64 - 1])
def test_noise_of_any_seed(seed, monkeypatch):
    monkeypatch.setattr(sampler_module, "NOISE_CHUNK", 7)
    ids = torch.tensor([0, 1, 151_935, *range(100, 200)])  # a whole group with its first
    signed = torch.tensor(seed - 2**64 if seed >= 2**63 else seed)
    for position in (0, 1, 100_000):
        noise = noise_of(
            signed.expand(len(ids)), ids, torch.tensor(position, dtype=torch.int32).expand(len(ids))
        )
        expected = [plain_noise(seed, i, position) for i in ids.tolist()]
        torch.testing.assert_close(noise, torch.tensor(expected, dtype=torch.float64))


def test_noise_is_that_of_independent_draws():
    """By Kolmogorov and Smirnov: each token's noise is Gumbel's, and so is that of the highest of
    a group, moved by its logarithm, though it is drawn first."""
    ids, num_draws = torch.arange(64), 4000
    seeds = torch.arange(num_draws).repeat_interleave(64)
    noise = noise_of(seeds, ids.repeat(num_draws), torch.full_like(seeds, 3)).view(-1, 64)

    def distance(values):
        ranks = torch.arange(len(values)) / len(values)
        return (torch.exp(-torch.exp(-values.sort().values)) - ranks).abs().max()

    limit = 1.95 / num_draws**0.5  # passed by chance once in a thousand times
    assert max(distance(noise[:, i]) for i in range(0, 64, 9)) < limit
    assert distance(noise.amax(1) - math.log(64)) < limit
    assert distance(noise.flatten()) < limit / 8
    assert torch.corrcoef(noise[:, :8].t()).sub(torch.eye(8)).abs().max() < 4 / num_draws**0.5
    # The one that is drawn first is any of the group, and wins as often as any.
    counts = noise.argmax(1).bincount(minlength=64).double()
    assert ((counts - num_draws / 64) ** 2).sum() / (num_draws / 64) < 105  # chi square of 63


@pytest.mark.parametrize("vocab", [3008, 3000, 3001])  # whole groups, and a short last one
@pytest.mark.parametrize("banned", [0.0, 0.9, 0.999])
def test_pruning_never_changes_the_winner(vocab, banned):
    generator = torch.Generator().manual_seed(0)
    ids = torch.arange(vocab)
    for scale in (0.0, 0.1, 1.0, 3.0, 8.0, 30.0):
        logits = torch.randn(40, vocab, generator=generator) * scale
        logits[torch.rand(logits.shape, generator=generator) < banned] = -torch.inf
        logits[:, vocab - 1] = 0  # something is left
        rows = [row(seed=1000 + i, output=[1] * i) for i in range(40)]
        expected = []
        for i in range(40):
            seeds, positions = torch.full((vocab,), 1000 + i), torch.full((vocab,), i)
            noise = noise_of(seeds, ids, positions)
            expected.append(int((logits[i].double() + noise).argmax()))
        assert sample(logits, rows).token_ids.tolist() == expected


# --- greedy --------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 9e-6])
def test_greedy_takes_the_lowest_of_the_best(temperature):
    logits = torch.randn(4, 50_000)
    logits[1, [40_000, 17, 30_000]] = 50.0
    logits[2] = 1.0
    logits[3, -1] = 60.0
    rows = [row(temperature=temperature, top_k=5, top_p=0.3, seed=i) for i in range(4)]
    expected = [int(logits[0].argmax()), 17, 0, 49_999]
    assert sample(logits, rows).token_ids.tolist() == expected


@pytest.mark.parametrize(
    "params", [{"top_p": 0.0}, {"top_k": 1}, {"min_p": 1.0}, {"temperature": 1e-5}]
)
def test_filters_that_leave_one_token(params):
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(200, 5000, generator=generator)
    rows = [row(seed=i, **params) for i in range(200)]
    assert torch.equal(sample(logits, rows).token_ids, logits.argmax(-1))


# --- filters -------------------------------------------------------------------------------------


def kept_by_sorting(scaled: torch.Tensor, top_k: int, top_p: float, min_p: float) -> set[int]:
    """The contract, read literally, with a sort."""
    order = sorted(range(len(scaled)), key=lambda i: (-scaled[i].item(), i))
    ranked = scaled[order].double()
    mass = (ranked - ranked[0]).exp()
    count = int((mass >= min_p).sum())
    if top_k > 0:
        count = min(count, top_k)
    mass = mass[:count]
    if top_p < 1:
        before = mass.cumsum(0) - mass
        count = max(1, int((before < top_p * mass.sum()).sum()))
    return set(order[:count])


def random_row(i: int, vocab: int, generator: torch.Generator) -> torch.Tensor:
    kind = i % 7
    noise = torch.randn(vocab, generator=generator)
    if kind == 0:
        return noise * 3
    if kind == 1:
        return (noise * 2).round()  # many ties
    if kind == 2:
        return torch.full((vocab,), 1.5)  # flat
    if kind == 3:
        return noise * 0.01
    if kind == 4:
        return torch.where(noise > 1, noise, -torch.inf)
    if kind == 5:  # neighbours in float32, some of which the temperature makes equal
        return 10 + (noise * 2).round().clamp(-3, 3) * 2**-20
    return noise * 20


FILTERS = [
    (top_k, top_p, min_p)
    for top_k in (0, 1, 3, 50, 10_000)
    for top_p in (1.0, 0.9, 0.5, 0.0)
    for min_p in (0.0, 0.05, 1.0)
]


@pytest.mark.parametrize("vocab", [70, 4300])
def test_filters_equal_a_sort(vocab):
    """500 rows for each vocabulary: peaked, tied, flat, partly banned, extreme."""
    generator = torch.Generator().manual_seed(vocab)
    for first in range(0, 500, 25):
        logits = torch.stack([random_row(first + i, vocab, generator) for i in range(25)])
        temperature = torch.tensor([(1.0, 0.3, 1.9, 1e-4, 1.7)[(first + i) % 5] for i in range(25)])
        scaled = logits / temperature[:, None]
        filters = [FILTERS[(first + i) * 7 % len(FILTERS)] for i in range(25)]
        top_k, top_p, min_p = (torch.tensor(column) for column in zip(*filters, strict=True))
        rows, ids, values = filter_tokens(
            Scores(logits, sampler_module._group_maxima(logits), temperature),
            top_k,
            top_p,
            min_p,
            max(k if k < vocab else 0 for k in top_k.tolist()),
        )
        assert torch.equal(values, scaled[rows, ids])
        for i in range(25):
            limits = filters[i][0], top_p[i].double().item(), min_p[i].double().item()
            expected = kept_by_sorting(scaled[i], *limits)
            kept = ids[rows == i].tolist()
            assert len(kept) == len(set(kept))
            assert set(kept) == {t for t in expected if scaled[i, t] > -INF}, (first + i, limits)


def test_draws_stay_within_the_filters():
    """Through the whole sampler, mixed with greedy and unfiltered rows."""
    logits = torch.zeros(3, 500)
    logits[:, 100:] = 1.0
    for seed in range(30):
        rows = [row(top_k=5, seed=seed), row(**GREEDY), row(seed=seed)]
        filtered, greedy, free = sample(logits, rows).token_ids.tolist()
        assert 100 <= filtered < 105
        assert greedy == 100
        assert 0 <= free < 500


def test_temperature_comes_before_the_filters():
    """0.6, 0.4 at temperature 1; above 0.9 and below 0.1 at 0.1."""
    logits = torch.tensor([[0.6, 0.4]]).log().repeat(50, 1)
    hot = [row(top_p=0.7, seed=i) for i in range(50)]
    assert set(sample(logits, hot).token_ids.tolist()) == {0, 1}
    cold = [row(top_p=0.7, temperature=0.1, seed=i) for i in range(50)]
    assert set(sample(logits, cold).token_ids.tolist()) == {0}


def test_nothing_is_sorted_when_nobody_filters(monkeypatch):
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("sorted")

    for name in ("sort", "argsort", "topk"):
        monkeypatch.setattr(torch.Tensor, name, refuse)
        monkeypatch.setattr(torch, name, refuse)
    logits = torch.randn(3, 5000)
    sample(logits, [row(**GREEDY), row(temperature=0.0, top_k=50, top_p=0.9), row()])
    with pytest.raises(AssertionError, match="sorted"):
        sample(logits, [row(**GREEDY), row(**GREEDY), row(top_k=50)])


# --- the draw ------------------------------------------------------------------------------------


def test_a_draw_depends_on_seed_and_position_only():
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(12, 3000, generator=generator)
    params = [{}, {"top_p": 0.9}, {"top_k": 40}, {"min_p": 0.02}, GREEDY, {"temperature": 0.7}]
    rows = [row(prompt=[1] * i, output=[2] * (i % 3), seed=i, **params[i % 6]) for i in range(12)]
    together = sample(logits, rows).token_ids.tolist()
    alone = [sample(logits[i : i + 1], [rows[i]]).token_ids.item() for i in range(12)]
    order = [7, 2, 11, 0, 5, 9, 4, 1, 10, 3, 8, 6]
    shuffled = sample(logits[order], [rows[i] for i in order]).token_ids.tolist()
    assert together == alone == [shuffled[order.index(i)] for i in range(12)]


def test_seed_and_position_change_the_draw_and_the_prompt_does_not():
    logits = torch.zeros(1, 1000)

    def draw(**kwargs: Any) -> int:
        return sample(logits, [row(**kwargs)]).token_ids.item()

    assert draw(seed=1) == draw(seed=1, prompt=[4] * 9)
    assert len({draw(seed=1, output=[5] * n) for n in range(20)}) > 15
    assert len({draw(seed=n) for n in range(20)}) > 15
    assert draw(seed=1) != draw(seed=1 + 2**32)


@pytest.mark.parametrize(
    ("params", "shares"),
    [
        ({}, [0.1, 0.2, 0.3, 0.25, 0.15]),
        ({"top_k": 3}, [0, 0.2 / 0.75, 0.3 / 0.75, 0.25 / 0.75, 0]),
        ({"top_p": 0.6}, [0, 0.2 / 0.75, 0.3 / 0.75, 0.25 / 0.75, 0]),
        ({"min_p": 0.6}, [0, 0.2 / 0.75, 0.3 / 0.75, 0.25 / 0.75, 0]),
    ],
)
def test_draws_follow_the_distribution(params, shares):
    count = 10_000
    logits = torch.tensor([[0.1, 0.2, 0.3, 0.25, 0.15]]).log().repeat(count, 1)
    drawn = sample(logits, [row(seed=9_000_000 + i, **params) for i in range(count)]).token_ids
    observed = drawn.bincount(minlength=5).double()
    expected = torch.tensor(shares, dtype=torch.float64) * count
    assert (observed[expected == 0] == 0).all()
    used = expected > 0
    chi_square = ((observed - expected)[used] ** 2 / expected[used]).sum().item()
    assert chi_square < 23.5  # 0.9999 quantile for 4 degrees of freedom


def test_padded_ids_are_never_sampled():
    logits = torch.zeros(10_000, 16)
    logits[:, 12:] = 30.0
    rows = [row(seed=i, temperature=2.0) for i in range(10_000)]
    drawn = sample(logits, rows, vocab_limit=12).token_ids
    assert set(drawn.tolist()) == set(range(12))
    output = sample(logits[:1], [row(logprobs=16, **GREEDY)], vocab_limit=12)
    assert output.token_ids.item() == 0
    assert output.top_token_ids.tolist() == [list(range(12))]
    assert output.logprobs.item() == pytest.approx(-math.log(12), abs=1e-6)


# --- masks, biases, penalties --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "output", "banned"),
    [
        ([[4]], [], {4}),
        ([[4], [6]], [1], {4, 6}),
        ([[1, 2, 9]], [5, 1, 2], {9}),
        ([[1, 2, 9]], [1, 2], {9}),
        ([[1, 2, 9]], [2], set()),
        ([[1, 2, 9]], [1, 2, 5], set()),
        ([[1, 2, 9], [2, 8], [7, 9]], [1, 2], {9, 8}),  # of different length; 9 twice
        ([[1, 9], [2, 9]], [2], {9}),
        ([[2, 9], [1, 9]], [2], {9}),
        ([[3, 9]], [], set()),  # the prompt does not count, nor stale tokens
        ([[2, VOCAB + 5]], [2], set()),
    ],
)
def test_bad_words(words, output, banned):
    changed = changed_logits(
        [1.0] * VOCAB, row(prompt=[3], output=output, bad_words_token_ids=words, **GREEDY)
    )
    assert {i for i, x in enumerate(changed) if x == -INF} == banned


def test_min_tokens_masks_eos_and_stop_ids_until_reached():
    def banned(num_outputs: int) -> set[int]:
        r = row(output=[6] * num_outputs, min_tokens=2, stop_token_ids=[4], **GREEDY)
        changed = changed_logits([1.0] * VOCAB, r, eos_token_ids=(0, 7, VOCAB + 1))
        return {i for i, x in enumerate(changed) if x == -INF}

    assert banned(0) == banned(1) == {0, 4, 7}
    assert banned(2) == set()


def test_logit_bias():
    bias = {0: 1.5, 3: -2.0, 4: -100.0, 5: 100.0, VOCAB + 3: 7.0}
    changed = changed_logits([1.0] * VOCAB, row(logit_bias=bias, **GREEDY))
    assert changed[:7] == [2.5, 1.0, 1.0, -1.0, -INF, 101.0, 1.0]
    assert sample(torch.randn(1, VOCAB), [row(logit_bias=bias)]).token_ids.item() == 5


HISTORY = {"prompt": [1, 1, 2], "output": [2, 3, 3, 3]}


def test_repetition_penalty_over_prompt_and_output():
    logits = [4.0, 4.0, -4.0, 0.0, 8.0]
    changed = changed_logits(logits, row(repetition_penalty=2.0, **HISTORY, **GREEDY))
    assert changed == [4.0, 2.0, -8.0, 0.0, 8.0]
    changed = changed_logits(logits, row(repetition_penalty=0.5, **HISTORY, **GREEDY))
    assert changed == [4.0, 8.0, -2.0, 0.0, 8.0]


def test_frequency_penalty_counts_the_output():
    changed = changed_logits([1.0] * 5, row(frequency_penalty=0.5, **HISTORY, **GREEDY))
    assert changed == [1.0, 1.0, 0.5, -0.5, 1.0]


def test_presence_penalty_counts_once():
    changed = changed_logits([1.0] * 5, row(presence_penalty=-0.5, **HISTORY, **GREEDY))
    assert changed == [1.0, 1.0, 1.5, 1.5, 1.0]


def test_penalties_of_several_rows_with_histories_of_different_length():
    rows = [
        row(frequency_penalty=1.0, prompt=[3] * 9, output=[0], **GREEDY),
        row(**GREEDY),
        row(presence_penalty=2.0, repetition_penalty=2.0, prompt=[1], **GREEDY),
        row(frequency_penalty=0.5, output=[2] * 12, **GREEDY),
    ]
    logits = torch.tensor([[3.0, 2.5, 2.0, 1.0]]).repeat(4, 1)
    logits[2, 1] = 5.0
    logits[3, 2] = 8.0
    assert sample(logits, rows).token_ids.tolist() == [1, 0, 0, 0]


def test_order_is_mask_bias_repetition_frequency():
    """Bias before repetition: (1 + 3) / 2 - 0.5, and a mask that no bias lifts."""
    r = row(
        logit_bias={2: 3.0, 3: 50.0},
        grammar=[1, 2],
        bad_words_token_ids=[[1]],
        repetition_penalty=2.0,
        frequency_penalty=0.5,
        output=[2],
        **GREEDY,
    )
    assert changed_logits([1.0] * 5, r) == [-INF, -INF, 1.5, -INF, -INF]


# --- unusable rows -------------------------------------------------------------------------------


@pytest.mark.parametrize("params", [GREEDY, {}, {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}])
@pytest.mark.parametrize("vocab", [VOCAB, 9000])
def test_unusable_rows_yield_no_token_and_leave_the_others_alone(params, vocab):
    logits = torch.randn(7, vocab, generator=torch.Generator().manual_seed(1))
    rows = [row(seed=i, logprobs=2, **params) for i in range(7)]
    expected = sample(logits, rows)
    broken = logits.clone()
    broken[1, vocab - 1] = NAN
    broken[2] = -INF
    broken[3, 4] = INF
    broken[5] = NAN
    output = sample(broken, rows)
    bad = [1, 2, 3, 5]
    good = [0, 4, 6]
    assert output.token_ids[bad].tolist() == [-1] * 4
    for part, expected_part in (
        (output.token_ids, expected.token_ids),
        (output.logprobs, expected.logprobs),
        (output.top_token_ids, expected.top_token_ids),
        (output.top_logprobs, expected.top_logprobs),
    ):
        assert torch.equal(part[good], expected_part[good])


def test_masks_that_leave_nothing():
    logits = torch.randn(4, VOCAB)
    everything = dict.fromkeys(range(VOCAB), -100.0)
    rows = [
        row(logit_bias=everything),
        row(grammar=[3], bad_words_token_ids=[[3]]),
        row(grammar=[VOCAB + 1], **GREEDY),
        row(grammar=[3]),
    ]
    assert sample(logits, rows).token_ids.tolist() == [-1, -1, -1, 3]


# --- log probabilities ---------------------------------------------------------------------------


def test_nobody_asks_for_logprobs():
    output = sample(torch.randn(2, VOCAB), [row(), row(**GREEDY)])
    assert (output.logprobs, output.top_token_ids, output.top_logprobs) == (None, None, None)


@pytest.mark.parametrize("vocab", [30, 9000])
def test_logprobs_are_of_the_raw_logits(vocab):
    logits = 3 * torch.randn(8, vocab, generator=torch.Generator().manual_seed(2))
    variants = [
        GREEDY,
        {"temperature": 0.5},
        {"temperature": 2.0},
        {"top_p": 0.1},
        {"top_k": 1},
        {"logit_bias": {3: 50.0}},
        {"repetition_penalty": 3.0, "frequency_penalty": 2.0, "output": [1, 2]},
        {"grammar": [5]},
    ]
    rows = [row(logprobs=[3, 0, None, 1][i % 4], vocab=vocab, **v) for i, v in enumerate(variants)]
    output = sample(logits, rows)
    expected = logits.double().log_softmax(-1)
    chosen = expected.gather(1, output.token_ids[:, None])[:, 0]
    torch.testing.assert_close(output.logprobs.double(), chosen, atol=1e-5, rtol=0)
    best = expected.sort(descending=True, stable=True)
    assert torch.equal(output.top_token_ids, best.indices[:, :3])
    torch.testing.assert_close(output.top_logprobs.double(), best.values[:, :3], atol=1e-5, rtol=0)
    assert output.token_ids[5:].tolist()[0::2] == [3, 5]


@pytest.mark.parametrize("vocab", [30, 9000])
def test_top_logprobs_break_ties_by_id_and_keep_minus_infinity(vocab):
    logits = torch.zeros(3, vocab)
    logits[0, 10:] = 1.0
    logits[1, 20:] = -INF
    logits[2] = -INF
    logits[2, [5, 25]] = 0.0
    output = sample(logits, [row(logprobs=4, **GREEDY)] * 3)
    assert output.top_token_ids[:2].tolist() == [[10, 11, 12, 13], [0, 1, 2, 3]]
    assert output.top_token_ids[2].tolist() == [5, 25, 0, 1]
    assert output.top_logprobs[2].tolist() == pytest.approx([-math.log(2)] * 2 + [-INF] * 2)


def test_device_keys_rank_like_the_host():
    """The ranking that CUDA uses, on the CPU."""
    logits = torch.stack([random_row(i, 500, torch.Generator().manual_seed(i)) for i in range(6)])
    logits[0, :5] = torch.tensor([0.0, -0.0, 0.0, -0.0, 1e-40])
    expected = logits.argsort(descending=True, stable=True)[:, :20]
    assert expected[0, :5].tolist() != expected[1, :5].tolist()
    assert torch.equal(sampler_module._top_ids_on_gpu(logits, 20), expected)
    assert torch.equal(sampler_module._top_ids(logits, 20), expected)


# --- metadata ------------------------------------------------------------------------------------


def test_plain_greedy_rows_build_no_tensor(monkeypatch):
    rows = [RowSampling(SamplingParams(temperature=0.0, top_k=7), 0, 0, 3, 5)] * 4
    monkeypatch.setattr(torch, "from_numpy", None)
    metadata = build_sampling_metadata(rows, torch.zeros(1, 8), VOCAB, [0], torch.device("cpu"))
    assert metadata.draws is None
    assert metadata.changes is None
    assert metadata.max_logprobs == -1


def test_neutral_parameters_take_the_unfiltered_path():
    params = SamplingParams(top_k=-1, top_p=1.0, min_p=0.0, repetition_penalty=1.0, min_tokens=2)
    rows = [RowSampling(params, 2**64 - 1, 0, 3, 5)]
    metadata = build_sampling_metadata(rows, torch.zeros(1, 8), VOCAB, [0], torch.device("cpu"))
    assert metadata.changes is None
    assert metadata.draws.free_rows.tolist() == [0]
    assert metadata.draws.filtered_rows is None
    assert metadata.draws.max_top_k == 0
    assert metadata.draws.seeds.tolist() == [-1]
    assert metadata.draws.output_positions.tolist() == [2]


# --- grammars ------------------------------------------------------------------------------------


def test_a_grammar_leaves_only_its_tokens():
    logits = [float(i) for i in range(VOCAB)]
    seen = changed_logits(logits, row(grammar=[3, 17, 19], **GREEDY))
    assert seen == [x if i in (3, 17, 19) else -INF for i, x in enumerate(logits)]


def test_a_grammar_before_all_other_changes():
    """What a grammar forbids no bias brings back; bans within it may leave nothing."""
    logits = [0.0] * VOCAB
    seen = changed_logits(
        logits,
        row(
            grammar=[3, 17],
            logit_bias={2: 100.0, 17: 5.0},
            bad_words_token_ids=[[3]],
            **GREEDY,
        ),
    )
    assert seen == [5.0 if i == 17 else -INF for i in range(VOCAB)]
    everything = row(grammar=[3], bad_words_token_ids=[[3]], **GREEDY)
    nothing = row(grammar=[], temperature=2.0)
    free = row(**GREEDY)
    batch = torch.tensor([[0.0] * VOCAB] * 3)
    assert sample(batch, [everything, nothing, free]).token_ids.tolist() == [-1, -1, 0]


def test_min_tokens_under_a_grammar():
    logits = torch.tensor([[0.0] * VOCAB] * 2)
    rows = [row(grammar=[0, 9], min_tokens=n, temperature=0.0) for n in (0, 1)]
    assert sample(logits, rows, eos_token_ids=(0,)).token_ids.tolist() == [0, 9]


def test_a_mask_hides_no_nan_and_no_logprobs():
    logits = torch.tensor([[0.0] * VOCAB] * 2)
    logits[0, 5] = NAN
    logits[1, 5] = 3.0
    rows = [row(grammar=[7], **GREEDY), row(grammar=[7], logprobs=1, **GREEDY)]
    output = sample(logits, rows)
    assert output.token_ids.tolist() == [-1, 7]
    assert output.top_token_ids[1].tolist() == [5], "log probabilities are of the raw logits"
    assert output.logprobs[1] < output.top_logprobs[1, 0]


@pytest.mark.parametrize("vocab", [33, 1000, 4097])
def test_masks_of_many_words_and_rows_without_one(vocab):
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(6, vocab, generator=generator)
    allowed = torch.rand(6, vocab, generator=generator) < 0.1
    rows = []
    for i in range(6):
        ids = allowed[i].nonzero()[:, 0].tolist()
        r, tokens = row(seed=i, temperature=1.0)
        masked = dataclasses.replace(r, bitmask=bitmask(ids, vocab) if i % 2 else None)
        rows.append((masked, tokens))
    tokens = sample(logits, rows).token_ids.tolist()
    alone = [sample(logits[i : i + 1], [rows[i]]).token_ids.item() for i in range(6)]
    assert tokens == alone
    assert all(allowed[i, tokens[i]] for i in (1, 3, 5))
