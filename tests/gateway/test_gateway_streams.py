"""Many streams at once, clients that do not read, streams that are quiet."""

from __future__ import annotations

import asyncio
import itertools
import math
from typing import Any

import aiohttp
import msgspec
from gateway_fakes import Conversation, FakeTokenizer, Gateway, read_events

CHAT = "/v1/chat/completions"
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "stream": True}
N_STREAMS = 500
N_TOKENS = 20


async def test_five_hundred_streams_keep_their_own_text(
    gateway: Gateway, tokenizer: FakeTokenizer
) -> None:
    async def count(talk: Conversation) -> None:
        """One token per stream and turn, so that all streams interleave."""
        messages = talk.generate.prompt.messages or []
        talk.accept()
        for i in range(N_TOKENS):
            last = {"finish_reason": "stop"} if i == N_TOKENS - 1 else {}
            talk.delta(f"{messages[0]['content']}:{i} ", [i], **last)
            await asyncio.sleep(0)

    async def one(session: aiohttp.ClientSession, name: str) -> str:
        body = BODY | {"messages": [{"role": "user", "content": name}]}
        async with session.post(gateway.url + CHAT, json=body) as response:
            events = await read_events(response)
        assert events[-1] == "[DONE]"
        choices = [msgspec.json.decode(event)["choices"][0] for event in events[:-1]]
        assert [c["finish_reason"] for c in choices if c["finish_reason"]] == ["stop"]
        return "".join(choice["delta"].get("content", "") for choice in choices)

    tokenizer.script = count
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        names = [f"s{i}" for i in range(N_STREAMS)]
        texts = await asyncio.gather(*(one(session, name) for name in names))
    assert texts == ["".join(f"{name}:{i} " for i in range(N_TOKENS)) for name in names]


async def ask_without_reading(gateway: Gateway, **fields: Any) -> asyncio.StreamWriter:
    """A client that sends BODY and leaves the answer where it is."""
    host, port = gateway.url.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, int(port), limit=1024)
    writer.transport.pause_reading()  # type: ignore[attr-defined]
    body = msgspec.json.encode(BODY | fields)
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    return writer


async def test_a_deadline_holds_for_a_client_that_does_not_read(
    gateway: Gateway, tokenizer: FakeTokenizer
) -> None:
    """Less waits for it than makes a slow client, and its handler hangs in a write."""
    talks: asyncio.Queue[Conversation] = asyncio.Queue()

    async def speak(talk: Conversation) -> None:
        talks.put_nowait(talk)
        talk.accept()
        for _ in range(30):
            talk.delta("x" * 100_000, [1])
            await asyncio.sleep(0)

    tokenizer.script = speak
    writer = await ask_without_reading(gateway, timeout=0.5)
    talk = await talks.get()
    async with asyncio.timeout(3):
        await talk.cancelled.wait()
    writer.transport.abort()


async def test_a_client_that_does_not_read_is_aborted(
    gateway: Gateway, tokenizer: FakeTokenizer
) -> None:
    talks: asyncio.Queue[Conversation] = asyncio.Queue()

    async def flood(talk: Conversation) -> None:
        talks.put_nowait(talk)
        talk.accept()
        while not talk.cancelled.is_set():
            talk.delta("x" * 65536, [1])
            await asyncio.sleep(0)

    tokenizer.script = flood
    writer = await ask_without_reading(gateway)
    talk = await talks.get()
    async with asyncio.timeout(30):
        await talk.cancelled.wait()
    assert "pagemesh_slow_clients_aborted_total 1.0" in await gateway.metrics()
    assert (await gateway.post(CHAT, BODY | {"messages": []}))[0] == 400
    writer.transport.abort()


async def test_a_quiet_stream_gets_comments(gateway: Gateway, tokenizer: FakeTokenizer) -> None:
    """Accepted but queued: headers and pings come before any text. The clock is wound by hand."""
    tokenizer.script = None
    sweep = gateway.core.backend.keep_alive.sweep
    asking = asyncio.create_task(gateway.session.post(gateway.url + CHAT, json=BODY))
    talk = await tokenizer.asked.get()
    talk.accept()
    async with asyncio.timeout(10):
        while not asking.done():
            sweep(math.inf)
            await asyncio.sleep(0)
        response = asking.result()
        assert b"assistant" in await response.content.readuntil(b"\n\n")
        for _ in range(2):
            sweep(math.inf)
            assert await response.content.readuntil(b"\n\n") == b": ping\n\n"
    talk.delta("text", [1], finish_reason="stop")
    assert (await read_events(response))[-1] == "[DONE]"


async def test_half_a_character_makes_no_chunk(gateway: Gateway, tokenizer: FakeTokenizer) -> None:
    async def halves(talk: Conversation) -> None:
        talk.accept()
        for token_id, text in enumerate(["", "", "😀", ""]):
            talk.delta(text, [token_id])
        talk.delta("", [9], finish_reason="stop")

    tokenizer.script = halves
    body = BODY | {"stream_options": {"include_usage": True}}
    async with gateway.session.post(gateway.url + CHAT, json=body) as response:
        chunks = [msgspec.json.decode(event) for event in (await read_events(response))[:-1]]
    contents = [c["choices"][0]["delta"].get("content") for c in chunks if c["choices"]]
    assert contents == ["", "😀", None]
    assert chunks[-1]["usage"]["completion_tokens"] == 5


async def test_tokens_that_came_together_leave_in_one_chunk(
    gateway: Gateway, tokenizer: FakeTokenizer
) -> None:
    """Nothing is lost or reordered however deltas are cut; fewer chunks than tokens is allowed."""
    n_tokens = 2000

    async def burst(talk: Conversation) -> None:
        talk.accept()
        for i in range(n_tokens):
            talk.delta(f"{i} ", [i % 100])
        talk.delta("", [], finish_reason="stop")

    tokenizer.script = burst
    async with gateway.session.post(gateway.url + CHAT, json=BODY) as response:
        events = await read_events(response)
    choices = [msgspec.json.decode(event)["choices"][0] for event in events[:-1]]
    text = "".join(choice["delta"].get("content", "") for choice in choices)
    assert text == "".join(f"{i} " for i in range(n_tokens))
    numbers = [int(number) for number in text.split()]
    assert all(b == a + 1 for a, b in itertools.pairwise(numbers))
