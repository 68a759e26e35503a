"""The model's own sampling parameters, of its generation_config.json, for requests without."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from pagemesh.shared.errors import StartupError
from pagemesh.shared.sampling import SamplingParams

FILE: Final = "generation_config.json"
OF_MODEL: Final = "auto"
OFF: Final = "vllm"
_MOST: Final = 2**31 - 1
# Its names, and ours.
_NAMES: Final = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}


class GenerationConfig(msgspec.Struct, frozen=True):
    """`defaults` by the names of SamplingParams, without those that are its defaults anyway;
    `max_tokens` limits an answer whose request does not. `eos_token_ids` end answers as well."""

    defaults: dict[str, int | float] = {}
    eos_token_ids: list[int] = []


def generation_config(folder: Path, setting: str) -> GenerationConfig:
    """As `setting` says: "auto" is that of the prepared `folder`, "vllm" none, else that of a
    folder. Raises StartupError for one that cannot be used."""
    path = (folder if setting in (OF_MODEL, OFF) else Path(setting).expanduser()) / FILE
    if setting == OFF or (setting == OF_MODEL and not path.is_file()):
        return GenerationConfig()
    try:
        given = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        return GenerationConfig(_defaults(given), _ids(given.get("eos_token_id")))
    except (OSError, ValueError, TypeError) as error:
        raise StartupError(
            f"{path} cannot be used ({error}): set --generation-config to {OFF}, or to a folder "
            "with another one"
        ) from error


def _defaults(given: dict[str, Any]) -> dict[str, int | float]:
    """Raises ValueError or TypeError for what is no such parameter."""
    found = {ours: given[name] for name, ours in _NAMES.items() if given.get(name) is not None}
    params = msgspec.convert(found, _Checked)
    SamplingParams(**msgspec.structs.asdict(params))
    standard = SamplingParams(max_tokens=None)
    return {name: value for name, value in found.items() if value != getattr(standard, name)}


class _Checked(msgspec.Struct):
    """Types of the parameters, and what fits a frame."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: Annotated[int, Meta(le=_MOST)] = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_tokens: Annotated[int, Meta(ge=1, le=_MOST)] | None = None


def _ids(given: Any) -> list[int]:
    """Raises ValueError for what is neither an id nor a list of ids."""
    ids = [] if given is None else given if isinstance(given, list) else [given]
    return msgspec.convert(ids, list[Annotated[int, Meta(le=_MOST)]])
