"""What `serve` decides before it starts anything, and what it prints once it is ready."""

from __future__ import annotations

import json
import os
import shlex
import socket
from typing import Any

import pytest
from msgspec.structs import replace

from pagemesh import launcher
from pagemesh.banner import banner, gateway_url
from pagemesh.children import line_writer, service_spec, service_specs
from pagemesh.gateway_port import free_port, held_port
from pagemesh.launcher import _complete
from pagemesh.services import run_service
from pagemesh.shared.errors import SettingsError, StartupError
from pagemesh.shared.settings import (
    GatewaySettings,
    LogSettings,
    MeshSettings,
    ModelSettings,
    Settings,
)
from pagemesh.shared.settings_sources import load_settings
from pagemesh.shared.shared_port import shared_socket
from pagemesh.supervisor import ChildSpec

FREE = Settings(gateway=GatewaySettings(port=0))


def pasted(text: str) -> list[str]:
    """The words a shell makes of the printed curl."""
    return shlex.split(text[text.index("curl ") :].replace("\\\n", " "))


def test_the_printed_curl_is_a_request() -> None:
    words = pasted(banner(Settings(), ["tiny"]))
    assert words[:3] == ["curl", "-N", "http://127.0.0.1:8000/v1/chat/completions"]
    body = json.loads(words[words.index("-d") + 1])
    assert (body["model"], body["stream"]) == ("tiny", True)
    assert "-H" in words
    assert "Content-Type: application/json" in words


def test_the_curl_of_a_guarded_mesh_names_certificate_and_key_but_no_secret() -> None:
    gateway = GatewaySettings(api_key=["hidden"], ssl_certfile="c.pem", ssl_keyfile="k.pem")
    text = banner(Settings(gateway=gateway), ["tiny"])
    words = pasted(text)
    assert words[words.index("--cacert") + 1] == "c.pem"
    assert "Authorization: Bearer $YOUR_API_KEY" in words
    assert "https://127.0.0.1:8000" in text
    assert "hidden" not in text


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("0.0.0.0", "http://127.0.0.1:8000"),
        ("::", "http://[::1]:8000"),
        ("::1", "http://[::1]:8000"),
        ("localhost", "http://localhost:8000"),
    ],
)
def test_the_address_is_one_that_this_machine_can_open(host: str, url: str) -> None:
    assert gateway_url(GatewaySettings(host=host)) == url


def test_port_zero_becomes_a_free_port_that_stays() -> None:
    port = _complete(FREE).gateway.port
    with socket.create_server(("127.0.0.1", port)) as server:
        assert server.getsockname()[1] == port > 0


@pytest.mark.parametrize(
    ("host", "reason"), [("127.0.0.1", "Address already in use"), ("203.0.113.1", "Cannot assign")]
)
def test_an_address_that_cannot_be_had_is_one_sentence(host: str, reason: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        gateway = GatewaySettings(host=host, port=taken.getsockname()[1], api_key=["k"])
        with pytest.raises(StartupError, match=reason):
            _complete(Settings(gateway=gateway))


def test_a_host_name_that_does_not_exist_is_one_sentence() -> None:
    gateway = GatewaySettings(host="no.such.host.invalid", api_key=["k"])
    with pytest.raises(StartupError, match=r"no\.such\.host\.invalid:8000: .*not known"):
        _complete(Settings(gateway=gateway))


def test_a_shared_port_is_held_for_the_gateways_and_refused_to_another_mesh() -> None:
    settings = _complete(replace(FREE, mesh=MeshSettings(gateways=2)))
    address = settings.gateway.host, settings.gateway.port
    with held_port(settings):
        assert_taken(settings.gateway)  # while nobody listens yet
        with shared_socket(*address) as one, shared_socket(*address) as other:
            one.listen()
            other.listen()
            assert_taken(settings.gateway)
            with socket.create_connection(address):
                pass
    assert free_port(settings.gateway) == settings.gateway.port


def assert_taken(gateway: GatewaySettings) -> None:
    with pytest.raises(StartupError, match="Address already in use"):
        free_port(gateway)


def test_a_gateway_with_a_port_to_itself_needs_nobody_to_hold_it() -> None:
    settings = _complete(FREE)
    with (
        held_port(settings),
        socket.create_server((settings.gateway.host, settings.gateway.port)),
        pytest.raises(StartupError, match="Address already in use"),
        held_port(replace(settings, mesh=MeshSettings(gateways=2))),
    ):
        pass


def test_gateways_alone_need_a_port_to_share() -> None:
    mesh = MeshSettings(gateways=2, redis_url="redis://127.0.0.1:1")
    with pytest.raises(SettingsError, match=r"--gateways 2 .*--port 0"):
        run_service("gateway", replace(FREE, mesh=mesh))


def test_several_children_of_a_service_have_numbers_and_the_same_command() -> None:
    settings = Settings(mesh=MeshSettings(gateways=2, tokenizers=10))
    workers = Settings(mesh=MeshSettings(workers=2))
    gateways, tokenizers = (service_specs(name, settings) for name in ("gateway", "tokenizer"))
    assert [spec.name for spec in gateways] == ["gateway-1", "gateway-2"]
    assert [spec.name for spec in tokenizers[8:]] == ["tokenizer-9", "tokenizer-10"]
    assert [spec.name for spec in service_specs("worker", workers)] == ["worker-1", "worker-2"]
    assert {spec.command for spec in gateways} == {service_spec("gateway", settings).command}
    assert service_specs("scheduler", settings) == [service_spec("scheduler", settings)]


def test_lines_of_numbered_children_stand_in_one_column(capsys: pytest.CaptureFixture[str]) -> None:
    log = LogSettings(log_format="human")
    write = line_writer(Settings(mesh=MeshSettings(tokenizers=10), log=log))
    for name in ("worker", "tokenizer-10"):
        write(name, "hello")
    assert capsys.readouterr().err == "worker       | hello\ntokenizer-10 | hello\n"


def test_one_port_for_several_services_is_refused() -> None:
    with pytest.raises(SettingsError, match="--service-port 7000 to each") as caught:
        _complete(replace(FREE, mesh=MeshSettings(service_port=7000)))
    assert caught.value.key == "service_port"


@pytest.mark.parametrize(("ending", "code"), [("exit 3", 3), ("kill -KILL $$", 137)])
async def test_the_exit_code_of_prepare_is_one_a_shell_knows(
    ending: str, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = ChildSpec("prepare", ("/bin/sh", "-c", ending), os.environ)
    monkeypatch.setattr(launcher, "service_spec", lambda *_: spec)
    assert await launcher._prepare(FREE) == code


def test_every_mesh_draws_its_own_secret_unless_one_is_given() -> None:
    drawn = {_complete(FREE).mesh.mesh_secret for _ in range(3)}
    assert len(drawn) == 3
    assert all(len(secret) >= 32 for secret in drawn)
    given = replace(FREE, mesh=MeshSettings(mesh_secret="given"))
    assert _complete(given).mesh.mesh_secret == "given"


def test_children_get_settings_and_secrets_by_environment_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PAGEMESH_MAX_NUM_SEQS", "3")
    monkeypatch.setenv("SOMETHING_ELSE", "kept")
    settings = _complete(FREE)
    spec = service_spec("worker", settings)
    assert spec.command[-2:] == ("pagemesh.cli", "worker")
    assert settings.mesh.mesh_secret not in " ".join(spec.command)
    assert spec.environ["SOMETHING_ELSE"] == "kept"
    assert load_settings({}, None, spec.environ).settings == settings


def test_each_model_has_workers_of_its_own() -> None:
    model = ModelSettings(models=["a", "x=./b"])
    settings = Settings(model=model, mesh=MeshSettings(workers=2))
    specs = service_specs("worker", settings)
    assert [spec.name for spec in specs] == [f"worker-{i}" for i in range(1, 5)]
    loaded = [load_settings({}, None, spec.environ).settings for spec in specs]
    assert [each.model.model for each in loaded] == ["a", "a", "./b", "./b"]
    assert loaded[3].model.served_model_name == ["x"]
    # They divide this machine's cores among all of them.
    assert {each.mesh.workers for each in loaded} == {4}
    [tokenizer] = service_specs("tokenizer", settings)
    assert load_settings({}, None, tokenizer.environ).settings == settings


def test_thread_settings_of_the_user_win(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert service_spec("gateway", Settings()).environ["OMP_NUM_THREADS"] == "1"
    assert service_spec("worker", Settings()).environ["OMP_NUM_THREADS"] == "1"
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert service_spec("gateway", Settings()).environ["OMP_NUM_THREADS"] == "7"


@pytest.mark.parametrize(
    ("log_format", "line", "written"),
    [
        ("human", "hello", "worker    | hello"),
        ("json", '{"event": "hello"}', '{"event": "hello"}'),
        ("json", "hello", '{"service": "worker", "level": "error", "event": "hello"}'),
    ],
)
def test_childrens_lines_stay_readable_or_parseable(
    log_format: Any, line: str, written: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line_writer(Settings(log=LogSettings(log_format=log_format)))("worker", line)
    assert capsys.readouterr().err == f"{written}\n"
