"""The links to every live instance of the service below.

`Peers` watches the registry, dials newcomers, and redials with back-off while an instance is still
announced; or it is told whom to link to. A link that answers is alive whatever the registry says: a
lapsed key closes nothing.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable, Iterable
from typing import Final

import aiohttp
import structlog
from prometheus_client import CollectorRegistry

from pagemesh.shared.distribution import Histogram
from pagemesh.shared.errors import HandshakeRefused
from pagemesh.shared.link import Link, dial
from pagemesh.shared.messages import Hello
from pagemesh.shared.registry import Instance, Registry

ECHO_PERIOD_S: Final = 1.0
FIRST_BACKOFF_S: Final = 0.1
MAX_BACKOFF_S: Final = 2.0
MAX_TOLD: Final = 64

log = structlog.get_logger(__name__)


class Peers:
    """Owner of the links to one service.

    `on_link` runs for the life of each link: it reads the link until the link ends, and whatever
    it does afterwards (placing requests elsewhere) belongs to it too. `lease_term` gives the term
    by which we command an instance, and `on_refused` hears of one that will not have us.
    """

    def __init__(
        self,
        service: str,
        registry: Registry,
        session: aiohttp.ClientSession,
        hello: Callable[[], Hello],
        on_link: Callable[[Link], Awaitable[None]],
        metrics: CollectorRegistry,
        tls: ssl.SSLContext | None = None,
        *,
        lease_term: Callable[[str], int] = lambda _: 0,
        on_refused: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.links: dict[str, Link] = {}
        self._service = service
        self._registry = registry
        self._session = session
        self._hello = hello
        self._on_link = on_link
        self._tls = tls
        self._lease_term = lease_term
        self._on_refused = on_refused
        self._wanted: dict[str, Instance] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._told: dict[str, str] = {}
        """Why each of the last that refused us did."""
        self._round_trip_s = Histogram(
            metrics,
            "pagemesh_link_round_trip_seconds",
            "A small message to a service below and back: event loops, queues and the network",
            labels=("peer_service",),
        ).labels(service)

    async def run(self) -> None:
        """Link to all that the registry announces, until cancelled; then close the links."""
        try:
            async for instances in self._registry.watch(self._service):
                self.want(instances)
        finally:
            await self.close()

    def want(self, instances: Iterable[Instance]) -> None:
        """Keep links to `instances` up. One that is no longer among them is not dialled again."""
        self._wanted = {instance.instance_id: instance for instance in instances}
        for instance in self._wanted.values():
            self._ensure(instance)

    async def close(self) -> None:
        self._wanted = {}  # so that nobody is dialled again
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _ensure(self, instance: Instance) -> None:
        name = instance.instance_id
        if name not in self._tasks:
            task = asyncio.create_task(self._keep(instance), name=f"peer-{name}")
            self._tasks[name] = task
            task.add_done_callback(lambda _: self._forget(name))

    def _forget(self, name: str) -> None:
        """A task ended; the registry tells changes only, so look whether it is still wanted."""
        self._tasks.pop(name, None)
        if name in self._wanted:
            self._ensure(self._wanted[name])

    async def _keep(self, instance: Instance) -> None:
        """Dial `instance` again and again for as long as it is wanted."""
        name, backoff_s = instance.instance_id, FIRST_BACKOFF_S
        while self._wanted.get(name) == instance:
            try:
                if await self._dial_and_serve(instance):
                    backoff_s = FIRST_BACKOFF_S
            except HandshakeRefused as error:
                self._tell(name, error.reason)
                self._on_refused(name)
                backoff_s = MAX_BACKOFF_S
            except Exception:
                # A fault of ours in one link must not cost the peer for ever.
                log.exception("link_failed", peer=name)
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)

    def _tell(self, name: str, reason: str) -> None:
        """Once, until there is a link or another reason."""
        if self._told.pop(name, None) != reason:
            log.error("handshake_refused", peer=name, reason=reason)
        self._told[name] = reason
        if len(self._told) > MAX_TOLD:
            del self._told[next(iter(self._told))]

    async def _dial_and_serve(self, instance: Instance) -> bool:
        """Whether there was a link. Raises HandshakeRefused, and what `on_link` raises."""
        try:
            hello = self._hello()._replace(lease_term=self._lease_term(instance.instance_id))
            link = await dial(self._session, instance.address, hello, self._tls)
        except (OSError, aiohttp.ClientError) as error:
            log.debug("dial_failed", peer=instance.instance_id, error=str(error))
            return False
        await self._serve(link)
        return True

    async def _serve(self, link: Link) -> None:
        self.links[link.name] = link
        self._told.pop(link.name, None)
        log.info("link_up", peer=link.name)
        echoes = asyncio.create_task(link.measure(ECHO_PERIOD_S, self._round_trip_s.observe))
        try:
            await self._on_link(link)
        finally:
            echoes.cancel()
            self.links.pop(link.name, None)
            await link.close()
            log.info("link_down", peer=link.name, reason=link.closed_reason)
