"""Which batches this gateway runs: those whose leases it holds (`shared/leases.py`)."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import Final

import structlog

from pagemesh.gateway.batches.batch_store import LeaseLost, OpenBatch
from pagemesh.gateway.batches.run import BatchRun, Means
from pagemesh.shared.errors import RequestError
from pagemesh.shared.leases import Lease, LeaseKeys
from pagemesh.shared.registry import AWAY

LOOK_PERIOD_S: Final = 0.5
SWEEP_PERIOD_S: Final = 300.0
RETRY_S: Final = 5.0
"""After which a batch that could not go on is tried again."""
MAX_RUNNING: Final = 8
"""Batches of one gateway at a time. They share its slots."""

log = structlog.get_logger(__name__)


class BatchRunner:
    """Takes open batches that nobody runs. With Redis away those at hand go on, and none is taken:
    their terms keep others' results apart from ours."""

    def __init__(self, means: Means, leases: LeaseKeys, holder: str) -> None:
        self._means = means
        self._leases = leases
        self._holder = holder
        self._held: dict[str, Lease] = {}
        self._runs: dict[str, asyncio.Task[None]] = {}
        self._not_before_s: dict[str, float] = {}
        self._stopped = False

    @property
    def n_running(self) -> int:
        return len(self._runs)

    async def run(self) -> None:
        """Until cancelled or stopped."""
        beside = [
            asyncio.create_task(self._sweep()),
            asyncio.create_task(self._means.slots.run()),
        ]
        try:
            while not self._stopped:
                with suppress(*AWAY):
                    await self._keep_leases()
                    await self._take_open()
                await asyncio.sleep(LOOK_PERIOD_S)
        finally:
            for task in beside:
                task.cancel()
            await self.stop()

    async def stop(self) -> None:
        """Let others go on with what is not done."""
        self._stopped = True
        runs = list(self._runs.values())
        for run in runs:
            run.cancel()
        await asyncio.gather(*runs, return_exceptions=True)

    async def _keep_leases(self) -> None:
        await self._leases.renew(self._held)
        found = await self._leases.read(self._held)
        for name, lease in list(self._held.items()):
            if name in found and found[name] != lease and name in self._runs:
                log.warning("batch_lease_lost", batch=name)
                self._runs[name].cancel()

    async def _take_open(self) -> None:
        batches = await asyncio.to_thread(self._means.batches.open_batches)
        names = {batch.id for batch in batches}
        self._not_before_s = {k: v for k, v in self._not_before_s.items() if k in names}
        leases = await self._leases.read(names)
        for batch in batches:
            lease = leases.get(batch.id)
            if self._may_take(batch.id) and (lease is None or not lease.holder):
                await self._take(batch)

    def _may_take(self, name: str) -> bool:
        free = len(self._runs) < MAX_RUNNING and name not in self._runs and not self._stopped
        return free and time.monotonic() >= self._not_before_s.get(name, 0.0)

    async def _take(self, batch: OpenBatch) -> None:
        lease = await self._leases.claim(batch.id, self._holder)
        if lease is not None and not self._stopped:
            self._held[batch.id] = lease
            self._runs[batch.id] = asyncio.create_task(self._run(batch, lease))

    async def _run(self, batch: OpenBatch, lease: Lease) -> None:
        log.info("batch_taken", batch=batch.id, term=lease.term)
        try:
            await BatchRun(self._means, batch, lease.term).run()
        except LeaseLost as lost:
            log.warning("batch_lease_lost", batch=lost.batch)
        except Exception as error:
            if isinstance(error, RequestError) and error.status == 404:  # its folder is gone
                await asyncio.to_thread(self._means.batches.close, batch)
                return
            self._not_before_s[batch.id] = time.monotonic() + RETRY_S
            log.exception("batch_failed", batch=batch.id, effect=f"tried again in {RETRY_S:g} s")
        finally:
            del self._runs[batch.id], self._held[batch.id]
            with suppress(*AWAY):
                await self._leases.release(batch.id, lease)

    async def _sweep(self) -> None:
        files, batches = self._means.files, self._means.batches
        while True:
            with suppress(OSError):
                await asyncio.to_thread(files.sweep, time.time())
                await asyncio.to_thread(batches.sweep, files.owners(), time.time())
            await asyncio.sleep(SWEEP_PERIOD_S)
