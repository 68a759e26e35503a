"""Whether the mesh is paused, in Redis and here: followed, and changed by administrators."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

import msgspec
import structlog

from pagemesh.shared.errors import RequestError
from pagemesh.shared.pause_keys import Mode, PauseKeys, StoredPause
from pagemesh.shared.registry import AWAY

LOOK_PERIOD_S: Final = 0.5

log = structlog.get_logger(__name__)


class PauseStore:
    """With Redis away what was last known goes on. `on_change` hears of every new mode."""

    def __init__(self, keys: PauseKeys, on_change: Callable[[Mode | None], None]) -> None:
        self.stored = StoredPause()
        self.looked = False
        """Whether Redis was asked at least once, and answered or is known to be away."""
        self._keys = keys
        self._on_change = on_change

    @property
    def paused(self) -> bool:
        return self.stored.mode is not None

    async def run(self) -> None:
        """Follow what other gateways are told, until cancelled."""
        while True:
            try:
                self._adopt(await self._keys.newest(self.stored))
            except AWAY:
                pass  # the store of the routes says so
            except msgspec.MsgspecError as error:
                log.warning("pause_not_read", reason=str(error))
            self.looked = True
            await asyncio.sleep(LOOK_PERIOD_S)

    async def change(self, mode: Mode | None) -> None:
        """For every gateway, from now on: those to come as well. Raises RequestError (503) when
        Redis is away; nothing has changed then."""
        try:
            new = await self._keys.change(self.stored, lambda _: mode)
        except AWAY as error:
            raise RequestError(
                "Redis, through which all gateways are told, does not answer: nothing was changed.",
                status=503,
            ) from error
        if new is None:
            raise RequestError("Others changed it meanwhile: try again.", status=409)
        self._adopt(new)

    def _adopt(self, newest: StoredPause) -> None:
        if newest.version > self.stored.version:
            self.stored = newest
            log.warning("mesh_paused" if newest.mode else "mesh_resumed", mode=newest.mode)
            self._on_change(newest.mode)


def paused_too_long(waited_s: float) -> RequestError:
    """For a request that was held, or cannot be."""
    return RequestError(
        f"The server is paused. A request waits for at most {waited_s:g} s until it goes on.",
        status=503,
        code="paused",
    )


def ended_by_pause() -> RequestError:
    return RequestError("The server was paused and ended this request.", status=503, code="paused")
