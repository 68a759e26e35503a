"""The conservation table: what every process of a mesh took in, and what became of it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import reduce
from typing import Final

import aiohttp
import psutil

from pagemesh.shared.ledger import OUTCOMES, Ledger
from parts.chaos_mesh import ChaosMesh, Member

BAD_ROWS: Final = "pagemesh_worker_bad_rows_total"
_PREFIX: Final = "pagemesh_ledger_"
_TIMEOUT_S: Final = 1.0


def ledger_of(metrics: str) -> tuple[Ledger, int]:
    """The ledger in a scrape, and how many rows a worker could not compute. Read with the least
    effort: clients share the process, and their waits are measured."""
    values: dict[str, int] = {}
    bad_rows = 0
    for line in metrics.splitlines():
        if line.startswith(BAD_ROWS):
            bad_rows += _value(line)
        elif line.startswith(_PREFIX):
            name, _, label = line.rpartition(" ")[0].partition("{")
            outcome = label.removeprefix('outcome="').removesuffix('"}')
            name = name.removeprefix(_PREFIX).removesuffix("_total")
            values[outcome or name] = _value(line)
    return Ledger(**values), bad_rows


def _value(line: str) -> int:
    return int(float(line.rpartition(" ")[2]))


@dataclass
class Books:
    """The last ledger of each process that ever was, by service and process id.

    One that was killed takes what it had with it: the table shows that as `died`, and what it took
    in since it was last asked is not in it.
    """

    last: dict[str, dict[int, Ledger]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def note(self, member: Member, pid: int, ledger: Ledger, bad_rows: int = 0) -> None:
        """Of the process `pid`, which is the member now."""
        self.last.setdefault(member.service, {})[pid] = ledger
        if ledger.unaccounted:
            self.problems.append(f"{member.name}: {ledger.unaccounted} unaccounted in {ledger}")
        if ledger.failed or bad_rows:
            self.problems.append(f"{member.name}: {ledger.failed} failed, {bad_rows} bad rows")

    def table(self, living: Mapping[str, set[int]]) -> list[str]:
        """One line for each service; `living` are its processes now."""
        columns = ("received", *OUTCOMES, "died", "in flight")
        lines = ["".join([f"{'':10}", *(f"{name:>11}" for name in columns)])]
        for service, ledgers in self.last.items():
            now = _sum(ledgers[pid] for pid in ledgers if pid in living[service])
            before = _sum(ledgers[pid] for pid in ledgers if pid not in living[service])
            ended = [getattr(now, name) + getattr(before, name) for name in columns[:-2]]
            numbers = [*ended, before.in_flight, now.in_flight]
            lines.append("".join([f"{service:10}", *(f"{number:11}" for number in numbers)]))
        return lines

    def left_over(self, living: Mapping[str, set[int]]) -> list[str]:
        """Who still has something, now that nobody asks any more."""
        return [
            f"a {service} still has {ledger.in_flight} in flight"
            for service, ledgers in self.last.items()
            for pid, ledger in ledgers.items()
            if pid in living[service] and ledger.in_flight
        ]


def _sum(ledgers: Iterable[Ledger]) -> Ledger:
    return reduce(Ledger.plus, ledgers, Ledger())


class Bookkeeper:
    """Asks every process for its ledger, again and again."""

    def __init__(self, mesh: ChaosMesh) -> None:
        self.books = Books()
        self._mesh = mesh

    async def keep(self, period_s: float) -> None:
        """Until cancelled."""
        while True:
            await self.ask_all()
            await asyncio.sleep(period_s)

    async def ask_all(self) -> None:
        await self._ask_these(self._mesh.members.values())

    async def ledgers(self, service: str) -> list[Ledger]:
        """Of the processes of one service that answer now."""
        members = [each for each in self._mesh.members.values() if each.service == service]
        return [ledger for ledger in await self._ask_these(members) if ledger is not None]

    async def _ask_these(self, members: Iterable[Member]) -> list[Ledger | None]:
        timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
        processes = self._mesh.processes()
        living = [
            (member, processes[member.name]) for member in members if member.name in processes
        ]
        async with aiohttp.ClientSession(timeout=timeout) as session:
            return await asyncio.gather(*(self._ask(session, *each) for each in living))

    def living(self) -> dict[str, set[int]]:
        """The processes that there are now, by service."""
        pids: dict[str, set[int]] = {}
        processes = self._mesh.processes()
        for member in self._mesh.members.values():
            process = processes.get(member.name)
            pids.setdefault(member.service, set()).update([process.pid] if process else [])
        return pids

    async def _ask(
        self, session: aiohttp.ClientSession, member: Member, process: psutil.Process
    ) -> Ledger | None:
        try:
            async with session.get(f"{member.url}/metrics") as answer:
                text = await answer.text()
        except (OSError, aiohttp.ClientError, TimeoutError):
            return None  # it is being hurt
        ledger, bad_rows = ledger_of(text)
        if process.is_running():
            self.books.note(member, process.pid, ledger, bad_rows)
        return ledger
