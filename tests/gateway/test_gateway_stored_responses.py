"""What gateways keep of responses: any of them answers for all, until it is let go."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from gateway_fakes import (
    PIECES,
    Conversation,
    FakeTokenizer,
    Gateway,
    running_gateway,
    say_hello,
    settings_for,
)
from openai.types.responses import Response
from test_gateway_responses import kinds, numbered

from pagemesh.shared.access import ANYONE
from pagemesh.shared.errors import RequestError
from pagemesh.shared.registry import Registry
from pagemesh.shared.response_keys import ResponseKeys, ResponseLimits, StoredResponse
from pagemesh.shared.settings import Settings

TEXT = "".join(PIECES)
LIMITS = ResponseLimits(60.0, 2**20)


@pytest.fixture
def settings(redis_url: str, mesh_name: str) -> Settings:
    return settings_for(
        redis_url, mesh_name, max_background_responses=2, max_response_bytes=16 * 1024
    )


@pytest.fixture
async def other(settings: Settings, gateway: Gateway) -> AsyncIterator[Gateway]:
    async with running_gateway(settings) as other:
        await other.until_ready()
        yield other


@pytest.fixture
async def keys(settings: Settings) -> AsyncIterator[ResponseKeys]:
    registry = Registry(settings.mesh.redis_url or "", settings.mesh.mesh_name)
    yield registry.responses
    await registry.close()


async def create(gateway: Gateway, given: Any = "Hi!", **fields: Any) -> dict[str, Any]:
    status, answer = await gateway.post("/v1/responses", {"input": given, **fields})
    assert status == 200, answer
    Response.model_validate(answer, strict=True)
    return dict(answer)


async def get(gateway: Gateway, response_id: str) -> dict[str, Any]:
    status, answer = await gateway.get(f"/v1/responses/{response_id}")
    assert status == 200, answer
    return dict(answer)


async def ended(gateway: Gateway, response_id: str) -> dict[str, Any]:
    async with asyncio.timeout(10):
        while (found := await get(gateway, response_id))["status"] in ("queued", "in_progress"):
            continue
    return found


async def follow(gateway: Gateway, response_id: str, after: int | None = None) -> Any:
    query = "" if after is None else f"&starting_after={after}"
    url = f"{gateway.url}/v1/responses/{response_id}?stream=true{query}"
    async with gateway.session.get(url) as response:
        assert response.status == 200
        return numbered(await response.text(), 0 if after is None else after + 1)


def held_by(steps: asyncio.Queue[str]) -> Any:
    """Says what comes in `steps`; an empty step is the last."""

    async def script(talk: Conversation) -> None:
        talk.accept()
        while text := await steps.get():
            talk.delta(text, [1])
        talk.delta("", [], finish_reason="stop")

    return script


async def test_what_redis_took_without_a_word_is_told_once(
    gateway: Gateway, tokenizer: FakeTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was slow, so it is asked again."""
    update, n_updates = ResponseKeys.update, 0

    async def without_a_word(*args: Any, **kwargs: Any) -> bool:
        nonlocal n_updates
        taken = await update(*args, **kwargs)
        n_updates += 1
        if n_updates % 2:
            raise TimeoutError
        return taken

    monkeypatch.setattr(ResponseKeys, "update", without_a_word)
    steps: asyncio.Queue[str] = asyncio.Queue()
    tokenizer.script = held_by(steps)
    begun = await create(gateway, background=True)
    for text in ("a", "b", ""):
        steps.put_nowait(text)
        await asyncio.sleep(0.25)
    await ended(gateway, begun["id"])
    told = await follow(gateway, begun["id"])
    assert kinds(told).count("output_text.delta") == 2
    assert kinds(told)[-1] == "completed"


async def test_any_gateway_goes_on_with_a_response(
    gateway: Gateway, other: Gateway, tokenizer: FakeTokenizer
) -> None:
    first = await create(gateway, instructions="Be kind.", stop=["E"], metadata={"a": "b"})
    assert await get(other, first["id"]) == first
    second = await create(
        other, [{"role": "user", "content": "More!"}], previous_response_id=first["id"]
    )
    third = await create(gateway, "Even more!", previous_response_id=second["id"])
    messages = list(tokenizer.talks.values())[-1].generate.prompt.messages
    assert messages == [
        {"role": "user", "content": "Hi!"},
        {"role": "assistant", "content": TEXT},
        {"role": "user", "content": "More!"},
        {"role": "assistant", "content": TEXT},
        {"role": "user", "content": "Even more!"},
    ]
    path = f"/v1/responses/{third['id']}/input_items"
    _, page = await other.get(path)
    texts = [item["content"][0]["text"] for item in page["data"]]
    assert texts == ["Even more!", TEXT, "More!", TEXT, "Hi!"]
    _, page = await other.get(f"{path}?order=asc&limit=2&after={page['last_id']}")
    assert [item["role"] for item in page["data"]] == ["assistant", "user"]
    assert page["has_more"]
    reference = {"type": "item_reference", "id": page["data"][0]["id"]}
    await create(other, [reference, {"role": "user", "content": "Again?"}])
    messages = list(tokenizer.talks.values())[-1].generate.prompt.messages or []
    assert [message["content"] for message in messages] == [TEXT, "Again?"]


async def test_what_is_deleted_is_gone_everywhere(
    gateway: Gateway, other: Gateway, tokenizer: FakeTokenizer
) -> None:
    first = await create(gateway, stop=["E"])
    second = await create(gateway, previous_response_id=first["id"])
    path = f"/v1/responses/{first['id']}"
    async with other.session.delete(other.url + path) as response:
        assert await response.json() == {"id": first["id"], "object": "response", "deleted": True}
    async with gateway.session.delete(gateway.url + path) as response:
        assert response.status == 404
    for gone in (path, f"{path}?stream=true", f"{path}/input_items", f"{path}:events"):
        status, answer = await gateway.get(gone)
        assert (status, answer["error"]["code"]) == (404, "response_not_found")
    for previous in (first, second):
        body = {"input": "?", "previous_response_id": previous["id"]}
        status, answer = await gateway.post("/v1/responses", body)
        assert (status, answer["error"]["code"]) == (400, "previous_response_not_found")
        assert first["id"] in answer["error"]["message"]


async def test_what_is_not_stored_is_not_there(gateway: Gateway) -> None:
    answer = await create(gateway, store=False)
    assert not answer["store"]
    assert (await gateway.get(f"/v1/responses/{answer['id']}"))[0] == 404
    stored = await create(gateway)
    path = f"/v1/responses/{stored['id']}"
    for query, param in (
        ("?stream=true", "stream"),
        ("?stream=maybe", "stream"),
        ("?stream=true&starting_after=x", "starting_after"),
        ("?include[]=x", "include"),
        ("/input_items?limit=101", "limit"),
        ("/input_items?order=up", "order"),
        ("/input_items?after=msg_1", "after"),
    ):
        status, refused = await gateway.get(path + query)
        assert (status, refused["error"]["param"]) == (400, param)
    status, refused = await gateway.post(f"{path}/cancel", {})
    assert status == 400
    assert "background" in refused["error"]["message"]


async def test_what_is_too_large_to_keep_is_answered_and_says_so(
    gateway: Gateway, tokenizer: FakeTokenizer
) -> None:
    large = {"input": "x" * 17_000}
    for fields in ({"store": True}, {"background": True}):
        status, answer = await gateway.post("/v1/responses", large | fields)
        assert (status, answer["error"]["param"]) == (400, "store")
    assert not (await create(gateway, large["input"]))["store"]
    steps: asyncio.Queue[str] = asyncio.Queue()
    tokenizer.script = held_by(steps)
    for step in ("y" * 17_000, "", "y" * 17_000, ""):
        steps.put_nowait(step)
    answer = await create(gateway)
    assert (answer["status"], answer["store"]) == ("completed", False)
    assert (await gateway.get(f"/v1/responses/{answer['id']}"))[0] == 404
    assert "pagemesh_responses_not_stored_total 1.0" in await gateway.metrics()
    begun = await create(gateway, background=True)
    failed = await ended(gateway, begun["id"])
    assert "at most 16384 bytes" in failed["error"]["message"]


async def test_a_response_in_the_background(
    gateway: Gateway, other: Gateway, tokenizer: FakeTokenizer
) -> None:
    steps: asyncio.Queue[str] = asyncio.Queue()
    tokenizer.script = held_by(steps)
    begun = await create(gateway, background=True)
    assert (begun["status"], begun["background"], begun["output"]) == ("queued", True, [])
    assert (await get(other, begun["id"]))["status"] == "queued"
    following = asyncio.create_task(follow(other, begun["id"]))
    steps.put_nowait("one")
    async with asyncio.timeout(10):
        while (await get(other, begun["id"]))["status"] == "queued":
            continue
    assert (await get(other, begun["id"]))["status"] == "in_progress"
    assert "pagemesh_background_responses 1.0" in await gateway.metrics()
    steps.put_nowait(" two")
    steps.put_nowait("")
    done = await ended(other, begun["id"])
    assert done["status"] == "completed"
    assert done["output"][0]["content"][0]["text"] == "one two"
    found = await following
    assert kinds(found)[:3] == ["created", "queued", "in_progress"]
    assert kinds(found)[-1] == "completed"
    assert found[-1]["response"] == done
    assert await follow(gateway, begun["id"], 4) == found[5:]
    assert await follow(gateway, begun["id"], len(found) - 1) == []
    assert await get(gateway, begun["id"]) == done
    status, again = await other.post(f"/v1/responses/{begun['id']}/cancel", {})
    assert (status, again) == (200, done)
    tokenizer.script = say_hello
    await create(other, previous_response_id=begun["id"])


async def test_background_is_cancelled_from_anywhere(
    gateway: Gateway, other: Gateway, tokenizer: FakeTokenizer
) -> None:
    steps: asyncio.Queue[str] = asyncio.Queue()
    tokenizer.script = held_by(steps)
    for canceller in (gateway, other):
        begun = await create(gateway, background=True)
        following = asyncio.create_task(follow(gateway, begun["id"]))
        status, answer = await canceller.post(f"/v1/responses/{begun['id']}/cancel", {})
        assert (status, answer["status"]) == (200, "cancelled")
        async with asyncio.timeout(10):
            await tokenizer.talks[begun["id"]].cancelled.wait()
            found = await following
        assert kinds(found)[-1] == "incomplete"
        assert found[-1]["response"]["status"] == "cancelled"
        status, refused = await other.post(
            "/v1/responses", {"input": "?", "previous_response_id": begun["id"]}
        )
        assert (status, refused["error"]["param"]) == (400, "previous_response_id")
    begun = await create(gateway, background=True)
    url = f"{other.url}/v1/responses/{begun['id']}"
    async with other.session.delete(url) as response:
        assert response.status == 200
    async with asyncio.timeout(10):
        await tokenizer.talks[begun["id"]].cancelled.wait()


async def test_background_has_bounds_and_tells_of_failure(
    gateway: Gateway, tokenizer: FakeTokenizer
) -> None:
    steps: asyncio.Queue[str] = asyncio.Queue()
    tokenizer.script = held_by(steps)
    running = [await create(gateway, background=True) for _ in range(2)]
    body = {"input": "?", "background": True}
    status, refused = await gateway.post("/v1/responses", body)
    assert (status, refused["error"]["code"]) == (429, "too_many_background_responses")
    await gateway.post(f"/v1/responses/{running[0]['id']}/cancel", {})
    await tokenizer.hang_up()
    gateway.core.backend.upstream.fail_all(RequestError("it broke", status=500))
    failed = await ended(gateway, running[1]["id"])
    assert failed["error"] == {"code": "server_error", "message": "it broke"}
    found = await follow(gateway, running[1]["id"])
    assert kinds(found)[-2:] == ["error", "failed"]


async def test_what_its_gateway_left_has_failed(gateway: Gateway, keys: ResponseKeys) -> None:
    """Its lease is gone, as it is some seconds after a gateway was killed."""
    lost_id = f"resp_{0:032x}"
    begun = f'{{"id": "{lost_id}", "background": true}}'
    lost = StoredResponse("in_progress", begun, "[]", [], owner=ANYONE)
    await keys.add(lost_id, lost, LIMITS, [b"event: response.created\ndata: {}\n\n"])
    async with gateway.session.get(f"{gateway.url}/v1/responses/{lost_id}?stream=true") as response:
        events = (await response.text()).split("\n\n")
    assert events[0].startswith("event: response.created")
    assert events[1].startswith("event: response.failed")
    found = await get(gateway, lost_id)
    assert found["status"] == "failed"
    assert "is gone" in found["error"]["message"]
    assert not await keys.update(lost_id, LIMITS, status="completed", holds=False)


async def test_the_end_of_a_gateway_is_told(
    settings: Settings, tokenizer: FakeTokenizer, keys: ResponseKeys
) -> None:
    tokenizer.script = held_by(asyncio.Queue())
    async with running_gateway(settings) as gateway:
        await gateway.until_ready()
        begun = await create(gateway, background=True)
    [found] = await keys.read([begun["id"]], LIMITS)
    assert found is not None
    assert (found.status, found.held) == ("failed", False)
    assert "shutting down" in found.object


async def test_the_least_used_go_beyond_the_limit(keys: ResponseKeys) -> None:
    limits = ResponseLimits(60.0, 5000)

    def sized(n: int) -> StoredResponse:
        return StoredResponse("completed", "x" * n, "[]", [])

    await keys.add("first", sized(2000), limits)
    await keys.add("second", sized(2000), limits)
    await keys.read(["first"], limits)
    await keys.add("third", sized(2000), limits)
    found = await keys.read(["first", "second", "third"], limits)
    assert [each is not None for each in found] == [True, False, True]
    await keys.add("huge", sized(9000), limits)
    assert [each is None for each in await keys.read(["first", "third"], limits)] == [True] * 2
    assert await keys.delete("huge")
    assert not await keys.delete("huge")


async def test_what_is_not_used_lapses(keys: ResponseKeys) -> None:
    soon = ResponseLimits(0.05, 2**20)
    await keys.add("soon", StoredResponse("completed", "{}", "[]", []), soon)
    async with asyncio.timeout(10):
        while (await keys.events("soon", 0)).status is not None:
            continue
    assert await keys.read(["soon"], soon) == [None]


async def test_without_redis(mesh_name: str, gateway: Gateway) -> None:
    """What needs no state is answered, and says that it is not kept."""
    store = gateway.core.responses.store
    away = Registry("redis://127.0.0.1:1/0", mesh_name)
    store._keys = away.responses
    try:
        assert not (await create(gateway))["store"]
        for fields in ({"previous_response_id": f"resp_{0:032x}"}, {"background": True}):
            status, refused = await gateway.post("/v1/responses", {"input": "?", **fields})
            assert (status, refused["error"]["code"]) == (503, "service_unavailable")
        assert (await gateway.get(f"/v1/responses/resp_{0:032x}"))[0] == 503
    finally:
        await away.close()


async def test_each_key_has_its_own(
    redis_url: str, mesh_name: str, tokenizer: FakeTokenizer
) -> None:
    settings = settings_for(redis_url, mesh_name, api_key=["mine", "yours"])
    mine, yours = ({"headers": {"Authorization": f"Bearer {key}"}} for key in ("mine", "yours"))
    async with running_gateway(settings) as gateway:
        await gateway.until_ready()
        _, kept = await gateway.post("/v1/responses", {"input": "Hi!"}, **mine)
        path = f"/v1/responses/{kept['id']}"
        assert (await gateway.get(path, **mine))[0] == 200
        assert (await gateway.get(path, **yours))[0] == 404
        assert (await gateway.post(f"{path}/cancel", {}, **yours))[0] == 404
        async with gateway.session.delete(gateway.url + path, **yours) as response:
            assert response.status == 404
        for fields in (
            {"input": "?", "previous_response_id": kept["id"]},
            {"input": [{"type": "item_reference", "id": kept["output"][0]["id"]}]},
        ):
            assert (await gateway.post("/v1/responses", fields, **mine))[0] == 200
            assert (await gateway.post("/v1/responses", fields, **yours))[0] == 400
