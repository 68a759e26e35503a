"""A worker process whose device takes a set time for each step, one after the other.

python -m steps_parts.device        (settings in PAGEMESH_*, the step's time in STEPS_BENCH_STEP_S)

As with an accelerator, a step that waits in the queue starts when the one before it ends, whatever
the process does meanwhile. The loop polls instead of sleeping: no timer is precise enough, and the
process has a core for itself.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from contextlib import suppress
from typing import Final, NamedTuple

import uvloop
from aiohttp import web

from pagemesh.shared.engine_messages import Step, StepResult
from pagemesh.shared.errors import LinkClosed
from pagemesh.shared.link import LINK_PATH, Link, accept
from pagemesh.shared.logs import configure_logging
from pagemesh.shared.messages import Capacity, Engines, EngineStats, EngineStatus, ModelCard
from pagemesh.shared.service import Runtime, serve
from pagemesh.shared.settings_sources import load_settings
from pagemesh.shared.wire import pack_ids

STEP_S: Final = "STEPS_BENCH_STEP_S"
BLOCKS_PER_ROW: Final = 64
CARD: Final = ModelCard(["steps"], 32_000, 8192, 16, "scripted", [2], 1, "steps", 0)
TOKEN: Final = pack_ids([7])


class Computing(NamedTuple):
    link: Link
    step: Step
    end_s: float


class Device:
    """A shared.service.ServiceCore."""

    def __init__(self, runtime: Runtime, step_s: float) -> None:
        rows = runtime.settings.scheduler.max_num_seqs
        capacity = Capacity(1 + rows * BLOCKS_PER_ROW, rows, 8192, 1024, "cpu")
        self._runtime = runtime
        self._step_s = step_s
        self._queue: deque[Computing] = deque()
        self._status = EngineStatus(runtime.instance_id, CARD, capacity, EngineStats())

    def routes(self) -> list[web.RouteDef]:
        return [web.get(LINK_PATH, self._serve_scheduler)]

    def not_ready(self) -> str | None:
        return None

    async def run(self) -> None:
        while True:
            now_s = time.perf_counter()
            while self._queue and self._queue[0].end_s <= now_s:
                self._answer(self._queue.popleft())
            await asyncio.sleep(0)

    async def drain(self) -> None:
        """Whoever measures stops asking first."""

    async def _serve_scheduler(self, request: web.Request) -> web.WebSocketResponse:
        link, socket = await accept(request, self._runtime.hello())
        if link is None:
            return socket
        link.send(Engines([self._status]))
        free_s = 0.0
        async for message in link:
            if isinstance(message, Step):
                free_s = max(free_s, time.perf_counter()) + self._step_s
                self._queue.append(Computing(link, message, free_s))
        await link.close()
        return socket

    def _answer(self, done: Computing) -> None:
        step = done.step
        result = StepResult(step.epoch, step.step, TOKEN * step.n_rows, elapsed_s=self._step_s)
        with suppress(LinkClosed):
            done.link.send(result)


def main() -> None:
    settings = load_settings({}, None, os.environ).settings
    configure_logging("worker", settings.log)
    step_s = float(os.environ[STEP_S])
    uvloop.run(
        serve("worker", settings, lambda runtime: Device(runtime, step_s), host="127.0.0.1", port=0)
    )


if __name__ == "__main__":
    main()
