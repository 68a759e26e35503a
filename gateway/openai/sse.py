"""Server-sent events: the one loop behind every stream."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any, Final, Protocol

import msgspec
import structlog
from aiohttp import web

from pagemesh.gateway.generation import Gain, Generation
from pagemesh.gateway.headers import REQUEST_ID, common_headers
from pagemesh.gateway.keepalive import HEADER_GRACE_S, KEEP_ALIVE_S, KeepAlive
from pagemesh.gateway.openai.errors import error_body
from pagemesh.shared.errors import RequestError

PING: Final = b": ping\n\n"
DONE: Final = b"data: [DONE]\n\n"
# An echo with logprobs can be many megabytes per choice; they are not gathered.
WRITE_BYTES: Final = 2**20

log = structlog.get_logger(__name__)


class Chunks(Protocol):
    """How one endpoint words its chunks. Each method returns whole events, or nothing."""

    async def opening(self) -> bytes:
        """Before any text."""

    async def gain(self, gain: Gain) -> bytes:
        """One choice gained something."""

    def closing(self) -> bytes:
        """After the last choice has finished."""


def event(payload: Any) -> bytes:
    return b"data: " + msgspec.json.encode(payload) + b"\n\n"


async def stream(
    request: web.Request, generation: Generation, chunks: Chunks, keep_alive: KeepAlive
) -> web.StreamResponse:
    """Answer with the generation as it grows.

    Raises RequestError while that can still be an HTTP status; later an error is an event.
    """
    with keep_alive.watching(generation):
        await _first_sign(generation)
        response = web.StreamResponse(headers=_headers(request))
        await response.prepare(request)
        try:
            await _pump(response, generation, chunks)
        except RequestError as error:
            await _end_with(response, error, request[REQUEST_ID])
        except ConnectionError:
            # The client is gone; whoever opened the generation cancels it.
            return response
        except Exception:
            log.exception("stream_failed", x_request_id=request[REQUEST_ID])
            internal = RequestError("Internal error", status=500)
            await _end_with(response, internal, request[REQUEST_ID])
    return response


def _headers(request: web.Request) -> dict[str, str]:
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


async def _pump(response: web.StreamResponse, generation: Generation, chunks: Chunks) -> None:
    """One write per wake-up, whatever has gathered until then, unless that is much."""
    loop = asyncio.get_running_loop()
    data = bytearray(await chunks.opening())
    while True:
        # Before the awaits: what comes meanwhile is the next turn's.
        gains, finished = generation.take(), generation.done
        for gain in gains:
            data += await chunks.gain(gain)
            if len(data) > WRITE_BYTES:
                await response.write(data)
                data = bytearray()
        if finished:
            data += chunks.closing() + DONE
        if not data and generation.nudged:
            data += PING
        generation.nudged = False
        if data:
            generation.nudge_at_s = loop.time() + KEEP_ALIVE_S
            await response.write(data)
        if finished:
            return
        await generation.changed()
        data = bytearray()


async def _end_with(response: web.StreamResponse, error: RequestError, request_id: str) -> None:
    log.warning("stream_error", x_request_id=request_id, status=error.status, error=error.message)
    with suppress(ConnectionError):
        await response.write(event(error_body(error)) + DONE)
