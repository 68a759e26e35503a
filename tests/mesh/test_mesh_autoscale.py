"""`pagemesh serve --autoscale 1:2`: a worker comes with the load and goes when it is over."""

from __future__ import annotations

import asyncio
from itertools import chain
from pathlib import Path
from typing import Final

import aiohttp
import pytest
import requests
from mesh_parts import RECOVERY_S, Told, listen_to, told_alone
from mesh_process import MeshProcess, running_mesh, wait_until
from metric_names import Scrape

from pagemesh.shared.metrics import DESIRED_WORKERS
from pagemesh.worker_svc.cores import usable_cores

pytestmark = [
    pytest.mark.mesh,
    pytest.mark.timeout(300),
    pytest.mark.skipif(usable_cores() < 2, reason="two workers need two cores"),
]
FLAGS: Final = (
    *("--autoscale", "1:2"),
    *("--max-num-seqs", "4"),
    *("--scale-down-after-s", "4"),
    *("--device", "cpu"),
)
N_STREAMS: Final = 6
RUNNING: Final = "vllm:num_requests_running"


def series(mesh: MeshProcess, name: str) -> list[float]:
    text = requests.get(f"{mesh.base_url}/metrics", {"name[]": name}, timeout=10).text
    return [value for sample, _, value in Scrape.of(text).samples if sample == name]


def both_work(mesh: MeshProcess) -> bool:
    return len([running for running in series(mesh, RUNNING) if running]) == 2


async def streams_until_both_work(mesh: MeshProcess) -> list[Told]:
    """Streams without a pause until two engines have some; all that were begun."""
    enough = asyncio.Event()

    async def listen_again() -> list[Told]:
        told = []
        while not enough.is_set():
            told.append(await listen_to(mesh.base_url, session))
        return told

    async with aiohttp.ClientSession() as session, asyncio.TaskGroup() as group:
        tasks = [group.create_task(listen_again()) for _ in range(N_STREAMS)]
        await asyncio.to_thread(wait_until, lambda: both_work(mesh), RECOVERY_S)
        enough.set()
    return [told for task in tasks for told in task.result()]


async def test_a_worker_comes_with_the_load_and_goes_after_it(
    tiny_settings: dict[str, str], tmp_path: Path
) -> None:
    model = [(f"--{key.replace('_', '-')}", value) for key, value in tiny_settings.items()]
    with running_mesh(tmp_path, *chain.from_iterable(model), *FLAGS) as mesh:
        undisturbed = told_alone(mesh.base_url)
        assert series(mesh, DESIRED_WORKERS) == [1]
        first = mesh.child("worker")
        # Six requests are more than 0.8 of a batch of four.
        told = await streams_until_both_work(mesh)
        assert told == [undisturbed] * len(told)
        # Some load goes on while the second one leaves.
        told = await streams_while_it_leaves(mesh)
        assert told == [undisturbed] * len(told)
        assert mesh.child("worker").pid == first.pid
        assert series(mesh, DESIRED_WORKERS) == [1]
        assert "child_ended" not in mesh.log.read_text()


async def streams_while_it_leaves(mesh: MeshProcess) -> list[Told]:
    told = []
    async with aiohttp.ClientSession() as session, asyncio.timeout(RECOVERY_S):
        while len(mesh.all_of("worker")) == 2:
            told += await asyncio.gather(*(listen_to(mesh.base_url, session) for _ in range(2)))
    return told
