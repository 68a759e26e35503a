"""Tells the prefix index what the engines hold, off the step path."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Iterable
from typing import Final

import structlog
from prometheus_client import CollectorRegistry, Counter

from pagemesh.scheduler_svc.engine import Engine
from pagemesh.scheduler_svc.publish import Publication
from pagemesh.shared.prefix_index import Claim, PrefixIndex, Standing
from pagemesh.shared.registry import AWAY

PERIOD_S: Final = 0.05
HURRIED_SECTIONS: Final = 8
"""Walked in a period when something may have been lost: all of them in two seconds."""
REST_S: Final = 1.0
"""Between two sections of the walk otherwise. It renews the engine's claim as well."""
BACKOFF_S: Final = 1.0
"""After a call that failed."""

log = structlog.get_logger(__name__)


class PublishMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self.calls = Counter(
            "pagemesh_index_publish_calls", "Calls that told the prefix index", registry=registry
        )
        self.failed = Counter(
            "pagemesh_index_publish_failures", "Such calls that failed", registry=registry
        )
        self.blocks = Counter(
            "pagemesh_index_published_blocks",
            "Blocks the index was told of when they entered or left a cache",
            registry=registry,
        )
        self.dropped = Counter(
            "pagemesh_index_dropped_blocks",
            "Blocks it was not told of then, and had to learn from the walk",
            registry=registry,
        )
        self.sections = Counter(
            "pagemesh_index_sections_walked", "256ths of a cache rewritten", registry=registry
        )


class PublishedEngine:
    """One opening of an engine: an owner in the index, with a number once it has claimed one."""

    def __init__(self, engine: Engine) -> None:
        self.claim: Claim | None = None
        self.publication = Publication(engine.card, lambda: engine.contents)
        self.rests_until_s = 0.0
        self.dropped_told = 0
        self._owner = f"{engine.engine_id}/{uuid.uuid4().hex[:8]}"

    @property
    def number(self) -> int:
        return self.claim.number if self.claim is not None else 0

    async def claimed(self, index: PrefixIndex) -> Claim:
        if self.claim is None:
            self.claim = await index.claim(self._owner)
            self.publication.doubt()
        return self.claim

    def heard(self, standing: Standing) -> None:
        """What a call for it brought."""
        if standing is Standing.TAKEN:
            self.claim = None
        elif standing is Standing.FORGOTTEN:
            self.publication.doubt()


class Publisher:
    """Owner of no engine: `engines` are those to speak of, one after the other, a call or two each
    in a period. With Redis slow or away changes are dropped and the walk makes up for them."""

    def __init__(
        self,
        index: PrefixIndex,
        engines: Callable[[], Iterable[PublishedEngine]],
        metrics: PublishMetrics,
    ) -> None:
        self._index = index
        self._engines = engines
        self._metrics = metrics
        self._away = False

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            try:
                for engine in list(self._engines()):
                    await self._speak_of(engine)
            except AWAY as error:
                self._note_away(error)
                await asyncio.sleep(BACKOFF_S)
            else:
                self._note_back()
            await asyncio.sleep(PERIOD_S)

    async def _speak_of(self, engine: PublishedEngine) -> None:
        claim = await engine.claimed(self._index)
        await self._publish(engine, claim)
        if engine.publication.hurried:
            for _ in range(HURRIED_SECTIONS):
                await self._walk(engine, claim)
        elif time.monotonic() >= engine.rests_until_s:
            await self._walk(engine, claim)
            engine.rests_until_s = time.monotonic() + REST_S

    async def _publish(self, engine: PublishedEngine, claim: Claim) -> None:
        publication = engine.publication
        change = publication.take()
        try:
            if change.n_blocks:
                self._metrics.calls.inc()
                engine.heard(await self._index.publish(claim, change.added, change.removed))
                self._metrics.blocks.inc(change.n_blocks)
        except AWAY:
            publication.lost(change)
            raise
        finally:
            self._metrics.dropped.inc(publication.dropped_blocks - engine.dropped_told)
            engine.dropped_told = publication.dropped_blocks

    async def _walk(self, engine: PublishedEngine, claim: Claim) -> None:
        first, second, held = engine.publication.section()
        self._metrics.calls.inc()
        standing, second = await self._index.rewrite(claim, first, second, held)
        engine.heard(standing)
        if standing is not Standing.TAKEN:
            engine.publication.walked(second)
            self._metrics.sections.inc()

    def _note_away(self, error: BaseException) -> None:
        self._metrics.failed.inc()
        if not self._away:
            effect = "the prefix index learns of changes later"
            log.warning("prefix_index_away", error=str(error) or "no answer", effect=effect)
        self._away = True

    def _note_back(self) -> None:
        if self._away:
            log.info("prefix_index_back")
        self._away = False
