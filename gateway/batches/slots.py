"""How many requests of batches are out from this gateway, all its batches together."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from contextlib import suppress
from functools import partial
from typing import Final

from pagemesh.gateway.backend import Backend
from pagemesh.gateway.batches.pace import Pace
from pagemesh.shared.messages import EngineStatus

LOOK_PERIOD_S: Final = 0.1
YIELD_PERIOD_S: Final = 0.25


class Slots:
    """`most` at a time; fewer beside the requests of others: those that were asked last are
    withdrawn then, by cancelling their tasks."""

    def __init__(self, backend: Backend, most: int) -> None:
        self._directory = backend.directory
        self._router = backend.router
        self._pause = backend.pause
        self._most = most
        self._paces: defaultdict[str | None, Pace] = defaultdict(Pace)
        self._out: dict[asyncio.Task[None], str | None] = {}
        self._one_ended = asyncio.Event()

    async def run(self) -> None:
        """Withdraw what is too much, until cancelled."""
        while True:
            for name, pace in self._paces.items():
                excess = pace.excess(self._engines(name), self._most, _now_s())
                tasks = [task for task, its in self._out.items() if its == name]
                for task in tasks[len(tasks) - excess :]:
                    task.cancel()
            await asyncio.sleep(YIELD_PERIOD_S)

    async def until_free(self, model: str | None) -> None:
        """Until one more may go to the engines of `model`, or to any if that is no model's name."""
        while not self._is_free(self._name(model)):
            self._one_ended.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_PERIOD_S):
                    await self._one_ended.wait()

    def hold(self, task: asyncio.Task[None], model: str | None) -> None:
        """`task` asks `model`, until it is done."""
        name = self._name(model)
        self._out[task] = name
        self._paces[name].ours += 1
        # A task that is cancelled before it began runs no `finally`.
        task.add_done_callback(partial(self._ended, name))

    async def until_served(self, model: str | None) -> None:
        """Return once an engine can be asked for `model`."""
        while True:
            if self._is_served(model):
                return
            await asyncio.sleep(LOOK_PERIOD_S)

    def _ended(self, name: str | None, task: asyncio.Task[None]) -> None:
        del self._out[task]
        self._paces[name].ours -= 1
        self._one_ended.set()

    def _is_free(self, name: str | None) -> bool:
        room = self._paces[name].room(self._engines(name), self._most, _now_s())
        return room > 0 and len(self._out) < self._most and not self._pause.paused

    def _is_served(self, model: str | None) -> bool:
        if self._pause.paused:
            return False
        if model is None:
            return bool(self._directory.models)
        live = self._directory.live(model), self._router.live_route(model)
        return any(each is not None for each in live)

    def _name(self, model: str | None) -> str | None:
        """The model's own; None for what is no model's."""
        served = self._directory.live(model) if model is not None else None
        return None if served is None else served.card.names[0]

    def _engines(self, name: str | None) -> list[EngineStatus]:
        engines = self._directory.engines()
        return [each for each in engines if name in each.card.names] if name else engines


def _now_s() -> float:
    return asyncio.get_running_loop().time()
