"""A mesh with two schedulers and two workers: each has its own, and any may die."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import aiohttp
import psutil
import pytest
import requests
from mesh_parts import RECOVERY_S, STORY, Part, Told, listen_to, parts_of, streams_during
from mesh_process import SMALL_MESH, MeshProcess, running_mesh, wait_until
from metric_names import Scrape

from pagemesh.scheduler_svc.leasing import RETURN_S
from pagemesh.shared.leases import LEASE_TTL_S

pytestmark = [pytest.mark.mesh, pytest.mark.timeout(300)]
TWO_OF_EACH: Final = ("--schedulers", "2", "--workers", "2")


@pytest.fixture(scope="module")
def mesh(smollm2_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[MeshProcess]:
    """Of this module alone, to be hurt."""
    assert smollm2_folder.is_dir()
    flags = (*SMALL_MESH, *TWO_OF_EACH, "--request-timeout-s", "100")
    with running_mesh(tmp_path_factory.mktemp("leases"), *flags) as running:
        yield running


@pytest.fixture
def whole_mesh(mesh: MeshProcess) -> MeshProcess:
    """An engine to each scheduler, whatever the last test has done."""
    wait_until(lambda: engines_by_scheduler(mesh) == [1, 1], RECOVERY_S)
    return mesh


@pytest.fixture(scope="module")
def undisturbed(mesh: MeshProcess) -> str:
    """What STORY gives when nothing happens."""
    answer = requests.post(f"{mesh.base_url}/v1/completions", json=STORY, timeout=100)
    text: str = answer.json()["choices"][0]["text"]
    return text


def engines(scheduler: Part) -> set[str]:
    samples = scheduler.scrape().samples
    return {labels["engine"] for name, labels, _ in samples if name == "vllm:num_requests_running"}


def engines_by_scheduler(mesh: MeshProcess) -> list[int]:
    try:
        return sorted(len(engines(scheduler)) for scheduler in parts_of(mesh, "scheduler"))
    except (psutil.Error, requests.ConnectionError):
        return []


def log_lines(log: Path) -> list[dict[str, Any]]:
    return list(map(json.loads, log.read_text().rpartition("\n")[0].splitlines()))


def leases_taken(mesh: MeshProcess) -> int:
    return [line["event"] for line in log_lines(mesh.log)].count("lease_taken")


async def streams(mesh: MeshProcess, n: int) -> list[Told]:
    async with aiohttp.ClientSession() as session:
        return await asyncio.gather(*(listen_to(mesh.base_url, session) for _ in range(n)))


def steps_of(workers: list[Part]) -> list[float]:
    return [worker.total("pagemesh_worker_steps_total") for worker in workers]


async def test_all_workers_compute_and_each_scheduler_drives_one(
    whole_mesh: MeshProcess, undisturbed: str
) -> None:
    schedulers, workers = parts_of(whole_mesh, "scheduler"), parts_of(whole_mesh, "worker")
    assert len(engines(schedulers[0]) | engines(schedulers[1])) == 2
    before = steps_of(workers)
    assert await streams(whole_mesh, 4) == [Told(undisturbed, broken=False)] * 4
    computed = [now - then for now, then in zip(steps_of(workers), before, strict=True)]
    # Two streams each, decoded together.
    assert min(computed) >= STORY["max_tokens"]


async def test_streams_of_a_killed_scheduler_go_on_and_its_worker_has_another(
    whole_mesh: MeshProcess, undisturbed: str
) -> None:
    victim, survivor = parts_of(whole_mesh, "scheduler")
    workers = whole_mesh.all_of("worker")
    told = await streams_during([whole_mesh.base_url] * 4, victim.process)
    assert told == [Told(undisturbed, broken=False)] * 4
    wait_until(lambda: engines_by_scheduler(whole_mesh) == [1, 1], RECOVERY_S)
    assert len(engines(survivor)) == 1
    assert whole_mesh.all_of("worker") == workers
    assert await streams(whole_mesh, 4) == [Told(undisturbed, broken=False)] * 4


async def test_streams_of_a_killed_worker_go_on_on_the_other(
    whole_mesh: MeshProcess, undisturbed: str
) -> None:
    victim = whole_mesh.all_of("worker")[0]
    told = await streams_during([whole_mesh.base_url] * 4, victim)
    assert told == [Told(undisturbed, broken=False)] * 4


async def test_no_lease_moves_and_no_request_fails_when_redis_is_killed(
    whole_mesh: MeshProcess, undisturbed: str
) -> None:
    schedulers = parts_of(whole_mesh, "scheduler")
    before = [engines(scheduler) for scheduler in schedulers]
    taken = leases_taken(whole_mesh)
    valkey = whole_mesh.child("valkey")
    told = await streams_during([whole_mesh.base_url] * 4, valkey)
    assert told == [Told(undisturbed, broken=False)] * 4
    wait_until(lambda: whole_mesh.has_child("valkey"), RECOVERY_S)
    await asyncio.sleep(RETURN_S + LEASE_TTL_S)
    assert await streams(whole_mesh, 4) == [Told(undisturbed, broken=False)] * 4
    assert [engines(scheduler) for scheduler in schedulers] == before
    assert leases_taken(whole_mesh) == taken


@pytest.fixture
def late_worker(whole_mesh: MeshProcess, tmp_path: Path) -> Iterator[Path]:
    """`pagemesh worker`, started alone by whoever knows the mesh's settings. Yields its log."""
    environ = whole_mesh.all_of("worker")[0].environ()
    command = [sys.executable, "-m", "pagemesh.cli", "worker"]
    log = tmp_path / "late.log"
    with log.open("w") as stderr:
        process = subprocess.Popen(command, env=environ, stderr=stderr)
    try:
        yield log
    finally:
        process.terminate()
        assert process.wait(RECOVERY_S) == 0, log.read_text()


def steps_in_life(log: Path) -> float:
    """Of the worker that wrote `log`."""
    [address] = [line["address"] for line in log_lines(log) if line["event"] == "listening"]
    scrape = Scrape.of(requests.get(f"http://{address}/metrics", timeout=10).text)
    return scrape.total("pagemesh_worker_steps_total")


async def test_a_worker_started_later_is_used(
    whole_mesh: MeshProcess, late_worker: Path, undisturbed: str
) -> None:
    wait_until(lambda: sum(engines_by_scheduler(whole_mesh)) == 3, RECOVERY_S)
    assert await streams(whole_mesh, 6) == [Told(undisturbed, broken=False)] * 6
    assert steps_in_life(late_worker) > 0
