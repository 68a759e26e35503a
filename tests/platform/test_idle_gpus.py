"""What `serve` says of GPUs that nobody uses."""

from __future__ import annotations

import shlex
import stat
import sys
from pathlib import Path

import pytest

from pagemesh import idle_gpus as module
from pagemesh.idle_gpus import Gpu, idle_gpus, idle_hint, list_gpus, parse_gpus, visible_gpus
from pagemesh.shared.settings import (
    GatewaySettings,
    MeshSettings,
    ModelSettings,
    ParallelSettings,
    Settings,
)

LISTED = """\
0, GPU-aa11, 131072
1, GPU-bb22, 4
2, GPU-cc33, [N/A]
3, GPU-dd44, 0
"""
GPUS = parse_gpus(LISTED)
SETTINGS = Settings(
    model=ModelSettings(model="a model"),
    gateway=GatewaySettings(port=9000),
)


def test_cards_that_do_not_tell_are_left_out() -> None:
    aa, bb, dd = Gpu("0", "GPU-aa11", 131072), Gpu("1", "GPU-bb22", 4), Gpu("3", "GPU-dd44", 0)
    assert parse_gpus(LISTED) == [aa, bb, dd]
    assert parse_gpus("No devices were found\n") == []


@pytest.mark.parametrize(
    ("chosen", "indices"),
    [
        (None, "013"),
        ("3,0", "30"),
        ("GPU-bb, 0", "10"),
        ("", ""),
        ("-1", ""),
        ("0,7,1", "0"),
        ("NoDevFiles", ""),
    ],
)
def test_what_cuda_would_show(chosen: str | None, indices: str) -> None:
    environ = {} if chosen is None else {module.VISIBLE: chosen}
    assert "".join(gpu.number for gpu in visible_gpus(GPUS, environ)) == indices


def hinted(settings: Settings, gpus: list[Gpu]) -> list[str]:
    """The words of the command."""
    hint = idle_hint(settings, gpus)
    assert hint is not None
    return shlex.split(hint.splitlines()[-1])


def test_idle_cards_are_counted_and_put_to_use() -> None:
    hint = idle_hint(SETTINGS, GPUS)
    assert hint is not None
    assert hint.startswith("2 of 3 GPUs unused: ")
    assert hinted(SETTINGS, GPUS) == ["pagemesh", "serve", "a model", "--workers", "3"]


def test_cards_that_others_use_are_left_to_them() -> None:
    gpus = [*GPUS, Gpu("4", "GPU-ee55", 90000)]
    words = hinted(SETTINGS, gpus)
    assert words[0] == "CUDA_VISIBLE_DEVICES=0,1,3"
    assert words[-2:] == ["--workers", "3"]
    both = Settings(mesh=MeshSettings(workers=2))
    assert hinted(both, [gpus[0], gpus[3], gpus[1]])[-2:] == ["--workers", "3"]


@pytest.mark.parametrize("gpus", [[], GPUS[:1]])
def test_nothing_is_said_where_nothing_is_idle(gpus: list[Gpu]) -> None:
    assert idle_hint(SETTINGS, gpus) is None


def test_a_worker_that_fell_back_to_the_cpu_is_named() -> None:
    assert idle_hint(SETTINGS, GPUS[1:2]) == (
        "1 of 1 GPUs unused: the worker computes on the CPU; with --device cuda it says why"
    )


async def test_nobody_is_asked_when_the_cpu_was_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_QUERY", ("/no/such/tool",))
    settings = Settings(parallel=ParallelSettings(device="cpu"))
    assert idle_hint(settings, GPUS) is None
    assert await idle_gpus(settings) is None


def tool(folder: Path, program: str) -> tuple[str, ...]:
    path = folder / "tool"
    path.write_text(f"#!{sys.executable}\n{program}")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return (str(path),)


async def test_the_tool_is_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(module, "_QUERY", tool(tmp_path, f"print({LISTED!r})"))
    monkeypatch.delenv(module.VISIBLE, raising=False)
    assert await list_gpus() == GPUS
    hint = await idle_gpus(SETTINGS)
    assert hint is not None
    assert hint.startswith("2 of 3")


@pytest.mark.parametrize("program", ["raise SystemExit(9)", "import time; time.sleep(600)"])
async def test_a_tool_that_fails_or_hangs_is_passed_over(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, program: str
) -> None:
    monkeypatch.setattr(module, "_QUERY", tool(tmp_path, program))
    monkeypatch.setattr(module, "_TIMEOUT_S", 0.2)
    assert await list_gpus() == []


async def test_without_the_tool_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_QUERY", ("/no/such/tool",))
    assert await list_gpus() == []
