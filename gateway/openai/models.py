"""GET /v1/models, /v1/models/{id} and /version."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any, Final

from aiohttp import web

from pagemesh.gateway.backend import Backend
from pagemesh.gateway.directory import ServedModel, not_ready
from pagemesh.gateway.openai.answer import encode_json

OWNER: Final = "pagemesh"


class ModelsEndpoint:
    def __init__(self, backend: Backend) -> None:
        self._directory = backend.directory
        self._version = version("pagemesh")

    async def list_models(self, _: web.Request) -> web.Response:
        """Live models only; aliases are entries of their own."""
        models = self._directory.models
        if not models:
            raise not_ready("no engine is alive at the moment")
        return _json({"object": "list", "data": [_shown(model) for model in models]})

    async def one_model(self, request: web.Request) -> web.Response:
        """Names may hold slashes, as Hub ids do."""
        name = request.match_info["model"].removesuffix("/")
        return _json(_shown(self._directory.resolve(name)))

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
    }


def _json(body: dict[str, Any]) -> web.Response:
    return web.Response(body=encode_json(body), content_type="application/json")
