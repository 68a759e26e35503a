"""compose.yaml at length, with the real model: `make compose`, which takes minutes."""

from __future__ import annotations

import re
import shutil
import subprocess
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import pytest
import requests
from composed import KEY, ROOT, Mesh, composed_mesh, why_no_containers
from openai import InternalServerError

SCALE: Final = {"gateway": 3, "tokenizer": 2, "scheduler": 2, "worker": 2}
N_STREAMS: Final = 8
pytestmark = pytest.mark.timeout(500)


@pytest.fixture(autouse=True)
def _permitted() -> None:
    reason = why_no_containers()
    if reason is not None:
        pytest.skip(reason)


@pytest.fixture
def folder(tmp_path: Path, smollm2_folder: Path) -> Path:
    """Of the volumes and logs. What the containers cannot fetch, having no way out, was fetched
    before: the volume of models has the file of the default one."""
    fetched = smollm2_folder.parents[1] / "models"
    shutil.copytree(fetched, tmp_path / "models" / "models")
    return tmp_path


class Load:
    """Streams through the balancer, one after another from each thread, until the block ends.

    Threads are on the network of the one that starts them.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.texts: list[str] = []
        self._mesh = mesh
        self._model = mesh.model
        self._stop = threading.Event()
        self._pool = ThreadPoolExecutor(N_STREAMS)

    def __enter__(self) -> Load:
        self._running = [self._pool.submit(self._run) for _ in range(N_STREAMS)]
        self.wait_for_more()
        return self

    def __exit__(self, *_: object) -> None:
        """Raises what a stream raised."""
        self._stop.set()
        for running in self._running:
            running.result()
        self._pool.shutdown()

    def wait_for_more(self) -> None:
        """Until each thread has had another stream, or one has failed."""
        goal = len(self.texts) + N_STREAMS
        self._mesh.wait_for(
            lambda: len(self.texts) >= goal or any(each.done() for each in self._running)
        )

    def _run(self) -> None:
        while not self._stop.is_set():
            self.texts.append(self._mesh.stream(self._model))


def test_under_load_it_scales_down_and_loses_one_of_each(folder: Path) -> None:
    """All but the streams of a killed gateway, which are its own."""
    with composed_mesh(folder, {}, scale=SCALE) as mesh:
        mesh.wait_for(lambda: mesh.engines() == SCALE["worker"])
        containers = mesh.containers
        changes: list[Callable[[], object]] = [
            lambda: containers.stop(containers.running("gateway")[0]),
            lambda: containers.kill(containers.running("worker")[0]),
            lambda: containers.start("worker"),
            lambda: containers.kill(containers.running("scheduler")[0]),
            lambda: containers.kill(containers.running("tokenizer")[0]),
            lambda: containers.stop(containers.only("valkey")),
            lambda: containers.start("valkey"),
            lambda: mesh.wait_for(lambda: mesh.engines() == SCALE["worker"]),
            lambda: containers.stop(containers.running("worker")[0]),
        ]
        model = mesh.model
        told = mesh.stream(model)
        assert mesh.in_flight_after_first_token() == 1
        with Load(mesh) as load:
            for change in changes:
                change()
                load.wait_for_more()
        assert set(load.texts) == {told}
        containers.kill(containers.running("gateway")[0])
        assert mesh.stream(mesh.model) == told
        for worker in containers.running("worker"):
            containers.kill(worker)
        with pytest.raises(InternalServerError, match="The server is not ready"):
            mesh.stream(model)
        assert set(containers.down().values()) == {0}


@pytest.mark.filterwarnings("ignore:Unverified HTTPS request")
def test_tls_on_every_hop(folder: Path) -> None:
    """With the certificates that docs/deploy.md makes."""
    if shutil.which("redis-server") is None:
        pytest.skip("a registry with TLS needs redis-server: the wheel's Valkey speaks none")
    environ = {"CERTIFICATES": str(certificates(folder))}
    with composed_mesh(folder, environ, "compose.tls.yaml") as mesh:
        url = f"https://{mesh.balancer}:8443/v1/models"
        answer = requests.get(url, headers={"Authorization": f"Bearer {KEY}"}, verify=False)
        assert answer.status_code == 200
        assert mesh.stream(mesh.model)
        scheduler = mesh.containers.only("scheduler").host.address
        with pytest.raises(requests.exceptions.ConnectionError):
            requests.get(f"https://{scheduler}:7000/metrics", verify=False, timeout=5)
        assert set(mesh.containers.down().values()) == {0}


def certificates(folder: Path) -> Path:
    block = re.search(
        r"```bash\n(mkdir certificates.*?)```", (ROOT / "docs/deploy.md").read_text(), re.S
    )
    assert block is not None
    subprocess.run(["bash", "-ec", block[1]], cwd=folder, check=True, capture_output=True)
    return folder / "certificates"
