"""Who may import whom: the rule of the design, read from the source."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SERVICES = ("gateway", "tokenizer_svc", "scheduler_svc", "worker_svc")
ROOMS = (*SERVICES, "kernels", "shared")
MAY_IMPORT = {
    "gateway": {"shared"},
    "tokenizer_svc": {"shared"},
    "scheduler_svc": {"shared"},
    "worker_svc": {"shared", "kernels"},
    "kernels": set(),
    "shared": set(),
}
TORCH_ROOMS = ("worker_svc", "kernels")


def source_files(room: str) -> list[Path]:
    files = sorted((ROOT / room).rglob("*.py"))
    assert files, f"{room} has no source"
    return files


def imported_modules(file: Path) -> Iterator[str]:
    """Absolute names of every module a file imports, inside functions too."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            assert node.module is not None
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def rooms_imported_by(file: Path) -> set[str]:
    """Rooms a file imports; `pagemesh` itself counts as the room of the people."""
    rooms: set[str] = set()
    for module in imported_modules(file):
        parts = module.split(".")
        if parts[0] == "pagemesh" and len(parts) > 1:
            rooms.add(parts[1] if parts[1] in ROOMS else "pagemesh")
        assert parts[0] not in ROOMS, f"{file} imports {module} by its folder's name"
    return rooms


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_what_it_may(room: str) -> None:
    for file in source_files(room):
        extra = rooms_imported_by(file) - MAY_IMPORT[room] - {room}
        assert not extra, f"{file.relative_to(ROOT)} imports {sorted(extra)}"


@pytest.mark.parametrize("room", [*(room for room in ROOMS if room not in TORCH_ROOMS), "pagemesh"])
def test_torch_is_imported_only_where_tensors_are(room: str) -> None:
    for file in source_files(room):
        path = file.relative_to(ROOT).as_posix()
        if path.startswith(("pagemesh/prepare", "pagemesh/llm")):
            continue
        tops = {module.split(".")[0] for module in imported_modules(file)}
        assert not tops & {"torch", "transformers", "triton"}, path
