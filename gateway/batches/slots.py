"""How many requests of batches are out from this gateway, all its batches together."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from contextlib import suppress
from typing import Final

from pagemesh.gateway.batches.pace import Pace
from pagemesh.gateway.directory import ModelDirectory

LOOK_PERIOD_S: Final = 0.1


class Slots:
    """`most` at a time; fewer beside the requests of others."""

    def __init__(self, directory: ModelDirectory, most: int) -> None:
        self._directory = directory
        self._most = most
        self._taken = 0
        self._paces: defaultdict[str | None, Pace] = defaultdict(Pace)
        self._given_back = asyncio.Event()

    async def take(self, model: str | None) -> Pace:
        """Wait for a slot at the engines of `model`, or at any if that is no model's name. The
        result is to be given back."""
        while not self._is_free(model):
            self._given_back.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_PERIOD_S):
                    await self._given_back.wait()
        pace = self._pace(model)
        pace.ours += 1
        self._taken += 1
        return pace

    def give_back(self, pace: Pace) -> None:
        pace.ours -= 1
        self._taken -= 1
        self._given_back.set()

    def _is_free(self, model: str | None) -> bool:
        engines = self._directory.engines()
        its = [each for each in engines if model in each.card.names] or engines
        room = self._pace(model).room(its, self._most, asyncio.get_running_loop().time())
        return room > 0 and self._taken < self._most

    def _pace(self, model: str | None) -> Pace:
        served = self._directory.live(model) if model is not None else None
        return self._paces[None if served is None else served.card.names[0]]
