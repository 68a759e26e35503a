"""An OpenAI-style server that answers from scripts, and a clock that both sides share."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

Body = dict[str, Any]


class Reply:
    """One streamed answer being written."""

    def __init__(self, request: web.Request, body: Body) -> None:
        self.body = body
        self._request = request
        self._response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})

    async def start(self) -> Reply:
        await self._response.prepare(self._request)
        return self

    async def send(self, *payloads: Any) -> None:
        """Events in one write."""
        events = [p if isinstance(p, str) else json.dumps(p) for p in payloads]
        await self._response.write("".join(f"data: {event}\n\n" for event in events).encode())

    async def end(self) -> web.StreamResponse:
        await self._response.write_eof()
        return self._response

    def cut(self) -> web.StreamResponse:
        """The connection goes away in the middle of the answer."""
        assert self._request.transport is not None
        self._request.transport.close()
        return self._response


Play = Callable[[Reply], Awaitable[web.StreamResponse]]


def text(piece: str, finish: str | None = None) -> Body:
    return {"choices": [{"index": 0, "text": piece, "finish_reason": finish}], "usage": None}


def chat(finish: str | None = None, **delta: Any) -> Body:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}


def usage(prompt_tokens: int, completion_tokens: int) -> Body:
    counts = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}
    return {"choices": [], "usage": counts}


async def obedient(reply: Reply) -> web.StreamResponse:
    """As many tokens as were asked for, counted by usage, over either endpoint."""
    await reply.start()
    wanted = reply.body["max_tokens"]
    is_chat = "messages" in reply.body
    for left in range(wanted, 0, -1):
        finish = "length" if left == 1 else None
        await reply.send(chat(finish, content="x") if is_chat else text("x", finish))
    prompt = reply.body.get("prompt")
    await reply.send(usage(len(prompt) if isinstance(prompt, list) else 7, wanted), "[DONE]")
    return await reply.end()


class ScriptedServer:
    """`play` answers streams; `takes_ids` says whether a prompt may be token ids."""

    def __init__(
        self,
        play: Play = obedient,
        *,
        takes_ids: bool = True,
        api_key: str | None = None,
        models: Any = None,
    ) -> None:
        self.play = play
        self.bodies: list[Body] = []
        self.url = ""
        self._takes_ids = takes_ids
        self._api_key = api_key
        self._models = {"data": [{"id": "scripted"}]} if models is None else models

    @property
    def streamed(self) -> list[Body]:
        return [body for body in self.bodies if body.get("stream")]

    @asynccontextmanager
    async def running(self, port: int = 0) -> AsyncIterator[ScriptedServer]:
        app = web.Application(client_max_size=2**24)
        app.router.add_get("/v1/models", self._list_models)
        app.router.add_post("/v1/completions", self._answer)
        app.router.add_post("/v1/chat/completions", self._answer)
        runner = web.AppRunner(app, shutdown_timeout=1.0)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        self.url = "http://127.0.0.1:{1}".format(*runner.addresses[0])
        try:
            yield self
        finally:
            await runner.cleanup()

    async def _list_models(self, request: web.Request) -> web.Response:
        self._check_key(request)
        return web.json_response(self._models)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self._check_key(request)
        body = await request.json()
        self.bodies.append(body)
        if isinstance(body.get("prompt"), list) and not self._takes_ids:
            raise web.HTTPBadRequest(text="prompt must be a string")
        if not body.get("stream"):
            return web.json_response({"choices": [{"text": "x"}]})
        return await self.play(Reply(request, body))

    def _check_key(self, request: web.Request) -> None:
        if self._api_key and request.headers.get("Authorization") != f"Bearer {self._api_key}":
            raise web.HTTPUnauthorized(text="wrong key")


class ScriptedClock:
    """Time that the server moves and the client reads. Each read is seen by `was_read`."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._read = asyncio.Event()

    def __call__(self) -> float:
        self._read.set()
        return self.now_s

    async def was_read(self) -> None:
        await self._read.wait()
        self._read.clear()
