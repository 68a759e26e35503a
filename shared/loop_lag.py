"""How late an event loop is: what every other callback of its process waits too."""

from __future__ import annotations

import asyncio
import time
from typing import Final

from prometheus_client import CollectorRegistry

from pagemesh.shared.distribution import Histogram

# Fine where streams begin to notice it. uvloop's timers themselves have whole milliseconds.
LAG_S: Final = (
    *(0.001, 0.002, 0.003, 0.004, 0.005, 0.006, 0.008, 0.01, 0.012, 0.015, 0.02, 0.03, 0.05),
    *(0.1, 0.2, 0.5, 1, 2, 5),
)
# A tenth of a percent of a core.
_PERIOD_S: Final = 0.02


class LoopLag:
    """Wakes now and then, and observes how long after the time that it asked for."""

    def __init__(self, metrics: CollectorRegistry) -> None:
        self._lag_s = Histogram(
            metrics,
            "pagemesh_event_loop_lag_seconds",
            "How late the event loop calls what is due, looked at fifty times a second",
            LAG_S,
        ).labels()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            due_s = time.monotonic() + _PERIOD_S
            await asyncio.sleep(_PERIOD_S)
            self._lag_s.observe(max(0.0, time.monotonic() - due_s))
