"""Weights at rest: the tensors of a file, read one at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

from safetensors import SafetensorError, safe_open
from torch import Tensor

from pagemesh.shared.errors import StartupError

_FLOATS: Final = ("F64", "F32", "F16", "BF16")
_PART_BYTES: Final = 2**26


class Part(NamedTuple):
    """Some rows of a tensor, in the host's memory: values of any float type."""

    rows: slice
    values: Tensor


class StoredTensor(NamedTuple):
    """`name` is the Hugging Face name. `parts()` reads the tensor of `shape` piece by piece: no
    whole copy of it exists, whatever has to be converted or sent elsewhere."""

    name: str
    shape: tuple[int, ...]
    parts: Callable[[], Iterator[Part]]


def read_safetensors(path: Path) -> Iterator[StoredTensor]:
    """Every tensor of a .safetensors file. Raises StartupError when it is missing or damaged."""
    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (not a dict)
                entry = file.get_slice(name)
                if entry.get_dtype() not in _FLOATS:
                    raise StartupError(
                        f"{path}: {name} is stored as {entry.get_dtype()}; quantised safetensors "
                        "are not supported, use the unquantised model or a GGUF"
                    )
                yield StoredTensor(name, tuple(entry.get_shape()), partial(_parts, file, name))
    except (SafetensorError, OSError) as error:
        raise damaged(path, error) from error


def _parts(file: Any, name: str) -> Iterator[Part]:
    """Views of the mapped file: it is read when they are."""
    tensor = file.get_tensor(name)
    step = max(1, _PART_BYTES // tensor[:1].nbytes)
    for start in range(0, len(tensor), step):
        rows = slice(start, start + step)
        yield Part(rows, tensor[rows])


def damaged(path: Path, error: Exception) -> StartupError:
    """The sentence for a weights file that cannot be read."""
    if not path.exists():
        return StartupError(f"{path} is missing: run `pagemesh prepare` again")
    return StartupError(
        f"{path} cannot be read ({error}): it is truncated or damaged; delete it and fetch the "
        "model again"
    )
