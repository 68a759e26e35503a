"""Weights at rest: the tensors of a file, read one at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

from safetensors import SafetensorError, safe_open
from torch import Tensor

from pagemesh.shared.errors import StartupError

_FLOATS: Final = ("F64", "F32", "F16", "BF16")


class StoredTensor(NamedTuple):
    """`name` is the Hugging Face name; `copy_to(view)` reads the tensor into a view of `shape`."""

    name: str
    shape: tuple[int, ...]
    copy_to: Callable[[Tensor], None]


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
                yield StoredTensor(name, tuple(entry.get_shape()), _copier(file, name))
    except (SafetensorError, OSError) as error:
        raise damaged(path, error) from error


def _copier(file: Any, name: str) -> Callable[[Tensor], None]:
    def copy_to(view: Tensor) -> None:
        view.copy_(file.get_tensor(name))

    return copy_to


def damaged(path: Path, error: Exception) -> StartupError:
    """The sentence for a weights file that cannot be read."""
    if not path.exists():
        return StartupError(f"{path} is missing: run `pagemesh prepare` again")
    return StartupError(
        f"{path} cannot be read ({error}): it is truncated or damaged; delete it and fetch the "
        "model again"
    )
