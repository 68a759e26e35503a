"""deploy/ready.py, the health check of the images, against a service that is ready, then not."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Final

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from certificates import Authority

from pagemesh.shared.tls import listening_context

PROBE: Final = Path(__file__).parents[2] / "deploy/ready.py"


@pytest.mark.parametrize("tls", [False, True])
async def test_it_says_what_the_service_says(tls: bool, tmp_path: Path) -> None:
    environ = dict(os.environ)
    context = None
    if tls:
        identity = Authority(tmp_path / "ca").issue("member")
        context = listening_context(identity.mesh())
        environ["PAGEMESH_MESH_CERTFILE"] = str(identity.certfile)
        environ["PAGEMESH_MESH_KEYFILE"] = str(identity.keyfile)
    answers = iter((200, 503))

    async def ready(_: web.Request) -> web.Response:
        return web.Response(status=next(answers))

    app = web.Application()
    app.router.add_get("/ready", ready)
    server = TestServer(app)
    await server.start_server(ssl=context)
    assert [await exit_code(server.port, environ) for _ in range(2)] == [0, 1]
    await server.close()
    assert await exit_code(server.port, environ) == 1


async def exit_code(port: int | None, environ: dict[str, str]) -> int:
    probe = await asyncio.create_subprocess_exec(
        sys.executable, str(PROBE), str(port), env=environ, stdout=asyncio.subprocess.DEVNULL
    )
    return await probe.wait()
