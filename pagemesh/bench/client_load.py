"""How busy a client process is, measured by itself while it works."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

PERIOD_S: Final = 0.05
# A client that uses this share of a core cannot take more load: the rest goes to the system.
SATURATED_CPU_SHARE: Final = 0.85
# Longer than it takes to send a few hundred requests at once.
SATURATED_FOR_S: Final = 2.0
# Linux: nanoseconds on a core, nanoseconds in a run queue, time slices.
_SCHEDSTAT: Final = Path("/proc/thread-self/schedstat")


@dataclass(slots=True)
class ClientLoad:
    """How busy one client was. `cpu_share` is the share of one core that its thread used,
    `queued_share` the share of the time that it wanted to run and got no core (0 where the system
    does not tell); `lag_s` are samples of how late its event loop ran."""

    cpu_share: float = 0.0
    queued_share: float = 0.0
    lag_s: list[float] = field(default_factory=list)


class CpuWindow:
    """The share of a core used over the last SATURATED_FOR_S."""

    def __init__(self) -> None:
        self._marks: deque[tuple[float, float]] = deque()

    def add(self, wall_s: float, cpu_s: float) -> None:
        """Note the CPU time used until `wall_s`."""
        self._marks.append((wall_s, cpu_s))
        while len(self._marks) > 2 and self._marks[1][0] <= wall_s - SATURATED_FOR_S:
            self._marks.popleft()

    @property
    def is_saturated(self) -> bool:
        """False until the window is full."""
        if not self._marks:
            return False
        (first_s, first_cpu_s), (last_s, last_cpu_s) = self._marks[0], self._marks[-1]
        elapsed_s = last_s - first_s
        return elapsed_s >= SATURATED_FOR_S and (
            last_cpu_s - first_cpu_s >= SATURATED_CPU_SHARE * elapsed_s
        )


@asynccontextmanager
async def measured_load(on_saturated: Callable[[], object]) -> AsyncIterator[ClientLoad]:
    """Measure this thread while the block runs; the share of a core is there at its end.

    `on_saturated` is called once, at the moment when the client has become the limit.
    """
    load = ClientLoad()
    wall_s, cpu_s, queued_s = time.monotonic(), time.thread_time(), _queued_s()
    watching = asyncio.create_task(_watch(load.lag_s, on_saturated))
    try:
        yield load
    finally:
        watching.cancel()
        with suppress(asyncio.CancelledError):
            await watching
        elapsed_s = max(time.monotonic() - wall_s, 1e-9)
        load.cpu_share = (time.thread_time() - cpu_s) / elapsed_s
        load.queued_share = (_queued_s() - queued_s) / elapsed_s


def _queued_s() -> float:
    """Time that this thread has spent in a run queue; 0 where the system does not tell."""
    try:
        return int(_SCHEDSTAT.read_text().split()[1]) * 1e-9
    except (OSError, IndexError):
        return 0.0


async def _watch(lag_s: list[float], on_saturated: Callable[[], object]) -> None:
    window, was_saturated = CpuWindow(), False
    while True:
        due_s = time.monotonic() + PERIOD_S
        await asyncio.sleep(PERIOD_S)
        now_s = time.monotonic()
        lag_s.append(max(now_s - due_s, 0.0))
        window.add(now_s, time.thread_time())
        if window.is_saturated and not was_saturated:
            was_saturated = True
            on_saturated()
