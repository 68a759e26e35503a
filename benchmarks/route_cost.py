"""What routing a request costs the gateway, and what a change of the routes does.

python benchmarks/route_cost.py
"""

from __future__ import annotations

import timeit
from collections.abc import Callable
from functools import partial
from typing import Final

from pagemesh.shared.routes import MAX_ROUTES, MAX_TARGETS, model_shares, preferred

KEY: Final = "req_0123456789abcdef0123456789abcdef"
REPEATS: Final = 5


def best_s(call: Callable[[], object], times: int) -> float:
    return min(timeit.repeat(call, number=times, repeat=REPEATS)) / times


def main() -> None:
    for n_targets in (1, 2, MAX_TARGETS):
        shares = {f"model-{i}": 1 / n_targets for i in range(n_targets)}
        spent_us = 1e6 * best_s(partial(preferred, shares, KEY), 20_000)
        print(f"a request, split over {n_targets}: {spent_us:.1f} µs")
    targets = {f"model-{i}": 1.0 for i in range(MAX_TARGETS)}
    routes = {f"route-{i}": targets for i in range(MAX_ROUTES)}
    spent_ms = 1e3 * best_s(partial(model_shares, routes), 5)
    print(f"a change of {MAX_ROUTES} routes over {MAX_TARGETS} models: {spent_ms:.1f} ms")


if __name__ == "__main__":
    main()
