"""When requests are sent: all at once, or as a Poisson process."""

from __future__ import annotations

import math
import random
from itertools import accumulate


def arrival_times_s(n_requests: int, rate_per_s: float, seed: int) -> list[float]:
    """Ascending offsets in seconds, the first 0. An infinite rate sends everything at once."""
    if math.isinf(rate_per_s):
        return [0.0] * n_requests
    draw = random.Random(f"arrivals-{seed}")
    gaps = (draw.expovariate(rate_per_s) for _ in range(n_requests - 1))
    return list(accumulate(gaps, initial=0.0)) if n_requests else []
