"""/admin/routes: the routes as they are, and how to change them while the mesh runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from pagemesh.gateway.backend import Backend
from pagemesh.gateway.openai.answer import encode_json
from pagemesh.gateway.request_body import read_body
from pagemesh.gateway.route_store import Edit
from pagemesh.gateway.routes import RouteOrigin
from pagemesh.shared.errors import RequestError
from pagemesh.shared.routes import MAX_NAME_CHARS, BadRoute, Route, read_route

_T = TypeVar("_T", bound=msgspec.Struct)


class WholeRoute(msgspec.Struct, forbid_unknown_fields=True):
    targets: str | dict[str, float]


class RouteChanges(msgspec.Struct, forbid_unknown_fields=True):
    targets: dict[str, float | None]


class RoutesEndpoint:
    def __init__(self, backend: Backend) -> None:
        self._directory = backend.directory
        self._store = backend.route_store

    async def list_routes(self, _: web.Request) -> web.Response:
        routes = self._store.routes
        shown = {name: self._shown(origin) for name, origin in routes.origins().items()}
        return _json({"version": routes.stored.version, "routes": shown})

    async def show(self, request: web.Request) -> web.Response:
        return self._one(_name(request))

    async def put(self, request: web.Request) -> web.Response:
        """Replace all targets of one route, or make it."""
        name, body = _name(request), await _body(request, WholeRoute)
        return await self._set(name, lambda _: body.targets)

    async def patch(self, request: web.Request) -> web.Response:
        """Change the weights of some targets; null takes one away."""
        name, body = _name(request), await _body(request, RouteChanges)
        return await self._set(name, lambda before: _patched(before, body.targets))

    async def delete(self, request: web.Request) -> web.Response:
        """Take back what was set at run time; a route of the settings comes forth again."""
        name = _name(request)

        def without(routes: dict[str, Route]) -> dict[str, Route]:
            if name not in routes:
                raise self._not_of_run_time(name)
            return {other: route for other, route in routes.items() if other != name}

        await self._change(without)
        return _json({"deleted": name})

    def _not_of_run_time(self, name: str) -> RequestError:
        if name not in self._store.routes.given:
            return _no_route(name)
        return RequestError(
            f"The route {name!r} is of the gateway's settings: PUT one of that name over it, or "
            "change the settings.",
            status=409,
        )

    async def _set(
        self, name: str, edit: Callable[[Route], str | Mapping[str, float]]
    ) -> web.Response:
        """`edit` makes the new route of the one in force, or of none."""

        def edit_all(routes: dict[str, Route]) -> dict[str, Route]:
            before = routes.get(name, self._store.routes.given.get(name, {}))
            return {**routes, name: read_route(name, edit(before))}

        await self._change(edit_all)
        return self._one(name)

    async def _change(self, edit: Edit) -> None:
        try:
            await self._store.change(edit)
        except BadRoute as error:
            raise RequestError(str(error), param="targets") from error

    def _one(self, name: str) -> web.Response:
        return _json({"name": name} | self._shown(self._origin(name)))

    def _origin(self, name: str) -> RouteOrigin:
        origin = self._store.routes.origins().get(name)
        if origin is None:
            raise _no_route(name)
        return origin

    def _shown(self, origin: RouteOrigin) -> dict[str, Any]:
        shown: dict[str, Any] = {
            "targets": origin.route,
            "source": "run time" if origin.run_time else "settings",
        }
        if origin.hidden is not None:
            shown["of_settings"] = origin.hidden
        shares = self._store.routes.shares
        models = [target for target in origin.route if target not in shares]
        without = [model for model in models if self._directory.live(model) is None]
        return shown | {"without_engine": without}


def _no_route(name: str) -> RequestError:
    return RequestError(f"There is no route {name[:MAX_NAME_CHARS]!r}.", status=404)


def _patched(before: Route, changes: Mapping[str, float | None]) -> Route:
    weights = {**before, **changes}
    return {target: weight for target, weight in weights.items() if weight is not None}


def _name(request: web.Request) -> str:
    """Names may hold slashes, as Hub ids do."""
    return request.match_info["name"].removesuffix("/")


async def _body(request: web.Request, shape: type[_T]) -> _T:
    try:
        return msgspec.json.decode(await read_body(request), type=shape)
    except msgspec.MsgspecError as error:
        raise RequestError(
            f'The body must be {{"targets": {{"MODEL": WEIGHT, …}}}}, or for PUT {{"targets": '
            f'"MODEL"}}: {error}',
            param="targets",
        ) from error


def _json(body: dict[str, Any]) -> web.Response:
    return web.Response(body=encode_json(body), content_type="application/json")
