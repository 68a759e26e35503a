"""What an administrator asks of the mesh: what it is, what it has to do, and that it hold on."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any, Final

from aiohttp import web

from pagemesh.gateway.backend import Backend
from pagemesh.gateway.openai.answer import encode_json, new_id
from pagemesh.gateway.openai.errors import bad
from pagemesh.shared.errors import RequestError
from pagemesh.shared.messages import CacheReset, EngineStatus, ResetCache
from pagemesh.shared.pause_keys import Mode
from pagemesh.shared.registry import AWAY, Registry

SERVICES: Final = ("gateway", "tokenizer", "scheduler", "worker")
SETTLE_S: Final = 1.5
"""Until every gateway knows of a pause, and this one what engines then have to do."""
POLL_S: Final = 0.1
_BOOLEANS: Final = {"true": True, "1": True, "false": False, "0": False}


class MeshEndpoint:
    """`settings`: what may be shown of them."""

    def __init__(
        self, backend: Backend, registry: Registry, settings: Mapping[str, Mapping[str, Any]]
    ) -> None:
        self._backend = backend
        self._registry = registry
        self._settings = settings

    # -- what there is ----------------------------------------------------------------------------

    async def server_info(self, _: web.Request) -> web.Response:
        info = {
            "version": version("pagemesh"),
            "is_paused": self._backend.pause.paused,
            "settings": self._settings,
            "models": _models(self._backend.directory.engines()),
            "services": {service: await self._instances(service) for service in SERVICES},
        }
        return _json(info)

    async def load(self, _: web.Request) -> web.Response:
        """`server_load`, as in vLLM, is this gateway's own."""
        engines = self._backend.directory.engines()
        body = {
            "server_load": self._backend.metrics.requests.ledger().in_flight,
            "models": _loads(engines),
            "services": {service: await self._in_flight(service) for service in SERVICES},
        }
        return _json(body)

    async def _instances(self, service: str) -> list[dict[str, Any]]:
        try:
            found = await self._registry.instances(service)
        except AWAY as error:
            raise _redis_away() from error
        return [
            {"instance": each.instance_id, "address": each.address, "models": each.models}
            for each in found
        ]

    async def _in_flight(self, service: str) -> dict[str, dict[str, int | None]]:
        try:
            loads = await self._registry.loads(service)
        except AWAY as error:
            raise _redis_away() from error
        return {name: load._asdict() for name, load in loads.items()}

    # -- caches -----------------------------------------------------------------------------------

    async def reset_prefix_cache(self, request: web.Request) -> web.Response:
        """Of `model`, or of all. What requests use at the moment stays."""
        return _json({"reset": await self._reset(request.query.get("model"))})

    async def _reset(self, name: str | None) -> dict[str, list[str]]:
        """The engines that were told, by model."""
        directory = self._backend.directory
        if name is None:
            models = sorted({engine.card.names[0] for engine in directory.engines()})
        else:
            models = [directory.resolve(name).card.names[0]]
        told = {}
        for model in models:
            answer = await self._backend.upstream.ask(ResetCache(new_id("reset"), model))
            assert isinstance(answer, CacheReset)
            told[model] = answer.engines
        return told

    # -- pause ------------------------------------------------------------------------------------

    async def pause(self, request: web.Request) -> web.Response:
        """Answers when nothing runs any more, at any gateway."""
        mode = _mode(request)
        clears = _flag(request, "clear_cache", default=True)
        await self._backend.pause.change(mode)
        await self._settled()
        if clears:
            await self._reset(None)
        return _json({"status": "paused", "mode": mode})

    async def resume(self, _: web.Request) -> web.Response:
        await self._backend.pause.change(None)
        return _json({"status": "resumed"})

    async def is_paused(self, _: web.Request) -> web.Response:
        return _json({"is_paused": self._backend.pause.paused})

    async def _settled(self) -> None:
        """Engines report when they come, go or have another load; nothing says that all rest."""
        await asyncio.sleep(SETTLE_S)
        while self._busy():  # noqa: ASYNC110
            await asyncio.sleep(POLL_S)

    def _busy(self) -> bool:
        engines = self._backend.directory.engines()
        return any(each.stats.running or each.stats.waiting for each in engines)


def _models(engines: Sequence[EngineStatus]) -> list[dict[str, Any]]:
    """Each with its card, and what its engines offer."""
    shown: dict[str, dict[str, Any]] = {}
    for engine in engines:
        card = engine.card._asdict() | {"parsers": engine.card.parsers._asdict()}
        model = shown.setdefault(engine.card.names[0], {**card, "engines": {}})
        model["engines"][engine.engine_id] = engine.capacity._asdict()
    return list(shown.values())


def _loads(engines: Sequence[EngineStatus]) -> dict[str, Any]:
    loads: dict[str, Any] = {}
    for engine in engines:
        stats = engine.stats
        model = loads.setdefault(engine.card.names[0], {"running": 0, "waiting": 0, "engines": {}})
        model["running"] += stats.running
        model["waiting"] += stats.waiting
        model["engines"][engine.engine_id] = {
            "running": stats.running,
            "waiting": stats.waiting,
            "kv_cache_usage": round(stats.kv_usage, 6),
            "prefill_tokens": stats.prefill_tokens,
            "queue_s": stats.queue_s,
        }
    return loads


def _mode(request: web.Request) -> Mode:
    """vLLM's names; `wait_for_inflight_requests` is its older way to say wait."""
    waits = _flag(request, "wait_for_inflight_requests", default=False)
    match request.query.get("mode", "wait" if waits else "abort"):
        case "abort":
            return "abort"
        case "wait":
            return "wait"
        case "keep":
            rule = "keep is not supported: requests in flight end (wait), or are ended (abort)"
            raise bad("mode", rule, code="unsupported_parameter")
        case _:
            raise bad("mode", "must be abort or wait")


def _flag(request: web.Request, name: str, *, default: bool) -> bool:
    given = request.query.get(name)
    if given is None:
        return default
    if given.lower() not in _BOOLEANS:
        raise bad(name, "must be true or false")
    return _BOOLEANS[given.lower()]


def _redis_away() -> RequestError:
    return RequestError("Redis, which knows who is in the mesh, does not answer.", status=503)


def _json(body: dict[str, Any]) -> web.Response:
    return web.json_response(body=encode_json(body))
