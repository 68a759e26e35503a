"""`prepare`: write the prepared folder of a model, once, atomically."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from pathlib import Path

import msgspec
from filelock import FileLock

from pagemesh.prepare import gguf_file, tokenizer
from pagemesh.prepare.fingerprint import fingerprint
from pagemesh.prepare.report import Report, log_report
from pagemesh.prepare.sources import Source, resolve
from pagemesh.shared.errors import StartupError
from pagemesh.shared.prepared import MANIFEST, PreparedModel, load_prepared, prepared_folder
from pagemesh.shared.settings import ModelSettings


def prepare(model: ModelSettings, *, report: Report = log_report) -> Path:
    """The prepared folder of `model`, written now unless it is there and its source unchanged.

    Safe to call from several processes at once. Raises StartupError, in one sentence, for a model
    that cannot be found, fetched, read or served.
    """
    target = prepared_folder(model)
    if Path(model.model).expanduser().resolve() == target:
        load_prepared(target)
        return target
    source = resolve(model, report)
    mark = _fingerprint(source, model)
    if _is_fresh(target, mark):
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(target.with_name(f"{target.name}.lock")):
        if not _is_fresh(target, mark):
            report(f"preparing {source.name} in {target}")
            _write(source, model, mark, target)
    return target


def _fingerprint(source: Source, model: ModelSettings) -> str:
    files = [source.path] if source.kind == "gguf" else _model_files(source.path)
    return fingerprint(files, [source.revision, model.load_format])


def _model_files(folder: Path) -> list[Path]:
    return [
        path
        for pattern in ("*.json", "*.safetensors", "*.model", "*.jinja")
        for path in folder.glob(pattern)
    ]


def _is_fresh(target: Path, mark: str) -> bool:
    try:
        prepared = load_prepared(target)
    except StartupError:
        return False
    whole = all((target / name).exists() for name in prepared.weights)
    return whole and prepared.fingerprint == mark


def _write(source: Source, model: ModelSettings, mark: str, target: Path) -> None:
    """Write beside the goal and rename, so that a reader sees the old folder or the new one."""
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as scratch:
        new, old = Path(scratch) / "new", Path(scratch) / "old"
        new.mkdir()
        manifest = _fill(source, model, mark, new)
        (new / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest)))
        if target.exists():
            os.rename(target, old)
        os.rename(new, target)


def _fill(source: Source, model: ModelSettings, mark: str, folder: Path) -> PreparedModel:
    if source.kind == "gguf":
        gguf_file.write_config(source.path, folder)
    else:
        for name in ("config.json", "generation_config.json"):
            if (source.path / name).is_file():
                shutil.copyfile(source.path / name, folder / name)
    facts = tokenizer.write_tokenizer(
        source.path if source.kind == "folder" else source.path.parent,
        folder,
        gguf_file=source.path.name if source.kind == "gguf" else None,
        trust_remote_code=model.trust_remote_code,
    )
    config = tokenizer.read_json(folder / "config.json")
    weights = [source.path] if source.kind == "gguf" else list(source.path.glob("*.safetensors"))
    for file in weights:
        (folder / file.name).symlink_to(file)
    return PreparedModel(
        name=source.name,
        source=source.origin,
        architecture=config["architectures"][0],
        weights_format="gguf" if source.kind == "gguf" else "safetensors",
        weights=[file.name for file in weights],
        vocab_tokens=config["vocab_size"],
        max_position_tokens=config["max_position_embeddings"],
        bos_token_id=facts.bos_token_id,
        eos_token_ids=[facts.eos_token_id] if facts.eos_token_id is not None else [],
        template_tokens=facts.special_tokens,
        fingerprint=mark,
        created_s=int(time.time()),
    )
