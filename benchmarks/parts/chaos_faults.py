"""What befalls a process of a mesh, and what its clients noticed of it."""

from __future__ import annotations

import asyncio
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager
from itertools import count
from typing import Final, NamedTuple

from parts.chaos_client import Clients
from parts.chaos_mesh import REDIS, ChaosMesh
from parts.conservation import Bookkeeper

HURT: Final = ("worker", "scheduler", "tokenizer", "gateway")
KINDS: Final = ("kill", "freeze", "cut", "drain")
CALM: Final = "nothing"
OF_REDIS: Final = ("kill", "flush", "freeze", "cut", "restart")
# Longer than any silence that is forgiven, so that the peers go on without it, and it comes back.
LASTS_S: Final = 4.0
FREED_S: Final = 3.0
_SETTLES_S: Final = 1.0
_POLL_S: Final = 0.05
_WHOLE_S: Final = 240.0
_SIGNALS: Final = {
    "kill": signal.SIGKILL,
    "drain": signal.SIGTERM,
    "restart": signal.SIGTERM,
}


class Fault(NamedTuple):
    """`nothing` shows what clients notice of a busy machine alone. `kill`: SIGKILL. `freeze`:
    SIGSTOP for a while. `cut`: of its network, for a while. `drain`, `restart`: SIGTERM. `flush`:
    Redis forgets everything."""

    kind: str
    service: str


class Noticed(NamedTuple):
    """`pause_s` is the longest silence of a stream until the mesh was whole again. `freed_s`: until
    nothing of a killed gateway was in flight any more."""

    fault: Fault
    name: str
    pause_s: float
    whole_s: float
    errors: int
    freed_s: float | None = None

    def line(self) -> str:
        freed = f", its requests freed in {self.freed_s:.2f} s" if self.freed_s is not None else ""
        return (
            f"{self.fault.kind:8} {self.name:12} pause {self.pause_s:5.2f} s, "
            f"whole again in {self.whole_s:5.1f} s, errors {self.errors}{freed}"
        )


def all_faults(*, can_cut: bool) -> list[Fault]:
    """Nothing, then each kind at each service, kinds first."""
    of_services = [Fault(kind, service) for kind in KINDS for service in HURT]
    faults = [Fault(CALM, "worker"), *of_services, *(Fault(kind, REDIS) for kind in OF_REDIS)]
    return [fault for fault in faults if can_cut or fault.kind != "cut"]


def rounds(faults: Iterable[Fault]) -> Iterator[tuple[int, Fault]]:
    """Again and again, with the number of the round."""
    every = list(faults)
    return ((number, fault) for number in count() for fault in every)


class Tormentor:
    """Inflicts faults on a mesh under load, one at a time."""

    def __init__(self, mesh: ChaosMesh, clients: Clients, keeper: Bookkeeper) -> None:
        self._mesh = mesh
        self._clients = clients
        self._keeper = keeper
        self._struck: Counter[str] = Counter()

    async def inflict(self, fault: Fault) -> Noticed:
        """Raises TimeoutError if the mesh does not recover."""
        name = self._victim(fault.service)
        errors, began_s = self._n_bad, time.monotonic()
        freed_s = None
        async with self._may_break(fault, name):
            await self._strike(fault, name)
            if fault == ("kill", "gateway"):
                freed_s = await self._until_freed(name)
            await asyncio.sleep(_SETTLES_S)
            await self._mesh.until_whole(_WHOLE_S)
        whole_s = time.monotonic() - began_s
        await asyncio.sleep(_SETTLES_S)
        pause_s = self._clients.tally.longest_silence_s(began_s, time.monotonic())
        return Noticed(fault, name, pause_s, whole_s, self._n_bad - errors, freed_s)

    @property
    def _n_bad(self) -> int:
        tally = self._clients.tally
        return len(tally.errors) + len(tally.wrong)

    def _victim(self, service: str) -> str:
        """In turn: who was hurt last may have nothing to do yet."""
        names = [REDIS] if service == REDIS else self._mesh.names(service)
        self._struck[service] += 1
        return names[self._struck[service] % len(names)]

    @asynccontextmanager
    async def _may_break(self, fault: Fault, name: str) -> AsyncIterator[None]:
        """Streams of a gateway that is killed end: nobody else has their connections."""
        gateway = {self._mesh.members[name].url} if fault.service == "gateway" else set()
        mortal = gateway if fault.kind == "kill" else set()
        leaving = gateway if fault.kind == "drain" else set()
        self._clients.mortal |= mortal
        self._clients.leaving |= leaving
        try:
            yield
        finally:
            self._clients.mortal -= mortal
            self._clients.leaving -= leaving

    async def _strike(self, fault: Fault, name: str) -> None:
        match fault.kind:
            case "nothing":
                await asyncio.sleep(LASTS_S)
            case "flush":
                await self._mesh.flush_redis()
            case "freeze":
                self._mesh.send(name, signal.SIGSTOP)
                await asyncio.sleep(LASTS_S)
                self._mesh.send(name, signal.SIGCONT)
            case "cut":
                self._mesh.cut(name)
                await asyncio.sleep(LASTS_S)
                self._mesh.heal(name)
            case kind:
                self._mesh.send(name, _SIGNALS[kind])

    async def _until_freed(self, gateway: str) -> float:
        """Seconds until the tokenizer services have no more in flight than clients of the other
        gateways wait for."""
        began_s, url = time.monotonic(), self._mesh.members[gateway].url
        while time.monotonic() - began_s < 2 * FREED_S:
            in_flight = sum(
                [ledger.in_flight for ledger in await self._keeper.ledgers("tokenizer")]
            )
            waited_for = sum(n for at, n in self._clients.tally.open.items() if at != url)
            if in_flight <= waited_for:
                break
            await asyncio.sleep(_POLL_S)
        return time.monotonic() - began_s
