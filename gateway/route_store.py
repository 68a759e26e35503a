"""The routes of run time, in Redis and here: read again and again, changed one at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Final

import msgspec
import structlog

from pagemesh.gateway.routes import Routes
from pagemesh.shared.errors import RequestError
from pagemesh.shared.registry import AWAY
from pagemesh.shared.route_keys import RouteKeys, StoredRoutes
from pagemesh.shared.routes import BadRoute, Route

LOOK_PERIOD_S: Final = 0.5

Edit = Callable[[dict[str, Route]], dict[str, Route]]
log = structlog.get_logger(__name__)


class RouteStore:
    """The asyncio shell around Routes. With Redis away the last known routes go on."""

    def __init__(self, keys: RouteKeys, routes: Routes) -> None:
        self.routes = routes
        self.looked = False
        """Whether Redis was asked at least once, and answered or is known to be away."""
        self._keys = keys
        self._flaw: str | None = None

    async def run(self) -> None:
        """Follow what other gateways change, until cancelled."""
        while True:
            await self._look()
            self.looked = True
            await asyncio.sleep(LOOK_PERIOD_S)

    async def change(self, edit: Edit) -> None:
        """Replace the routes of run time by what `edit` makes of them, for every gateway.

        Raises RequestError (503) when Redis is away, and what `edit` raises, BadRoute for routes
        that do not go together; nothing has changed then.
        """
        try:
            new = await self._keys.change(self.routes.stored, partial(self._edited, edit))
        except AWAY as error:
            raise RequestError(
                "Redis, which keeps the routes, does not answer: nothing was changed, and the "
                "routes go on as they are. Try again once it is back.",
                status=503,
                code="service_unavailable",
            ) from error
        except msgspec.MsgspecError as error:
            raise RequestError(
                f"The routes in Redis are of another version, so that nothing was changed: {error}",
                status=409,
            ) from error
        if new is None:
            raise RequestError("Others changed the routes meanwhile: try again.", status=409)
        log.info("routes_changed", version=new.version, routes=new.routes)
        self.routes.adopt(new)

    def _edited(self, edit: Edit, held: StoredRoutes) -> dict[str, Route]:
        wanted = edit(dict(held.routes))
        self.routes.check(wanted)
        return wanted

    async def _look(self) -> None:
        try:
            newest = await self._keys.newest(self.routes.stored)
            if newest.version > self.routes.stored.version:
                self.routes.adopt(newest)
                log.info("routes_learned", version=newest.version, routes=newest.routes)
        except AWAY as error:
            self._tell(f"Redis is away: {error}")
        except (BadRoute, msgspec.MsgspecError) as error:
            self._tell(str(error))
        else:
            self._flaw = None

    def _tell(self, flaw: str) -> None:
        """Once, until it is another or gone."""
        if flaw != self._flaw:
            log.warning("routes_not_read", reason=flaw, effect="the last known ones go on")
        self._flaw = flaw
