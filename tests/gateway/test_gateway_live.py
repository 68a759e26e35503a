"""Streams that keep up are written without their handlers, and together."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from typing import Final

import msgspec
import pytest
import uvloop
from gateway_fakes import (
    Conversation,
    FakeTokenizer,
    Gateway,
    Tls,
    fake_tokenizer,
    running_gateway,
)
from metric_names import Scrape

from pagemesh.gateway.generation import Generation
from pagemesh.gateway.openai.live import LiveStream, Turn
from pagemesh.shared.distribution import HOP_S, Observations
from pagemesh.shared.errors import RequestError
from pagemesh.shared.messages import Delta
from pagemesh.shared.settings import Settings

COMPLETIONS: Final = "/v1/completions"
BODY: Final = {"prompt": "a", "stream": True}


class Connection:
    """A transport that holds `unsent_bytes`, and tells a shared log of each write."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.unsent_bytes, self.written = name, 0, b""
        self.broken = False
        self._log = log

    def get_write_buffer_size(self) -> int:
        return self.unsent_bytes

    def write(self, data: bytes) -> None:
        if self.broken:
            raise ArithmeticError("broken transport")
        self._log.append(f"write {self.name}")
        self.written += data


class Words:
    """Words a gain as its text. A gain "bad" cannot be worded."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self._log = name, log

    def event(self, gain: Delta) -> bytes:
        self._log.append(f"word {self.name}")
        if gain.text == "bad":
            raise ArithmeticError("bad gain")
        return gain.text.encode()


class Client:
    """One live stream and all it works with."""

    def __init__(self, name: str, turn: Turn, log: list[str]) -> None:
        self.connection = Connection(name, log)
        self.generation = Generation(1, 1)
        words = Words(name, log)
        live = LiveStream(turn, self.connection, self.generation, words)  # type: ignore[arg-type]
        self.running = asyncio.create_task(live.run())

    def gain(self, text: str, finish_reason: str | None = None) -> None:
        self.generation.add(0, Delta("r", 0, text, b"", finish_reason=finish_reason))


@pytest.fixture
async def log() -> list[str]:
    return []


@pytest.fixture
async def clients(log: list[str]) -> AsyncIterator[list[Client]]:
    turn = Turn(Observations(HOP_S))
    both = [Client(name, turn, log) for name in "ab"]
    await turns()
    yield both
    for client in both:
        client.running.cancel()
    await asyncio.gather(*(client.running for client in both), return_exceptions=True)


async def turns() -> None:
    """Let the event loop turn until nothing is due."""
    for _ in range(3):
        await asyncio.sleep(0)


async def test_all_streams_of_a_turn_are_worded_before_any_is_written(
    clients: list[Client], log: list[str]
) -> None:
    for client in clients:
        client.gain("x")
    await turns()
    assert log == ["word a", "word b", "write a", "write b"]
    assert clients[0].connection.written == b"1\r\nx\r\n"


async def test_each_arrival_is_a_write_and_arrivals_of_one_turn_are_one(
    clients: list[Client],
) -> None:
    first = clients[0]
    first.gain("x")
    await turns()
    first.gain("y")
    first.gain("z")
    await turns()
    assert first.connection.written == b"1\r\nx\r\n" + b"2\r\nyz\r\n"


async def test_a_client_that_is_behind_is_handed_back_with_what_gathered(
    clients: list[Client],
) -> None:
    first = clients[0]
    first.connection.unsent_bytes = 1
    first.gain("x")
    await first.running
    first.gain("y")
    assert first.connection.written == b""
    assert [gain.text for gain in first.generation.take()] == ["xy"]


@pytest.mark.parametrize("why", ["end", "nudge", "error"])
async def test_the_handler_takes_over_when_it_is_needed(clients: list[Client], why: str) -> None:
    first, second = clients
    match why:
        case "end":
            first.gain("x", finish_reason="stop")
        case "nudge":
            first.generation.nudge()
        case "error":
            first.generation.fail(RequestError("broken"))
    await first.running
    assert first.connection.written == b""
    assert not second.running.done()


async def test_what_came_before_the_stream_went_live_is_written(log: list[str]) -> None:
    turn = Turn(Observations(HOP_S))
    client = Client("a", turn, log)
    client.gain("x")
    await turns()
    assert client.connection.written == b"1\r\nx\r\n"
    client.running.cancel()
    await asyncio.gather(client.running, return_exceptions=True)


async def test_a_gain_that_cannot_be_worded_ends_its_own_stream(clients: list[Client]) -> None:
    first, second = clients
    first.gain("bad")
    second.gain("x")
    with pytest.raises(ArithmeticError):
        await first.running
    assert second.connection.written == b"1\r\nx\r\n"


async def test_a_write_that_fails_ends_its_own_stream(clients: list[Client]) -> None:
    first, second = clients
    first.connection.broken = True
    first.gain("x")
    second.gain("y")
    with pytest.raises(ArithmeticError):
        await first.running
    assert second.connection.written == b"1\r\ny\r\n"


async def test_only_what_is_written_puts_off_the_next_comment(clients: list[Client]) -> None:
    first = clients[0]
    first.gain("")  # half a character, say
    await turns()
    assert first.generation.nudge_at_s == 0
    first.gain("x")
    await turns()
    assert first.generation.nudge_at_s > asyncio.get_running_loop().time()


async def test_nothing_is_written_for_a_handler_that_is_gone(clients: list[Client]) -> None:
    first = clients[0]
    first.gain("x")
    first.running.cancel()
    await turns()
    assert first.connection.written == b""


async def test_a_client_that_keeps_up_gets_an_event_for_each_token(
    gateway: Gateway, tokenizer: FakeTokenizer
) -> None:
    tokenizer.script = None
    asking = asyncio.create_task(gateway.session.post(gateway.url + COMPLETIONS, json=BODY))
    talk = await tokenizer.asked.get()
    talk.accept()
    talk.delta("0", [0])
    response = await asking
    for i in range(1, 20):
        assert await next_text(response.content) == str(i - 1)
        talk.delta(str(i), [i])
    assert await next_text(response.content) == "19"
    assert await n_live(gateway) == 19
    talk.delta("", [], finish_reason="stop")
    assert (await response.read()).endswith(b"data: [DONE]\n\n")


async def n_live(gateway: Gateway) -> float:
    """Turns of the event loop in which live streams gained something."""
    seen = Scrape.of(await gateway.metrics())
    return seen.total("pagemesh_gateway_token_seconds_count")


async def next_text(content: asyncio.StreamReader) -> str:
    event = await content.readuntil(b"\n\n")
    text: str = msgspec.json.decode(event.removeprefix(b"data: "))["choices"][0]["text"]
    return text


async def test_a_client_of_http_1_0_gets_plain_bytes(
    gateway: Gateway, tokenizer: FakeTokenizer
) -> None:
    talks: asyncio.Queue[Conversation] = asyncio.Queue()
    tokenizer.script = talks.put
    host, port = gateway.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    body = msgspec.json.encode(BODY)
    head = f"POST {COMPLETIONS} HTTP/1.0\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    talk = await talks.get()
    talk.accept()
    talk.delta("0", [0])
    assert b"chunked" not in await reader.readuntil(b"\r\n\r\n")
    for i in range(1, 5):
        assert (await reader.readuntil(b"\n\n")).startswith(b'data: {"id"')
        talk.delta(str(i), [i])
    talk.delta("", [], finish_reason="stop")
    assert (await reader.read()).endswith(b"data: [DONE]\n\n")
    assert await n_live(gateway) == 0
    writer.close()


async def read_live_then_stop(
    gateway: Gateway, tokenizer: FakeTokenizer, tls: ssl.SSLContext | None = None
) -> None:
    """A client whose stream is live while it reads, and that is cut after it has stopped."""
    host, port = gateway.url.rpartition("/")[2].split(":")
    reader, writer = await asyncio.open_connection(host, int(port), ssl=tls)
    body = msgspec.json.encode(BODY)
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    talk = await tokenizer.asked.get()
    talk.accept()
    talk.delta("0", [0])
    await reader.readuntil(b"\n\n")
    for i in range(1, 5):
        talk.delta(str(i), [i])
        assert f'"text":"{i}"'.encode() in await reader.readuntil(b"\n\n")
    assert await n_live(gateway) == 4
    writer.transport.pause_reading()  # type: ignore[attr-defined]
    async with asyncio.timeout(30):
        while not talk.cancelled.is_set():
            talk.delta("x" * 65536, [1])
            await asyncio.sleep(0)
    seen = Scrape.of(await gateway.metrics())
    assert seen.total("pagemesh_slow_clients_aborted_total") == 1
    writer.transport.abort()


async def run_read_live_then_stop(settings: Settings, tls: Tls | None = None) -> None:
    async with (
        fake_tokenizer(settings) as tokenizer,
        running_gateway(settings, tls) as gateway,
    ):
        await gateway.until_ready()
        await read_live_then_stop(gateway, tokenizer, tls and tls.client)


def test_a_client_that_stops_reading_is_cut_under_uvloop(settings: Settings) -> None:
    uvloop.run(run_read_live_then_stop(settings))


def test_a_client_that_stops_reading_is_cut_under_uvloop_and_tls(
    settings: Settings, tls: Tls
) -> None:
    uvloop.run(run_read_live_then_stop(settings, tls))
