"""All kernels are known before the first request, and compiled once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pagemesh.kernels.gpu import kernel as kernel_module
from pagemesh.kernels.gpu.code_folder import VARIABLE, keep_compiled
from pagemesh.kernels.gpu.compile_ahead import noted_launches
from pagemesh.kernels.gpu.kernel import Kernel

PROGRAM = Path(__file__).with_name("compile_ahead_program.py")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("triton")
    environ = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    ran = subprocess.run(
        [sys.executable, str(PROGRAM)],
        capture_output=True,
        text=True,
        check=False,
        env=environ | {VARIABLE: str(folder)},
    )
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout) | {"cubins": len(list(folder.rglob("*.cubin")))}


def test_a_dry_run_reaches_the_kernels_of_every_kind_of_step(found: dict[str, Any]) -> None:
    kinds = {
        "prefill_hopper_kernel",
        "_decode_kernel",
        "_survey_kernel",
        "_penalise_kernel",
        "_scatter",
    }
    assert kinds <= set(found["rehearsed"])


def test_no_later_step_needs_a_kernel_that_the_dry_run_did_not(found: dict[str, Any]) -> None:
    assert found["new_later"] == []


def test_what_was_noted_is_compiled_once_and_found_on_disk(found: dict[str, Any]) -> None:
    half = len(found["hits"]) // 2
    assert half == found["cubins"] > 0
    assert found["hits"] == [False] * half + [True] * half


def test_a_launch_finds_what_was_compiled_ahead(found: dict[str, Any]) -> None:
    assert set(found["at_hand"]) == {True}


class Jit:
    """Triton's part, which notes what it is asked."""

    params = (SimpleNamespace(name="x", default=None),)

    def __init__(self) -> None:
        self.asked: list[str] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*_: object, **__: object) -> SimpleNamespace:
            self.asked.append("launch")
            return SimpleNamespace(run=self._run, function=0, packed_metadata=())

        return launch

    def _run(self, *_: object) -> None:
        self.asked.append("launch again")

    def warmup(self, *_: object, **__: object) -> None:
        self.asked.append("compile")


def test_nothing_is_launched_while_launches_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even what was compiled before: it would read what the others have not written."""
    card = SimpleNamespace(get_current_device=int, get_current_stream=abs)
    monkeypatch.setattr(kernel_module, "driver", SimpleNamespace(active=card))
    jit = Jit()
    kernel = Kernel(jit)
    with noted_launches():
        kernel[(1,)](7)
    kernel[(1,)](7)
    with noted_launches():
        kernel[(1,)](7)
    kernel[(1,)](7)
    assert jit.asked == ["compile", "launch", "compile", "launch again"]


def test_the_folder_is_ours_unless_the_user_has_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(VARIABLE, raising=False)
    folder = keep_compiled()
    assert folder == tmp_path / "pagemesh" / "kernels" / "triton"
    assert folder.is_dir()
    assert os.environ[VARIABLE] == str(folder)
    chosen = tmp_path / "chosen"
    monkeypatch.setenv(VARIABLE, str(chosen))
    assert keep_compiled() == chosen
    assert chosen.is_dir()
    monkeypatch.setenv(VARIABLE, "/dev/null/chosen")
    assert keep_compiled() is None


def test_where_no_folder_can_be_kept_it_is_a_temporary_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setenv(VARIABLE, "")
    folder = keep_compiled()
    assert folder.is_dir()
    assert "pagemesh-kernels-" in folder.name
    folder.rmdir()
