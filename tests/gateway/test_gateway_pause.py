"""The administrator's routes: what the mesh is and does, caches forgotten, and a pause."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from gateway_fakes import (
    CARD,
    FakeTokenizer,
    Gateway,
    engine,
    fake_tokenizer,
    running_gateway,
    say_hello,
    settings_for,
)

from pagemesh.gateway import admin_mesh
from pagemesh.shared.messages import EngineStats
from pagemesh.shared.settings import Settings

ASK: dict[str, Any] = {"model": "tiny", "prompt": "a", "max_tokens": 9}
ADMIN: Any = {"headers": {"authorization": "Bearer admin"}}
BUSY = engine()._replace(stats=EngineStats(running=1))
IDLE = engine()._replace(stats=EngineStats())


@pytest.fixture
def settings(redis_url: str, mesh_name: str) -> Settings:
    return settings_for(redis_url, mesh_name, admin_key=["admin"], request_timeout_s=5.0)


@pytest.fixture
async def tokenizer(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[FakeTokenizer]:
    monkeypatch.setattr(admin_mesh, "SETTLE_S", 0.05)
    async with fake_tokenizer(settings) as fake:
        fake.engines = [IDLE]
        yield fake


async def complete(gateway: Gateway) -> tuple[int, Any]:
    return await gateway.post("/v1/completions", ASK)


async def until_paused(gateway: Gateway, *, paused: bool = True) -> None:
    async with asyncio.timeout(5):
        while gateway.core.backend.pause.paused is not paused:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def test_every_gateway_holds_requests_until_they_go_on(
    settings: Settings, gateway: Gateway, tokenizer: FakeTokenizer
) -> None:
    tokenizer.script = say_hello
    answer = await gateway.post("/pause?mode=wait", None, **ADMIN)
    assert answer == (200, {"status": "paused", "mode": "wait"})
    assert await gateway.get("/is_paused", **ADMIN) == (200, {"is_paused": True})
    assert tokenizer.reset == ["tiny"]
    async with running_gateway(settings) as later:
        await later.until_ready()
        held = [asyncio.create_task(complete(each)) for each in (gateway, later)]
        assert (await later.post("/tokenize", {"prompt": "a"}))[0] == 200
        assert await later.get("/admin/is_paused", **ADMIN) == (200, {"is_paused": True})
        await until_held(gateway, later)
        assert not tokenizer.talks
        assert (await gateway.post("/admin/resume", None, **ADMIN))[0] == 200
        await until_paused(later, paused=False)
        assert [status for status, _ in await asyncio.gather(*held)] == [200, 200]


async def until_held(*gateways: Gateway) -> None:
    async with asyncio.timeout(5):
        for each in gateways:
            while not each.core.backend.metrics.requests.ledger().in_flight:  # noqa: ASYNC110
                await asyncio.sleep(0.02)


async def test_who_waits_too_long_may_come_again(
    gateway: Gateway, tokenizer: FakeTokenizer
) -> None:
    gateway.core.backend.upstream._timeout_s = 0.1
    await gateway.post("/pause?clear_cache=false", None, **ADMIN)
    assert not tokenizer.reset
    url = f"{gateway.url}/v1/completions"
    async with gateway.session.post(url, json=ASK) as answer:
        assert (answer.status, (await answer.json())["error"]["code"]) == (503, "paused")
        assert int(answer.headers["retry-after"]) >= 1


async def test_a_pause_may_end_what_runs(gateway: Gateway, tokenizer: FakeTokenizer) -> None:
    asked = asyncio.create_task(complete(gateway))
    talk = await tokenizer.asked.get()
    talk.accept()
    tokenizer.push([BUSY])
    pausing = asyncio.create_task(gateway.post("/admin/pause", None, **ADMIN))
    status, answer = await asked
    assert (status, answer["error"]["code"]) == (503, "paused")
    async with asyncio.timeout(1):
        await talk.cancelled.wait()
    assert not pausing.done()
    tokenizer.push([IDLE])
    assert (await pausing)[0] == 200


async def test_a_pause_may_wait_for_what_runs(gateway: Gateway, tokenizer: FakeTokenizer) -> None:
    asked = asyncio.create_task(complete(gateway))
    talk = await tokenizer.asked.get()
    tokenizer.push([BUSY])
    older = "/pause?wait_for_inflight_requests=true"
    pausing = asyncio.create_task(gateway.post(older, None, **ADMIN))
    await until_paused(gateway)
    await say_hello(talk)
    assert (await asked)[0] == 200
    tokenizer.push([IDLE])
    assert (await pausing)[1]["mode"] == "wait"


@pytest.mark.parametrize("query", ["mode=keep", "mode=x", "clear_cache=x"])
async def test_what_is_refused(gateway: Gateway, query: str) -> None:
    status, answer = await gateway.post(f"/pause?{query}", None, **ADMIN)
    assert (status, answer["error"]["param"]) == (400, query.partition("=")[0])
    assert not gateway.core.backend.pause.paused


async def test_caches_are_reset_by_model(gateway: Gateway, tokenizer: FakeTokenizer) -> None:
    alias = await gateway.post("/admin/reset_prefix_cache?model=tiny-alias", None, **ADMIN)
    assert alias == (200, {"reset": {"tiny": ["engine-1"]}})
    assert tokenizer.reset == ["tiny"]
    assert (await gateway.post("/reset_prefix_cache?model=x", None, **ADMIN))[0] == 404


async def test_what_there_is(gateway: Gateway) -> None:
    status, info = await gateway.get("/admin/server_info", **ADMIN)
    assert status == 200
    assert info["settings"]["gateway"]["admin_key"] == "********"
    assert info["settings"]["gateway"]["request_timeout_s"] == 5.0
    [model] = info["models"]
    assert (model["names"], model["max_model_len"]) == (CARD.names, CARD.max_model_len)
    assert model["engines"]["engine-1"]["device"] == "cpu"
    assert {service: len(found) for service, found in info["services"].items()} == {
        "gateway": 1,
        "tokenizer": 1,
        "scheduler": 0,
        "worker": 0,
    }
    assert info["is_paused"] is False


async def test_what_there_is_to_do(gateway: Gateway, tokenizer: FakeTokenizer) -> None:
    asked = asyncio.create_task(complete(gateway))
    talk = await tokenizer.asked.get()
    status, load = await gateway.get("/load", **ADMIN)
    assert (status, load["server_load"]) == (200, 1)
    assert load["models"]["tiny"]["engines"]["engine-1"]["kv_cache_usage"] == 0.0
    assert set(load["services"]) == {"gateway", "tokenizer", "scheduler", "worker"}
    await say_hello(talk)
    await asked


async def test_without_redis_nothing_changes(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(*_: object) -> None:
        raise ConnectionRefusedError("nobody is there")

    pause = gateway.core.backend.pause
    monkeypatch.setattr(pause._keys, "newest", refuse)
    assert (await gateway.post("/pause", None, **ADMIN))[0] == 503
    assert not pause.paused
