"""Whether the figures are the server's or the client's own."""

from __future__ import annotations

import os
from typing import Final

from pagemesh.bench.client_load import SATURATED_CPU_SHARE, ClientLoad
from pagemesh.bench.statistics import spread

LATE_MS: Final = 20.0


def lag_p99_ms(load: ClientLoad) -> float:
    measured = spread(load.lag_s)
    return 0.0 if measured is None else measured.p99 * 1e3


def client_limits(load: ClientLoad, n_clients: int) -> list[str]:
    """A sentence for each way in which the client held the figures back."""
    sentences = []
    lag_ms = lag_p99_ms(load)
    if load.cpu_share >= SATURATED_CPU_SHARE:
        sentences.append(
            f"The client was the limit: it used {load.cpu_share:.0%} of a core{_advice(n_clients)}."
        )
    elif lag_ms >= LATE_MS:
        sentences.append(
            f"The client ran late ({lag_ms:.0f} ms at P99) with {load.cpu_share:.0%} of a core: "
            "other work holds its cores, and latencies are that much too long."
        )
    return sentences


def _advice(n_clients: int) -> str:
    if n_clients < (os.cpu_count() or 1):
        return f". Give --clients {2 * n_clients}"
    return f" in each of {n_clients} processes, and there are no cores for more"
