"""The scheduler service: tokenizer services above, a link to each leased worker below."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial, reduce
from itertools import count
from typing import Final

import structlog
from aiohttp import web

from pagemesh.scheduler_svc import notices
from pagemesh.scheduler_svc.collector import rare_collections
from pagemesh.scheduler_svc.engine import Engine
from pagemesh.scheduler_svc.engine_host import EngineHost
from pagemesh.scheduler_svc.metrics import EngineView, SchedulerCollector
from pagemesh.scheduler_svc.publisher import Publisher, PublishMetrics
from pagemesh.scheduler_svc.takeover import MAX_FRAMES, trusted_contents
from pagemesh.scheduler_svc.worker_leases import WorkerLeases
from pagemesh.shared.engine_messages import (
    CachedBlocks,
    End,
    ForgetCached,
    Lost,
    NeedSnapshot,
    StepResult,
    Submit,
    Tokens,
)
from pagemesh.shared.errors import LinkClosed, SettingsError
from pagemesh.shared.ledger import Ledger, LedgerCollector
from pagemesh.shared.link import LINK_PATH, Link, accept
from pagemesh.shared.messages import Engines, EngineStatus
from pagemesh.shared.metrics import EngineCollector
from pagemesh.shared.progress import LivedTime
from pagemesh.shared.registry import Load
from pagemesh.shared.service import Runtime
from pagemesh.shared.wire import Message

REPORT_PERIOD_S: Final = 0.2

log = structlog.get_logger(__name__)


class SchedulerService:
    """A shared.service.ServiceCore. Owner of the engines, by engine id, and of the links of the
    tokenizer services, by owner name: one name per link, so that a peer that dials again starts
    with no requests."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._hosts: dict[str, EngineHost] = {}
        self._owners: dict[str, Link] = {}
        self._numbers = count(1)
        self._reported: list[EngineStatus] = []
        self._refused: str | None = None
        self._former = Ledger()
        """Of what is no engine's any more, or never was."""
        self._draining = False
        self._settled = asyncio.Event()
        self._leases = WorkerLeases(runtime, self._serve_worker, self._busy, self._let_go)
        self._publisher = Publisher(
            runtime.registry.prefix_index,
            lambda: [host.published for host in self._hosts.values()],
            PublishMetrics(runtime.metrics),
        )
        self._n_ejected = 0
        runtime.metrics.register(EngineCollector(self._all_statuses))
        runtime.metrics.register(SchedulerCollector(self._views, lambda: self._n_ejected))
        runtime.metrics.register(LedgerCollector(self._ledger))

    def routes(self) -> list[web.RouteDef]:
        return [web.get(LINK_PATH, self._serve_tokenizer)]

    def not_ready(self) -> str | None:
        if self._draining:
            return "draining"
        if not self._hosts and not self._leases.stands_by:
            return self._refused or "no worker is linked"
        for host in self._hosts.values():
            overdue_s = host.overdue_s()
            if overdue_s is not None:
                return f"{host.engine.engine_id} has been at one step for {overdue_s:.0f} s"
        return None

    def load(self) -> Load:
        rows = sum(host.engine.capacity.max_num_seqs for host in self._hosts.values())
        return Load(self._ledger().in_flight, rows)

    async def run(self) -> None:
        try:
            with rare_collections():
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(self._leases.run(), name="workers")
                    tasks.create_task(self._report(), name="report")
                    if self._runtime.settings.cache.enable_prefix_caching:
                        tasks.create_task(self._publisher.run(), name="publisher")
        finally:
            await self._let_tokenizers_go()

    async def drain(self) -> None:
        """Send newcomers elsewhere and return when every engine is idle."""
        self._draining = self._leases.leaving = True
        self._push_engines()
        try:
            while not all(host.engine.idle for host in self._hosts.values()):
                self._settled.clear()
                await self._settled.wait()
        finally:
            await self._let_tokenizers_go()

    async def _let_tokenizers_go(self) -> None:
        """What they still have here they submit to others."""
        links = list(self._owners.values())
        await asyncio.gather(*(link.close("shutting down") for link in links))

    # -- tokenizer services ------------------------------------------------------------------------

    async def _serve_tokenizer(self, request: web.Request) -> web.WebSocketResponse:
        link, socket = await accept(request, self._runtime.hello(self._offered()))
        if link is None:
            return socket
        owner = f"{link.name}#{next(self._numbers)}"
        self._owners[owner] = link
        _send(link, Engines(self._offered(), self._draining))
        try:
            async for message in link:
                self._on_tokenizer(owner, link, message)
        finally:
            del self._owners[owner]
            dropped = sum(host.drop_owner(owner) for host in self._hosts.values())
            log.info("tokenizer_gone", peer=link.name, aborted=dropped)
            await link.close()
        return socket

    def _on_tokenizer(self, owner: str, link: Link, message: Message) -> None:
        match message:
            case Submit():
                self._on_submit(owner, link, message)
            case End(keys=keys, reason=reason):
                for host in self._hosts.values():
                    host.end(owner, keys, reason)
            case ForgetCached(engine_id):
                if engine_id in self._hosts:
                    self._hosts[engine_id].forget_cached()
            case _:
                log.warning("unexpected_message", peer=link.name, kind=type(message).__name__)

    def _on_submit(self, owner: str, link: Link, submit: Submit) -> None:
        """A request for an engine that is going or gone is lost, not refused: the sender places it
        elsewhere."""
        host = self._hosts.get(submit.engine_id)
        if host is None or host.draining or self._draining:
            self._former = self._former.plus(Ledger(received=1, moved=1))
            _send(link, Lost(submit.engine_id, [submit.key]))
        else:
            host.submit(owner, submit)

    def _deliver(self, frames: dict[str, Tokens]) -> None:
        for owner, tokens in frames.items():
            link = self._owners.get(owner)
            if link is not None:
                _send(link, tokens)

    # -- workers -----------------------------------------------------------------------------------

    async def _serve_worker(self, link: Link) -> None:
        """A worker that we lease offers its engine when it is ready; before that it tells what its
        pages hold, which is good for its first engine alone."""
        host: EngineHost | None = None
        told = list[CachedBlocks]()
        last_step = 0
        try:
            async for message in link:
                match message:
                    case StepResult():
                        if host is not None:
                            host.on_result(message)
                    case NeedSnapshot():
                        if host is not None:
                            host.on_gap(message)
                    case CachedBlocks():
                        if host is None and len(told) < MAX_FRAMES:
                            told.append(message)
                    case Engines():
                        last_step = host.engine.last_step if host is not None else last_step
                        host = self._on_offer(link, host, message, last_step, told)
                        told.clear()
                    case _:
                        kind = type(message).__name__
                        log.warning("unexpected_message", peer=link.name, kind=kind)
        except Exception:
            # The link is dialled again, and the worker offers its engine anew.
            log.exception("worker_link_failed", peer=link.name)
        finally:
            self._lose(host)

    def _on_offer(
        self,
        link: Link,
        host: EngineHost | None,
        offer: Engines,
        last_step: int,
        told: Sequence[CachedBlocks],
    ) -> EngineHost | None:
        """The engine to go on with: the old one, a new one, or none."""
        status = next(iter(offer.engines), None)
        if host is None or status is None or not _same_engine(host.engine, status):
            self._lose(host)
            host = self._open(link, status, last_step, told) if status is not None else None
        if host is not None:
            host.draining = offer.draining
        self._push_engines()
        return host

    def _open(
        self, link: Link, status: EngineStatus, last_step: int, told: Sequence[CachedBlocks]
    ) -> EngineHost | None:
        settings = self._runtime.settings
        cached = trusted_contents(told, link.peer.epoch, status)
        try:
            engine = Engine(
                status.engine_id,
                status.card,
                status.capacity,
                settings.scheduler,
                epoch=link.peer.epoch,
                prefix_caching=settings.cache.enable_prefix_caching,
                after_step=last_step,
                cached=cached,
                report_ended=partial(notices.request_ended, status.engine_id),
            )
        except SettingsError as error:
            self._refused = str(error)
            log.error("engine_refused", engine=status.engine_id, reason=str(error))
            return None
        timeout_s = settings.mesh.step_timeout_s
        host = EngineHost(engine, link, self._deliver, self._settled.set, timeout_s)
        name = status.card.names[0]
        log.info("engine_up", engine=status.engine_id, model=name, cached_blocks=len(cached))
        self._hosts[status.engine_id] = host
        self._refused = None
        return host

    def _lose(self, host: EngineHost | None) -> None:
        """Its requests may go on anywhere else, with what they have generated."""
        if host is None or self._hosts.get(host.engine.engine_id) is not host:
            return  # it is lost already
        engine_id = host.engine.engine_id
        del self._hosts[engine_id]
        self._former = self._former.plus(host.engine.ledger().closed())
        lost = host.engine.lost()
        log.warning("engine_lost", engine=engine_id, requests=sum(map(len, lost.values())))
        if host.overdue_s() is not None:
            self._n_ejected += 1
        self._push_engines()
        for owner, keys in lost.items():
            link = self._owners.get(owner)
            if link is not None:
                _send(link, Lost(engine_id, keys))
        self._settled.set()

    def _busy(self) -> set[str]:
        return {name for name, host in self._hosts.items() if not host.engine.idle}

    def _let_go(self, worker: str) -> None:
        """Its engine, which is idle, is another scheduler's now."""
        host = self._hosts.pop(worker, None)
        if host is not None:
            self._former = self._former.plus(host.engine.ledger().closed())
            self._push_engines()
            self._settled.set()

    # -- reports -----------------------------------------------------------------------------------

    def _all_statuses(self) -> list[EngineStatus]:
        return [host.status() for host in self._hosts.values()]

    def _offered(self) -> list[EngineStatus]:
        """Engines that take new requests."""
        return [host.status() for host in self._hosts.values() if not host.draining]

    def _ledger(self) -> Ledger:
        """Of choices, on all engines that this process has driven."""
        engines = (host.engine.ledger() for host in self._hosts.values())
        return reduce(Ledger.plus, engines, self._former)

    def _views(self) -> Iterator[EngineView]:
        for engine in (host.engine for host in self._hosts.values()):
            age_s = engine.step_age_s(time.monotonic())
            yield EngineView(engine.card.names[0], engine.engine_id, engine.counters, age_s)

    async def _report(self) -> None:
        """Until cancelled: tell the tokenizer services of changed load, and audit idle engines."""
        lived = LivedTime(time.monotonic())
        while True:
            await asyncio.sleep(REPORT_PERIOD_S)
            lived_s = lived.look(time.monotonic())
            if self._offered() != self._reported:
                self._push_engines()
            for host in list(self._hosts.values()):
                host.look(lived_s)
                if host.stalled:
                    self._leases.eject(host.engine.engine_id)
                    host.eject()
                host.expire()
                host.audit_if_idle()

    def _push_engines(self) -> None:
        self._reported = self._offered()
        for link in self._owners.values():
            _send(link, Engines(self._reported, self._draining))


def _same_engine(engine: Engine, status: EngineStatus) -> bool:
    ours = (engine.engine_id, engine.card, engine.capacity)
    return ours == (status.engine_id, status.card, status.capacity)


def _send(link: Link, message: Message) -> None:
    """To a link that may be gone: whoever reads it notices."""
    with suppress(LinkClosed):
        link.send(message)
