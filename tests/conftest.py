"""Fixtures shared by every room's tests."""

from __future__ import annotations

import logging
import os
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
import redis
import structlog
from mesh_process import SMALL_MESH, MeshProcess, running_mesh
from redis.backoff import ConstantBackoff
from redis.retry import Retry

from pagemesh.embedded_valkey import embedded_valkey
from pagemesh.prepare import prepare
from pagemesh.shared.settings import ModelSettings
from pagemesh.supervisor import guarded

# No test is timed: a busy machine makes any example slow.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")

# Some tests configure logging in this process, and others look at what is logged: no logger may
# hold on to a configuration of the past.
_configure = structlog.configure
structlog.configure = lambda **kept: _configure(**{**kept, "cache_logger_on_first_use": False})


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    yield
    structlog.reset_defaults()
    root = logging.getLogger()
    for handler in root.handlers[:]:
        if type(handler) is logging.StreamHandler:  # pytest has its own kinds
            root.removeHandler(handler)
    root.setLevel(logging.WARNING)


# Before any test imports torch: the suite shares its cores with the processes it starts.
os.environ.setdefault("GOMP_SPINCOUNT", "3000")


def _sees_a_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


if not _sees_a_gpu():
    # Triton reads it when a kernel is defined, and tests of several rooms import kernels.
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_addoption(parser: pytest.Parser) -> None:
    """For tests of which `make fuzz` and `make test-clients` want more."""
    parser.addoption("--fuzz-requests", type=int, default=1000, help="how many hostile requests")
    parser.addoption("--fuzz-seed", default="0", help="what they are drawn from")
    parser.addoption("--runs", type=int, default=6, help="how many answers of a form are drawn")


@pytest.fixture(scope="session")
def n_runs(pytestconfig: pytest.Config) -> int:
    """How often an answer is asked for that may be any, but of a form."""
    runs: int = pytestconfig.getoption("--runs")
    return runs


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a GPU where there is none."""
    needy = [item for item in items if item.get_closest_marker("gpu")]
    if needy and not _sees_a_gpu():
        for item in needy:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


@pytest.fixture(scope="session")
def smollm2_folder() -> Path:
    """The prepared folder of the real SmolLM2-135M-Instruct, kept in the user's cache."""
    return prepare(ModelSettings())


@pytest.fixture(scope="session")
def redis_url() -> Iterator[str]:
    """A real Valkey for the whole session; isolate tests with `mesh_name`."""
    with embedded_valkey() as valkey:
        server = subprocess.Popen(
            guarded(valkey.spec.command), stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
        )
        assert server.stdin is not None
        server.stdin.write(valkey.spec.config)
        server.stdin.close()
        wait_for_redis(valkey.url)
        yield valkey.url
        server.terminate()
        server.wait()


@pytest.fixture(scope="session")
def mesh(smollm2_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[MeshProcess]:
    """The real mesh with the real model in float32. Leave its processes alone."""
    assert smollm2_folder.is_dir()
    with running_mesh(tmp_path_factory.mktemp("mesh"), *SMALL_MESH) as running:
        yield running


@pytest.fixture
def mesh_name() -> str:
    """A prefix of keys that no other test uses."""
    return f"test-{uuid.uuid4().hex[:8]}"


def wait_for_redis(url: str) -> None:
    retry = Retry(ConstantBackoff(0.02), retries=500, supported_errors=(redis.ConnectionError,))
    with redis.Redis.from_url(url, retry=retry) as client:
        client.ping()
