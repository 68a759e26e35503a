"""Server-sent events: the one loop behind every stream."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, NamedTuple, Protocol

import msgspec
import structlog
from aiohttp import web
from aiohttp.hdrs import TRANSFER_ENCODING

from pagemesh.gateway.backend import Backend
from pagemesh.gateway.generation import Generation
from pagemesh.gateway.headers import REQUEST_ID, common_headers
from pagemesh.gateway.keepalive import HEADER_GRACE_S, KEEP_ALIVE_S
from pagemesh.gateway.openai.errors import error_body
from pagemesh.gateway.openai.live import LiveStream, Turn
from pagemesh.shared.errors import RequestError
from pagemesh.shared.messages import Delta

# An echo with logprobs can be many megabytes per choice; they are not gathered.
WRITE_BYTES: Final = 2**20

log = structlog.get_logger(__name__)


def event(payload: Any) -> bytes:
    return b"data: " + msgspec.json.encode(payload) + b"\n\n"


class Framing(NamedTuple):
    """What one API has around its chunks: a sign of life on a quiet stream, the end of one that is
    complete, and all that ends one that failed."""

    ping: bytes
    done: bytes
    failure: Callable[[RequestError], bytes]


_DONE: Final = b"data: [DONE]\n\n"
OPENAI: Final = Framing(
    ping=b": ping\n\n",
    done=_DONE,
    failure=lambda error: event(error_body(error)) + _DONE,
)


class Chunks(Protocol):
    """How one endpoint words its chunks. Each method returns whole events, or nothing."""

    @property
    def framing(self) -> Framing:
        """Of the API that the endpoint is of."""

    async def opening(self) -> bytes:
        """Before any text."""

    async def gain(self, gain: Delta) -> bytes:
        """One choice gained something."""

    @property
    def quick(self) -> bool:
        """Whether nothing but the gains is needed from now on, and each is worded at once, so that
        `event` may be used."""

    def event(self, gain: Delta) -> bytes:
        """As `gain`, for one that is quick to word."""

    async def closing(self) -> bytes:
        """After the last choice has finished."""


async def stream(
    request: web.Request, generation: Generation, chunks: Chunks, backend: Backend
) -> web.StreamResponse:
    """Answer with the generation as it grows.

    Raises RequestError while that can still be an HTTP status; later an error is an event.
    """
    with backend.keep_alive.watching(generation):
        await _first_sign(generation)
        response = web.StreamResponse(headers=event_headers(request))
        await response.prepare(request)
        pump = Pump(response, request.transport, generation, chunks, backend.turn)
        try:
            await pump.run()
        except RequestError as error:
            await _end_with(response, chunks.framing, error, request[REQUEST_ID])
        except ConnectionError:
            # The client is gone; whoever opened the generation cancels it.
            return response
        except Exception:
            log.exception("stream_failed", x_request_id=request[REQUEST_ID])
            internal = RequestError("Internal error", status=500)
            await _end_with(response, chunks.framing, internal, request[REQUEST_ID])
    return response


def event_headers(request: web.Request) -> dict[str, str]:
    """Of an answer that is a stream."""
    return {
        "content-type": "text/event-stream; charset=utf-8",
        "cache-control": "no-cache",
        "x-accel-buffering": "no",
    } | common_headers(request)


async def _first_sign(generation: Generation) -> None:
    """Wait for every prompt's acceptance, then for text or a short while without a refusal."""
    loop = asyncio.get_running_loop()
    accepted = False
    while not (generation.accepted and generation.begun):
        await generation.changed()
        if accepted and generation.nudged:
            return
        generation.nudged = False
        if generation.accepted and not accepted:
            accepted = True
            generation.nudge_at_s = loop.time() + HEADER_GRACE_S


class Pump:
    """The handler's side of one stream: every turn of it that is more than passing on events."""

    def __init__(
        self,
        response: web.StreamResponse,
        transport: asyncio.Transport | None,
        generation: Generation,
        chunks: Chunks,
        turn: Turn,
    ) -> None:
        self._response = response
        self._transport = transport
        self._generation = generation
        self._chunks = chunks
        self._turn = turn
        self._began = False

    async def run(self) -> None:
        """Until the generation is done and written. Raises what ended it."""
        data = bytearray(await self._chunks.opening())
        while not await self._pass_on(data):
            if self._may_go_live():
                await self._go_live()
            else:
                await self._generation.changed()
            data = bytearray()

    async def _pass_on(self, data: bytearray) -> bool:
        """One write with whatever has gathered, unless that is much; whether it was the last."""
        generation = self._generation
        # Before the awaits: what comes meanwhile is the next turn's.
        gains, finished = generation.take(), generation.done
        for gain in gains:
            data += await self._chunks.gain(gain)
            if len(data) > WRITE_BYTES:
                await self._response.write(data)
                data = bytearray()
        if finished:
            data += await self._chunks.closing() + self._chunks.framing.done
        if not data and generation.nudged:
            data += self._chunks.framing.ping
        generation.nudged = False
        if data:
            generation.nudge_at_s = asyncio.get_running_loop().time() + KEEP_ALIVE_S
            self._began = True
            await self._response.write(data)
        return finished

    def _may_go_live(self) -> bool:
        """Headers travel with the first write. A client of HTTP/1.0 gets no chunks."""
        return (
            self._began
            and self._chunks.quick
            and self._transport is not None
            and not self._transport.get_write_buffer_size()
            and self._response.headers.get(TRANSFER_ENCODING) == "chunked"
        )

    async def _go_live(self) -> None:
        assert self._transport is not None
        live = LiveStream(self._turn, self._transport, self._generation, self._chunks)
        await live.run()


async def _end_with(
    response: web.StreamResponse, framing: Framing, error: RequestError, request_id: str
) -> None:
    log.warning("stream_error", x_request_id=request_id, status=error.status, error=error.message)
    with suppress(ConnectionError):
        await response.write(framing.failure(error))
