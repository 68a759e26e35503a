"""Waiting for the pieces of a mesh: the registry, then every process of every service."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

import aiohttp
import structlog
from redis.exceptions import RedisError

from pagemesh.banner import gateway_url
from pagemesh.children import SERVICES, child_names
from pagemesh.shared.errors import StartupError
from pagemesh.shared.registry import Registry
from pagemesh.shared.settings import Settings
from pagemesh.shared.tls import dialling_context

REGISTRY_TIMEOUT_S: Final = 10.0
ANSWER_TIMEOUT_S: Final = 2.0
_POLL_S: Final = 0.05
_WAITING_LOG_S: Final = 10.0

log = structlog.get_logger(__name__)


async def wait_for_registry(settings: Settings) -> None:
    """Raises StartupError when Valkey does not answer in time."""
    async with _registry(settings) as registry:
        try:
            async with asyncio.timeout(REGISTRY_TIMEOUT_S):
                await _until_answer(registry)
        except TimeoutError as error:
            raise StartupError(
                f"the embedded Valkey did not answer within {REGISTRY_TIMEOUT_S:.0f} s"
            ) from error


async def wait_until_ready(settings: Settings) -> None:
    """Ask all services until all are ready; now and then say what is missing."""
    loop = asyncio.get_running_loop()
    next_log_s = loop.time() + _WAITING_LOG_S
    timeout = aiohttp.ClientTimeout(total=ANSWER_TIMEOUT_S)
    link_tls = dialling_context(settings.mesh)
    async with _registry(settings) as registry, aiohttp.ClientSession(timeout=timeout) as session:
        while (reason := await _missing(settings, registry, session, link_tls)) is not None:
            if loop.time() > next_log_s:
                next_log_s += _WAITING_LOG_S
                log.info("waiting_for_mesh", reason=reason)
            await asyncio.sleep(_POLL_S)


@asynccontextmanager
async def _registry(settings: Settings) -> AsyncIterator[Registry]:
    assert settings.mesh.redis_url is not None
    registry = Registry(settings.mesh.redis_url, settings.mesh.mesh_name)
    try:
        yield registry
    finally:
        await registry.close()


async def _until_answer(registry: Registry) -> None:
    while True:
        try:
            return await registry.ping()
        except (RedisError, OSError):
            await asyncio.sleep(_POLL_S)


async def _missing(
    settings: Settings,
    registry: Registry,
    session: aiohttp.ClientSession,
    link_tls: ssl.SSLContext | None,
) -> str | None:
    """What the mesh waits for. Who has announced himself answers at an address of his own."""
    url = gateway_url(settings.gateway)
    scheme = url.partition("://")[0]
    inner_scheme = "http" if link_tls is None else "https"
    for service in SERVICES:
        is_inner = service != "gateway"
        its_scheme, tls = (inner_scheme, link_tls) if is_inner else (scheme, None)
        try:
            addresses = [each.address for each in await registry.instances(service)]
        except (RedisError, OSError) as error:
            return f"the registry does not answer: {error}"
        asked = (_not_ready(session, f"{its_scheme}://{each}", tls) for each in addresses)
        reasons = await asyncio.gather(*asked)
        n_wanted = len(child_names(service, settings))
        if reasons.count(None) < n_wanted:
            known = next(filter(None, reasons), "it has not announced itself")
            return f"{service} {reasons.count(None) + 1} of {n_wanted}: {known}"
    return await _not_ready(session, url)


async def _not_ready(
    session: aiohttp.ClientSession, url: str, tls: ssl.SSLContext | None = None
) -> str | None:
    try:
        # A gateway is our own process, maybe under a self-signed certificate: nothing to verify.
        async with session.get(f"{url}/ready", ssl=tls or False) as answer:
            if answer.status == 200:
                return None
            reason: str = (await answer.json())["reason"]
            return reason
    except (OSError, aiohttp.ClientError, TimeoutError) as error:
        return f"it does not answer yet: {error}"
