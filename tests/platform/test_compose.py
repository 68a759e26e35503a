"""compose.yaml and the Dockerfile, as far as they can be checked without a container engine: every
command and variable goes through our own command line and settings."""

from __future__ import annotations

import asyncio
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web
from aiohttp.test_utils import TestServer
from certificates import Authority

from pagemesh import cli
from pagemesh.shared.settings import Settings
from pagemesh.shared.settings_sources import ENV_PREFIX, load_settings
from pagemesh.shared.tls import listening_context

ROOT = Path(__file__).parents[2]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text())
TLS: dict[str, Any] = yaml.safe_load((ROOT / "compose.tls.yaml").read_text())
DOCKERFILE = (ROOT / "deploy" / "Dockerfile").read_text()
OURS = ("gateway", "tokenizer", "scheduler", "worker", "prepare")
SHELL = {"PAGEMESH_MESH_SECRET": "s", "PAGEMESH_API_KEY": "k"}


def interpolated(text: str, environ: dict[str, str]) -> str:
    """`${NAME:-default}` and `${NAME:?message}` as compose reads them."""

    def value(match: re.Match[str]) -> str:
        name, operator, rest = match.groups()
        if environ.get(name):
            return environ[name]
        assert operator == ":-", f"{name} must be set: {rest}"
        return rest

    return re.sub(r"\$\{(\w+)(:[-?])([^}]*)\}", value, text)


def settings_of(service: str) -> Settings:
    environment = COMPOSE["services"][service]["environment"]
    environ = {name: interpolated(value, SHELL) for name, value in environment.items()}
    return load_settings({}, None, environ).settings


@pytest.mark.parametrize("service", OURS)
def test_every_command_is_one_of_ours(service: str) -> None:
    command = COMPOSE["services"][service]["command"]
    parser, _ = cli._build_parsers()
    namespace, extras = parser.parse_known_args(command)
    assert namespace.command == service
    assert extras == []


@pytest.mark.parametrize("service", OURS)
def test_every_variable_is_a_setting(service: str) -> None:
    settings = settings_of(service)
    assert settings.mesh.mesh_secret == "s"
    assert settings.mesh.redis_url == "redis://valkey:6379/0"
    assert settings.mesh.service_host == "0.0.0.0"


def test_every_service_sees_the_same_model_in_the_same_place() -> None:
    assert len({repr(settings_of(service).model) for service in OURS}) == 1
    for service in OURS:
        mount, *others = COMPOSE["services"][service]["volumes"]
        assert all(other.startswith("kernels:") for other in others)
        volume, path, *mode = mount.split(":")
        assert volume in COMPOSE["volumes"]
        assert path == settings_of(service).model.cache_dir
        assert mode == ([] if service == "prepare" else ["ro"])


def test_only_the_gateway_is_open_and_it_wants_a_key() -> None:
    published = [name for name, service in COMPOSE["services"].items() if "ports" in service]
    assert published == ["gateway"]
    gateway = settings_of("gateway").gateway
    assert gateway.api_key == ["k"]
    (port,) = COMPOSE["services"]["gateway"]["ports"]
    assert interpolated(port, {}) == f"127.0.0.1:8000:{gateway.port}"


@pytest.mark.parametrize("name", SHELL)
def test_without_its_secrets_compose_does_not_start(name: str) -> None:
    text = (ROOT / "compose.yaml").read_text()
    others = {key: value for key, value in SHELL.items() if key != name}
    with pytest.raises(AssertionError, match=name):
        interpolated(text, others)


@pytest.mark.parametrize("service", OURS[:-1])
def test_health_is_readiness_on_the_services_own_port(service: str) -> None:
    settings = settings_of(service)
    port = settings.gateway.port if service == "gateway" else settings.mesh.service_port
    check = COMPOSE["services"][service]["healthcheck"]["test"]
    assert check[:3] == ["CMD", "python", "-c"]
    assert f"http://127.0.0.1:{port}/ready" in check[3]
    compile(check[3], "healthcheck", "exec")


def test_every_target_is_a_stage_with_the_right_extra() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    stages = dict(re.findall(r"^FROM base AS (\w+)\n(.*?)(?=^FROM|\Z)", DOCKERFILE, re.M | re.S))
    for service in OURS:
        build = COMPOSE["services"][service]["build"]
        assert (ROOT / build["dockerfile"]).is_file()
        stage = stages[build["target"]]
        assert f'CMD ["{service}"]' in stage
        # An extra without packages of its own is what the base installs.
        assert (f"[{service}]" in stage) == bool(extras["optional-dependencies"][service])


def test_the_images_variables_are_no_unknown_settings() -> None:
    assert ENV_PREFIX not in DOCKERFILE


def test_the_worker_may_have_a_gpu() -> None:
    gpu: dict[str, Any] = yaml.safe_load((ROOT / "compose.gpu.yaml").read_text())
    assert gpu["services"].keys() == {"worker"} <= COMPOSE["services"].keys()
    [device] = gpu["services"]["worker"]["deploy"]["resources"]["reservations"]["devices"]
    assert device["capabilities"] == ["gpu"]
    assert interpolated(device["device_ids"][0], {}) == "0"


@pytest.mark.parametrize("service", OURS[:-1])
def test_tls_is_the_same_for_every_service(service: str) -> None:
    more = TLS["services"][service]
    environ = {**COMPOSE["services"][service]["environment"], **more["environment"]}
    interpolate = {name: interpolated(value, SHELL) for name, value in environ.items()}
    mesh = load_settings({}, None, interpolate).settings.mesh
    files = {mesh.mesh_certfile, mesh.mesh_keyfile, mesh.mesh_cafile}
    assert len(files) == 3
    [mount] = more["volumes"]
    folder = interpolated(mount, {}).split(":")[1]
    assert all(str(file).startswith(f"{folder}/") for file in files)


@pytest.mark.parametrize("service", OURS[1:-1])
async def test_health_behind_tls_is_asked_for_as_a_member(service: str, tmp_path: Path) -> None:
    identity = Authority(tmp_path / "ca").issue("member")
    for name, file in zip(("cert.pem", "key.pem", "ca.pem"), identity, strict=True):
        (tmp_path / name).write_bytes(file.read_bytes())

    answers = iter((200, 503))

    async def ready(_: web.Request) -> web.Response:
        return web.Response(status=next(answers))

    app = web.Application()
    app.router.add_get("/ready", ready)
    server = TestServer(app)
    await server.start_server(ssl=listening_context(identity.mesh()))
    _, *command, program = TLS["services"][service]["healthcheck"]["test"]
    program = program.replace("/certificates", str(tmp_path)).replace("7000", str(server.port))
    for exit_code in (0, 1):
        probe = await asyncio.create_subprocess_exec(
            *command, program, stderr=asyncio.subprocess.DEVNULL
        )
        assert await probe.wait() == exit_code
    await server.close()
