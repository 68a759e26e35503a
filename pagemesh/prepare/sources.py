"""Where a model comes from: a folder, a .gguf file, a Hub id, or a built-in name."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal

from pagemesh.prepare import builtin, hub
from pagemesh.prepare.report import Report
from pagemesh.shared.errors import StartupError
from pagemesh.shared.settings import ModelSettings

# Two parts of letters, digits, '-', '_' and '.', as the Hub accepts them.
_HUB_ID: Final = re.compile(r"\w[\w.-]*/\w[\w.-]*")
_FINGERPRINTED: Final = (
    "*.json",
    "*.safetensors",
    "*.model",
    "*.tiktoken",
    "*.jinja",
    "merges.txt",
)


@dataclass(frozen=True)
class Source:
    """Everything on this machine that a prepared folder is made from.

    `path` is the model folder or the .gguf file. `origin` says where it came from, for people;
    `revision` is the Hub commit, empty for local files. `tokenizer` (a folder) and `template` (the
    text) replace the model's own.
    """

    kind: Literal["folder", "gguf"]
    path: Path
    name: str
    origin: str
    revision: str = ""
    tokenizer: Path | None = None
    template: str | None = None

    def files(self) -> list[Path]:
        """The files whose content the prepared folder depends on."""
        folders = [self.path] if self.kind == "folder" else []
        folders += [self.tokenizer] if self.tokenizer else []
        found = [
            path for folder in folders for kind in _FINGERPRINTED for path in folder.glob(kind)
        ]
        return found + ([self.path] if self.kind == "gguf" else [])


def resolve(model: ModelSettings, report: Report, check_config: Callable[[Path], None]) -> Source:
    """The files of `model`, fetched when they are not here yet.

    `check_config` is shown a Hub model's folder before its weights are fetched. Raises StartupError
    when a name leads nowhere or its files cannot be fetched.
    """
    source = _model_source(model, report, check_config)
    if model.revision and not source.revision:
        raise StartupError(f"--revision {model.revision} is for Hub ids; {source.origin} has none")
    tokenizer = _tokenizer_folder(model) if model.tokenizer else None
    template = read_template(model.chat_template) if model.chat_template else None
    return replace(source, tokenizer=tokenizer, template=template)


def _model_source(
    model: ModelSettings, report: Report, check_config: Callable[[Path], None]
) -> Source:
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
    if _HUB_ID.fullmatch(model.model):
        folder = hub.fetch(model, report, check_config)
        commit = folder.name
        return Source("folder", folder, model.model, f"{model.model}@{commit}", commit)
    raise StartupError(_unknown_name(model.model))


def _folder(path: Path) -> Source:
    """A folder with one .gguf file and no config.json means that file."""
    ggufs = sorted(path.glob("*.gguf"))
    if (path / "config.json").is_file() or not ggufs:
        return Source("folder", path, path.name, str(path))
    if len(ggufs) > 1:
        names = ", ".join(file.name for file in ggufs)
        raise StartupError(f"{path} holds several .gguf files ({names}): name one of them")
    return _gguf(ggufs[0])


def _gguf(path: Path) -> Source:
    if not path.is_file():
        raise StartupError(f"{path}: no such file")
    if path.suffix != ".gguf":
        raise StartupError(f"{path} is neither a model folder nor a .gguf file")
    return Source("gguf", path.resolve(), path.stem, str(path.resolve()))


def _looks_like_path(name: str) -> bool:
    return name.startswith(("/", ".", "~")) or name.count("/") > 1


def _unknown_name(name: str) -> str:
    near = difflib.get_close_matches(name.lower(), builtin.MODELS, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]}?" if near else ""
    return (
        f"{name!r} is no folder, no .gguf file and no built-in name ({', '.join(builtin.MODELS)}), "
        f"and a Hub id has the form organisation/model{hint}"
    )


def _tokenizer_folder(model: ModelSettings) -> Path:
    assert model.tokenizer is not None
    path = Path(model.tokenizer).expanduser()
    if path.is_dir():
        return path.resolve()
    if _looks_like_path(model.tokenizer) or not _HUB_ID.fullmatch(model.tokenizer):
        raise StartupError(f"--tokenizer {model.tokenizer}: no such folder, and no Hub id")
    return hub.fetch_tokenizer(model.tokenizer, trust_remote_code=model.trust_remote_code)


def read_template(option: str) -> str:
    """The text of --chat-template, which is a file or the template itself.

    Raises StartupError when it is a file that cannot be read.
    """
    if "{" in option or "\n" in option:
        return option
    try:
        return Path(option).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise StartupError(f"--chat-template {option}: cannot be read ({error})") from error
