"""Comments on quiet streams, from one timer for all of them instead of one per token."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from pagemesh.gateway.generation import Generation

SWEEP_PERIOD_S: Final = 0.5
# A request refused by its engine right after acceptance still gets a proper HTTP status.
HEADER_GRACE_S: Final = 1.0
# Proxies cut idle streams at 60 s.
KEEP_ALIVE_S: Final = 10.0


class KeepAlive:
    """Nudges each watched generation whose `nudge_at_s` (event loop time) has passed."""

    def __init__(self) -> None:
        self._watched: set[Generation] = set()

    @contextmanager
    def watching(self, generation: Generation) -> Iterator[None]:
        self._watched.add(generation)
        try:
            yield
        finally:
            self._watched.discard(generation)

    def sweep(self, now_s: float) -> None:
        for generation in self._watched:
            if now_s >= generation.nudge_at_s:
                generation.nudge()

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(SWEEP_PERIOD_S)
            self.sweep(loop.time())
