"""compose.yaml and its companions: every command, variable, path and address goes through our own
command line and settings."""

from __future__ import annotations

import re
import sys
from itertools import chain
from pathlib import Path
from typing import Final

import pytest
import yaml

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from parts.compose_files import MissingVariable, Service, interpolated, read_services
from parts.dockerfile import read_targets

from pagemesh import cli
from pagemesh.shared.settings import Settings
from pagemesh.shared.settings_sources import load_settings

ROOT: Final = Path(__file__).parents[2]
SECRETS: Final = {"PAGEMESH_MESH_SECRET": "s", "PAGEMESH_API_KEY": "k"}
FILES: Final = {
    "plain": ["compose.yaml"],
    "gpu": ["compose.yaml", "compose.gpu.yaml"],
    "tls": ["compose.yaml", "compose.tls.yaml"],
}
OURS: Final = ("gateway", "tokenizer", "scheduler", "worker", "prepare")
INNER: Final = ("tokenizer", "scheduler", "worker")
IMAGES: Final = read_targets((ROOT / "deploy/Dockerfile").read_text())
EVERYTHING: Final = [(kind, service) for kind in FILES for service in OURS]


def services(kind: str = "plain", **environ: str) -> dict[str, Service]:
    files = [ROOT / name for name in FILES[kind]]
    return read_services(files, {**SECRETS, **environ}, profiles=["monitoring"])


def settings_of(service: Service) -> Settings:
    """What the container's process reads from its variables. Raises for an unknown setting."""
    assert service.target is not None
    environ = {**IMAGES[service.target].environment, **service.environment}
    return load_settings({}, None, environ).settings


@pytest.mark.parametrize(("kind", "name"), EVERYTHING)
def test_every_command_is_one_of_ours(kind: str, name: str) -> None:
    service = services(kind)[name]
    assert service.target is not None
    image = IMAGES[service.target]
    assert image.entrypoint == ["pagemesh"]
    assert image.command == service.command
    parser, _ = cli._build_parsers()
    namespace, extras = parser.parse_known_args(service.command)
    assert (namespace.command, extras) == (name, [])


@pytest.mark.parametrize(("kind", "name"), EVERYTHING)
def test_every_variable_is_a_setting(kind: str, name: str) -> None:
    settings = settings_of(services(kind)[name])
    assert settings.mesh.mesh_secret == "s"
    if name in INNER:
        assert (settings.mesh.service_host, settings.mesh.service_port) == ("0.0.0.0", 7000)
    tls = kind == "tls" and name != "prepare"
    assert str(settings.mesh.redis_url).startswith("rediss" if tls else "redis://valkey:6379/0")
    assert (settings.mesh.mesh_cafile is not None) == tls


@pytest.mark.parametrize("kind", FILES)
def test_everything_of_the_model_lies_in_the_volume_that_all_share(kind: str) -> None:
    """What the Hub sent too: a prepared folder links to its weights."""
    ours = [services(kind)[name] for name in OURS]
    assert len({repr(settings_of(service).model) for service in ours}) == 1
    for service in ours:
        [models] = [volume for volume in service.volumes if volume.source == "models"]
        assert models.read_only == (service.name != "prepare")
        assert settings_of(service).model.cache_dir == models.path
        hub = Path(IMAGES[service.target or ""].environment["HF_HOME"])
        assert hub.is_relative_to(models.path)


@pytest.mark.parametrize("kind", FILES)
def test_what_is_mounted_exists_and_what_is_named_is_declared(kind: str) -> None:
    declared = yaml.safe_load((ROOT / "compose.yaml").read_text())["volumes"]
    for volume in chain.from_iterable(each.volumes for each in services(kind).values()):
        if volume.is_named:
            assert volume.source in declared
        elif volume.source != "./certificates":
            assert (ROOT / volume.source).exists()
            assert volume.read_only


def test_only_the_balancer_is_open_and_clients_need_a_key() -> None:
    published = {
        name: each.spec["ports"] for name, each in services().items() if "ports" in each.spec
    }
    assert published == {
        "balancer": ["127.0.0.1:8000:8000"],
        "prometheus": ["127.0.0.1:9090:9090"],
        "grafana": ["127.0.0.1:3000:3000"],
    }
    gateway = settings_of(services()["gateway"]).gateway
    assert (gateway.api_key, gateway.admin_key, gateway.port) == (["k"], [], 8000)


def test_monitoring_is_asked_for() -> None:
    asked = read_services([ROOT / "compose.yaml"], SECRETS)
    assert services().keys() - asked.keys() == {"prometheus", "grafana"}


@pytest.mark.parametrize("name", SECRETS)
def test_without_its_secrets_compose_says_what_to_do(name: str) -> None:
    others = {key: value for key, value in SECRETS.items() if key != name}
    with pytest.raises(MissingVariable, match=r"into \.env") as missing:
        read_services([ROOT / "compose.yaml"], others)
    assert missing.value.name == name


def test_the_example_names_every_secret_and_no_stranger() -> None:
    example = (ROOT / ".env.example").read_text()
    asked_for = re.findall(r"^([A-Z_]+)=$", example, re.M)
    assert set(asked_for) == SECRETS.keys()
    known = set(
        re.findall(r"\$\{(\w+)", "".join((ROOT / name).read_text() for name in FILES["tls"]))
    )
    assert set(re.findall(r"^#?([A-Z_]+)=", example, re.M)) <= known


@pytest.mark.parametrize("kind", FILES)
def test_running_requests_may_finish(kind: str) -> None:
    for name in OURS[:-1]:
        service = services(kind)[name]
        settings = settings_of(service)
        assert service.stop_grace_s > settings.mesh.drain_timeout_s + 3
    # The balancer asks twice a second, and needs a moment for it.
    gateway = settings_of(services(kind)["gateway"])
    assert 1 <= gateway.gateway.drain_notice_s < gateway.mesh.drain_timeout_s


def test_each_service_waits_for_the_registry_and_the_model() -> None:
    for name in OURS[:-1]:
        assert dict(services()[name].depends_on) == {
            "valkey": "service_healthy",
            "prepare": "service_completed_successfully",
        }


def test_containers_come_back_and_their_logs_do_not_grow_for_ever() -> None:
    for name, service in services().items():
        assert service.spec["restart"] == ("no" if name == "prepare" else "unless-stopped")
        assert service.spec["logging"] == {"driver": "local"}
        assert ":" in service.spec["image"]


def test_the_worker_may_have_a_gpu() -> None:
    worker = services("gpu")["worker"]
    assert worker.target == "worker-cuda"
    [device] = worker.spec["deploy"]["resources"]["reservations"]["devices"]
    assert (device["capabilities"], device["device_ids"]) == (["gpu"], ["0"])


def test_with_tls_the_registry_is_the_same_one_behind_it() -> None:
    plain, tls = services()["valkey"], services("tls")["valkey"]
    assert tls.command[: len(plain.command)] == plain.command


@pytest.mark.parametrize(
    ("text", "environ", "filled"),
    [
        ("${A:-b}", {}, "b"),
        ("${A:-b}:${C}", {"A": "a", "C": "c"}, "a:c"),
        ("${A:-}", {"A": ""}, ""),
        ("${A:?put it there}", {"A": "a"}, "a"),
    ],
)
def test_variables_are_filled_in(text: str, environ: dict[str, str], filled: str) -> None:
    assert interpolated(text, environ) == filled
