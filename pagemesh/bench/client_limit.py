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
    used, lag_ms = f"{load.cpu_share:.0%} of a core", lag_p99_ms(load)
    if load.cpu_share >= SATURATED_CPU_SHARE:
        return [f"The client was the limit: it used {used}{_advice(n_clients)}."]
    if load.cpu_share + load.queued_share >= SATURATED_CPU_SHARE:
        return [
            f"The client was the limit: it was never idle but got {used}, since other work (the "
            "server, perhaps) holds the cores. Drive the server from another machine."
        ]
    if lag_ms >= LATE_MS:
        return [
            f"The client ran late ({lag_ms:.0f} ms at P99) with {used}: other work holds its "
            "cores, and latencies are that much too long."
        ]
    return []


def _advice(n_clients: int) -> str:
    if n_clients < (os.cpu_count() or 1):
        return f". Give --clients {2 * n_clients}"
    return f" in each of {n_clients} processes, and there are no cores for more"
