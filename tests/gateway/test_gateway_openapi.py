"""/openapi.json and /docs: every route is described, and who has no key may read it."""

from __future__ import annotations

import re
from html import unescape

from aiohttp import web
from gateway_fakes import Gateway, running_gateway, settings_for

from pagemesh.gateway.docs_page import docs_page
from pagemesh.gateway.openapi import openapi_document
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


def test_keys_are_asked_for_as_the_rule_says() -> None:
    def security(path: str, method: str) -> list[dict[str, list[str]]]:
        return DOCUMENT["paths"][path][method]["security"]

    assert security("/v1/models", "get") == [{"key": []}]
    assert security("/health", "get") == []
    assert security("/admin/routes", "get") == [{"admin": []}]
    without = openapi_document(OPERATIONS, client_access(GatewaySettings()), "1")
    assert without["paths"]["/v1/models"]["get"]["security"] == [{"key": []}, {}]


def test_bodies_are_the_structs_that_validate() -> None:
    for operation in OPERATIONS:
        if operation.request is not None:
            described = DOCUMENT["paths"][operation.path][operation.method.lower()]["requestBody"]
            reference = described["content"][operation.takes]["schema"]["$ref"]
            schema = SCHEMAS[reference.rpartition("/")[2]]
            assert schema["properties"].keys() == set(operation.request.__struct_fields__)
