"""Cancelling by id: at the gateway that holds the request and at another, by whose key."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from gateway_fakes import (
    Conversation,
    FakeTokenizer,
    Gateway,
    fake_tokenizer,
    read_events,
    running_gateway,
    settings_for,
)

from pagemesh.shared.settings import Settings

ASK: dict[str, Any] = {"model": "tiny", "prompt": "a", "max_tokens": 9}
MINE, OTHER, ADMIN = ({"authorization": f"Bearer {key}"} for key in ("mine", "other", "admin"))


@pytest.fixture
def settings(redis_url: str, mesh_name: str) -> Settings:
    return settings_for(redis_url, mesh_name, api_key=["mine", "other"], admin_key=["admin"])


@pytest.fixture
async def tokenizer(settings: Settings) -> AsyncIterator[FakeTokenizer]:
    async with fake_tokenizer(settings) as fake:
        yield fake


@pytest.fixture
async def neighbour(settings: Settings, gateway: Gateway) -> AsyncIterator[Gateway]:
    async with running_gateway(settings) as neighbour:
        await neighbour.until_ready()
        yield neighbour


def begin(gateway: Gateway, request_id: str, **fields: Any) -> asyncio.Task[Any]:
    headers = MINE | {"x-request-id": request_id}

    async def ask() -> Any:
        url = f"{gateway.url}/v1/completions"
        async with gateway.session.post(url, json=ASK | fields, headers=headers) as answer:
            if answer.status == 200:
                return await read_events(answer)
            return answer.status, (await answer.json())["error"]["code"]

    return asyncio.create_task(ask())


async def cancel(gateway: Gateway, request_id: str, key: dict[str, str]) -> int:
    return (await gateway.post(f"/v1/requests/{request_id}/cancel", {}, headers=key))[0]


async def ends(talk: Conversation) -> None:
    async with asyncio.timeout(1):
        await talk.cancelled.wait()


async def test_who_began_it_may_cancel_it_anywhere(
    gateway: Gateway, neighbour: Gateway, tokenizer: FakeTokenizer
) -> None:
    for by, key in ((gateway, MINE), (neighbour, MINE), (neighbour, ADMIN)):
        asked = begin(gateway, "one")
        talk = await tokenizer.asked.get()
        talk.accept()
        assert await cancel(by, "one", OTHER) == 404
        assert not talk.cancelled.is_set()
        assert await cancel(by, "one", key) == 200
        await ends(talk)
        assert await asked == (499, "cancelled")
    assert await cancel(gateway, "one", MINE) == 404


async def test_a_stream_ends_with_an_error_event(
    gateway: Gateway, tokenizer: FakeTokenizer
) -> None:
    url, body = f"{gateway.url}/v1/completions", ASK | {"stream": True}
    async with asyncio.TaskGroup() as group:
        asked = group.create_task(gateway.session.post(url, json=body, headers=MINE))
        talk = await tokenizer.asked.get()
        talk.accept()
        talk.delta("text", [1])
    async with asked.result() as answer:
        assert b"text" in await answer.content.readline()
        assert await cancel(gateway, talk.generate.request_id, MINE) == 200
        told = await read_events(answer)
    await ends(talk)
    assert (told[-1], '"code":"cancelled"' in told[-2]) == ("[DONE]", True)


async def test_several_are_aborted_in_vllms_words(
    gateway: Gateway, neighbour: Gateway, tokenizer: FakeTokenizer
) -> None:
    asked = [begin(gateway, "a"), begin(neighbour, "b")]
    talks = [await tokenizer.asked.get() for _ in asked]
    body = {"request_ids": ["a", "b", "c", "x" * 100_000, "\0"]}
    answer = await gateway.post("/abort_requests", body, headers=ADMIN)
    assert answer == (200, {"status": "aborted", "aborted": 2})
    await asyncio.gather(*map(ends, talks))
    assert await asyncio.gather(*asked) == [(499, "cancelled")] * 2
    assert 'reason="abort"' in await gateway.metrics()
    keys = gateway.core.backend.cancellations._keys
    assert await keys._redis.memory_usage(keys._stream) < 10_000
    for wrong in ({}, {"request_ids": []}, {"request_ids": [1]}):
        status, answer = await gateway.post("/abort_requests", wrong, headers=ADMIN)
        assert (status, answer["error"]["param"]) == (400, "request_ids")


async def test_without_redis_others_cannot_be_told(
    gateway: Gateway, tokenizer: FakeTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(*_: object) -> None:
        raise ConnectionRefusedError("nobody is there")

    monkeypatch.setattr(gateway.core.backend.cancellations._keys, "tell", refuse)
    asked = begin(gateway, "here")
    await tokenizer.asked.get()
    assert await cancel(gateway, "here", MINE) == 200
    assert await asked == (499, "cancelled")
    assert await cancel(gateway, "there", MINE) == 503
