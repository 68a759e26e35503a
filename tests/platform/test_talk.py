"""`pagemesh chat` and `pagemesh complete` against a scripted server."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web

from pagemesh.talk.stream import AnswerFailed, text_of

PIECES = ["Hello", " wörld", "!"]


class Server:
    """Lists one model and says PIECES; notes what it was asked."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.refusal: dict[str, Any] | None = None
        self.url = ""

    async def models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "tiny"}]})

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append(await request.json())
        self.keys.append(request.headers.get("Authorization"))
        if self.refusal is not None:
            return web.json_response({"error": self.refusal}, status=400)
        response = web.StreamResponse()
        await response.prepare(request)
        chat = request.path.endswith("chat/completions")
        for piece in PIECES:
            choice = {"delta": {"content": piece}} if chat else {"text": piece}
            event = f"data: {json.dumps({'choices': [choice]})}\n\n".encode()
            await response.write(event[:9])
            await response.write(event[9:])
        await response.write(b": ping\n\ndata: [DONE]\n\n")
        return response


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    scripted, app = Server(), web.Application()
    app.router.add_get("/v1/models", scripted.models)
    app.router.add_post("/v1/{path:.*}", scripted.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]
    scripted.url = f"http://{host}:{port}/v1"
    yield scripted
    await runner.cleanup()


async def pagemesh(*argv: str, typed: str = "") -> tuple[int, str, str]:
    """Exit code, standard output and error of the command."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "pagemesh.cli", *argv),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate(typed.encode())
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


async def test_a_text_is_gone_on_with(server: Server) -> None:
    code, out, _ = await pagemesh("complete", "Once", "--url", server.url, "--max-tokens", "7")
    assert (code, out) == (0, "Hello wörld!\n")
    assert server.bodies == [{"model": "tiny", "prompt": "Once", "max_tokens": 7, "stream": True}]


async def test_a_conversation_keeps_what_was_said(server: Server) -> None:
    flags = ["--url", server.url, "--api-key", "k", "--model", "m", "--system", "Be brief."]
    code, out, _ = await pagemesh("chat", *flags, typed="Hi\n\nAnd you?\n")
    assert code == 0
    assert out.count("Hello wörld!") == 2
    said = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello wörld!"},
        {"role": "user", "content": "And you?"},
    ]
    assert [body["messages"] for body in server.bodies] == [said[:2], said]
    assert server.keys == ["Bearer k", "Bearer k"]


async def test_a_refusal_is_told_and_ends_with_1(server: Server) -> None:
    server.refusal = {"message": "too long", "type": "invalid_request_error"}
    code, _, err = await pagemesh("chat", "Hi", "--url", server.url)
    assert (code, err) == (1, "pagemesh: error: too long\n")


async def test_no_server_is_told_in_a_sentence() -> None:
    code, _, err = await pagemesh("chat", "Hi", "--url", "http://127.0.0.1:9")
    assert code == 2
    assert "no OpenAI-style server answers at http://127.0.0.1:9" in err


def test_an_error_event_breaks_the_answer_off() -> None:
    assert text_of({"choices": [], "usage": {}}) == ""
    assert text_of({"choices": [{"delta": {}}]}) == ""
    with pytest.raises(AnswerFailed, match="engine lost"):
        text_of({"error": {"message": "engine lost"}})
