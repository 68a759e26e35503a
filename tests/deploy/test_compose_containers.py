"""compose.yaml, started: every service in a network namespace of its own, asked through the
balancer, scaled, and one of each killed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from composed import Mesh, composed_mesh, why_no_containers
from tiny_llama import save_tiny_llama

pytestmark = [pytest.mark.mesh, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    reason = why_no_containers()
    if reason is not None:
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("compose")
    model = save_tiny_llama(folder / "tiny")
    with composed_mesh(folder, {"PAGEMESH_MODEL": str(model)}) as running:
        yield running
        codes = running.containers.down()
        assert set(codes.values()) == {0}, codes


def test_it_scales_while_it_serves_and_outlives_one_of_each(mesh: Mesh) -> None:
    told = mesh.complete()
    containers = mesh.containers
    containers.start("gateway")
    containers.start("worker")
    mesh.wait_for(lambda: mesh.gateways_in_use() == 2 and mesh.engines() == 2)
    for _ in range(8):
        assert mesh.complete() == told
    first, second = containers.running("gateway")
    assert min(mesh.answered(each.host.address) for each in (first, second)) > 0

    containers.kill(first)
    containers.kill(containers.running("worker")[0])
    for _ in range(8):
        assert mesh.complete() == told


def test_a_stream_passes_whole(mesh: Mesh) -> None:
    stream = mesh.client.chat.completions.create(
        model=mesh.model,
        messages=[{"role": "user", "content": "page"}],
        max_tokens=16,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    chunks = list(stream)
    assert len(chunks) > 2
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].usage.completion_tokens == 16
