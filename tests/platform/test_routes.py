"""The routing table of every service, walked: a route is on the list of the open ones, or it wants
a key, or it is a link and wants the mesh secret."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from pagemesh.gateway import admin_mesh, cancelling
from pagemesh.services import service_parts
from pagemesh.shared.errors import HandshakeRefused
from pagemesh.shared.link import LINK_PATH, dial
from pagemesh.shared.messages import Hello
from pagemesh.shared.registry import Registry
from pagemesh.shared.service import Runtime, service_app
from pagemesh.shared.settings import GatewaySettings, MeshSettings, Settings
from pagemesh.shared.wire import PROTOCOL

# The tokenizer service reads its model's folder.
pytestmark = pytest.mark.usefixtures("smollm2_folder")

INNER: Final = ("tokenizer", "scheduler", "worker")
SERVICES: Final = ("gateway", *INNER)
OPEN: Final = ("/health", "/ready", "/metrics")
KEYS: Final = ("Bearer admin", "Bearer client")
ADMINS: Final = ("is_paused", "load", "pause", "reset_prefix_cache", "resume", "server_info")
SHARED: Final = ("/requests/{request_id}/cancel", "/abort_requests")
OPEN_DOCUMENTS: Final = ("/docs", "/openapi.json")
SETTINGS: Final = Settings(
    gateway=GatewaySettings(api_key=["client"], admin_key=["admin"]),
    mesh=MeshSettings(mesh_secret="secret"),
)
NO_KEYS: Final = ("", "Bearer", "Bearer wrong", "Basic client", "client", "Bearer secret")


async def reached(_: web.Request) -> web.Response:
    return web.Response(text="reached")


@asynccontextmanager
async def serving(
    service: str, registry: Registry, *more: web.RouteDef
) -> AsyncIterator[TestClient[web.Request, web.Application]]:
    """A service as its process builds it, and `more` routes."""
    async with aiohttp.ClientSession() as session:
        runtime = Runtime(service, SETTINGS, registry, session)
        parts = service_parts(service, SETTINGS)
        app = service_app(parts.build(runtime), runtime, parts.middlewares)
        app.add_routes(more)
        async with TestClient(TestServer(app)) as client:
            yield client


@pytest.fixture
async def registry(redis_url: str, mesh_name: str) -> AsyncIterator[Registry]:
    registry = Registry(redis_url, mesh_name)
    yield registry
    await registry.close()


def routes_of(client: TestClient[web.Request, web.Application]) -> list[tuple[str, str]]:
    """Every (method, path) of the routing table."""
    app = client.app
    assert app is not None
    table = [(route.method, route.resource) for route in app.router.routes()]
    return [(method, resource.canonical) for method, resource in table if resource is not None]


async def statuses(
    client: TestClient[web.Request, web.Application], method: str, path: str, *keys: str
) -> set[int]:
    """What a request is answered with, for each of the headers."""
    found = set()
    for key in keys:
        headers = {"Authorization": key} if key else {}
        answer = await client.request(method, re.sub(r"{\w+}", "x", path), headers=headers)
        found.add(answer.status)
    return found


def keys_of(path: str) -> set[str]:
    """The keys that open it."""
    if path.rstrip("/").removeprefix("/v1") in SHARED:
        return {*KEYS}
    parts = path.strip("/").split("/")
    return {"Bearer admin" if "admin" in parts or parts[0] in ADMINS else "Bearer client"}


@pytest.mark.parametrize("service", SERVICES)
async def test_every_route_is_open_by_the_list_or_wants_a_key(
    service: str, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admin_mesh, "SETTLE_S", 0.0)
    monkeypatch.setattr(cancelling, "PATIENCE_S", 0.001)
    async with serving(service, registry) as client:
        walked = routes_of(client)
        open_ones = (*OPEN, *OPEN_DOCUMENTS) if service == "gateway" else OPEN
        assert len(walked) > len(open_ones)
        for method, path in walked:
            if path == LINK_PATH and service != "gateway":
                continue
            found = await statuses(client, method, path, *NO_KEYS)
            if path.rstrip("/") in open_ones:
                assert not found & {401, 403}, (method, path)
            else:
                assert found == {401}, (method, path)
                assert service == "gateway", "an inner service has links only"
                for key in KEYS:
                    refused = 401 in await statuses(client, method, path, key)
                    assert refused == (key not in keys_of(path)), (method, path, key)


@pytest.mark.parametrize("service", INNER)
async def test_a_link_wants_the_mesh_secret(service: str, registry: Registry) -> None:
    async with serving(service, registry) as client, aiohttp.ClientSession() as session:
        assert ("GET", LINK_PATH) in routes_of(client)
        address = f"{client.host}:{client.port}"
        for secret in ("", "another", "client", "admin"):
            hello = Hello(PROTOCOL, "gateway", "gateway-1", 1, secret)
            with pytest.raises(HandshakeRefused, match="mesh secret"):
                await dial(session, address, hello)
        link = await dial(session, address, Hello(PROTOCOL, "gateway", "gateway-1", 1, "secret"))
        await link.close()


@pytest.mark.parametrize("service", SERVICES)
async def test_routes_of_tomorrow_are_closed(service: str, registry: Registry) -> None:
    tomorrow = [web.post(path, reached) for path in ("/new", "/admin/new", "/v1/admin/new")]
    async with serving(service, registry, *tomorrow) as client:
        for path in (route.path for route in tomorrow):
            assert await statuses(client, "POST", path, *NO_KEYS) == {401}
        for path in ("/admin/new", "/v1/admin/new"):
            assert await statuses(client, "POST", path, "Bearer client") == {401}
            assert await statuses(client, "POST", path, "Bearer admin") == {200}
        assert await statuses(client, "POST", "/new", "Bearer admin") == {401}
        assert await statuses(client, "GET", "/nowhere", *NO_KEYS) == {401}
