"""Every step that the scheduler may plan has a bucket, whatever the limits."""

import pytest

from pageserve.worker.cuda_graphs import row_buckets, token_buckets


@pytest.mark.parametrize("limit", [1, 2, 5, 64, 100, 512, 1024, 3000])
def test_buckets_rise_to_the_limit(limit):
    sizes = row_buckets(limit)
    assert sizes == sorted(set(sizes)) and sizes[-1] == limit


@pytest.mark.parametrize(("limit", "largest"), [(1, 1), (64, 64), (600, 600), (8192, 2048)])
def test_token_buckets_end_where_graphs_stop_paying(limit, largest):
    sizes = token_buckets(limit)
    assert sizes == sorted(set(sizes)) and sizes[-1] == largest
