"""Asks the prefix index which engines hold the beginning of a prompt, without waiting for Redis."""

from __future__ import annotations

import asyncio
import time
from typing import Final

import structlog
from prometheus_client import CollectorRegistry, Counter

from pagemesh.shared.distribution import Histogram
from pagemesh.shared.prefix_index import PrefixIndex
from pagemesh.shared.registry import AWAY

PATIENCE_S: Final = 0.005
"""A request waits for the answer that long: about what computing one or two blocks takes."""
MAX_LOOKUPS: Final = 64
"""Out at a time. Over it the index is slow, and nobody asks until some are answered."""
TELL_EVERY_S: Final = 60.0
"""That the index is silent."""

log = structlog.get_logger(__name__)


class LookupMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        lookups = Counter(
            "pagemesh_index_lookups",
            "Prompts whose beginning was looked up in the prefix index, by result",
            ["result"],
            registry=registry,
        )
        self.hits, self.misses = lookups.labels("hit"), lookups.labels("miss")
        self.unanswered = lookups.labels("unanswered")
        self.prompt_tokens = Counter(
            "pagemesh_placement_tokens", "Tokens of prompts placed on an engine", registry=registry
        )
        self.hit_tokens = Counter(
            "pagemesh_placement_hit_tokens",
            "Of these, expected to be cached on the engine that was chosen",
            registry=registry,
        )
        self.lookup_s = Histogram(
            registry, "pagemesh_index_lookup_seconds", "One answer of the prefix index"
        ).labels()


class Lookup:
    """Owner of the calls that are out. One whose asker lost patience goes on: to break it off would
    cost the connection."""

    def __init__(self, index: PrefixIndex, metrics: LookupMetrics) -> None:
        self._index = index
        self._metrics = metrics
        self._out: set[asyncio.Task[dict[int, int]]] = set()
        self._tell_at_s = 0.0

    async def depths(self, keys: bytes) -> dict[int, int] | None:
        """Engine number → how many leading blocks of `keys` it holds; None without an answer."""
        if len(self._out) >= MAX_LOOKUPS:
            self._unanswered(f"{MAX_LOOKUPS} lookups are out")
            return None
        task = asyncio.create_task(self._ask(keys), name="lookup")
        self._out.add(task)
        task.add_done_callback(self._end)
        done, _ = await asyncio.wait({task}, timeout=PATIENCE_S)
        if not done:
            self._unanswered(f"no answer within {PATIENCE_S * 1e3:g} ms")
            return None
        try:
            depths = task.result()
        except AWAY as error:
            self._unanswered(str(error) or "no answer")
            return None
        (self._metrics.hits if depths else self._metrics.misses).inc()
        return depths

    async def close(self) -> None:
        for task in self._out:
            task.cancel()
        await asyncio.gather(*self._out, return_exceptions=True)

    async def _ask(self, keys: bytes) -> dict[int, int]:
        began_s = time.monotonic()
        depths = await self._index.depths(keys)
        self._metrics.lookup_s.observe(time.monotonic() - began_s)
        return depths

    def _end(self, task: asyncio.Task[dict[int, int]]) -> None:
        self._out.discard(task)
        if not task.cancelled():
            task.exception()  # whoever waited has been told; nobody else wants to know

    def _unanswered(self, reason: str) -> None:
        self._metrics.unanswered.inc()
        now_s = time.monotonic()
        if now_s >= self._tell_at_s:
            effect = "requests are placed by affinity and load meanwhile"
            log.warning("prefix_index_silent", reason=reason, effect=effect)
            self._tell_at_s = now_s + TELL_EVERY_S
