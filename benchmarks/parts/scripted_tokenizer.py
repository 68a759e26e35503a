"""A tokenizer service without a model: every step, each open choice gains a token of one text.

python -m parts.scripted_tokenizer tokenizer    (settings in PAGEMESH_*, the step in MESH_BENCH_*)
"""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import suppress
from typing import Final

import uvloop
from aiohttp import web

from pagemesh.shared.errors import LinkClosed
from pagemesh.shared.link import LINK_PATH, Link, accept
from pagemesh.shared.logs import configure_logging
from pagemesh.shared.messages import (
    Accepted,
    Begun,
    Cancel,
    Capacity,
    Delta,
    Deltas,
    EngineStats,
    EngineStatus,
    Generate,
    ModelCard,
)
from pagemesh.shared.registry import Load
from pagemesh.shared.service import Runtime, serve
from pagemesh.shared.settings import Settings
from pagemesh.shared.settings_sources import load_settings
from pagemesh.shared.wire import Message, pack_ids

STEP_S: Final = "MESH_BENCH_TOKENIZER_STEP_S"
MODEL: Final = "scripted"
# All events of a stream are of one length, so that bytes tell their number.
TOKEN_TEXT: Final = " token"
_PROMPT_IDS: Final = pack_ids(range(8))
_TOKEN_ID: Final = pack_ids([7])
_CARD: Final = ModelCard([MODEL], 1000, 2**20, 16, "scripted", [2], 1, "scripted", 0)
_CAPACITY: Final = Capacity(1024, 1024, 8192, 1024, "cpu")


class Feed:
    """What one gateway gets. `left` tokens of each open choice are to come."""

    def __init__(self, link: Link, engine_id: str) -> None:
        self._link = link
        self._engine_id = engine_id
        self._left: dict[str, int] = {}
        self._begun: list[Begun] = []
        self._some_left = asyncio.Event()

    def take(self, message: Message) -> None:
        match message:
            case Generate(request_id):
                self._link.send(Accepted(request_id, _PROMPT_IDS))
                self._left[request_id] = message.params.max_tokens or 1
                self._begun.append(Begun(request_id, 0, self._engine_id, 0, 0.001, 0.001))
            case Cancel(request_id):
                self._left.pop(request_id, None)
        self._look()

    async def run(self, step_s: float) -> None:
        """Until the link ends. A step that is due while the last one is still being sent waits."""
        next_s = time.monotonic()
        with suppress(LinkClosed):
            while True:
                next_s = max(next_s + step_s, time.monotonic())
                await asyncio.sleep(next_s - time.monotonic())
                await self._some_left.wait()
                self._link.send(self._step())
                await self._link.drained()

    def _step(self) -> Deltas:
        begun, self._begun = self._begun, []
        rows = [self._delta(request_id, left - 1) for request_id, left in self._left.items()]
        self._left = {request_id: left - 1 for request_id, left in self._left.items() if left > 1}
        self._look()
        return Deltas(rows, begun)

    def _look(self) -> None:
        if self._left:
            self._some_left.set()
        else:
            self._some_left.clear()

    @staticmethod
    def _delta(request_id: str, left: int) -> Delta:
        reason = None if left else "length"
        return Delta(request_id, 0, TOKEN_TEXT, _TOKEN_ID, finish_reason=reason)


class ScriptedTokenizer:
    """A shared.service.ServiceCore."""

    def __init__(self, runtime: Runtime, step_s: float) -> None:
        self._runtime = runtime
        self._step_s = step_s
        engine_id = f"engine-of-{runtime.instance_id}"
        self._engines = [EngineStatus(engine_id, _CARD, _CAPACITY, EngineStats())]

    def routes(self) -> list[web.RouteDef]:
        return [web.get(LINK_PATH, self._serve_gateway)]

    def load(self) -> Load:
        return Load()

    def not_ready(self) -> str | None:
        return None

    async def run(self) -> None:
        await asyncio.get_running_loop().create_future()

    async def drain(self) -> None:
        """Whoever measures stops asking first."""

    async def _serve_gateway(self, request: web.Request) -> web.WebSocketResponse:
        link, socket = await accept(request, self._runtime.hello(self._engines))
        if link is None:
            return socket
        feed = Feed(link, self._engines[0].engine_id)
        running = asyncio.create_task(feed.run(self._step_s))
        async for message in link:
            feed.take(message)
        running.cancel()
        await link.close()
        return socket


def run(settings: Settings, step_s: float) -> None:
    configure_logging("tokenizer", settings.log)
    uvloop.run(
        serve(
            "tokenizer",
            settings,
            lambda runtime: ScriptedTokenizer(runtime, step_s),
            host=settings.mesh.service_host,
            port=0,
        )
    )


if __name__ == "__main__":
    run(load_settings({}, None, os.environ).settings, float(os.environ[STEP_S]))
