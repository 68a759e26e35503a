"""Finding and checking safetensors files without loading them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from pagemesh.prepare.json_file import read_json
from pagemesh.shared.errors import StartupError

INDEX: Final = "model.safetensors.index.json"
_PICKLES: Final = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_MAX_HEADER_BYTES: Final = 100 << 20  # the limit of the safetensors format


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model folder, each checked to be whole.

    Raises StartupError when there are none, a shard is missing, or a file is truncated.
    """
    files = _shards(folder) if (folder / INDEX).is_file() else _single(folder)
    for file in files:
        check_whole(file)
    return files


def _single(folder: Path) -> list[Path]:
    usual = folder / "model.safetensors"
    # Mistral repositories carry a second copy in their own format under this name.
    files = [usual] if usual.is_file() else sorted(folder.glob("*.safetensors"))
    files = [file for file in files if not file.name.startswith("consolidated")]
    if files:
        return files
    if any(next(folder.glob(pattern), None) for pattern in _PICKLES):
        raise StartupError(
            f"{folder} holds its weights only as pickle files, which can run code when loaded: "
            "convert them to safetensors (transformers: save_pretrained)"
        )
    raise StartupError(
        f"{folder} holds no weights (*.safetensors); --load-format dummy runs without any"
    )


def _shards(folder: Path) -> list[Path]:
    weight_map = read_json(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise StartupError(f"{folder / INDEX} has no weight_map: fetch the file again")
    files = [folder / name for name in sorted(set(weight_map.values()))]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise StartupError(
            f"{folder} is incomplete: {len(missing)} of {len(files)} weight files are missing "
            f"({missing[0]} first)"
        )
    return files


def check_whole(file: Path) -> None:
    """Raises StartupError unless the size of `file` is what its header promises.

    The format: uint64 length of a JSON header, the header, then the tensors' bytes.
    """
    size_bytes = file.stat().st_size
    try:
        with file.open("rb") as stream:
            header_bytes = int.from_bytes(stream.read(8), "little")
            if not 0 < header_bytes <= min(size_bytes - 8, _MAX_HEADER_BYTES):
                raise ValueError("header length out of range")
            header = json.loads(stream.read(header_bytes))
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name[:2] != "__"]
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise StartupError(
            f"{file} is no safetensors file or is damaged ({error}): fetch it again"
        ) from error
    promised_bytes = 8 + header_bytes + max(ends, default=0)
    if size_bytes != promised_bytes:
        raise StartupError(
            f"{file} is truncated: {size_bytes} bytes of {promised_bytes}; fetch it again"
        )
