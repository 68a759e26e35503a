"""A mesh with two gateways on one port and two tokenizer services: all work, and any may die."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import aiohttp
import openai
import psutil
import pytest
import requests
from mesh_parts import RECOVERY_S, STORY, Part, Told, listen_to, parts_of, streams_during
from mesh_process import (
    SMALL_MESH,
    MeshProcess,
    clean_environ,
    running_mesh,
    serve_command,
    wait_until,
)

pytestmark = [pytest.mark.mesh, pytest.mark.timeout(300)]
TWO_OF_EACH: Final = ("--gateways", "2", "--tokenizers", "2", "--admin-key", "admin")
ADMIN: Final = {"Authorization": "Bearer admin"}
ENDLESS: Final[dict[str, Any]] = {**STORY, "max_tokens": 1900, "ignore_eos": True}
FREED_S: Final = 3.0
# A client's sockets are dealt out by a hash, so that many are needed to meet both gateways.
N_CONNECTIONS: Final = 40
N_LINES: Final = 16


@pytest.fixture(scope="module")
def mesh(smollm2_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[MeshProcess]:
    """Of this module alone, to be hurt."""
    assert smollm2_folder.is_dir()
    folder = tmp_path_factory.mktemp("several")
    flags = (
        *SMALL_MESH,
        *TWO_OF_EACH,
        "--request-timeout-s",
        "100",
        *("--files-dir", str(folder), "--batch-concurrency", "4"),
    )
    with running_mesh(folder, *flags) as running:
        yield running


@pytest.fixture
def whole_mesh(mesh: MeshProcess) -> MeshProcess:
    """Two of each, all ready and linked, whatever the last test has done."""
    wait_until(lambda: is_whole(mesh), RECOVERY_S)
    return mesh


def is_whole(mesh: MeshProcess) -> bool:
    try:
        gateways, tokenizers = parts_of(mesh, "gateway"), parts_of(mesh, "tokenizer")
        if (len(gateways), len(tokenizers)) != (2, 2):
            return False
        linked = all(_dialled(gateway, tokenizers) for gateway in gateways)
        asked = [requests.get(f"{each.url}/ready", timeout=5) for each in gateways + tokenizers]
        return linked and all(answer.status_code == 200 for answer in asked)
    except (psutil.Error, requests.ConnectionError):
        return False


def _dialled(gateway: Part, tokenizers: Sequence[Part]) -> bool:
    connections = gateway.process.net_connections("tcp")
    peers = {f"http://{each.raddr.ip}:{each.raddr.port}" for each in connections if each.raddr}
    return peers >= {tokenizer.url for tokenizer in tokenizers}


def served_until_whole(mesh: MeshProcess) -> bool:
    """Whether the one port answers all the time until the mesh is whole again."""
    while not is_whole(mesh):
        if requests.get(f"{mesh.base_url}/ready", timeout=10).status_code != 200:
            return False
    return True


@pytest.fixture(scope="module")
def undisturbed(mesh: MeshProcess) -> str:
    """What STORY gives when nothing happens."""
    answer = requests.post(f"{mesh.base_url}/v1/completions", json=STORY, timeout=100)
    text: str = answer.json()["choices"][0]["text"]
    return text


def test_both_gateways_take_connections_at_the_one_port(whole_mesh: MeshProcess) -> None:
    gateways = parts_of(whole_mesh, "gateway")
    seen = {"handler": "/version"}
    before = [gateway.total("http_requests_total", **seen) for gateway in gateways]
    for _ in range(N_CONNECTIONS):
        assert requests.get(f"{whole_mesh.base_url}/version", timeout=10).status_code == 200
    taken = [
        gateway.total("http_requests_total", **seen) - earlier
        for gateway, earlier in zip(gateways, before, strict=True)
    ]
    assert sum(taken) == N_CONNECTIONS
    assert min(taken) > 0


async def test_each_gateway_uses_both_tokenizer_services(
    whole_mesh: MeshProcess, undisturbed: str
) -> None:
    counted = "pagemesh_tokenizer_output_tokens_total"
    tokenizers = parts_of(whole_mesh, "tokenizer")
    for gateway in parts_of(whole_mesh, "gateway"):
        before = [tokenizer.total(counted) for tokenizer in tokenizers]
        async with aiohttp.ClientSession() as session:
            told = await asyncio.gather(*(listen_to(gateway.url, session) for _ in range(4)))
        assert told == [Told(undisturbed, broken=False)] * 4
        after = [tokenizer.total(counted) for tokenizer in tokenizers]
        # Two streams each: the engine is reached through either service.
        assert after == [tokens + 2 * STORY["max_tokens"] for tokens in before]


def post(url: str, body: Any = None, **headers: str) -> requests.Response:
    return requests.post(url, json=body, headers=ADMIN | headers, timeout=RECOVERY_S)


def running(gateway: Part) -> int:
    load = requests.get(f"{gateway.url}/load", headers=ADMIN, timeout=10).json()
    return int(load["models"][STORY["model"]]["running"])


def begin(threads: ThreadPoolExecutor, gateway: Part, name: str) -> Future[requests.Response]:
    headers = {"x-request-id": name}
    asked = threads.submit(post, f"{gateway.url}/v1/completions", ENDLESS, **headers)
    wait_until(lambda: running(gateway) == 1, RECOVERY_S)
    return asked


def test_a_request_is_cancelled_through_another_gateway(whole_mesh: MeshProcess) -> None:
    one, other = parts_of(whole_mesh, "gateway")
    with ThreadPoolExecutor(1) as threads:
        asked = begin(threads, one, "mine")
        assert post(f"{other.url}/v1/requests/mine/cancel").json()["status"] == "cancelled"
        assert asked.result().status_code == 499
    wait_until(lambda: running(one) == running(other) == 0, FREED_S)
    assert post(f"{other.url}/v1/requests/mine/cancel").status_code == 404


def test_a_pause_holds_the_whole_mesh(whole_mesh: MeshProcess) -> None:
    one, other = parts_of(whole_mesh, "gateway")
    with ThreadPoolExecutor(2) as threads:
        ended = begin(threads, one, "ended")
        assert post(f"{other.url}/pause").json() == {"status": "paused", "mode": "abort"}
        assert ended.result().json()["error"]["code"] == "paused"
        assert running(one) == 0
        brief = {**STORY, "max_tokens": 1}
        held = threads.submit(post, f"{one.url}/v1/completions", brief)
        info = requests.get(f"{one.url}/server_info", headers=ADMIN, timeout=10).json()
        assert info["is_paused"] is True
        assert len(info["services"]["gateway"]) == 2
        assert not held.done()
        assert post(f"{other.url}/resume").json() == {"status": "resumed"}
        assert held.result().json()["usage"]["completion_tokens"] > 0


def test_a_reset_forgets_cached_prompts(whole_mesh: MeshProcess) -> None:
    one, other = parts_of(whole_mesh, "gateway")
    tokens = "This page table is of no use to anybody any more. " * 4
    prompt = {**STORY, "prompt": tokens, "max_tokens": 1}

    def cached_tokens(gateway: Part) -> int:
        usage = post(f"{gateway.url}/v1/completions", prompt).json()["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    cached_tokens(one)
    assert cached_tokens(other) > 0
    told = post(f"{one.url}/reset_prefix_cache").json()["reset"]
    assert [len(engines) for engines in told.values()] == [1]
    assert cached_tokens(one) == 0


async def test_streams_of_a_killed_tokenizer_service_go_on_through_the_other(
    whole_mesh: MeshProcess, undisturbed: str
) -> None:
    gateways = parts_of(whole_mesh, "gateway")
    victim, survivor = parts_of(whole_mesh, "tokenizer")
    resubmitted = "pagemesh_requests_resubmitted_total"
    before = [gateway.total(resubmitted) for gateway in gateways]
    refused = survivor.total("pagemesh_tokenizer_requests_refused_total")
    told = await streams_during([gateway.url for gateway in gateways] * 2, victim.process)
    assert told == [Told(undisturbed, broken=False)] * 4
    after = [gateway.total(resubmitted) for gateway in gateways]
    # Each gateway had one of its two streams there, and left the other where it was.
    assert after == [requests + 1 for requests in before]
    assert survivor.total("pagemesh_tokenizer_requests_refused_total") == refused
    wait_until(lambda: is_whole(whole_mesh), RECOVERY_S)
    assert victim.process.pid not in [each.pid for each in whole_mesh.all_of("tokenizer")]


async def test_a_killed_gateway_costs_its_own_streams_alone(
    whole_mesh: MeshProcess, undisturbed: str
) -> None:
    victim, survivor = parts_of(whole_mesh, "gateway")
    told = await streams_during([victim.url, survivor.url] * 2, victim.process)
    assert [each.broken for each in told] == [True, False] * 2
    assert [each.text for each in told if not each.broken] == [undisturbed] * 2
    # While its successor is not ready the kernel gives every connection to the other.
    assert served_until_whole(whole_mesh)
    assert victim.process.pid not in [each.pid for each in whole_mesh.all_of("gateway")]
    in_flight = "pagemesh_tokenizer_requests_in_flight"
    for tokenizer in parts_of(whole_mesh, "tokenizer"):
        wait_until(lambda part=tokenizer: part.total(in_flight) == 0, RECOVERY_S)


def test_a_batch_outlives_the_gateway_that_runs_it(whole_mesh: MeshProcess) -> None:
    lines = [
        {
            "custom_id": f"r{i}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {
                **STORY,
                "prompt": f"{STORY['prompt']} {i}",
                "max_tokens": 8,
                "ignore_eos": True,
            },
        }
        for i in range(N_LINES)
    ]
    with openai.OpenAI(base_url=f"{whole_mesh.base_url}/v1", api_key="none") as client:
        content = "\n".join(map(json.dumps, lines)).encode()
        file = client.files.create(file=("in.jsonl", content), purpose="batch")
        batch = client.batches.create(
            input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
        )

        def counts() -> tuple[int, int]:
            found = client.batches.retrieve(batch.id)
            assert found.request_counts is not None
            return found.request_counts.completed, found.request_counts.failed

        wait_until(lambda: counts()[0] > 0, RECOVERY_S)
        running = "pagemesh_batches_running"
        (victim,) = [each for each in parts_of(whole_mesh, "gateway") if each.total(running)]
        victim.process.kill()
        n_before = counts()[0]
        assert n_before < N_LINES
        wait_until(lambda: client.batches.retrieve(batch.id).status == "completed", RECOVERY_S)
        assert counts() == (N_LINES, 0)
        done = client.batches.retrieve(batch.id)
        assert done.output_file_id is not None
        assert done.error_file_id is None
        answers = [
            json.loads(each) for each in client.files.content(done.output_file_id).text.splitlines()
        ]
        assert [each["custom_id"] for each in answers] == [f"r{i}" for i in range(N_LINES)]
        for answer in answers:
            assert answer["response"]["body"]["usage"]["completion_tokens"] == 8
        assert client.files.retrieve(done.output_file_id).purpose == "batch_output"
        another = client.batches.create(
            input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
        )
        client.batches.cancel(another.id)
        wait_until(lambda: client.batches.retrieve(another.id).status == "cancelled", RECOVERY_S)
        assert [each.id for each in client.batches.list(limit=1)] == [another.id, batch.id]
        assert {client.files.delete(each.id).deleted for each in client.files.list()} == {True}


def test_another_mesh_does_not_share_the_port(whole_mesh: MeshProcess) -> None:
    port = whole_mesh.base_url.rpartition(":")[2]
    for flags in (TWO_OF_EACH, ()):
        done = subprocess.run(
            serve_command("--port", port, *flags),
            capture_output=True,
            text=True,
            env=clean_environ(),
        )
        assert done.returncode == 2
        assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in done.stderr
