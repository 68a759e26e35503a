"""One mesh for all clients: the server has another environment than they."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import requests
from asked import KEY
from mesh_process import SMALL_MESH, MeshProcess, running_mesh, wait_until

# Before any test imports litellm, which would fetch prices.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
PROJECT = Path(__file__).parents[3]
_UNFINISHED = re.compile(r"^vllm:num_requests_(?:running|waiting)\{.*\} (\S+)$", re.MULTILINE)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--server-python",
        default=str(PROJECT / ".venv/bin/python"),
        help="the interpreter of an environment with pagemesh",
    )


@pytest.fixture(scope="session")
def mesh(
    pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[MeshProcess]:
    """The real mesh with the real model in float32, which asks for KEY."""
    python = pytestconfig.getoption("--server-python")
    flags = (*SMALL_MESH, "--api-key", KEY)
    with running_mesh(tmp_path_factory.mktemp("mesh"), *flags, python=python) as running:
        yield running


@pytest.fixture(scope="session")
def base_url(mesh: MeshProcess) -> str:
    return f"{mesh.base_url}/v1"


@pytest.fixture
def becomes_idle(mesh: MeshProcess) -> Callable[[], None]:
    """Return once the engine has no request; fail where it keeps one."""

    def unfinished() -> float:
        metrics = requests.get(f"{mesh.base_url}/metrics", timeout=10).text
        return sum(map(float, _UNFINISHED.findall(metrics)))

    return lambda: wait_until(lambda: unfinished() == 0, timeout_s=20)
