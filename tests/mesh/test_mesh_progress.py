"""A mesh with two workers, of which one hangs in a step, or is stopped for longer than a step may
take."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import aiohttp
import pytest
import pytest_asyncio
import requests
from mesh_parts import RECOVERY_S, STORY, Told, listen_to, parts_of
from mesh_process import SMALL_MESH, MeshProcess, running_mesh, wait_until
from structlog.testing import capture_logs

from pagemesh.shared.watchdog import EXIT_STALLED
from pagemesh.supervisor import ChildSpec, Supervisor

pytestmark = [
    pytest.mark.mesh,
    pytest.mark.timeout(300),
    pytest.mark.asyncio(loop_scope="module"),
]
STEP_TIMEOUT_S: Final = 2.0
FLAGS: Final = (
    *SMALL_MESH,
    *("--request-timeout-s", "100"),
    *("--step-timeout-s", str(STEP_TIMEOUT_S)),
)


class HangingWorker(NamedTuple):
    """A second worker of the mesh, under a supervisor of its own. It hangs once `hang_file` is
    there."""

    hang_file: Path
    lines: list[str]

    def urls(self) -> list[str]:
        """Of the process and its successors."""
        entries = [json.loads(line) for line in self.lines if line.startswith("{")]
        return [f"http://{e['address']}" for e in entries if e["event"] == "listening"]


@pytest.fixture(scope="module")
def mesh(smollm2_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[MeshProcess]:
    """Of this module alone, to be hurt."""
    assert smollm2_folder.is_dir()
    with running_mesh(tmp_path_factory.mktemp("progress"), *FLAGS) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def hanging(
    mesh: MeshProcess, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[HangingWorker]:
    worker = HangingWorker(tmp_path_factory.mktemp("hanging") / "hang", [])
    program = str(Path(__file__).with_name("hanging_worker.py"))
    environ = {**mesh.child("worker").environ(), "HANG_FILE": str(worker.hang_file)}
    supervisor = Supervisor(lambda _, line: worker.lines.append(line))
    supervisor.start(ChildSpec("hanging", (sys.executable, program), environ))
    supervisor.mark_ready()
    try:
        await until_engines(mesh, 2)
        yield worker
    finally:
        await supervisor.stop(grace_s=20)


async def until_engines(mesh: MeshProcess, n: int) -> None:
    def known() -> bool:
        [scheduler] = parts_of(mesh, "scheduler")
        names = [name for name, _, _ in scheduler.scrape().samples]
        return names.count("vllm:num_requests_running") == n

    await asyncio.to_thread(wait_until, known, RECOVERY_S)


def undisturbed(mesh: MeshProcess) -> str:
    """What STORY gives when nothing happens."""
    answer = requests.post(f"{mesh.base_url}/v1/completions", json=STORY, timeout=100)
    text: str = answer.json()["choices"][0]["text"]
    return text


def why_not_ready(url: str) -> str:
    answer: dict[str, Any] = requests.get(f"{url}/ready", timeout=5).json()
    return str(answer.get("reason", ""))


async def begun_streams(
    mesh: MeshProcess, session: aiohttp.ClientSession, n: int
) -> list[asyncio.Task[Told]]:
    begun = asyncio.Semaphore(0)
    told = [asyncio.create_task(listen_to(mesh.base_url, session, begun)) for _ in range(n)]
    for _ in told:
        await begun.acquire()
    return told


async def test_a_worker_that_hangs_in_a_step_is_replaced_and_its_streams_go_on(
    mesh: MeshProcess, hanging: HangingWorker
) -> None:
    text = await asyncio.to_thread(undisturbed, mesh)
    async with aiohttp.ClientSession() as session:
        with capture_logs() as ended:
            streams = await begun_streams(mesh, session, 4)
            hanging.hang_file.touch()
            [url] = hanging.urls()
            while "a step has been computing" not in await asyncio.to_thread(why_not_ready, url):
                pass
            assert await asyncio.gather(*streams) == [Told(text, broken=False)] * 4
            await asyncio.to_thread(wait_until, lambda: len(hanging.urls()) == 2, RECOVERY_S)
    assert [line["ended"] for line in ended] == [f"exit code {EXIT_STALLED}"]
    stacks = "\n".join(hanging.lines)
    assert " in hanging\n" in stacks
    [scheduler] = parts_of(mesh, "scheduler")
    assert scheduler.total("pagemesh_worker_ejections_total") == 1
    await until_engines(mesh, 2)
    assert await asyncio.to_thread(why_not_ready, hanging.urls()[-1]) == ""


async def test_a_worker_that_was_stopped_for_longer_is_not_replaced(
    mesh: MeshProcess, hanging: HangingWorker
) -> None:
    """Its streams go on elsewhere at once; it computes again as soon as it may."""
    text = await asyncio.to_thread(undisturbed, mesh)
    stopped = mesh.child("worker")
    async with aiohttp.ClientSession() as session:
        streams = await begun_streams(mesh, session, 4)
        stopped.suspend()
        try:
            assert await asyncio.gather(*streams) == [Told(text, broken=False)] * 4
            await asyncio.sleep(3 * STEP_TIMEOUT_S)
        finally:
            stopped.resume()
        await until_engines(mesh, 2)
        streams = await begun_streams(mesh, session, 4)
        assert await asyncio.gather(*streams) == [Told(text, broken=False)] * 4
    assert mesh.child("worker").pid == stopped.pid
    assert not [line for line in mesh.log.read_text().splitlines() if '"stalled"' in line]
