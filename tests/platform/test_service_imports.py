"""What each service loads in a process of its own, and that its extra brings exactly that."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from importlib.metadata import packages_distributions

import pytest
from installed_closure import closure, extra_requirements, normal

MODULES = {
    "gateway": "pagemesh.gateway.service",
    "tokenizer": "pagemesh.tokenizer_svc.service",
    "scheduler": "pagemesh.scheduler_svc.service",
    "worker": "pagemesh.worker_svc.service",
}
REPORT = """
import importlib, json, pkgutil, sys
from importlib.machinery import PathFinder

class Partial(PathFinder):
    # Does not find what the service's extra does not install.
    absent = set(sys.argv[2].split(","))

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name.split(".")[0] not in cls.absent:
            return super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Partial
import pagemesh.cli, pagemesh.services
package = sys.argv[1].rsplit(".", 1)[0]
importlib.import_module(sys.argv[1])
# Lazily imported parts count too, but for what computes on a GPU: its Triton comes with a CUDA
# build of PyTorch.
for module in pkgutil.walk_packages(importlib.import_module(package).__path__, package + "."):
    if not module.name.startswith("pagemesh.worker_svc.gpu."):
        importlib.import_module(module.name)
loaded = {name: getattr(module, "__file__", None) for name, module in sys.modules.items()}
print(json.dumps(loaded))
"""
# Extension modules of the gateway's dependencies; all are C or Cython. A new one has to be looked
# at: the gateway must not need a Rust toolchain's output.
GATEWAY_EXTENSIONS = {
    "aiohttp",
    "frozenlist",
    "msgspec",
    "multidict",
    "propcache",
    "uvloop",
    "yaml",
    "yarl",
}


@functools.cache
def loaded_by(service: str) -> dict[str, str | None]:
    """Every module in a process that runs `service` with its extra alone, and the files."""
    command = [sys.executable, "-c", REPORT, MODULES[service], ",".join(absent_without(service))]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    modules: dict[str, str | None] = json.loads(done.stdout)
    return modules


def absent_without(service: str) -> set[str]:
    """Top-level names that an environment with only this service's extra does not have."""
    installed = closure(extra_requirements(service)) | {"pagemesh"}
    return {
        name
        for name, owners in packages_distributions().items()
        if not {normal(owner) for owner in owners} & installed
    }


def top_names(service: str) -> set[str]:
    return {name.split(".")[0] for name in loaded_by(service)}


@pytest.mark.parametrize("service", ["gateway", "tokenizer", "scheduler"])
def test_no_torch_and_no_transformers_outside_the_worker(service: str) -> None:
    assert not top_names(service) & {"torch", "transformers", "triton"}


def test_the_gateway_loads_no_tokenizers_and_no_rust() -> None:
    assert not top_names("gateway") & {
        "tokenizers",
        "pydantic",
        "pydantic_core",
        "orjson",
        "jsonschema",
        "rpds",
        "numpy",
    }
    compiled = {
        name.split(".")[0]
        for name, file in loaded_by("gateway").items()
        if file and file.endswith(".so") and "site-packages" in file
    }
    assert {name.lstrip("_") for name in compiled} <= GATEWAY_EXTENSIONS


@pytest.mark.parametrize("service", MODULES)
def test_other_services_are_not_loaded(service: str) -> None:
    own = MODULES[service].split(".")[1]
    rooms = {name.split(".")[1] for name in loaded_by(service) if name.startswith("pagemesh.")}
    others = {module.split(".")[1] for module in MODULES.values()} - {own}
    assert not rooms & others


@pytest.mark.parametrize("service", MODULES)
def test_a_service_starts_with_its_extra_alone(service: str) -> None:
    assert MODULES[service] in loaded_by(service)
    assert "pytest" in absent_without(service)
