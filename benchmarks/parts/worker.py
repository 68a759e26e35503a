"""A worker process without a model: the real link protocol around what stands for a device."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

import uvloop
from aiohttp import web

from pagemesh.shared.engine_messages import Step, StepResult
from pagemesh.shared.errors import LinkClosed
from pagemesh.shared.link import LINK_PATH, Link, accept
from pagemesh.shared.logs import configure_logging
from pagemesh.shared.messages import Capacity, Engines, EngineStats, EngineStatus, ModelCard
from pagemesh.shared.registry import Load
from pagemesh.shared.service import Runtime, serve
from pagemesh.shared.settings import Settings
from pagemesh.shared.settings_sources import load_settings


class Device(Protocol):
    """What computes the steps, or pretends to."""

    card: ModelCard
    capacity: Capacity

    def take(self, link: Link, step: Step) -> None:
        """Answer `step` over `link` when it is done, with `send_result`."""

    async def run(self) -> None:
        """Until cancelled."""


class ModelessWorker:
    """A shared.service.ServiceCore that hands each step to its device."""

    def __init__(self, runtime: Runtime, device: Device) -> None:
        self._runtime = runtime
        self._device = device
        self._status = EngineStatus(
            runtime.instance_id, device.card, device.capacity, EngineStats()
        )

    def routes(self) -> list[web.RouteDef]:
        return [web.get(LINK_PATH, self._serve_scheduler)]

    def load(self) -> Load:
        return Load()

    def not_ready(self) -> str | None:
        return None

    async def run(self) -> None:
        await self._device.run()

    async def drain(self) -> None:
        """Whoever measures stops asking first."""

    async def _serve_scheduler(self, request: web.Request) -> web.WebSocketResponse:
        link, socket = await accept(request, self._runtime.hello())
        if link is None:
            return socket
        link.send(Engines([self._status]))
        async for message in link:
            if isinstance(message, Step):
                self._device.take(link, message)
        await link.close()
        return socket


def send_result(link: Link, result: StepResult) -> None:
    with suppress(LinkClosed):
        link.send(result)


def run_worker(build: Callable[[Settings], Device]) -> None:
    """Serve a device until SIGTERM, with the settings of the environment (PAGEMESH_*)."""
    settings = load_settings({}, None, os.environ).settings
    configure_logging("worker", settings.log)
    device = build(settings)
    uvloop.run(
        serve(
            "worker",
            settings,
            lambda runtime: ModelessWorker(runtime, device),
            host=settings.mesh.service_host,
            port=0,
        )
    )
