"""Routes at a running gateway: aliases, splits, and their change while it runs."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

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
from metric_names import Scrape

from pagemesh.shared.registry import Registry
from pagemesh.shared.route_keys import StoredRoutes
from pagemesh.shared.settings import Settings

A, B = CARD._replace(names=["model-a"]), CARD._replace(names=["model-b"], fingerprint="b")
ADMIN: Final = {"headers": {"Authorization": "Bearer admin"}}
SEEN_S: Final = 5.0


@pytest.fixture
def settings(redis_url: str, mesh_name: str) -> Settings:
    routes: Any = {"fast": "model-b", "chat": {"model-a": 0.5, "model-b": 0.5}, "later": "model-c"}
    return settings_for(redis_url, mesh_name, routes=routes, admin_key=["admin"])


@pytest.fixture
async def tokenizer(settings: Settings) -> AsyncIterator[FakeTokenizer]:
    async with fake_tokenizer(settings, script=say_hello) as fake:
        fake.engines = [engine("a", A), engine("b", B)]
        yield fake


@asynccontextmanager
async def ready_gateway(settings: Settings) -> AsyncIterator[Gateway]:
    async with running_gateway(settings) as gateway:
        await gateway.until_ready()
        yield gateway


async def complete(gateway: Gateway, model: str | None, **fields: Any) -> tuple[int, Any]:
    body = {"model": model, "prompt": "Hi", "max_tokens": 1, **fields}
    return await gateway.post("/v1/completions", body)


async def targets(gateway: Gateway, fake: FakeTokenizer, model: str, **fields: Any) -> str:
    """The model that a request for `model` is given to."""
    asked = len(fake.talks)
    status, body = await complete(gateway, model, **fields)
    assert (status, body.get("model")) == (200, model), body
    assert len(fake.talks) == asked + 1
    return list(fake.talks.values())[-1].generate.model


async def change(gateway: Gateway, method: str, name: str, body: Any = None) -> tuple[int, Any]:
    url = f"{gateway.url}/admin/routes/{name}"
    async with gateway.session.request(method, url, json=body, **ADMIN) as response:
        return response.status, await response.json()


async def until(condition: Any) -> None:
    """Ask again and again; what is waited for tells nobody."""
    async with asyncio.timeout(SEEN_S):
        while not await condition():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def test_an_alias_answers_under_its_own_name(
    gateway: Gateway, tokenizer: FakeTokenizer
) -> None:
    assert await targets(gateway, tokenizer, "fast") == "model-b"
    assert await targets(gateway, tokenizer, "model-a") == "model-a"


async def test_a_split_is_even_sticky_and_counted(
    gateway: Gateway, tokenizer: FakeTokenizer
) -> None:
    found = Counter([await targets(gateway, tokenizer, "chat") for _ in range(40)])
    assert set(found) == {"model-a", "model-b"}
    for who in ({"user": "ann"}, {"prompt_cache_key": "thread-9"}):
        assert len({await targets(gateway, tokenizer, "chat", **who) for _ in range(8)}) == 1
    scrape = Scrape.of(await gateway.metrics())
    counted = "pagemesh_route_requests_total"
    for model, n in found.items():
        assert scrape.total(counted, route="chat", target=model) >= n
        assert scrape.total("vllm:request_success_total", model_name=model) >= n
    assert scrape.total(counted) == 40 + 16


async def test_a_request_id_decides_a_split(gateway: Gateway, tokenizer: FakeTokenizer) -> None:
    """A client that asks again under the same id is answered by the same model."""
    body = {"model": "chat", "prompt": "Hi", "max_tokens": 1}
    for i in range(6):
        for _ in range(2):
            headers = {"X-Request-Id": f"try-{i}"}
            assert (await gateway.post("/v1/completions", body, headers=headers))[0] == 200
        first, second = list(tokenizer.talks.values())[-2:]
        assert first.generate.model == second.generate.model


async def test_a_target_without_an_engine_is_passed_over(
    gateway: Gateway, tokenizer: FakeTokenizer
) -> None:
    tokenizer.push([engine("a", A)])
    await until(lambda: _lacks(gateway, "model-b"))
    assert {await targets(gateway, tokenizer, "chat") for _ in range(10)} == {"model-a"}
    scrape = Scrape.of(await gateway.metrics())
    passed = scrape.total("pagemesh_route_targets_passed_over_total", route="chat")
    assert 0 < passed <= 10
    for gone in ("fast", "model-b"):
        status, body = await complete(gateway, gone)
        assert (status, body["error"]["code"]) == (503, "service_unavailable")
    status, body = await complete(gateway, "fast")
    assert "'fast', which leads to model-b" in body["error"]["message"]


async def _lacks(gateway: Gateway, model: str) -> bool:
    _, body = await gateway.get("/v1/models")
    return model not in [each["id"] for each in body["data"]]


async def test_an_unknown_model_is_told_what_is_served(gateway: Gateway) -> None:
    status, body = await complete(gateway, "model-z")
    assert (status, body["error"]["code"], body["error"]["param"]) == (
        404,
        "model_not_found",
        "model",
    )
    assert "Served here: model-a, model-b, fast, chat." in body["error"]["message"]
    status, body = await complete(gateway, None)
    assert (status, body["error"]["param"]) == (400, "model")


async def test_the_model_list_shows_routes(gateway: Gateway, tokenizer: FakeTokenizer) -> None:
    tokenizer.push([engine("a", A._replace(max_model_len=100)), engine("b", B)])
    await until(lambda: _has_length(gateway, 100))
    _, body = await gateway.get("/v1/models")
    shown = {each["id"]: each for each in body["data"]}
    assert list(shown) == ["model-a", "model-b", "fast", "chat"]  # nothing serves "later"
    assert shown["model-a"]["parent"] is None
    assert (shown["fast"]["root"], shown["fast"]["parent"]) == ("model-b", "model-b")
    assert shown["chat"]["max_model_len"] == 100
    assert shown["chat"]["shares"] == {"model-a": 0.5, "model-b": 0.5}
    assert (await gateway.get("/v1/models/chat"))[1] == shown["chat"]
    assert (await gateway.get("/v1/models/later"))[0] == 503
    assert (await gateway.get("/v1/models/nobody"))[0] == 404


async def _has_length(gateway: Gateway, tokens: int) -> bool:
    return bool((await gateway.get("/v1/models/model-a"))[1]["max_model_len"] == tokens)


async def test_a_model_known_below_without_an_engine_is_503(
    gateway: Gateway, tokenizer: FakeTokenizer
) -> None:
    tokenizer.push([engine("a", A)], names=["model-a", "model-never-up"])
    await until(lambda: _lacks(gateway, "model-b"))
    assert (await complete(gateway, "model-never-up"))[0] == 503
    assert (await complete(gateway, "model-a"))[0] == 200


# -- at run time ----------------------------------------------------------------------------------


async def test_every_gateway_follows_a_change(
    gateway: Gateway, tokenizer: FakeTokenizer, settings: Settings
) -> None:
    async with ready_gateway(settings) as other:
        status, body = await change(gateway, "PUT", "org/new", {"targets": "model-a"})
        assert (status, body["source"]) == (200, "run time")
        assert await targets(gateway, tokenizer, "org/new") == "model-a"
        await until(lambda: _knows(other, "org/new"))
        assert await targets(other, tokenizer, "org/new") == "model-a"
        assert (await change(other, "DELETE", "org/new"))[0] == 200
        await until(lambda: _forgot(gateway, "org/new"))
        assert (await complete(gateway, "org/new"))[0] == 404


async def _knows(gateway: Gateway, route: str) -> bool:
    _, body = await gateway.get("/admin/routes", **ADMIN)
    return route in body["routes"]


async def _forgot(gateway: Gateway, route: str) -> bool:
    return not await _knows(gateway, route)


async def test_run_time_overrides_the_settings_until_it_is_deleted(
    gateway: Gateway, tokenizer: FakeTokenizer
) -> None:
    status, body = await change(gateway, "PATCH", "chat", {"targets": {"model-b": None}})
    assert (status, body["targets"]) == (200, {"model-a": 0.5})
    assert body["of_settings"] == {"model-a": 0.5, "model-b": 0.5}
    assert {await targets(gateway, tokenizer, "chat") for _ in range(8)} == {"model-a"}
    _, listed = await gateway.get("/admin/routes", **ADMIN)
    sources = {name: route["source"] for name, route in listed["routes"].items()}
    assert sources == {"chat": "run time", "fast": "settings", "later": "settings"}
    assert listed["routes"]["later"]["without_engine"] == ["model-c"]
    assert (await change(gateway, "DELETE", "chat"))[0] == 200
    assert (await change(gateway, "GET", "chat"))[1]["source"] == "settings"
    assert (await change(gateway, "DELETE", "chat"))[0] == 409


@pytest.mark.parametrize(
    ("method", "name", "body", "status", "told"),
    [
        ("PUT", "x", {"targets": {"model-a": -1}}, 400, "positive number"),
        ("PUT", "x", {"targets": {}}, 400, "1 to 16 targets"),
        ("PUT", "x", {"targets": {"model-a": None}}, 400, "The body must be"),
        ("PUT", "x", {"target": "model-a"}, 400, "The body must be"),
        ("PUT", "x", [], 400, "The body must be"),
        ("PATCH", "x", {"targets": "model-a"}, 400, "The body must be"),
        ("PATCH", "fast", {"targets": {"model-b": None}}, 400, "1 to 16 targets"),
        ("PUT", "later", {"targets": "y"}, 200, ""),
        ("PUT", "fast", {"targets": "chat", "more": 1}, 400, "The body must be"),
        ("DELETE", "nobody", None, 404, "no route 'nobody'"),
        ("GET", "nobody", None, 404, "no route 'nobody'"),
    ],
)
async def test_what_cannot_be_is_refused_with_a_sentence(
    gateway: Gateway, method: str, name: str, body: Any, status: int, told: str
) -> None:
    found, answer = await change(gateway, method, name, body)
    assert found == status, answer
    if status != 200:
        assert told in answer["error"]["message"]


async def test_a_cycle_with_the_settings_is_refused(gateway: Gateway) -> None:
    assert (await change(gateway, "PUT", "model-b", {"targets": "x"}))[0] == 200
    status, body = await change(gateway, "PUT", "x", {"targets": "fast"})
    assert (status, body["error"]["param"]) == (400, "targets")
    assert "leads back to itself" in body["error"]["message"]
    assert (await change(gateway, "GET", "x"))[0] == 404


async def test_a_deletion_that_uncovers_a_cycle_is_refused(gateway: Gateway) -> None:
    assert (await change(gateway, "PUT", "fast", {"targets": "model-a"}))[0] == 200
    assert (await change(gateway, "PUT", "model-b", {"targets": "fast"}))[0] == 200
    status, body = await change(gateway, "DELETE", "fast")
    assert (status, body["error"]["param"]) == (400, "targets")
    assert (await change(gateway, "GET", "fast"))[1]["source"] == "run time"


async def test_what_was_set_at_one_gateway_can_be_deleted_at_another_at_once(
    gateway: Gateway, settings: Settings
) -> None:
    async with ready_gateway(settings) as other:
        assert (await change(gateway, "PUT", "new", {"targets": "model-a"}))[0] == 200
        assert (await change(other, "DELETE", "new"))[0] == 200


async def test_routes_of_another_version_are_not_overwritten(
    gateway: Gateway, settings: Settings
) -> None:
    registry = Registry(settings.mesh.redis_url or "", settings.mesh.mesh_name)
    written = {"version": 2**52, "routes": '{"a": ["of tomorrow"]}'}
    await registry._redis.hset(f"{settings.mesh.mesh_name}:routes", mapping=written)
    status, body = await change(gateway, "PUT", "new", {"targets": "model-a"})
    assert (status, "another version" in body["error"]["message"]) == (409, True)
    await registry.close()


@pytest.mark.parametrize("key", ["", "Bearer client", "Bearer wrong"])
async def test_only_administrators_may_look_or_change(gateway: Gateway, key: str) -> None:
    headers = {"Authorization": key}
    for method in ("GET", "PUT", "PATCH", "DELETE"):
        url = f"{gateway.url}/admin/routes/fast"
        async with gateway.session.request(method, url, json={}, headers=headers) as response:
            assert response.status == 401


async def test_a_gateway_started_later_knows_what_was_set(
    gateway: Gateway, tokenizer: FakeTokenizer, settings: Settings
) -> None:
    await change(gateway, "PUT", "new", {"targets": "model-a"})
    async with ready_gateway(settings) as later:
        assert await targets(later, tokenizer, "new") == "model-a"


async def test_a_redis_that_forgot_learns_the_routes_again(
    gateway: Gateway, settings: Settings
) -> None:
    await change(gateway, "PUT", "new", {"targets": "model-a"})
    registry = Registry(settings.mesh.redis_url or "", settings.mesh.mesh_name)
    await registry._redis.delete(f"{settings.mesh.mesh_name}:routes")
    await until(lambda: _stores(registry, "new"))
    await registry.close()


async def _stores(registry: Registry, route: str) -> bool:
    return route in (await registry.routes.newest(StoredRoutes())).routes


async def test_without_redis_the_routes_go_on_and_none_changes(
    gateway: Gateway, tokenizer: FakeTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    await change(gateway, "PUT", "new", {"targets": "model-a"})

    async def refuse(*_: object) -> None:
        raise ConnectionRefusedError("nobody is there")

    with monkeypatch.context() as broken:
        broken.setattr(gateway.core.backend.route_store._keys._redis, "eval", refuse)
        status, body = await change(gateway, "PUT", "new", {"targets": "model-b"})
        assert status == 503
        assert "Redis, which keeps the routes, does not answer" in body["error"]["message"]
        assert await targets(gateway, tokenizer, "new") == "model-a"
    assert (await change(gateway, "PUT", "new", {"targets": "model-b"}))[0] == 200
    assert await targets(gateway, tokenizer, "new") == "model-b"


async def test_changes_at_the_same_time_all_count(gateway: Gateway, settings: Settings) -> None:
    async with ready_gateway(settings) as other:
        answers = await asyncio.gather(
            *(
                change(at, "PUT", f"n{i}", {"targets": "model-a"})
                for i, at in enumerate([gateway, other] * 3)
            )
        )
        assert {status for status, _ in answers} == {200}
        for at in (gateway, other):
            await until(lambda at=at: _knows_all(at))


async def _knows_all(gateway: Gateway) -> bool:
    _, body = await gateway.get("/admin/routes", **ADMIN)
    return {f"n{i}" for i in range(6)} <= set(body["routes"])
