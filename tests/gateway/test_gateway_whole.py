"""Whole answers on the wire: one head, one body, and a connection that stays or goes as asked."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

import msgspec
import pytest
from gateway_fakes import Gateway

PATH: Final = "/v1/completions"
BODY: Final = msgspec.json.encode({"model": "tiny", "prompt": "a", "max_tokens": 2})


class Client:
    """A connection whose bytes are seen as they are."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self._writer = writer

    async def ask(self, version: str = "1.1", **headers: str) -> tuple[str, dict[str, str], bytes]:
        """Status line, headers by their names in lower case, and body."""
        named = {"Host": "x", "Content-Length": str(len(BODY)), **headers}
        lines = [f"POST {PATH} HTTP/{version}", *(f"{k}: {v}" for k, v in named.items())]
        self._writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + BODY)
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode()
        status, *rest = head.strip().split("\r\n")
        answered = [line.split(": ", 1) for line in rest]
        by_name = {name.lower(): value for name, value in answered}
        assert len(by_name) == len(answered)
        return status, by_name, await self.reader.readexactly(int(by_name["content-length"]))

    def close(self) -> None:
        self._writer.close()


@asynccontextmanager
async def client_of(gateway: Gateway) -> AsyncIterator[Client]:
    host, port = gateway.url.removeprefix("http://").split(":")
    client = Client(*await asyncio.open_connection(host, int(port)))
    try:
        yield client
    finally:
        client.close()


async def test_answers_follow_each_other_on_one_connection(gateway: Gateway) -> None:
    async with client_of(gateway) as client:
        for name in ("first", "second"):
            status, headers, body = await client.ask(**{"X-Request-Id": name})
            assert status == "HTTP/1.1 200 OK"
            assert msgspec.json.decode(body)["choices"][0]["text"] == "Hello wörld"
            assert headers["x-request-id"] == name


async def test_the_head_is_that_of_every_other_answer(gateway: Gateway) -> None:
    async with client_of(gateway) as client:
        _, headers, _ = await client.ask()
    async with gateway.session.get(f"{gateway.url}/v1/models") as other:
        assert set(headers) == {name.lower() for name in other.headers}
        for name in ("content-type", "server", "access-control-allow-origin"):
            assert headers[name].partition(";")[0] == other.headers[name].partition(";")[0]


@pytest.mark.parametrize("version", ["1.0", "1.1"])
async def test_the_connection_closes_where_that_is_asked_for(
    gateway: Gateway, version: str
) -> None:
    async with client_of(gateway) as client:
        status, headers, body = await client.ask(version, Connection="close")
        assert status == f"HTTP/{version} 200 OK"
        assert headers.get("connection", "close") == "close"
        assert body.endswith(b"}")
        assert await client.reader.read() == b""


async def test_it_counts_as_answered(gateway: Gateway) -> None:
    async with client_of(gateway) as client:
        await client.ask()
    series = f'http_requests_total{{code="200",handler="{PATH}",method="POST",status="2xx"}} 1.0'
    assert series in await gateway.metrics()
