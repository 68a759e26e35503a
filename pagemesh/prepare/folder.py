"""`prepare`: write the prepared folder of a model, once, atomically."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import msgspec
from filelock import FileLock

from pagemesh.prepare.checkpoint import weight_files
from pagemesh.prepare.fingerprint import fingerprint
from pagemesh.prepare.gguf_file import GgufModel
from pagemesh.prepare.json_file import read_json, write_json
from pagemesh.prepare.report import Report, log_report
from pagemesh.prepare.sources import Source, resolve
from pagemesh.shared.errors import StartupError
from pagemesh.shared.prepared import MANIFEST, PreparedModel, load_prepared, prepared_folder
from pagemesh.shared.settings import ModelSettings

CONFIG: Final = "config.json"
GENERATION_CONFIG: Final = "generation_config.json"
TEMPLATE: Final = "chat_template.jinja"


def prepare(model: ModelSettings, *, report: Report = log_report) -> Path:
    """The prepared folder of `model`, written now unless it is there and its source unchanged.

    `report` hears one sentence per long step. Several processes may call this at once. Raises
    StartupError, in one sentence, for a model that cannot be found, fetched, read or served.
    """
    try:
        return _prepare(model, report)
    except OSError as error:
        raise StartupError(
            f"cannot prepare {model.model}: {error} (models are kept in {model.cache_dir}; "
            "--cache-dir chooses another place)"
        ) from error


def _prepare(model: ModelSettings, report: Report) -> Path:
    target = prepared_folder(model)
    if Path(model.model).expanduser().resolve() == target:
        _check_links(target)
        return target
    source = resolve(model, report, check_config)
    mark = fingerprint(source.files(), [source.revision, model.load_format, source.template or ""])
    if _is_fresh(target, mark):
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(target.with_name(f"{target.name}.lock")):
        if not _is_fresh(target, mark):
            report(f"preparing {source.name} in {target}")
            _write(source, model, mark, target)
    return target


def check_config(folder: Path) -> None:
    """Raises StartupError unless the model of folder/config.json can be served."""
    # Late: pagemesh.prepare answers for a prepared folder before it needs the worker's code.
    from pagemesh.worker_svc.models.config import DecoderConfig

    DecoderConfig.from_folder(folder)


def _is_fresh(target: Path, mark: str) -> bool:
    try:
        prepared = load_prepared(target)
    except StartupError:
        return False
    return prepared.fingerprint == mark and all(
        (target / name).exists() for name in prepared.weights
    )


def _check_links(folder: Path) -> None:
    missing = [name for name in load_prepared(folder).weights if not (folder / name).exists()]
    if missing:
        raise StartupError(
            f"{folder / missing[0]} links to weights that are gone: prepare the model again"
        )


def _write(source: Source, model: ModelSettings, mark: str, target: Path) -> None:
    """Write beside the goal and rename, so that a reader finds a whole folder or none."""
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as scratch:
        new = Path(scratch) / "new"
        new.mkdir()
        copy = _copy_gguf if source.kind == "gguf" else _copy_folder
        contents = copy(source.path, new, dummy=model.load_format == "dummy")
        manifest = _finish(source, model, mark, new, contents)
        (new / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest)))
        if target.exists():
            os.rename(target, Path(scratch) / "old")
        os.rename(new, target)


@dataclass(frozen=True)
class _Contents:
    """What a source gave: its weight files and the ids (or lists of ids) that end an answer."""

    weights_format: Literal["safetensors", "gguf", "dummy"]
    weights: list[Path]
    end_ids: list[Any]


def _copy_folder(source: Path, target: Path, *, dummy: bool) -> _Contents:
    end_ids: list[Any] = []
    for name in (CONFIG, GENERATION_CONFIG):
        if name == CONFIG or (source / name).is_file():
            end_ids.append(read_json(source / name).get("eos_token_id"))
            shutil.copyfile(source / name, target / name)
    check_config(target)
    if dummy:
        return _Contents("dummy", [], end_ids)
    return _Contents("safetensors", weight_files(source), end_ids)


def _copy_gguf(source: Path, target: Path, *, dummy: bool) -> _Contents:
    gguf = GgufModel(source)
    write_json(target / CONFIG, gguf.config())
    check_config(target)
    if dummy:
        return _Contents("dummy", [], gguf.end_token_ids())
    return _Contents("gguf", [source], gguf.end_token_ids())


def _finish(
    source: Source, model: ModelSettings, mark: str, folder: Path, contents: _Contents
) -> PreparedModel:
    """Write tokenizer, template and links beside the config; the manifest of it all."""
    # Late: both import much, and a model that is prepared already needs neither.
    from pagemesh.prepare.tokenizer import write_tokenizer
    from pagemesh.worker_svc.models.config import DecoderConfig

    config = DecoderConfig.from_folder(folder)
    facts = write_tokenizer(
        source.tokenizer or source.path, folder, trust_remote_code=model.trust_remote_code
    )
    template = source.template or facts.template
    if template is not None:
        (folder / TEMPLATE).write_text(template, encoding="utf-8")
    for file in contents.weights:
        (folder / file.name).symlink_to(file.resolve())
    return PreparedModel(
        name=source.name,
        source=source.origin,
        architecture=config.architecture,
        weights_format=contents.weights_format,
        weights=[file.name for file in contents.weights],
        vocab_tokens=config.vocab_size,
        max_position_tokens=config.max_position_tokens,
        bos_token_id=facts.bos_token_id,
        eos_token_ids=_all_ids([*contents.end_ids, facts.eos_token_id]),
        template_tokens=facts.special_tokens,
        fingerprint=mark,
        created_s=int(time.time()),
    )


def _all_ids(values: Iterable[Any]) -> list[int]:
    """The distinct ids in values that are each an id, a list of ids, or None."""
    lists = (value if isinstance(value, list) else [value] for value in values)
    return sorted({int(item) for items in lists for item in items if item is not None})
