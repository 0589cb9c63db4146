"""Greedy choice, the filtered draw and log probabilities against a plain statement of the rules."""

import pytest
import reference
import torch

from pageserve.kernels.sampling import (
    RepetitionPenalties,
    apply_bitmasks,
    greedy_sample,
    logsumexp,
    sample,
)

NAN, INF = float("nan"), float("inf")


def draw_logits(rows: int, vocab: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows + vocab)
    return (3 * torch.randn(rows, vocab, generator=generator)).to(dtype).to(device)


def draw(
    logits: torch.Tensor,
    rows: list[tuple[float, int, float, float, int, int]],
    penalties: RepetitionPenalties | None = None,
) -> list[int]:
    """Sample with (temperature, top_k, top_p, min_p, seed, position) per row."""
    temperature, top_k, top_p, min_p, seeds, positions = zip(*rows, strict=True)

    def column(values: tuple, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=logits.device)

    return sample(
        logits,
        column(temperature, torch.float32),
        column(top_k, torch.int32),
        column(top_p, torch.float32),
        column(min_p, torch.float32),
        column(seeds, torch.int64),
        column(positions, torch.int32),
        penalties,
    ).tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [5, 1000, 9001])
def test_greedy(dtype, vocab, device):
    logits = draw_logits(6, vocab, dtype, device)
    logits[1, :4] = 99.0  # ties
    logits[2, vocab - 1] = 77.0
    logits[3, vocab // 2] = NAN
    logits[4] = -INF
    logits[5, 1] = INF
    expected = [int(x.float().argmax()) for x in logits]
    expected[1], expected[3], expected[4], expected[5] = 0, -1, -1, -1
    assert greedy_sample(logits).tolist() == expected
    neutral = [(0.0, 0, 1.0, 0.0, 0, 0)] * 6
    assert draw(logits, neutral) == expected
    assert greedy_sample(logits[:0]).tolist() == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [70, 9001])
def test_repetition_penalties(dtype, vocab, device):
    """As if the logits, in float32, had been penalised before; slots in any order."""
    logits = draw_logits(6, vocab, dtype, device)
    seen = torch.rand(8, vocab, generator=torch.Generator().manual_seed(1)) < 0.4
    bits = torch.zeros(8, -(-vocab // 32) * 32, dtype=torch.int64)
    bits[:, :vocab] = seen.long()
    words = (bits.view(8, -1, 32) << torch.arange(32)).sum(-1).to(torch.uint32).view(torch.int32)
    slots, penalty = torch.tensor([5, 0, 7, 1, 6, 2]), torch.tensor([1.3, 0.5, 1.0, 1.1, 10, 1.7])
    x = logits.float().cpu()
    lowered = torch.where(x > 0, x / penalty[:, None], x * penalty[:, None])
    expected = torch.where(seen[slots], lowered, x).to(device)
    rows = [
        (t, k, p, m, 11 * i, i)
        for i, (t, k, p, m) in enumerate(
            [(0, 0, 1, 0), *PARAMETERS[:3], (1, 5, 0.9, 0), PARAMETERS[1]]
        )
    ]
    penalties = RepetitionPenalties(penalty.to(device), slots.int().to(device), words.to(device))
    assert draw(logits, rows, penalties) == draw(expected, rows)


def test_philox_is_the_standard_one():
    # Random123's known answer for counter and key all zero.
    words = reference.philox(0, torch.tensor([0]), 0)
    assert [w.item() for w in words] == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


PARAMETERS = [
    (1.0, 0, 1.0, 0.0),
    (0.3, 0, 1.0, 0.0),
    (2.0, 5, 1.0, 0.0),
    (1.0, 300, 1.0, 0.0),
    (1.0, 700, 0.99, 0.0),
    (0.7, 0, 0.9, 0.0),
    (1.5, 0, 0.3, 0.0),
    (1.0, 0, 0.9999, 0.0),
    (1.0, 0, 0.0, 0.0),
    (1.0, 0, 1.0, 0.05),
    (0.8, 40, 0.8, 0.0),
    (1.2, 20, 0.95, 0.1),
    (1.0, 1, 0.5, 0.5),
    (1.0, 100000, 0.7, 0.0),
    (1.0, -1, 1.0, 0.0),
    (0.0, 3, 0.5, 0.0),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [70, 4100])
def test_sample(dtype, vocab, device):
    logits = draw_logits(len(PARAMETERS), vocab, dtype, device)
    for position in range(3 if device.type == "cuda" else 1):
        seeds = [(i * 0x9E3779B97F4A7C15 + position) % 2**63 - 2**62 for i in range(len(logits))]
        rows = [(*p, seed, position) for p, seed in zip(PARAMETERS, seeds, strict=True)]
        expected = [reference.sample(x.cpu(), *row) for x, row in zip(logits, rows, strict=True)]
        assert draw(logits, rows) == expected


@pytest.mark.parametrize("vocab", [65, 4097])
@pytest.mark.parametrize("scale", [0.0, 3.0, 1e4])
def test_sample_of_what_masks_leave(vocab, scale, device):
    """Rows of a few, half or all tokens at any temperature, with seeds of all 64 bits."""
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(12, vocab, generator=generator) * scale
    for i, allowed in enumerate([0.0, 0.002, 0.5, 1.0] * 3):
        banned = torch.rand(vocab, generator=generator) >= allowed
        banned[17 * i % vocab] = False
        logits[i, banned] = -INF
    rows = []
    for i, temperature in enumerate([1e-4] * 4 + [1.0] * 4 + [2.0] * 4):
        filters = [(0, 1.0, 0.0), (0, 0.9, 0.0), (30, 0.95, 0.0), (0, 1.0, 0.02)][i // 2 % 4]
        rows.append((temperature, *filters, [-(2**63), 2**63 - 1, -1 - i][i % 3], i))
    seeds = [seed % 2**64 for *_, seed, _ in rows]
    expected = [
        reference.sample(x, *row[:4], seed, row[5])
        for x, row, seed in zip(logits, rows, seeds, strict=True)
    ]
    assert draw(logits.to(device), rows) == expected


@pytest.mark.parametrize("spread", [0.0, 1.0, 4.0])
def test_sample_of_many_groups(spread, device):
    """A row's groups are drawn a few at a time until no other can win: flat rows take several
    turns, and the winner stands anywhere."""
    generator = torch.Generator().manual_seed(3)
    logits = spread * torch.randn(6, 40_000, generator=generator)
    filters = [(0, 1.0, 0.0), (0, 1.0, 1e-3), (0, 0.98, 0.0)] * 2
    rows = [(1.0, *f, 7 * i, 2) for i, f in enumerate(filters)]
    expected = [reference.sample(x, *row) for x, row in zip(logits, rows, strict=True)]
    assert draw(logits.to(device), rows) == expected


@pytest.mark.parametrize("filters", [(0, 1.0, 0.0), (0, 0.9, 0.0)])
@pytest.mark.parametrize("vocab", [100, 600])  # pairs are compared of up to 512
def test_noise_is_not_lost_in_the_sum_with_large_logits(vocab, filters, device):
    """At 1e8 neighbouring float32 numbers are 8 apart, more than most tokens' noises."""
    logits = torch.full((8, vocab), 1e4)
    rows = [(1e-4, *filters, seed, 0) for seed in range(8)]
    expected = [reference.sample(x, *row) for x, row in zip(logits, rows, strict=True)]
    assert draw(logits.to(device), rows) == expected


def test_sample_keeps_exactly_k_of_tied_logits(device):
    logits = torch.zeros(20, 500, device=device)
    logits[:, 100:] = 1.0  # 400 ties at the top; the lowest 5 ids of them survive
    rows = [(1.0, 5, 1.0, 0.0, seed, 0) for seed in range(20)]
    assert set(draw(logits, rows)) == set(range(100, 105))
    rows = [(1.0, 0, 0.01, 0.0, seed, 0) for seed in range(20)]
    mass = (400 * 2.718281828 + 100) * 0.01 / 2.718281828  # top-p keeps ties by id as well
    assert set(draw(logits, rows)) <= set(range(100, 100 + int(mass) + 1))


@pytest.mark.parametrize("spread", [0.1, 3.0])
@pytest.mark.parametrize("top_p", [0.2, 0.9, 0.99])
def test_top_p_that_keeps_many_tokens(spread, top_p, device):
    logits = draw_logits(2, 6000, torch.float32, device) / 3 * spread
    logits[1] = logits[1].round(decimals=1)  # many ties
    rows = [(1.0, 0, top_p, 0.0, 11, 4), (0.7, 0, top_p, 0.0, 12, 5)]
    expected = [reference.sample(x.cpu(), *row) for x, row in zip(logits, rows, strict=True)]
    assert draw(logits, rows) == expected


def test_unusable_rows_and_masked_tokens(device):
    logits = draw_logits(5, 300, torch.float32, device)
    logits[0, 7] = NAN
    logits[1] = -INF
    logits[2] = -INF
    logits[2, 123] = -50.0
    logits[3, 10:] = -INF
    logits[4, 3] = INF
    for row in [(1.0, 0, 1.0, 0.0, 1, 2), (1.0, 50, 0.9, 0.0, 1, 2)]:
        drawn = draw(logits, [row] * 5)
        assert drawn[:3] == [-1, -1, 123] and 0 <= drawn[3] < 10 and drawn[4] == -1


def test_a_row_does_not_depend_on_its_batch(device):
    logits = draw_logits(5, 5000, torch.float32, device)
    rows = [(1.0, 0, 0.95, 0.0, 10 + i, i) for i in range(5)]
    together = draw(logits, rows)
    alone = [draw(logits[i : i + 1], rows[i : i + 1])[0] for i in range(5)]
    assert together == alone


def test_draws_follow_the_distribution(device):
    count = 4000 if device.type == "cuda" else 150
    logits = torch.tensor([0.1, 0.2, 0.3, 0.4], device=device).log().repeat(count, 1)
    drawn = torch.tensor(draw(logits, [(1.0, 0, 1.0, 0.0, 7, i) for i in range(count)]))
    shares = drawn.bincount(minlength=4) / count
    assert (shares - torch.tensor([0.1, 0.2, 0.3, 0.4])).abs().max() < 1.5 / count**0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logsumexp(dtype, device):
    logits = draw_logits(4, 5003, dtype, device)[:, :5000]  # rows are not contiguous
    logits[1, 5:] = -INF
    logits[2, 7] = NAN
    logits[3] = -INF
    expected = logits[:2].double().logsumexp(-1)
    out = logsumexp(logits)
    assert (out[:2] - expected).abs().max() < 1e-5
    assert out[2:].isnan().all()
    assert logsumexp(logits[:0]).tolist() == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [5, 1000, 9001])
def test_bitmasks(dtype, vocab, device):
    """Rows with a mask lose what its bits leave out, rows without one nothing; NaN stays."""
    logits = draw_logits(4, vocab + 3, dtype, device)[:, :vocab]  # rows are not contiguous
    logits[2, 1] = NAN
    generator = torch.Generator().manual_seed(vocab)
    allowed = torch.rand(2, -(-vocab // 32) * 32, generator=generator) < 0.4
    allowed[:, 1] = False
    words = (allowed.view(2, -1, 32).long() << torch.arange(32)).sum(-1)
    expected = logits.clone()
    expected[1] += torch.where(allowed[1, :vocab], 0.0, -INF).to(device)
    expected[2] += torch.where(allowed[0, :vocab], 0.0, -INF).to(device)
    index = torch.tensor([-1, 1, 0, -1], dtype=torch.int32, device=device)
    apply_bitmasks(logits, index, words.int().to(device))
    assert torch.equal(logits.nan_to_num(7.0), expected.nan_to_num(7.0))
    assert logits[2, 1].isnan()
