"""The processes of a mesh one by one, and streams that go on while one of them is killed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import aiohttp
import psutil
import requests
from mesh_process import MeshProcess
from metric_names import Scrape

# A worker that starts anew loads its model, here beside whatever else the machine does.
RECOVERY_S: Final = 100.0
STORY: Final[dict[str, Any]] = {
    "model": "smollm2-135m-instruct",
    "prompt": "Once upon a time there was a page table",
    "temperature": 0,
    "max_tokens": 48,
}


class Part(NamedTuple):
    """One process of a service, and the address of its own."""

    process: psutil.Process
    url: str

    def scrape(self) -> Scrape:
        return Scrape.of(requests.get(f"{self.url}/metrics", timeout=10).text)

    def total(self, name: str, **labels: str) -> float:
        return self.scrape().total(name, **labels)


def parts_of(mesh: MeshProcess, service: str) -> list[Part]:
    """Those that listen now, at the addresses in the log."""
    addresses = {
        int(line["address"].rpartition(":")[2]): line["address"]
        for line in map(json.loads, mesh.log.read_text().rpartition("\n")[0].splitlines())
        if (line["event"], line.get("service")) == ("listening", service)
    }
    return [
        Part(process, f"http://{addresses[port]}")
        for process in mesh.all_of(service)
        for port in _listens_on(process)
        if port in addresses
    ]


def _listens_on(process: psutil.Process) -> list[int]:
    connections = process.net_connections("tcp")
    return [each.laddr.port for each in connections if each.status == psutil.CONN_LISTEN]


class Told(NamedTuple):
    """A stream as its client saw it. `broken`: the connection ended before the stream did."""

    text: str
    broken: bool


def told_alone(url: str) -> Told:
    """What STORY gives when nothing happens."""
    answer = requests.post(f"{url}/v1/completions", json=STORY, timeout=RECOVERY_S)
    return Told(answer.json()["choices"][0]["text"], broken=False)


async def listen_to(
    url: str,
    session: aiohttp.ClientSession,
    begun: asyncio.Semaphore | None = None,
    **fields: Any,
) -> Told:
    """Stream STORY with other `fields`; `begun` is released with the third piece of text."""
    pieces: list[str] = []
    body = {**STORY, **fields, "stream": True}
    try:
        async with session.post(f"{url}/v1/completions", json=body) as answer:
            async for line in answer.content:
                if not line.startswith(b"data: {"):
                    continue  # a keep-alive comment, or the end
                chunk = json.loads(line.removeprefix(b"data: "))
                assert "error" not in chunk
                pieces.append(chunk["choices"][0]["text"])
                if len(pieces) == 3 and begun is not None:
                    begun.release()
    except aiohttp.ClientError:
        return Told("".join(pieces), broken=True)
    return Told("".join(pieces), broken=False)


async def streams_during(urls: Sequence[str], victim: psutil.Process, **fields: Any) -> list[Told]:
    """A stream from each of `urls`; the victim is killed once all have begun."""
    begun = asyncio.Semaphore(0)
    async with aiohttp.ClientSession() as session, asyncio.TaskGroup() as group:
        tasks = [group.create_task(listen_to(url, session, begun, **fields)) for url in urls]
        for _ in urls:
            await begun.acquire()
        victim.kill()
    return [task.result() for task in tasks]
