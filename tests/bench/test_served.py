"""A server under measurement, scripted: it answers, it ends, and nothing stays behind."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import psutil
import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from parts.served import Command, ServerFailed, served

_SCRIPT = Path(__file__).with_name("scripted_process.py")
_TIMEOUT_S = 60.0
SCRIPTED = Command("scripted", f"{sys.executable} {_SCRIPT} {{port}}")


def test_one_that_has_ended_is_noticed(tmp_path: Path) -> None:
    with served(SCRIPTED, tmp_path / "log", _TIMEOUT_S) as server:
        server.check()
        server.await_answer(_TIMEOUT_S)
        server.process.kill()
        server.process.wait()
        with pytest.raises(ServerFailed, match="it ended with -9"):
            server.await_answer(_TIMEOUT_S)
    assert not psutil.pid_exists(server.process.pid)


def test_it_may_have_an_environment_of_its_own(tmp_path: Path) -> None:
    line = f"{sys.executable} -c 'import os; raise SystemExit(os.environ[\"WORD\"])' {{port}}"
    environ = {**os.environ, "WORD": "its last word"}
    with (
        pytest.raises(ServerFailed, match="it ended with 1:\nits last word"),
        served(Command("wordy", line), tmp_path / "log", _TIMEOUT_S, environ=environ),
    ):
        pass


def test_memory_is_watched_unless_it_would_disturb(tmp_path: Path) -> None:
    with served(SCRIPTED, tmp_path / "log", _TIMEOUT_S) as watched:
        pass
    with served(SCRIPTED, tmp_path / "log", _TIMEOUT_S, watches_memory=False) as unwatched:
        pass
    assert watched.memory.total.rss > 0
    assert unwatched.memory.total.rss == 0
