"""The workers that this scheduler leases: their leases in Redis, and the links to them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection
from contextlib import suppress
from typing import Final, NamedTuple

import structlog

from pagemesh.scheduler_svc.leasing import Leasing, View
from pagemesh.shared.leases import Lease
from pagemesh.shared.link import Link
from pagemesh.shared.peers import Peers
from pagemesh.shared.registry import AWAY, WATCH_PERIOD_S, Instance
from pagemesh.shared.service import Runtime

# A worker that refused us obeys another scheduler, or will not have us at all.
REFUSED_S: Final = 3.0
# One that holds work and brings nothing, yet answers, may be so for others as well.
EJECTED_S: Final = 30.0

log = structlog.get_logger(__name__)


class _Held(NamedTuple):
    instance: Instance
    lease: Lease


class WorkerLeases:
    """Owner of the leases and of the links to the leased workers.

    A worker is dialled with the term of its lease, and redialled while we hold it. A lease whose
    link lives is kept whatever Redis says; with Redis away nothing is taken or given up. `busy`
    names the workers with requests, which are not given up; `let_go` is told of one that is, before
    its link closes.
    """

    def __init__(
        self,
        runtime: Runtime,
        on_link: Callable[[Link], Awaitable[None]],
        busy: Callable[[], Collection[str]],
        let_go: Callable[[str], None],
    ) -> None:
        self.leaving = False
        self.stands_by = False
        """Whether there are workers, and other schedulers have them all."""
        self._me = runtime.instance_id
        self._registry = runtime.registry
        self._leasing = Leasing(self._me)
        self._held: dict[str, _Held] = {}
        self._refused: dict[str, float] = {}
        self._busy = busy
        self._let_go = let_go
        self._peers = Peers(
            "worker",
            runtime.registry,
            runtime.session,
            runtime.hello,
            on_link,
            runtime.metrics,
            runtime.link_tls,
            lease_term=lambda worker: self._held[worker].lease.term,
            on_refused=self._on_refused,
        )

    async def run(self) -> None:
        """Until cancelled; the links are closed then, upon which the workers free their leases."""
        try:
            while True:
                with suppress(*AWAY):  # whoever announces us says so
                    await self._turn()
                await asyncio.sleep(WATCH_PERIOD_S)
        finally:
            await self._peers.close()

    async def _turn(self) -> None:
        schedulers = await self._registry.latest("scheduler")
        workers = {each.instance_id: each for each in await self._registry.latest("worker")}
        leases = await self._registry.leases.read({**workers, **self._held})
        self._drop_lost(workers, leases)
        await self._adopt(workers, leases)
        ours = {name: held.lease for name, held in self._held.items()}
        await self._registry.leases.renew(ours)
        view = View([each.instance_id for each in schedulers], workers, {**leases, **ours})
        await self._change(view, workers)
        self.stands_by = bool(workers) and all(
            name in leases and leases[name].holder not in ("", self._me) for name in workers
        )

    def _drop_lost(self, workers: dict[str, Instance], leases: dict[str, Lease]) -> None:
        """Forget leases without a link that have passed to another, and workers that are gone."""
        for name, held in list(self._held.items()):
            passed_on = leases.get(name, held.lease) != held.lease
            if name not in self._peers.links and (passed_on or name not in workers):
                log.info("lease_lost", worker=name, term=held.lease.term)
                del self._held[name]
        self._want()

    async def _adopt(self, workers: dict[str, Instance], leases: dict[str, Lease]) -> None:
        """Leases of ours that we do not hold: a claim's answer was lost, or we were refused."""
        for name, instance in workers.items():
            lease = leases.get(name)
            if lease is None or lease.holder != self._me or name in self._held:
                continue
            if name in self._refused:
                await self._registry.leases.release(name, lease)
            else:
                self._hold(instance, lease)

    async def _change(self, view: View, workers: dict[str, Instance]) -> None:
        now_s = time.monotonic()
        self._refused = {name: at_s for name, at_s in self._refused.items() if now_s < at_s}
        idle = self._held.keys() - set(self._busy())
        change = self._leasing.decide(view, idle, now_s, leaving=self.leaving)
        if change.give_up is not None:
            await self._give_up(change.give_up)
        for name in change.claim:
            if name not in self._refused:
                lease = await self._registry.leases.claim(name, self._me)
                if lease is not None:
                    self._hold(workers[name], lease)

    async def _give_up(self, name: str) -> None:
        """Nothing is awaited before the engine is let go: no request can have come meanwhile."""
        lease = self._held.pop(name).lease
        log.info("lease_given_up", worker=name, term=lease.term)
        self._let_go(name)
        self._want()
        link = self._peers.links.get(name)
        if link is not None:
            await link.close("its lease is given up")
        await self._registry.leases.release(name, lease)

    def _hold(self, instance: Instance, lease: Lease) -> None:
        log.info("lease_taken", worker=instance.instance_id, term=lease.term)
        self._held[instance.instance_id] = _Held(instance, lease)
        self._want()

    def eject(self, name: str) -> None:
        """Give the worker up for a while. Whoever takes it over sees whether it computes, since it
        offers its engine only when what it was at has landed."""
        self._leave_alone(name, EJECTED_S)

    def _on_refused(self, name: str) -> None:
        self._leave_alone(name, REFUSED_S)

    def _leave_alone(self, name: str, for_s: float) -> None:
        if self._held.pop(name, None) is not None:
            self._refused[name] = time.monotonic() + for_s
            self._want()

    def _want(self) -> None:
        self._peers.want([held.instance for held in self._held.values()])
