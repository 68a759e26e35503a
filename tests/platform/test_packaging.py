"""The wheel: built from what git knows, complete, and usable where it is installed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest
from installed_closure import closure, extra_requirements

ROOT = Path(__file__).parents[2]
ROOMS = ("gateway", "kernels", "pagemesh", "scheduler_svc", "shared", "tokenizer_svc", "worker_svc")
EXTRAS = {"gateway", "tokenizer", "scheduler", "worker", "prepare", "all", "dev"}


def known_files() -> list[str]:
    """Files of the working tree, without what git ignores."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return [name for name in done.stdout.splitlines() if (ROOT / name).is_file()]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built in a copy, so that no build folder appears in the tree."""
    copy, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for name in known_files():
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, copy / name)
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out)]
    done = subprocess.run([*command, str(copy)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = out.iterdir()
    return built


def test_every_room_is_inside(wheel: Path) -> None:
    inside = set(zipfile.ZipFile(wheel).namelist())
    sources = [name for name in known_files() if name.split("/")[0] in ROOMS]
    for name in sources:
        if name.endswith(".py"):
            expected = name if name.startswith("pagemesh/") else f"pagemesh/{name}"
            assert expected in inside


def test_nothing_else_is_inside(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0].split("-")[0] for name in names} == {"pagemesh"}
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_the_installed_wheel_answers(wheel: Path, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path)], check=True)
    python = tmp_path / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--quiet"]
    subprocess.run([*pip, str(wheel)], check=True)
    (site,) = (tmp_path / "lib").glob("python*/site-packages")
    # The dependencies of this environment, without its editable pagemesh: a path in a .pth file is
    # no site folder, so its own .pth files stay unread.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    command = [str(tmp_path / "bin" / "pagemesh"), "--version"]
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert done.stdout == "pagemesh 0.1.0\n", done.stderr
    where = "import pagemesh.shared.wire as w; print(w.__file__)"
    done = subprocess.run([python, "-c", where], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.startswith(str(site)), done.stderr


def constraints() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().split()
    pins = [re.fullmatch(r"([\w.-]+)==([\w.]+)", line) for line in lines]
    assert all(pins), "every line is an exact pin"
    return {re.sub(r"[-_.]+", "-", pin[1]).lower(): pin[2] for pin in pins if pin}


def test_constraints_pin_everything_that_is_installed() -> None:
    missing = closure(extra_requirements("dev")) - set(constraints()) - {"pagemesh"}
    assert not missing


def test_torch_is_pinned_without_a_build_tag() -> None:
    assert constraints()["torch"] == "2.13.0"


def test_extras_are_the_services() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(project["optional-dependencies"]) >= EXTRAS
    everyday = [lines for name, lines in project["optional-dependencies"].items() if name in EXTRAS]
    assert not [line for lines in everyday for line in lines if line.startswith("triton")]
