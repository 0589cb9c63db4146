"""Capacity and fragmentation: the logic on small pools, and that figures do not depend on luck."""

import capacity
import fragmentation
import pytest
from contiguous import Moment


@pytest.fixture(scope="module")
def small():
    return capacity.study(slots=1024, load_factor=6, prompt=(8, 40))


def test_capacity_is_deterministic(small):
    assert capacity.study(slots=1024, load_factor=6, prompt=(8, 40)) == small


def test_capacity_has_the_expected_shape(small):
    for row in small["workloads"].values():
        paged = [row["paged"][str(b)] for b in capacity.BLOCK_SIZES]
        assert paged[0]["waste"] == 0  # blocks of one token
        waste, entries = ([r[key] for r in paged] for key in ("waste", "entries"))
        assert waste == sorted(waste) and entries == sorted(entries, reverse=True)
        assert all(r["use"] <= 1 for r in paged)
        assert paged[0]["sequences"] > row["contiguous"]["sequences"]
    tail, low = (
        small["workloads"][n]["paged"]["2"]["gain"] for n in ("heavy tail", "low variance")
    )
    assert tail > 2 > low > 1  # the gain comes from what budgets promise and outputs do not use


def test_chosen_block_size_satisfies_every_workload():
    def row(*waste):
        sizes = zip(capacity.BLOCK_SIZES, waste, strict=True)
        return {"paged": {str(size): {"waste": w} for size, w in sizes}}

    one, other = row(0, 0.01, 0.03, 0.05, 1, 1, 1), row(0, 0.01, 0.02, 0.03, 0.039, 1, 1)
    assert capacity.choose_block_size({"a": other}) == 16
    assert capacity.choose_block_size({"a": one, "b": other}) == 4


def test_fragmentation_of_a_moment():
    record = fragmentation.Record(100)
    record.add(Moment(1, 1, used=30, free=40, largest_hole=10, wanted=20))
    record.add(Moment(1, 1, used=30, free=40, largest_hole=10, wanted=50))  # too little in all
    record.add(Moment(1, 0, used=1, free=40, largest_hole=10, wanted=0))  # nothing waits
    assert record.internal == [0.5, 0.5] and record.external == [0.75, 0.75]
    assert record.blocked == [True, False]
    assert record.idle == [0.4, 0.4] and record.use == [0.3, 0.3]


def test_blocks_waste_less_than_runs():
    for by_allocator in fragmentation.study(4096, 8 * 4096).values():
        rows = {name: record.summary() for name, record in by_allocator.items()}
        blocks = rows["blocks of 16"]
        assert blocks["external"] == blocks["blocked"] == 0
        assert blocks["internal"] < 0.1 < rows["first fit"]["internal"]
        assert rows["first fit"]["external"] > 0.3
        assert blocks["use"] > rows["first fit"]["use"] > 0
        assert rows["equal runs"]["internal"] > rows["first fit"]["internal"]
