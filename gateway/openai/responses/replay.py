"""The events of a response that runs, or ran, in the background, for whoever asks: from Redis."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Final

import msgspec
from aiohttp import web

from pagemesh.gateway.keepalive import KEEP_ALIVE_S
from pagemesh.gateway.openai.errors import bad
from pagemesh.gateway.openai.responses import objects
from pagemesh.gateway.openai.responses.answer import Events
from pagemesh.gateway.openai.responses.store import ResponseStore, redis_away
from pagemesh.gateway.openai.sse import OPENAI, event_headers
from pagemesh.shared.access import OWNER
from pagemesh.shared.errors import RequestError
from pagemesh.shared.registry import AWAY
from pagemesh.shared.response_keys import MAX_EVENTS_READ

LOOK_PERIOD_S: Final = 0.1
_ENDS: Final = tuple(
    f"event: response.{status}\n"
    for status in (objects.COMPLETED, objects.INCOMPLETE, objects.FAILED)
)


async def replay(
    request: web.Request, store: ResponseStore, response_id: str, start: int
) -> web.StreamResponse:
    """The events from the sequence number `start` on, until the response has ended.

    Raises RequestError (400) for a response without events.
    """
    with redis_away():
        first = await store.events(response_id, 0)
    if not first.events:
        raise bad("stream", "replays responses of the background only, for an hour after their end")
    response = web.StreamResponse(headers=event_headers(request))
    await response.prepare(request)
    with suppress(ConnectionError):
        await _Replay(response, store, request[OWNER], response_id, start).run()
    return response


class _Replay:
    def __init__(
        self,
        response: web.StreamResponse,
        store: ResponseStore,
        owner: str,
        response_id: str,
        start: int,
    ) -> None:
        self._response = response
        self._store = store
        self._owner = owner
        self._id = response_id
        self._next = start

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        said_s = loop.time()
        while not await self._pass_on():
            if loop.time() > said_s + KEEP_ALIVE_S:
                said_s = loop.time()
                await self._response.write(OPENAI.ping)
            await asyncio.sleep(LOOK_PERIOD_S)

    async def _pass_on(self) -> bool:
        """Whether that was all."""
        try:
            found = await self._store.events(self._id, self._next)
        except AWAY:
            return False
        if found.events:
            self._next += len(found.events)
            await self._response.write("".join(found.events).encode())
        if len(found.events) == MAX_EVENTS_READ or (found.status in objects.ACTIVE and found.held):
            return False
        last = found.events or await self._seen()
        if not any(each.startswith(_ENDS) for each in last):
            await self._response.write(await self._end())
        return True

    async def _seen(self) -> list[str]:
        """The event before the next one, and those that came meanwhile."""
        with suppress(*AWAY):
            return (await self._store.events(self._id, max(0, self._next - 1))).events
        return []

    async def _end(self) -> bytes:
        """Who ran it did not tell of the end: it was cancelled, deleted, or its gateway is gone."""
        events = Events(self._next)
        try:
            found = await self._store.get(self._owner, self._id)
        except RequestError as error:
            return events.error(error)
        ended = msgspec.json.decode(found.object)
        kind = objects.FAILED if found.status == objects.FAILED else objects.INCOMPLETE
        return events.word({"type": f"response.{kind}", "response": ended})
