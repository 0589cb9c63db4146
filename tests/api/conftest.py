import asyncio
from collections.abc import Callable, Iterator

import pytest
from api_harness import Api


@pytest.fixture
def make_api() -> Iterator[Callable[..., Api]]:
    with asyncio.Runner() as runner:
        yield lambda **options: Api(runner, **options)


@pytest.fixture
def api(make_api: Callable[..., Api]) -> Api:
    return make_api()
