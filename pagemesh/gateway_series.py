"""What the gateways of this mesh say of its workers, on their /metrics."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

import aiohttp
from prometheus_client.parser import text_string_to_metric_families
from redis.exceptions import RedisError

from pagemesh.shared.metrics import DESIRED_WORKERS
from pagemesh.shared.registry import Registry

RUNNING: Final = "vllm:num_requests_running"
"""A series for each engine."""
_QUERY: Final = [("name[]", DESIRED_WORKERS), ("name[]", RUNNING)]
_FAILURES: Final = (OSError, aiohttp.ClientError, TimeoutError, ValueError)


class Workers(NamedTuple):
    """How many are wanted, and how many are at work."""

    desired: int
    engines: int


class GatewaySeries:
    """Asks every gateway at its own address. `scheme` is http or https."""

    def __init__(self, registry: Registry, session: aiohttp.ClientSession, scheme: str) -> None:
        self._registry = registry
        self._session = session
        self._scheme = scheme

    async def workers(self) -> Workers | None:
        """The largest figures of all gateways; None when none knows any."""
        try:
            gateways = await self._registry.instances("gateway")
        except (RedisError, OSError):
            return None
        answers = await asyncio.gather(*(self._ask(each.address) for each in gateways))
        return most(filter(None, answers))

    async def _ask(self, address: str) -> Workers | None:
        url = f"{self._scheme}://{address}/metrics"
        try:
            # A gateway is our own process, maybe under a self-signed certificate.
            async with self._session.get(url, params=_QUERY, ssl=False) as answer:
                return read_workers(await answer.text())
        except _FAILURES:
            return None


def most(answers: Iterable[Workers]) -> Workers | None:
    known = list(answers)
    if not known:
        return None
    return Workers(max(each.desired for each in known), max(each.engines for each in known))


def read_workers(text: str) -> Workers | None:
    """Of all models together; None when there is no figure. Raises ValueError for no metrics."""
    samples = list(_samples(text))
    desired = [value for name, value in samples if name == DESIRED_WORKERS]
    engines = sum(1 for name, _ in samples if name == RUNNING)
    return Workers(int(sum(desired)), engines) if desired else None


def _samples(text: str) -> Iterator[tuple[str, float]]:
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            yield sample.name, sample.value
