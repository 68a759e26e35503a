"""Reading config, generation config and special ids out of a GGUF file."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from pagemesh.shared.errors import StartupError

# llama.cpp's keys for further ids that end a turn, beside eos_token_id.
_END_KEYS: Final = ("tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")


def write_config(file: Path, target: Path) -> None:
    """Write config.json for the GGUF `file` into folder `target`.

    An architecture that transformers cannot read from a GGUF is written with its name alone; the
    caller's architecture check then refuses it.
    """
    import json

    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    try:
        config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
        values: dict[str, Any] = config.to_dict()
    except (ValueError, KeyError):
        values = {"model_type": _architecture(file)}
    class_name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(values["model_type"])
    values["architectures"] = [class_name] if class_name else []
    (target / "config.json").write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def _architecture(file: Path) -> str:
    return str(_reader(file).fields["general.architecture"].contents())


def end_token_ids(file: Path) -> list[int]:
    """Ids beside eos_token_id that the file says end a turn."""
    fields = _reader(file).fields
    return [int(fields[key].contents()) for key in _END_KEYS if key in fields]


def _reader(file: Path) -> Any:
    from gguf import GGUFReader

    try:
        return GGUFReader(file)
    except Exception as error:
        raise StartupError(f"{file} cannot be read as GGUF ({error}): fetch it again") from error
