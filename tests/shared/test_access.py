"""Who may use which route: open ones by a list, administrators' by their key, others by theirs."""

from __future__ import annotations

import contextlib

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from hypothesis import given
from hypothesis import strategies as st

from pagemesh.shared.access import Access, Keys, client_access, guarding, link_access
from pagemesh.shared.settings import GatewaySettings

KEYED = GatewaySettings(api_key=["client"], admin_key=["admin"])
OPEN_TO_CLIENTS = GatewaySettings()


@given(key=st.text(), keys=st.lists(st.text()), pick=st.integers(0, 3))
def test_only_the_keys_pass(key: str, keys: list[str], pick: int) -> None:
    key = keys[pick] if pick < len(keys) else key
    fits = bool(key.strip()) and key.strip() in [known.strip() for known in keys]
    with contextlib.nullcontext() if fits else pytest.raises(web.HTTPUnauthorized):
        Keys(keys).check(f"Bearer {key}")


@pytest.mark.parametrize(
    ("access", "route", "key", "passes"),
    [
        (client_access(KEYED), "/metrics/", "", True),
        (client_access(KEYED), "/docs", "", True),
        (client_access(KEYED), "/openapi.json/", "", True),
        (client_access(KEYED), "/models", "client", True),
        (client_access(KEYED), "/models", "admin", False),
        (client_access(KEYED), "/link", "", False),
        (client_access(KEYED), "", "", False),
        (client_access(KEYED), "/admin/cache", "admin", True),
        (client_access(KEYED), "/v1/admin/cache/", "client", False),
        (client_access(KEYED), "/v1/requests/{request_id}/cancel", "admin", True),
        (client_access(KEYED), "/requests/{request_id}/cancel/", "client", True),
        (client_access(KEYED), "/abort_requests", "", False),
        (client_access(OPEN_TO_CLIENTS), "/models", "", True),
        (client_access(OPEN_TO_CLIENTS), "/admin", "", False),
        (client_access(OPEN_TO_CLIENTS), "/v1/admin/cache", "client", False),
        (link_access(KEYED), "/link", "", True),
        (link_access(KEYED), "/ready", "", True),
        (link_access(KEYED), "/docs", "", False),
        (link_access(KEYED), "/models", "client", False),
        (link_access(KEYED), "/admin/cache", "admin", True),
        (link_access(OPEN_TO_CLIENTS), "/models", "", False),
    ],
)
def test_the_rule(access: Access, route: str, key: str, passes: bool) -> None:
    with contextlib.nullcontext() if passes else pytest.raises(web.HTTPUnauthorized):
        access.check(route, f"Bearer {key}" if key else None)


@pytest.mark.parametrize("path", ["/%61dmin/cache", "/ADMIN/cache", "/admin/%2e%2e/health", "/x"])
async def test_no_spelling_gets_around_the_rule(path: str) -> None:
    """The rule is asked about the route that was found, not about what was written."""

    async def reached(_: web.Request) -> web.Response:
        return web.Response(text="reached")

    app = web.Application(middlewares=[guarding(client_access(KEYED))])
    app.router.add_get("/admin/cache", reached)
    async with TestClient(TestServer(app)) as client:
        for key in ("client", "none"):
            headers = {"Authorization": f"Bearer {key}"}
            answer = await client.get(path, headers=headers)
            assert answer.status in (401, 404)
            assert await answer.text() != "reached"
        assert (await client.get("/admin/cache")).status == 401
        headers = {"Authorization": "Bearer admin"}
        assert await (await client.get("/admin/cache", headers=headers)).text() == "reached"
