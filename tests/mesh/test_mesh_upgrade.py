"""A rolling upgrade: a mesh of another protocol version beside the old one, which drains."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import aiohttp
import pytest
import requests
from mesh_parts import RECOVERY_S, Told, listen_to, told_alone
from mesh_process import SERVICES, clean_environ, free_port, wait_until
from metric_names import Scrape

from pagemesh.shared.wire import PROTOCOL

pytestmark = [pytest.mark.mesh, pytest.mark.timeout(600)]
N_STREAMS: Final = 3
# Four processes at a time import what they need, here beside whatever else the machine does.
START_S: Final = 200.0
SERVED: Final = "vllm:request_success_total"


class Service(NamedTuple):
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def lines(self) -> list[dict[str, Any]]:
        return list(map(json.loads, self.log.read_text().rpartition("\n")[0].splitlines()))

    def events(self, name: str) -> list[dict[str, Any]]:
        return [line for line in self.lines if line["event"] == name]

    @property
    def url(self) -> str:
        return f"http://{self.events('listening')[0]['address']}"

    def is_ready(self) -> bool:
        listens = self.log.exists() and self.events("listening")
        return bool(listens) and is_ready(self.url)

    def total(self, name: str) -> float:
        return Scrape.of(requests.get(f"{self.url}/metrics", timeout=10).text).total(name)


def is_ready(url: str) -> bool:
    try:
        return requests.get(f"{url}/ready", timeout=5).ok
    except requests.ConnectionError:
        return False


class Version(NamedTuple):
    """All services of one version of the protocol, by name."""

    services: dict[str, Service]

    def wait_until_ready(self) -> None:
        wait_until(lambda: all(each.is_ready() for each in self.services.values()), START_S)

    def drain(self, name: str) -> None:
        service = self.services[name]
        service.process.send_signal(signal.SIGTERM)
        assert service.process.wait(RECOVERY_S) == 0, service.log.read_text()


@contextmanager
def version(protocol: int, folder: Path, settings: dict[str, str]) -> Iterator[Version]:
    """Its services, until the block ends; those that run then are killed."""
    entry = Path(__file__).with_name("other_version.py")
    environ = {**clean_environ(), **settings, "TEST_PROTOCOL": str(protocol)}
    services = {}
    with ExitStack() as stack:
        for name in SERVICES:
            log = folder / f"{name}-{protocol}.log"
            stderr = stack.enter_context(log.open("w"))
            command = [sys.executable, str(entry), name]
            process = subprocess.Popen(command, env=environ, stderr=stderr)
            stack.callback(process.wait)
            stack.callback(process.kill)
            services[name] = Service(process, log)
        yield Version(services)


@pytest.fixture
def settings(tiny_settings: dict[str, str], redis_url: str, mesh_name: str) -> dict[str, str]:
    """Of all services of both versions: one registry, and one port for both gateways."""
    return {
        **{f"PAGEMESH_{key.upper()}": value for key, value in tiny_settings.items()},
        "PAGEMESH_REDIS_URL": redis_url,
        "PAGEMESH_MESH_NAME": mesh_name,
        "PAGEMESH_GATEWAYS": "2",
        "PAGEMESH_WORKERS": "2",
        "PAGEMESH_PORT": str(free_port()),
        "PAGEMESH_DRAIN_TIMEOUT_S": "100",
        "PAGEMESH_LOG_FORMAT": "json",
        "OMP_NUM_THREADS": "1",
    }


class Listeners:
    """Streams without a pause. Half of them open a connection for each, the others keep theirs."""

    def __init__(self, url: str) -> None:
        self.told: list[Told] = []
        self._url = url
        self._over = asyncio.Event()

    async def listen(self, *, keeps_connection: bool) -> None:
        connector = aiohttp.TCPConnector(force_close=not keeps_connection)
        async with aiohttp.ClientSession(connector=connector) as session:
            while not self._over.is_set():
                told = await listen_to(self._url, session)
                if told == Told("", broken=True):
                    # Nothing had begun when its connection, which was kept, went: any client
                    # tries such a request again.
                    told = await listen_to(self._url, session)
                self.told.append(told)

    def stop(self) -> None:
        self._over.set()


async def test_the_old_version_drains_beside_the_new_one_and_nothing_is_lost(
    settings: dict[str, str], tmp_path: Path
) -> None:
    url = f"http://127.0.0.1:{settings['PAGEMESH_PORT']}"
    with version(PROTOCOL, tmp_path, settings) as old:
        await asyncio.to_thread(old.wait_until_ready)
        await asyncio.to_thread(wait_until, lambda: is_ready(url), RECOVERY_S)
        undisturbed = told_alone(url)
        listeners = Listeners(url)
        with version(PROTOCOL + 1, tmp_path, settings) as new:
            async with asyncio.TaskGroup() as group:
                for number in range(N_STREAMS):
                    group.create_task(listeners.listen(keeps_connection=number % 2 == 0))
                await asyncio.to_thread(new.wait_until_ready)
                for name in reversed(SERVICES):
                    await asyncio.to_thread(old.drain, name)
                gateway = new.services["gateway"]
                await asyncio.to_thread(
                    wait_until, lambda: gateway.total(SERVED) >= N_STREAMS, RECOVERY_S
                )
                listeners.stop()
    assert listeners.told == [undisturbed] * len(listeners.told)
