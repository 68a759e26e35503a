"""The routes in force at one gateway: of its settings, and over them those of run time. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from pagemesh.shared.route_keys import StoredRoutes
from pagemesh.shared.routes import Route, model_shares


class RouteOrigin(NamedTuple):
    """Weights by target as they were given, and where: at `run_time`, or else in the settings,
    whose own route of that name is then `hidden`."""

    route: Route
    run_time: bool
    hidden: Route | None


class Routes:
    """`given`: the routes of the settings. `shares`: by name, the share of each model behind it.
    Raises BadRoute, as `adopt` does."""

    def __init__(self, given: Mapping[str, Route]) -> None:
        self.given: Final = dict(given)
        self.stored = StoredRoutes()
        self.shares: dict[str, Route] = model_shares(given)

    def adopt(self, stored: StoredRoutes) -> None:
        """Use `stored` from now on. Raises BadRoute, and keeps what it had, when it does not go
        with the settings."""
        self.shares = self.check(stored.routes)
        self.stored = stored

    def check(self, stored: Mapping[str, Route]) -> dict[str, Route]:
        """The shares if `stored` were the routes of run time. Raises BadRoute."""
        return model_shares({**self.given, **stored})

    def origins(self) -> dict[str, RouteOrigin]:
        """By name, in order of names."""
        names = sorted({*self.given, *self.stored.routes})
        return {name: self._origin(name) for name in names}

    def _origin(self, name: str) -> RouteOrigin:
        given, stored = self.given.get(name), self.stored.routes.get(name)
        if stored is not None:
            return RouteOrigin(stored, True, given)
        assert given is not None
        return RouteOrigin(given, False, None)
