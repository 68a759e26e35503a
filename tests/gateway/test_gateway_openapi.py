"""/openapi.json and /docs: every route is described, and who has no key may read it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html import unescape
from typing import Any, Final

import pytest
from aiohttp import web
from gateway_fakes import Gateway, running_gateway, settings_for

from pagemesh.gateway.docs_page import docs_page
from pagemesh.gateway.openapi import JSON, openapi_document
from pagemesh.gateway.operations import OPERATIONS
from pagemesh.shared.access import client_access
from pagemesh.shared.settings import GatewaySettings

SHELLS = {("GET", path) for path in ("/health", "/ready", "/metrics")}
DOCUMENT = openapi_document(OPERATIONS, client_access(GatewaySettings(api_key=["client"])), "1")
SCHEMAS = DOCUMENT["components"]["schemas"]


def one_spelling(path: str) -> str:
    return path.rstrip("/").removeprefix("/v1")


def routes_of(gateway: Gateway) -> set[tuple[str, str]]:
    """Those of the gateway's own, each in one spelling."""
    router = web.UrlDispatcher()
    router.add_routes(gateway.core.routes())
    return {
        (route.method, one_spelling(route.resource.canonical))
        for route in router.routes()
        if route.resource is not None and route.method != "HEAD"
    }


async def test_every_route_is_described_to_whoever_asks(redis_url: str, mesh_name: str) -> None:
    settings = settings_for(redis_url, mesh_name, api_key=["client"])
    async with running_gateway(settings) as gateway:
        status, document = await gateway.get("/openapi.json")
        assert status == 200
        described = [
            (method.upper(), one_spelling(path))
            for path, operations in document["paths"].items()
            for method in operations
        ]
        assert set(described) == routes_of(gateway) | SHELLS
        assert len(described) == len(set(described))
        async with gateway.session.get(f"{gateway.url}/docs") as response:
            assert response.status == 200
            assert response.content_type == "text/html"
            page = unescape(await response.text())
        assert all(path in page for path in document["paths"])


def test_the_page_needs_nothing_from_elsewhere() -> None:
    page = docs_page(DOCUMENT)
    assert "<script" not in page
    assert re.findall(r"""(?:src|href|url)\s*[=(]\s*["']?([^"'>)]+)""", page) == ["openapi.json"]


def test_the_page_tells_types_and_limits() -> None:
    page = unescape(docs_page(DOCUMENT))
    assert "<code>temperature</code><td>number, ≥ 0, ≤ 2.0\n" in page
    assert "<code>max_tokens</code><td>integer, ≥ 0, ≤ 2147483647\n" in page
    assert "<code>prompt *</code><td>string or array of (string or integer" in page


def test_keys_are_asked_for_as_the_rule_says() -> None:
    def security(path: str, method: str) -> list[dict[str, list[str]]]:
        return DOCUMENT["paths"][path][method]["security"]

    assert security("/v1/models", "get") == [{"key": []}, {"x-api-key": []}]
    assert security("/health", "get") == []
    assert security("/admin/routes", "get") == [{"admin": []}, {"x-api-key": []}]
    without = openapi_document(OPERATIONS, client_access(GatewaySettings()), "1")
    assert {} in without["paths"]["/v1/models"]["get"]["security"]
    assert {} not in without["paths"]["/admin/routes"]["get"]["security"]


def test_bodies_are_the_structs_that_validate() -> None:
    for operation in OPERATIONS:
        if operation.request is not None:
            described = DOCUMENT["paths"][operation.path][operation.method.lower()]["requestBody"]
            reference = described["content"][operation.takes]["schema"]["$ref"]
            schema = SCHEMAS[reference.rpartition("/")[2]]
            assert schema["properties"].keys() == set(operation.request.__struct_fields__)


GOOD: Final[dict[str, dict[str, Any]]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
    "/v1/completions": {"prompt": "Hi", "echo": True},
}
# What must stand beside a value of a field for it to be good.
BESIDE: Final[dict[str, Any]] = {
    "best_of": lambda value: {"n": value},
    "min_tokens": lambda value: {"max_tokens": max(value, 1)},
    "top_logprobs": lambda _: {"logprobs": True},
}
SIDES: Final = {
    "minimum": lambda limit: (limit, limit - 1),
    "exclusiveMinimum": lambda limit: (limit + 0.5, limit),
    "maximum": lambda limit: (limit, limit + 1),
    "minLength": lambda limit: ("x" * limit, "x" * (limit - 1)),
    "maxLength": lambda limit: ("x" * limit, "x" * (limit + 1)),
}


def limits_of(path: str) -> Iterator[tuple[str, Any, Any]]:
    """Each field with a limit, a value at the limit, and one beyond it."""
    body = DOCUMENT["paths"][path]["post"]["requestBody"]["content"]["application/json"]
    schema = SCHEMAS[body["schema"]["$ref"].rpartition("/")[2]]
    for name, field in schema["properties"].items():
        for kind in field.get("anyOf", [field]):
            for keyword in SIDES.keys() & kind.keys():
                yield name, *SIDES[keyword](kind[keyword])


@pytest.mark.parametrize("path", GOOD)
async def test_limits_in_the_document_are_those_of_the_code(gateway: Gateway, path: str) -> None:
    found = list(limits_of(path))
    assert len(found) > 20
    for name, good, bad in found:
        beside = GOOD[path] | BESIDE.get(name, lambda _: {})(good)
        status, answer = await gateway.post(path, beside | {name: good})
        assert status == 200, (name, good, answer)
        status, answer = await gateway.post(path, beside | {name: bad})
        assert (status, answer["error"]["param"]) == (400, name), (name, bad, answer)


# Values of what a body needs; some of them name nothing that is there.
NEEDED: Final[dict[str, Any]] = {
    "completion_window": "24h",
    "endpoint": "/v1/chat/completions",
    "input": "Hi",
    "input_file_id": "file-x",
    "max_tokens": 4,
    "messages": [{"role": "user", "content": "Hi"}],
    "prompt": "Hi",
    "request_ids": ["x"],
    "token_ids": [5],
    "tokens": [5],
}


async def test_null_means_absent_in_every_body(gateway: Gateway) -> None:
    """Known failure 16."""
    for path, operations in DOCUMENT["paths"].items():
        content = operations.get("post", {}).get("requestBody", {"content": {}})["content"]
        if JSON not in content or path.startswith("/admin"):
            continue
        schema = SCHEMAS[content[JSON]["schema"]["$ref"].rpartition("/")[2]]
        needed = {name: NEEDED[name] for name in schema.get("required") or ["prompt"]}
        status, answer = await gateway.post(path, needed)
        assert status < 500
        with_nulls, told = await gateway.post(path, dict.fromkeys(schema["properties"]) | needed)
        assert with_nulls == status, (path, told)
        assert status < 400 or told["error"] == answer["error"], path
