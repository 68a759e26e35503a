"""Faults in a real mesh: whoever is killed or frozen, it recovers, and nothing outlives it."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import openai
import psutil
import pytest
import requests
from mesh_parts import RECOVERY_S, STORY, Told, streams_during
from mesh_process import (
    SERVICES,
    SMALL_MESH,
    STOP_TIMEOUT_S,
    MeshProcess,
    running_mesh,
    starting_mesh,
    wait_until,
)
from metric_names import Scrape
from openai.types.responses import Response

from pagemesh.shared.settings import Settings

pytestmark = [pytest.mark.mesh, pytest.mark.timeout(300)]
PATIENT: Final = ("--request-timeout-s", "100")
# A frozen peer is noticed within two seconds; the rest is patience with a busy machine.
FROZEN_NOTICED_S: Final = 40.0
DUMMY_MESH: Final = (*SMALL_MESH, "--load-format", "dummy")


@pytest.fixture(scope="module")
def victim(smollm2_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[MeshProcess]:
    """A mesh of this module alone, to be hurt."""
    with running_mesh(tmp_path_factory.mktemp("victim"), *SMALL_MESH, *PATIENT) as mesh:
        yield mesh


def ready_status(mesh: MeshProcess) -> int:
    try:
        return requests.get(f"{mesh.base_url}/ready", timeout=5).status_code
    except requests.ConnectionError:
        return 0


def complete(mesh: MeshProcess, **fields: Any) -> str:
    answer = requests.post(f"{mesh.base_url}/v1/completions", json={**STORY, **fields}, timeout=100)
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["text"]
    return text


@pytest.mark.parametrize("service", ["gateway", "valkey"])
def test_the_mesh_recovers_from_the_kill_of(service: str, victim: MeshProcess) -> None:
    wait_until(lambda: ready_status(victim) == 200, RECOVERY_S)
    before = victim.child(service)
    before.kill()
    wait_until(lambda: not before.is_running(), RECOVERY_S)
    wait_until(lambda: ready_status(victim) == 200, RECOVERY_S)
    assert complete(victim, max_tokens=4)
    # Requests do not wait for Valkey, so one may be answered before there is a new one.
    wait_until(lambda: victim.has_child(service), RECOVERY_S)
    assert victim.child(service).pid != before.pid


def assert_all_ended(mesh: MeshProcess) -> None:
    seen = Scrape.of(requests.get(f"{mesh.base_url}/metrics", timeout=10).text)
    assert seen.total("pagemesh_requests_in_flight") == 0
    ended = seen.total("vllm:request_success_total")
    assert seen.total("pagemesh_requests_received_total") == ended


@pytest.fixture(scope="module")
def undisturbed(victim: MeshProcess) -> str:
    """What STORY gives when nothing happens."""
    return complete(victim)


@pytest.mark.parametrize("service", ["worker", "scheduler", "tokenizer"])
async def test_a_stream_outlives_the_kill_of(
    service: str, undisturbed: str, victim: MeshProcess
) -> None:
    wait_until(lambda: ready_status(victim) == 200, RECOVERY_S)
    before = victim.child(service)
    assert await streams_during([victim.base_url], before) == [Told(undisturbed, broken=False)]
    assert_all_ended(victim)
    wait_until(lambda: ready_status(victim) == 200, RECOVERY_S)
    assert victim.child(service).pid != before.pid


def lines(mesh: MeshProcess, event: str) -> list[dict[str, Any]]:
    """The log lines of one event, in order."""
    whole_lines = mesh.log.read_text().rpartition("\n")[0].splitlines()
    return [line for line in map(json.loads, whole_lines) if line["event"] == event]


async def test_a_scheduler_started_again_finds_the_prefix_cache_warm(victim: MeshProcess) -> None:
    wait_until(lambda: ready_status(victim) == 200, RECOVERY_S)
    long_story = {"prompt": STORY["prompt"] + " and a very long table" * 40, "max_tokens": 40}
    undisturbed = complete(victim, **long_story)
    before = victim.child("scheduler")
    told = await streams_during([victim.base_url], before, **long_story)
    assert told == [Told(undisturbed, broken=False)]
    assert lines(victim, "engine_up")[-1]["cached_blocks"] > 0
    n_prompt = lines(victim, "request_ended")[-1]["prompt_tokens"]
    block_tokens = Settings().cache.block_size
    assert n_prompt > 200
    cached_tokens = (n_prompt - 1) // block_tokens * block_tokens

    def was_cached() -> bool:
        """The line travels through a pipe; the answer may be quicker."""
        return bool(lines(victim, "request_ended")[-1]["cached_tokens"] >= cached_tokens)

    wait_until(was_cached, RECOVERY_S)
    wait_until(lambda: victim.has_child("scheduler"), RECOVERY_S)
    assert victim.child("scheduler").pid != before.pid


@pytest.mark.parametrize("service", ["worker", "scheduler", "tokenizer"])
def test_a_frozen_service_makes_the_mesh_unready_until_it_thaws(
    service: str, victim: MeshProcess
) -> None:
    wait_until(lambda: ready_status(victim) == 200, RECOVERY_S)
    frozen = victim.child(service)
    frozen.suspend()
    try:
        wait_until(lambda: ready_status(victim) == 503, FROZEN_NOTICED_S)
        assert requests.get(f"{victim.base_url}/health", timeout=5).status_code == 200
    finally:
        frozen.resume()
    wait_until(lambda: ready_status(victim) == 200, RECOVERY_S)
    assert victim.child(service).pid == frozen.pid
    assert complete(victim, max_tokens=4)


def test_only_what_is_stored_outlives_the_parent(tmp_path: Path) -> None:
    """Killed or told to stop; what ran in the background has failed then."""
    stored: list[Response] = []
    for signum, code in ((signal.SIGKILL, -9), (signal.SIGINT, 0)):
        with (
            running_mesh(tmp_path, *DUMMY_MESH) as mesh,
            openai.OpenAI(base_url=f"{mesh.base_url}/v1", api_key="none") as client,
        ):
            children = mesh.children()
            assert len(children) == len(SERVICES) + 1
            if stored:
                check_stored(client, *stored)
            else:
                stored = store(client)
            mesh.process.send_signal(signum)
            assert mesh.process.wait(STOP_TIMEOUT_S) == code
            assert_gone(children)


def store(client: openai.OpenAI) -> list[Response]:
    """A response, and one that runs on in the background."""
    ask: Any = {"model": STORY["model"], "input": "Hi!", "extra_body": {"ignore_eos": True}}
    return [
        client.responses.create(**ask, max_output_tokens=4),
        client.responses.create(**ask, max_output_tokens=1500, background=True),
    ]


def check_stored(client: openai.OpenAI, whole: Response, begun: Response) -> None:
    assert client.responses.retrieve(whole.id) == whole
    wait_until(lambda: client.responses.retrieve(begun.id).status == "failed", RECOVERY_S)
    ask: Any = {"model": STORY["model"], "input": "More!", "max_output_tokens": 1}
    assert client.responses.create(**ask, previous_response_id=whole.id).usage


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 0), (signal.SIGKILL, -9)])
def test_nothing_outlives_a_parent_that_ends_while_starting(
    signum: signal.Signals, code: int, tmp_path: Path
) -> None:
    with starting_mesh(tmp_path, *DUMMY_MESH) as mesh:
        wait_until(lambda: mesh.has_child("gateway"), RECOVERY_S)
        children = mesh.children()
        mesh.process.send_signal(signum)
        assert mesh.process.wait(STOP_TIMEOUT_S) == code
        assert_gone(children)


def test_a_second_ctrl_c_does_not_wait(tmp_path: Path) -> None:
    with running_mesh(tmp_path, *DUMMY_MESH) as mesh:
        children = mesh.children()
        # A frozen gateway holds up the orderly stop until its patience ends.
        mesh.child("gateway").suspend()
        mesh.process.send_signal(signal.SIGINT)
        wait_until(lambda: "stopping" in mesh.log.read_text(), RECOVERY_S)
        mesh.process.send_signal(signal.SIGINT)
        assert mesh.process.wait(STOP_TIMEOUT_S) == 0
        assert "killing_child" not in mesh.log.read_text()
        assert_gone(children)


def assert_gone(children: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(children, timeout=STOP_TIMEOUT_S)
    assert [child for child in alive if child.status() != psutil.STATUS_ZOMBIE] == []
