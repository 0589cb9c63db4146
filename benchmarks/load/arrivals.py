"""When the requests of an open loop are due."""

import math
import random


def arrival_times(
    rate: float, count: int, *, burstiness: float = 1.0, seed: int = 0
) -> list[float]:
    """Return ``count`` rising times in seconds, ``rate`` a second on average.

    Gaps follow a gamma distribution of mean 1 / rate and shape ``burstiness``: 1 is a Poisson
    process, less clusters the arrivals, infinity spaces them evenly. An infinite rate makes all of
    them due at once. Raises ValueError unless both are positive.
    """
    if not (rate > 0 and burstiness > 0):
        raise ValueError(f"rate and burstiness must be positive, got {rate} and {burstiness}")
    if math.isinf(rate):
        return [0.0] * count
    if math.isinf(burstiness):
        return [i / rate for i in range(count)]
    rng = random.Random(seed)
    times, now = [], 0.0
    for _ in range(count):
        now += rng.gammavariate(burstiness, 1 / (rate * burstiness))
        times.append(now)
    return times
