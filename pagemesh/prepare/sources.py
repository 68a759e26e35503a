"""Where a model comes from: a folder, a .gguf file, a Hub id, or a built-in name."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pagemesh.prepare import builtin, hub
from pagemesh.prepare.report import Report
from pagemesh.shared.errors import StartupError
from pagemesh.shared.settings import ModelSettings

# Two parts of letters, digits, '-', '_' and '.', as the Hub accepts them.
_HUB_ID = re.compile(r"^[\w][\w.-]*/[\w][\w.-]*$")


@dataclass(frozen=True)
class Source:
    """The files of a model on this machine.

    `path` is the folder, or the .gguf file. `origin` says where they came from, for people;
    `revision` is the Hub commit, empty for local files.
    """

    kind: Literal["folder", "gguf"]
    path: Path
    name: str
    origin: str
    revision: str = ""


def resolve(model: ModelSettings, report: Report) -> Source:
    """The files of `model`, fetched when they are not here yet.

    Raises StartupError when the name leads nowhere or the files cannot be fetched.
    """
    path = Path(model.model).expanduser()
    if path.is_dir():
        return _folder(path.resolve())
    if path.is_file() or path.suffix == ".gguf":
        return _gguf(path)
    if model.model in builtin.MODELS:
        file = builtin.fetch(model.model, Path(model.cache_dir).expanduser(), report)
        return Source("gguf", file, model.model, f"built-in {model.model}")
    if _looks_like_path(model.model):
        raise StartupError(f"{model.model}: no such model folder or .gguf file")
    if _HUB_ID.match(model.model):
        folder, commit = hub.fetch(model.model, model, report, lambda _: None)
        return Source("folder", folder, model.model, f"{model.model}@{commit}", commit)
    raise StartupError(_unknown_name(model.model))


def _folder(path: Path) -> Source:
    """A folder that holds nothing but one .gguf file means that file."""
    ggufs = sorted(path.glob("*.gguf"))
    if not (path / "config.json").is_file() and ggufs:
        if len(ggufs) > 1:
            names = ", ".join(file.name for file in ggufs)
            raise StartupError(f"{path} holds several .gguf files ({names}): name one of them")
        return _gguf(ggufs[0])
    return Source("folder", path, path.name, str(path))


def _gguf(path: Path) -> Source:
    if not path.is_file():
        raise StartupError(f"{path}: no such file")
    if path.suffix != ".gguf":
        raise StartupError(f"{path} is a file but no .gguf: give a model folder or a .gguf file")
    return Source("gguf", path.resolve(), path.stem, str(path.resolve()))


def _looks_like_path(name: str) -> bool:
    return name.startswith(("/", "./", "../", "~")) or name.count("/") > 1


def _unknown_name(name: str) -> str:
    known = ", ".join(builtin.MODELS)
    near = difflib.get_close_matches(name.lower(), builtin.MODELS, n=1, cutoff=0.6)
    hint = f" Did you mean {near[0]}?" if near else ""
    return (
        f"{name!r} is no folder, no .gguf file and no built-in name ({known}); "
        f"a Hub id has the form organisation/model.{hint}"
    )
