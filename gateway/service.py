"""The gateway process: HTTP for clients above, links to the tokenizer services below."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Final

from aiohttp import web
from aiohttp.typedefs import Middleware

from pagemesh.gateway.admin_mesh import MeshEndpoint
from pagemesh.gateway.app import api_routes, mesh_routes
from pagemesh.gateway.backend import Backend
from pagemesh.gateway.batches.service import BatchService
from pagemesh.gateway.cancelling import Cancellations
from pagemesh.gateway.desired_workers import DesiredWorkers
from pagemesh.gateway.directory import ModelDirectory, not_ready
from pagemesh.gateway.entrance import Entrance
from pagemesh.gateway.headers import Origins
from pagemesh.gateway.keepalive import KeepAlive
from pagemesh.gateway.metrics import GatewayMetrics
from pagemesh.gateway.offload import Offload
from pagemesh.gateway.open_requests import OpenRequests
from pagemesh.gateway.openai.live import Turn
from pagemesh.gateway.openai.params import Seeds
from pagemesh.gateway.openai.responses.service import ResponsesService
from pagemesh.gateway.parting import Parting
from pagemesh.gateway.pause_store import PauseStore
from pagemesh.gateway.request_series import RequestCollector
from pagemesh.gateway.route_store import RouteStore
from pagemesh.gateway.routes import Routes
from pagemesh.gateway.routing import Router
from pagemesh.gateway.upstream import Upstream
from pagemesh.shared.access import client_access
from pagemesh.shared.ledger import LedgerCollector
from pagemesh.shared.metrics import DesiredWorkersCollector, EngineCollector
from pagemesh.shared.peers import Peers
from pagemesh.shared.registry import Load
from pagemesh.shared.routes import read_routes
from pagemesh.shared.service import Runtime
from pagemesh.shared.settings_shown import shown_settings

DEMAND_PERIOD_S: Final = 1.0


class GatewayService:
    """A ServiceCore."""

    def __init__(self, runtime: Runtime) -> None:
        gateway = runtime.settings.gateway
        self._parting = Parting()
        metrics = GatewayMetrics(runtime.metrics)
        directory = ModelDirectory()
        routes = Routes(read_routes(gateway.routes))
        store = RouteStore(runtime.registry.routes, routes)
        open_requests = OpenRequests()
        upstream = Upstream(directory, metrics, timeout_s=gateway.request_timeout_s)
        self.backend = Backend(
            directory=directory,
            router=Router(directory, store, metrics),
            route_store=store,
            upstream=upstream,
            metrics=metrics,
            keep_alive=KeepAlive(),
            turn=Turn(metrics.token_s),
            seeds=Seeds(gateway.seed),
            offload=Offload(),
            pause=PauseStore(runtime.registry.pause, upstream.pause),
            open_requests=open_requests,
            cancellations=Cancellations(runtime.registry.cancels, open_requests),
            trusts_chat_templates=gateway.trust_request_chat_template,
        )
        access = client_access(gateway)
        self._routes = api_routes(self.backend, access)
        settings = shown_settings(runtime.settings)
        self._mesh = MeshEndpoint(self.backend, runtime.registry, settings)
        self.responses = ResponsesService(runtime, self.backend)
        self._batches = BatchService(runtime, self.backend, self._routes)
        entrance = Entrance(access, Origins(gateway.allowed_origins), metrics, self._parting)
        self.middlewares: tuple[Middleware, ...] = (entrance.middleware(),)
        self._runtime = runtime
        self._leaving = False
        self._desired = DesiredWorkers(runtime.settings.mesh.scale_down_after_s)
        runtime.metrics.register(DesiredWorkersCollector(self._desired_workers))
        runtime.metrics.register(EngineCollector(directory.engines))
        runtime.metrics.register(LedgerCollector(metrics.requests.ledger))
        runtime.metrics.register(RequestCollector(metrics.requests, directory.engines))

    def routes(self) -> list[web.RouteDef]:
        responses, batches = self.responses.routes(), self._batches.routes()
        return [*self._routes, *responses, *batches, *mesh_routes(self._mesh)]

    def not_ready(self) -> str | None:
        """The link of a frozen process below ends, so its engines leave the directory
        within seconds."""
        if self._leaving:
            return "shutting down"
        if not self.backend.route_store.looked:
            return "the routes are not known yet"
        if not self.backend.pause.looked:
            return "whether the mesh is paused is not known yet"
        return None if self.backend.directory.models else "no engine is alive"

    def load(self) -> Load:
        return Load(self.backend.metrics.requests.ledger().in_flight)

    async def run(self) -> None:
        runtime = self._runtime
        peers = Peers(
            "tokenizer",
            runtime.registry,
            runtime.session,
            runtime.hello,
            self.backend.upstream.serve_link,
            runtime.metrics,
            runtime.link_tls,
        )
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(peers.run(), name="peers")
                group.create_task(self.backend.keep_alive.run(), name="keep-alive")
                group.create_task(self.backend.route_store.run(), name="routes")
                group.create_task(self.backend.pause.run(), name="pause")
                group.create_task(self.backend.cancellations.run(), name="cancellations")
                group.create_task(self._watch_demand(), name="demand")
                group.create_task(self._batches.run(), name="batches")
        finally:
            self._fail_all()
            await self.responses.close()
            self.backend.offload.close()

    def _desired_workers(self) -> Mapping[str, int]:
        self._desired.update(self.backend.directory.engines(), time.monotonic())
        return self._desired.by_model()

    async def _watch_demand(self) -> None:
        """Until cancelled. The figure depends on what was, whether anybody asks for it or not."""
        while True:
            self._desired_workers()
            await asyncio.sleep(DEMAND_PERIOD_S)

    async def drain(self) -> None:
        """A balancer that has not noticed yet is still answered for drain_notice_s; then until all
        is answered, and whoever was answered lately has had the time to ask again."""
        self._leaving = True
        try:
            await self._batches.stop()
            await asyncio.sleep(self._runtime.settings.gateway.drain_notice_s)
            self._parting.begin(self._runtime.connections())
            await self.backend.upstream.drain()
            while (patience_s := self._parting.patience_s()) > 0:
                await asyncio.sleep(patience_s)
                await self.backend.upstream.drain()
        finally:
            self._fail_all()

    def _fail_all(self) -> None:
        self.backend.upstream.fail_all(not_ready("it is shutting down"))
