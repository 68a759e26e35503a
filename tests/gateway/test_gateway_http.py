"""What surrounds the endpoints: models, tokenize, ids, keys, CORS, errors, metrics, readiness."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from gateway_fakes import (
    CARD,
    Conversation,
    FakeTokenizer,
    Gateway,
    engine,
    fake_tokenizer,
    running_gateway,
    settings_for,
)
from metric_names import GATEWAY_GOLDEN, names_types_labels
from msgspec.structs import replace

from pagemesh.shared.errors import RequestError
from pagemesh.shared.settings import Settings

CHAT = "/v1/chat/completions"
ENGINE = 'engine="engine-1"'
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/", "/models", "/models/"])
async def test_models_lists_every_name(gateway: Gateway, path: str) -> None:
    status, answer = await gateway.get(path)
    assert status == 200
    assert answer["object"] == "list"
    assert [model["id"] for model in answer["data"]] == ["tiny", "tiny-alias"]
    assert answer["data"][1] == {
        "id": "tiny-alias",
        "object": "model",
        "created": 7,
        "owned_by": "pagemesh",
        "max_model_len": 4096,
        "root": "tiny",
        "parent": None,
        "default_sampling_params": {},
    }


async def test_one_model_by_a_name_with_slashes(gateway: Gateway, tokenizer: FakeTokenizer) -> None:
    tokenizer.push([engine(card=CARD._replace(names=["Org/Model-1"]))])
    async with asyncio.timeout(5):
        while (await gateway.get("/v1/models"))[1]["data"][0]["id"] != "Org/Model-1":
            pass
    for name in ("Org/Model-1", "Org%2FModel-1", "Org/Model-1/"):
        status, answer = await gateway.get(f"/v1/models/{name}")
        assert (status, answer["id"]) == (200, "Org/Model-1")


async def test_unknown_models_are_404_with_a_code(gateway: Gateway) -> None:
    answers = [
        await gateway.get("/v1/models/gpt-9"),
        await gateway.post(CHAT, BODY | {"model": "gpt-9"}),
        await gateway.post("/v1/completions", {"model": "gpt-9", "prompt": "a"}),
        await gateway.post("/tokenize", {"model": "gpt-9", "prompt": "a"}),
    ]
    for status, answer in answers:
        assert status == 404
        assert answer["error"]["code"] == "model_not_found"
        assert answer["error"]["type"] == "not_found_error"


@pytest.mark.parametrize("base", ["", "/v1"])
async def test_tokenize_and_detokenize_have_vllms_shapes(gateway: Gateway, base: str) -> None:
    body = {"model": "tiny", "prompt": "ab", "return_token_strs": True}
    status, answer = await gateway.post(f"{base}/tokenize", body)
    expected = {"count": 2, "max_model_len": 4096, "tokens": [97, 98], "token_strs": ["a", "b"]}
    assert (status, answer) == (200, expected)
    status, answer = await gateway.post(f"{base}/tokenize", BODY)
    assert answer["tokens"] == [72, 105]
    assert answer["token_strs"] is None
    status, answer = await gateway.post(f"{base}/detokenize/", {"tokens": [97, 98]})
    assert (status, answer) == (200, {"prompt": "ab"})


async def test_version_health_and_ready(gateway: Gateway) -> None:
    assert (await gateway.get("/version"))[1].keys() == {"version"}
    for path in ("/health", "/ready", "/health/", "/v1/version"):
        assert (await gateway.get(path))[0] == 200


async def test_request_ids_are_kept_when_sane(gateway: Gateway) -> None:
    async def answered(given: str | None) -> str:
        headers = {} if given is None else {"X-Request-Id": given}
        async with gateway.session.post(gateway.url + CHAT, json={}, headers=headers) as response:
            assert response.status == 400
            return response.headers["x-request-id"]

    assert await answered("trace-42.a:b") == "trace-42.a:b"
    assert (await answered(None)).startswith("req_")
    for bad in ("", "a b", "x" * 200, "é", '"'):
        assert (await answered(bad)).startswith("req_")


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("POST", CHAT, BODY, 200),
        ("POST", CHAT, BODY | {"stream": True}, 200),
        ("POST", CHAT, {}, 400),
        ("GET", "/admin/routes", None, 401),
        ("GET", "/v1/models/none", None, 404),
        ("GET", "/nowhere", None, 404),
        ("GET", CHAT, None, 405),
        ("GET", "/health", None, 200),
        ("OPTIONS", CHAT, None, 204),
    ],
)
async def test_every_answer_carries_the_id_of_its_request(
    gateway: Gateway, method: str, path: str, body: Any, status: int
) -> None:
    headers = {"X-Request-Id": "trace-1"}
    asking = gateway.session.request(method, gateway.url + path, json=body, headers=headers)
    async with asking as response:
        assert response.status == status
        assert response.headers.getall("x-request-id") == ["trace-1"]


# As Chromium sends it for openai-node with `dangerouslyAllowBrowser`.
PREFLIGHT = {
    "Accept": "*/*",
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": (
        "authorization,content-type,x-stainless-arch,x-stainless-lang,x-stainless-os,"
        "x-stainless-package-version,x-stainless-retry-count,x-stainless-runtime,"
        "x-stainless-runtime-version,x-stainless-timeout"
    ),
    "Sec-Fetch-Mode": "cors",
    "Sec-Fetch-Site": "cross-site",
    "Sec-Fetch-Dest": "empty",
}
READABLE = {"x-request-id", "retry-after", "retry-after-ms", "x-should-retry"}


@pytest.mark.parametrize(
    ("allowed", "origin", "answered"),
    [
        (["*"], "https://x.test", "*"),
        (["*"], "null", "*"),
        (["https://x.test", "http://localhost:3000/"], "http://localhost:3000", None),
        (["https://x.test"], "https://x.test", None),
        (["https://x.test"], "https://y.test", ""),
        (["https://x.test"], "https://x.test.evil.test", ""),
        (["https://x.test"], "http://x.test", ""),
        ([], "https://x.test", ""),
    ],
)
async def test_pages_of_allowed_origins_may_call(
    settings: Settings, tokenizer: FakeTokenizer, allowed: list[str], origin: str, answered: str
) -> None:
    """`answered`: None is the origin itself, and empty is nothing at all."""
    expected = origin if answered is None else answered
    ours = replace(settings.gateway, allowed_origins=allowed, api_key=["key"])
    async with running_gateway(replace(settings, gateway=ours)) as gateway:
        await gateway.until_ready()
        asked = {"Origin": origin}
        url = gateway.url + CHAT
        async with gateway.session.options(url, headers=asked | PREFLIGHT) as response:
            assert response.status == 204
            assert response.headers.get("access-control-allow-origin", "") == expected
            wanted = PREFLIGHT["Access-Control-Request-Headers"]
            assert response.headers["access-control-allow-headers"] == wanted
            methods = set(response.headers["access-control-allow-methods"].split(", "))
            assert methods >= {"GET", "POST", "PUT", "PATCH", "DELETE"}
        keyed = asked | {"Authorization": "Bearer key"}
        bodies = ((BODY, 200), (BODY | {"stream": True}, 200), ({}, 400), (BODY, 401))
        for body, status in bodies:
            headers = asked if status == 401 else keyed
            async with gateway.session.post(url, json=body, headers=headers) as response:
                assert response.status == status
                assert response.headers.get("access-control-allow-origin", "") == expected
                assert response.headers.get("vary") == (None if expected == "*" else "Origin")
                exposed = response.headers.get("access-control-expose-headers", "").split(", ")
                assert set(exposed) >= (READABLE if expected else set())


async def test_unknown_routes_and_methods_have_the_error_shape(gateway: Gateway) -> None:
    status, answer = await gateway.post("/v1/nothing", {})
    assert (status, answer["error"]["code"]) == (404, "unknown_url")
    async with gateway.session.get(gateway.url + CHAT) as response:
        assert response.status == 405
        assert response.headers["allow"] == "POST"
        assert (await response.json())["error"]["code"] == "method_not_allowed"


@pytest.mark.parametrize("way", ["length", "chunked"])
async def test_a_body_over_the_limit_is_413(redis_url: str, mesh_name: str, way: str) -> None:
    body = json.dumps(BODY | {"user": "x" * 2000}).encode()

    async def pieces() -> AsyncIterator[bytes]:
        yield body[:500]
        yield body[500:]

    data = body if way == "length" else pieces()
    async with running_gateway(settings_for(redis_url, mesh_name, max_body_bytes=1024)) as gateway:
        url = gateway.url + CHAT
        async with gateway.session.post(url, data=data) as response:
            assert response.status == 413
            assert (await response.json())["error"]["code"] == "request_too_large"


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "zstd", "gzip, gzip", "made-up"])
async def test_compressed_bodies_are_refused_unread(gateway: Gateway, encoding: str) -> None:
    """Some kilobytes may hold gigabytes."""
    headers = {"Content-Encoding": encoding}
    url = gateway.url + CHAT
    async with gateway.session.post(url, data=gzip.compress(b"x"), headers=headers) as response:
        assert response.status == 415
        error = (await response.json())["error"]
        assert error["code"] == "unsupported_content_encoding"
        assert encoding in error["message"]
    as_it_is = {"Content-Encoding": "identity", "Content-Type": "application/json"}
    body = json.dumps(BODY)
    async with gateway.session.post(url, data=body, headers=as_it_is) as response:
        assert response.status == 200


async def test_keys_guard_every_route_that_is_not_open(redis_url: str, mesh_name: str) -> None:
    settings = settings_for(redis_url, mesh_name, api_key=["first", "second"])
    async with running_gateway(settings) as gateway:
        assert (await gateway.get("/health"))[0] == 200
        assert (await gateway.get("/ready"))[0] == 503
        assert "http_requests_total" in await gateway.metrics()
        guarded = ("/v1/models", "/version", "/nothing", "//health", "/health/x", "/metrics/x")
        for authorization in ("", "Bearer", "Bearer third", "Basic first", "first", "Bearer \xff"):
            for path in guarded:
                headers = {"Authorization": authorization}
                status, answer = await gateway.get(path, headers=headers)
                assert status == 401, (authorization, path)
                assert answer["error"]["type"] == "authentication_error"
                assert answer["error"]["code"] == "invalid_api_key"
        for key in ("first", "second"):
            headers = {"Authorization": f"Bearer {key}"}
            assert (await gateway.get("/version", headers=headers))[0] == 200


async def test_before_any_engine_the_answer_is_503_and_may_be_retried(settings: Settings) -> None:
    async with running_gateway(settings) as gateway:
        assert (await gateway.get("/health"))[0] == 200
        assert (await gateway.get("/ready"))[0] == 503
        async with gateway.session.post(gateway.url + CHAT, json=BODY) as response:
            assert response.status == 503
            assert response.headers["retry-after"]
            assert response.headers["retry-after-ms"]
            assert response.headers["x-should-retry"] == "true"
            assert (await response.json())["error"]["type"] == "server_error"
        assert (await gateway.get("/v1/models"))[0] == 503


async def test_readiness_follows_the_engines(gateway: Gateway, tokenizer: FakeTokenizer) -> None:
    """A frozen worker leaves its scheduler's list, and so, in the end, this one."""
    tokenizer.push([])
    await gateway.until_ready(ready=False)
    assert (await gateway.get("/ready"))[0] == 503
    assert (await gateway.get("/health"))[0] == 200
    # The name is known, only nobody is there: worth a retry, unlike a wrong name.
    assert (await gateway.post(CHAT, BODY))[0] == 503
    tokenizer.push([engine("engine-2")])
    await gateway.until_ready()
    assert (await gateway.post(CHAT, BODY))[0] == 200


@pytest.mark.parametrize(
    ("error", "type_", "code", "retry"),
    [
        (RequestError("busy", status=429), "rate_limit_error", "rate_limit_exceeded", "true"),
        (RequestError("away", status=503), "server_error", "service_unavailable", "true"),
        (RequestError("bug", status=500), "server_error", "internal_error", "false"),
        (RequestError("no", param="prompt"), "invalid_request_error", "invalid_value", "false"),
        (RequestError("no", code="x"), "invalid_request_error", "x", "false"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("accepted", [False, True])
async def test_refusals_from_below_keep_their_status(
    gateway: Gateway,
    tokenizer: FakeTokenizer,
    error: RequestError,
    type_: str,
    code: str,
    retry: str,
    stream: bool,
    accepted: bool,
) -> None:
    """Even an engine's refusal, which comes after acceptance, is a status and not a 200."""

    async def refuse(talk: Conversation) -> None:
        if accepted:
            talk.accept()
        talk.fail(error)

    tokenizer.script = refuse
    url = gateway.url + CHAT
    async with gateway.session.post(url, json=BODY | {"stream": stream}) as response:
        answer = await response.json()
        assert response.status == error.status
        assert response.headers["x-should-retry"] == retry
        assert ("retry-after" in response.headers) == (retry == "true")
    assert answer["error"] == {
        "message": error.message,
        "type": type_,
        "param": error.param,
        "code": code,
    }


async def test_metrics_show_engines_statuses_and_finish_reasons(gateway: Gateway) -> None:
    await gateway.post(CHAT, BODY)
    await gateway.post(CHAT, BODY | {"stop": "x", "n": 2})
    await gateway.post(CHAT, {})
    await gateway.post("/nothing", {})
    lines = (await gateway.metrics()).splitlines()
    for line in (
        'vllm:num_requests_running{engine="engine-1",model_name="tiny"} 1.0',
        'vllm:num_requests_waiting{engine="engine-1",model_name="tiny"} 2.0',
        'vllm:gpu_cache_usage_perc{engine="engine-1",model_name="tiny"} 0.25',
        'vllm:num_preemptions_total{engine="engine-1",model_name="tiny"} 3.0',
        f'vllm:request_success_total{{{ENGINE},finished_reason="length",model_name="tiny"}} 1.0',
        f'vllm:request_success_total{{{ENGINE},finished_reason="stop",model_name="tiny"}} 2.0',
        f'http_requests_total{{code="200",handler="{CHAT}",method="POST",status="2xx"}} 2.0',
        f'http_requests_total{{code="400",handler="{CHAT}",method="POST",status="4xx"}} 1.0',
        'http_requests_total{code="404",handler="(unmatched)",method="POST",status="4xx"} 1.0',
        f'http_request_duration_seconds_count{{handler="{CHAT}",method="POST"}} 3.0',
    ):
        assert line in lines


async def test_metric_names_are_an_interface(gateway: Gateway) -> None:
    await gateway.post(CHAT, BODY | {"made_up": 1})
    gateway.core.backend.metrics.routed("fast", "tiny")
    gateway.core.backend.metrics.passed_over("fast", "tiny")
    assert names_types_labels(await gateway.metrics()) == GATEWAY_GOLDEN.read_text()


async def test_an_engine_seen_over_two_links_is_shown_once(settings: Settings) -> None:
    async with (
        fake_tokenizer(settings, "t-1"),
        fake_tokenizer(settings, "t-2"),
        running_gateway(settings) as gateway,
    ):
        async with asyncio.timeout(5):
            while len(gateway.core.backend.directory.links_serving("tiny")) < 2:
                await gateway.get("/ready")
        text = await gateway.metrics()
    assert text.count("vllm:num_requests_running{") == 1


async def test_seeds_are_drawn_repeatably(settings: Settings) -> None:
    async def drawn() -> list[int | None]:
        async with fake_tokenizer(settings) as fake, running_gateway(settings) as gateway:
            await gateway.until_ready()
            body = {"model": "tiny", "prompt": ["a", "b"]}
            asking = asyncio.create_task(gateway.post("/v1/completions", body))
            talks = [await fake.asked.get() for _ in range(2)]
            for talk in talks:
                talk.fail(RequestError("enough", status=400))
            await asking
            return [talk.generate.params.seed for talk in talks]

    first = await drawn()
    assert len(set(first)) == 2
    assert None not in first
    assert await drawn() == first
