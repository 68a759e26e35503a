"""The responses of one gateway: their routes, and those it runs in the background."""

from __future__ import annotations

from functools import partial

from aiohttp import web

from pagemesh.gateway.app import responses_routes
from pagemesh.gateway.backend import Backend
from pagemesh.gateway.openai.responses.background import BackgroundResponses
from pagemesh.gateway.openai.responses.endpoint import ResponsesEndpoint
from pagemesh.gateway.openai.responses.store import ResponseStore
from pagemesh.shared.service import Runtime


class ResponsesService:
    def __init__(self, runtime: Runtime, backend: Backend) -> None:
        settings, metrics = runtime.settings.gateway, backend.metrics
        self.store = ResponseStore(runtime.registry.responses, settings, metrics, backend.offload)
        limit = settings.max_background_responses
        self._background = BackgroundResponses(backend.upstream, self.store, backend.seeds, limit)
        self._endpoint = ResponsesEndpoint(backend, self.store, self._background)
        metrics.background_responses.set_function(partial(len, self._background))

    def routes(self) -> list[web.RouteDef]:
        return responses_routes(self._endpoint)

    async def close(self) -> None:
        """What runs in the background has been failed, and says so."""
        await self._background.close()
