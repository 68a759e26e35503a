"""The prepared model folder: what `pagemesh prepare` writes and every service reads.

    pagemesh.json        this schema
    config.json          the Hugging Face config
    tokenizer.json       the fast tokenizer
    chat_template.jinja  absent when the model has none
    generation_config.json  absent when the model has none
    *.safetensors or *.gguf  the weights (links to the source files); none with load_format dummy

Services find the folder from their settings alone, without torch, transformers or a network.
"""

from __future__ import annotations

import re
from hashlib import blake2b
from pathlib import Path
from typing import Literal

import msgspec

from pagemesh.shared.errors import StartupError
from pagemesh.shared.settings import ModelSettings

MANIFEST = "pagemesh.json"
FORMAT = 1


class PreparedModel(msgspec.Struct, frozen=True, kw_only=True):
    """The manifest. `template_tokens` are the special tokens chat templates name (bos_token …)."""

    format: int = FORMAT
    name: str
    source: str
    architecture: str
    weights_format: Literal["safetensors", "gguf", "dummy"]
    weights: list[str]
    vocab_tokens: int
    max_position_tokens: int
    bos_token_id: int | None
    eos_token_ids: list[int]
    template_tokens: dict[str, str]
    fingerprint: str
    created_s: int


def prepared_folder(model: ModelSettings) -> Path:
    """Where the prepared form of `model` is or will be. A folder with a manifest is itself."""
    given = Path(model.model).expanduser()
    if (given / MANIFEST).is_file():
        return given.resolve()
    local = str(given.resolve()) if given.exists() else model.model
    options = (local, model.revision, model.tokenizer, model.chat_template, model.load_format)
    digest = blake2b(repr(options).encode(), digest_size=6).hexdigest()
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", given.name) or "model"
    return Path(model.cache_dir).expanduser() / "prepared" / f"{name}-{digest}"


def served_names(model: ModelSettings) -> list[str]:
    """What clients may call `model`; the first is the primary name. Raises StartupError when the
    name is the model's own and its folder cannot be read."""
    return model.served_model_name or [load_prepared(prepared_folder(model)).name]


def load_prepared(folder: Path) -> PreparedModel:
    """The manifest of `folder`. Raises StartupError when it is missing or of another format."""
    path = folder / MANIFEST
    try:
        prepared = msgspec.json.decode(path.read_bytes(), type=PreparedModel)
    except OSError as error:
        raise StartupError(
            f"{path} is missing: run `pagemesh prepare MODEL` with the same settings first"
        ) from error
    except msgspec.MsgspecError as error:
        raise StartupError(f"{path} is damaged ({error}): delete {folder} and prepare") from error
    if prepared.format != FORMAT:
        raise StartupError(
            f"{folder} was prepared by another version: delete it and run `pagemesh prepare`"
        )
    return prepared
