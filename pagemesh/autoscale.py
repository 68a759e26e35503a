"""`pagemesh serve --autoscale MIN:MAX`: start and stop local workers as the gateways ask for."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Collection, Sequence
from functools import partial
from typing import Final, NamedTuple

import aiohttp
import structlog
from msgspec.structs import replace

from pagemesh.gateway_series import GatewaySeries
from pagemesh.readiness import ANSWER_TIMEOUT_S
from pagemesh.shared.errors import SettingsError
from pagemesh.shared.model_list import listed_models
from pagemesh.shared.registry import Registry
from pagemesh.shared.settings import Settings
from pagemesh.supervisor import Child, ChildSpec, Supervisor
from pagemesh.worker_svc.cores import usable_cores

POLL_S: Final = 1.0

log = structlog.get_logger(__name__)


class Bounds(NamedTuple):
    low: int
    high: int


class Change(NamedTuple):
    """Numbers of the workers to start and to stop."""

    start: list[int]
    stop: list[int]


def bounds_of(settings: Settings) -> Bounds | None:
    """None without --autoscale. Raises SettingsError for what is no MIN:MAX."""
    text = settings.mesh.autoscale
    if text is None:
        return None
    match = re.fullmatch(r"(\d{1,6}):(\d{1,6})", text)
    bounds = Bounds(*map(int, match.groups())) if match else Bounds(0, 0)
    if not 1 <= bounds.low <= bounds.high:
        raise SettingsError(
            f"--autoscale {text} is no MIN:MAX: give two numbers of workers, 1 or more, the "
            "smaller one first, such as 1:4",
            key="autoscale",
        )
    if settings.mesh.workers != 1:
        raise SettingsError(
            f"--workers {settings.mesh.workers} and --autoscale {text} contradict each other: "
            "leave out the one or the other",
            key="autoscale",
        )
    if len(listed_models(settings.model)) > 1:
        raise SettingsError(
            f"--autoscale {text} is for the workers of one model: with several take --workers, or "
            "start workers apart (pagemesh worker), by the gateways' pagemesh:desired_workers",
            key="autoscale",
        )
    return bounds


def with_most_workers(settings: Settings, bounds: Bounds | None) -> Settings:
    """Every worker is to take what it may have when all of them run: a process cannot give back
    cores or memory when another one comes."""
    return settings if bounds is None else with_workers(settings, bounds.high)


def with_workers(settings: Settings, n_workers: int) -> Settings:
    return replace(settings, mesh=replace(settings.mesh, workers=n_workers))


def check_cores(bounds: Bounds | None, devices: Sequence[str]) -> None:
    """Raises SettingsError when workers that compute on the CPU would have to share a core."""
    if bounds is not None and not devices and bounds.high > usable_cores():
        raise SettingsError(
            f"--autoscale {bounds.low}:{bounds.high} is more than the {usable_cores()} cores of "
            "this machine: workers that share a core compute no faster than one, so lower MAX",
            key="autoscale",
        )


async def autoscale(scaler: Autoscaler, settings: Settings) -> None:
    """Until cancelled."""
    assert settings.mesh.redis_url is not None
    registry = Registry(settings.mesh.redis_url, settings.mesh.mesh_name)
    timeout = aiohttp.ClientTimeout(total=ANSWER_TIMEOUT_S)
    scheme = "http" if settings.gateway.ssl_certfile is None else "https"
    try:
        async with aiohttp.ClientSession(timeout=timeout) as session:
            await scaler.run(GatewaySeries(registry, session, scheme))
    finally:
        await registry.close()


def change(running: Collection[int], leaving: Collection[int], wanted: int, high: int) -> Change:
    """To have `wanted` of the workers 0 to `high` - 1. One that is `leaving` has its device still;
    the last ones go first."""
    taken = {*running, *leaving}
    free = [number for number in range(high) if number not in taken]
    return Change(free[: max(0, wanted - len(running))], sorted(running)[wanted:])


class Autoscaler:
    """Owner of the workers that run. `group` is where the supervisor keeps them: they are stopped
    with the mesh wherever they are in their lives."""

    def __init__(
        self,
        supervisor: Supervisor,
        group: list[Child],
        specs: Sequence[ChildSpec],
        bounds: Bounds,
        grace_s: float,
    ) -> None:
        self._supervisor = supervisor
        self._group = group
        self._specs = specs
        self._bounds = bounds
        self._grace_s = grace_s
        self._running = dict(enumerate(group))
        self._leaving: dict[int, asyncio.Task[None]] = {}

    async def run(self, series: GatewaySeries) -> None:
        """Until cancelled. While no gateway answers everything stays."""
        try:
            while True:
                await asyncio.sleep(POLL_S)
                seen = await series.workers()
                if seen is not None:
                    self.follow(seen.desired, seen.engines)
        finally:
            for task in self._leaving.values():
                task.cancel()

    def follow(self, desired: int, engines: int) -> None:
        """Start or stop what it takes. Nobody goes while another of those that run is not at work:
        its place may be needed."""
        wanted = min(max(desired, self._bounds.low), self._bounds.high)
        start, stop = change(self._running, self._leaving, wanted, self._bounds.high)
        for number in start:
            self._running[number] = self._supervisor.start_in(self._group, self._specs[number])
        if stop and engines < len(self._running):
            stop = []
        for number in stop:
            leaving = self._supervisor.retire(self._group, self._running.pop(number), self._grace_s)
            task = asyncio.create_task(leaving, name=f"retire-{number}")
            self._leaving[number] = task
            task.add_done_callback(partial(self._note_left, number))
        if start or stop:
            log.info("scaled", workers=len(self._running), desired=desired)

    def _note_left(self, number: int, _: asyncio.Task[None]) -> None:
        """Its device is free."""
        self._leaving.pop(number, None)
