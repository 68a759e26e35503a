"""The gateway as a process of its own: TLS, and the refusal to let strangers in without a key."""

from __future__ import annotations

import asyncio
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from mesh_process import free_port

from pagemesh.shared.registry import Registry

COMMAND = (sys.executable, "-m", "pagemesh.cli", "gateway", "--port", "0")


@asynccontextmanager
async def gateway_process(redis_url: str, mesh_name: str, *flags: str) -> AsyncIterator[str]:
    """host:port of a gateway process, which must end well when it is told to."""
    registry = Registry(redis_url, mesh_name)
    process = await asyncio.create_subprocess_exec(
        *COMMAND, "--redis-url", redis_url, "--mesh-name", mesh_name, *flags
    )
    try:
        async with aclosing(registry.watch("gateway")) as watch:
            async for instances in watch:
                if instances:
                    break
        yield instances[0].address
    finally:
        process.terminate()
        assert await process.wait() == 0
        await registry.close()


async def test_tls_with_the_files_of_the_settings(
    redis_url: str, mesh_name: str, certificate: tuple[Path, Path]
) -> None:
    chain, key = map(str, certificate)
    flags = ("--ssl-certfile", chain, "--ssl-keyfile", key)
    trusting = ssl.create_default_context(cafile=chain)
    async with (
        gateway_process(redis_url, mesh_name, *flags) as address,
        aiohttp.ClientSession() as session,
    ):
        async with session.get(f"https://{address}/version", ssl=trusting) as response:
            assert response.status == 200
        with pytest.raises(aiohttp.ClientError):
            await session.get(f"http://{address}/version")


async def test_a_gateway_that_shares_its_port_is_found_at_the_service_port(
    redis_url: str, mesh_name: str
) -> None:
    shared, own = str(free_port()), str(free_port())
    flags = ("--gateways", "2", "--port", shared, "--service-port", own)
    async with (
        gateway_process(redis_url, mesh_name, *flags) as address,
        aiohttp.ClientSession() as session,
    ):
        assert address == f"127.0.0.1:{own}"
        async with session.get(f"http://{address}/version") as response:
            assert response.status == 200


def test_another_host_needs_a_key(redis_url: str) -> None:
    command = [*COMMAND, "--host", "0.0.0.0", "--redis-url", redis_url]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "--api-key" in done.stderr
    assert "--allow-unauthenticated" in done.stderr
    assert "Traceback" not in done.stderr
