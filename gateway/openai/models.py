"""GET /v1/models, /v1/models/{id} and /version."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any, Final

from aiohttp import web

from pagemesh.gateway.backend import Backend
from pagemesh.gateway.directory import ServedModel, not_ready
from pagemesh.gateway.openai.answer import encode_json
from pagemesh.gateway.routing import LiveRoute

OWNER: Final = "pagemesh"


class ModelsEndpoint:
    def __init__(self, backend: Backend) -> None:
        self._directory = backend.directory
        self._router = backend.router
        self._version = version("pagemesh")

    async def list_models(self, _: web.Request) -> web.Response:
        """Live models and routes; further names are entries of their own, and a route stands for
        a model of its name."""
        models = self._directory.models
        if not models:
            raise not_ready("no engine is alive at the moment")
        shown = {model.name: _shown(model) for model in models}
        shown |= {route.name: _shown_route(route) for route in self._router.live_routes()}
        return _json({"object": "list", "data": list(shown.values())})

    async def one_model(self, request: web.Request) -> web.Response:
        """Names may hold slashes, as Hub ids do."""
        name = request.match_info["model"].removesuffix("/")
        route = self._router.live_route(name)
        if route is not None:
            return _json(_shown_route(route))
        return _json(_shown(self._router.resolve(name, key="")))

    async def show_version(self, _: web.Request) -> web.Response:
        return _json({"version": self._version})


def _shown(model: ServedModel) -> dict[str, Any]:
    return {
        "id": model.name,
        "object": "model",
        "created": model.card.created_s,
        "owned_by": OWNER,
        "max_model_len": model.card.max_model_len,
        "root": model.card.names[0],
        "parent": None,
        "default_sampling_params": model.card.defaults,
    }


def _shown_route(route: LiveRoute) -> dict[str, Any]:
    """`parent` is the model with the greatest share; any of them may answer, so the shortest
    context counts."""
    parent = route.models[0]
    return _shown(parent) | {
        "id": route.name,
        "max_model_len": min(model.card.max_model_len for model in route.models),
        "parent": parent.name,
        "shares": route.shares,
    }


def _json(body: dict[str, Any]) -> web.Response:
    return web.Response(body=encode_json(body), content_type="application/json")
