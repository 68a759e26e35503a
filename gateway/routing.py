"""From the name that a client asks for to the model that answers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import structlog

from pagemesh.gateway.directory import ModelDirectory, ServedModel, not_ready
from pagemesh.gateway.metrics import GatewayMetrics
from pagemesh.gateway.route_store import RouteStore
from pagemesh.shared.routes import Route, preferred

log = structlog.get_logger(__name__)


class LiveRoute(NamedTuple):
    """A route with an engine behind it: its live models with their shares, the greatest first."""

    name: str
    models: list[ServedModel]
    shares: Route


class Router:
    """Routes in front of the directory. A request is routed once, when it comes."""

    def __init__(
        self, directory: ModelDirectory, store: RouteStore, metrics: GatewayMetrics
    ) -> None:
        self._directory = directory
        self._store = store
        self._metrics = metrics
        self._passed_over: set[tuple[str, str]] = set()

    def resolve(self, name: str | None, key: str) -> ServedModel:
        """The model to serve a request for `name`, under that name. A split takes `key` to the same
        model always, but for one without an engine, which is passed over.

        Raises RequestError: 503 while no engine is alive for it, 404 when nobody knows the name.
        """
        if name is None:
            return self._plain(None)
        shares = self._store.routes.shares.get(name)
        if shares is None:
            return self._directory.live(name) or self._plain(name)
        for model in preferred(shares, key):
            served = self._directory.live(model)
            if served is not None:
                self._passed_over.discard((name, model))
                self._metrics.routed(name, model)
                return ServedModel(name, served.card)
            self._pass_over(name, model)
        raise not_ready(
            f"no engine is alive at the moment for {name!r}, which leads to {', '.join(shares)}"
        )

    def live_routes(self) -> Iterator[LiveRoute]:
        for name, shares in self._store.routes.shares.items():
            found = [self._directory.live(m) for m in sorted(shares, key=lambda m: -shares[m])]
            models = [model for model in found if model is not None]
            if models:
                yield LiveRoute(name, models, shares)

    def live_route(self, name: str) -> LiveRoute | None:
        return next((route for route in self.live_routes() if route.name == name), None)

    def _plain(self, name: str | None) -> ServedModel:
        if name is not None and not self._store.looked:
            raise not_ready("the routes are not known yet")
        return self._directory.resolve(name, (route.name for route in self.live_routes()))

    def _pass_over(self, route: str, model: str) -> None:
        """One line, until the model answers again."""
        self._metrics.passed_over(route, model)
        if (route, model) not in self._passed_over:
            self._passed_over.add((route, model))
            log.warning("route_target_passed_over", route=route, target=model, reason="no engine")
