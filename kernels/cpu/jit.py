"""How the CPU's kernels are compiled, and what the machine's registers hold."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TypeVar, cast

from llvmlite import binding
from numba import config, njit

from pagemesh.kernels.cpu.code_folder import CODE_FOLDER

Function = TypeVar("Function", bound=Callable[..., Any])
# Without Python's exception for a division by zero: IEEE's inf or NaN goes where it belongs, and no
# thread leaves a step with an item undone, for which the others would wait for ever.
_COMMON: Final[dict[str, Any]] = {"nogil": True, "error_model": "numpy"}


@contextmanager
def _kept_in(folder: Path) -> Iterator[None]:
    """For the functions that are decorated meanwhile; numba's own setting is the user's."""
    before = config.CACHE_DIR
    config.CACHE_DIR = str(folder)
    try:
        yield
    finally:
        config.CACHE_DIR = before


def kernel(function: Function) -> Function:
    """Compile at the first call, without the GIL; the code is kept for the next process, unless
    there is no place that may be written."""
    if CODE_FOLDER is None:
        return cast(Function, njit(**_COMMON)(function))
    with _kept_in(CODE_FOLDER):
        return cast(Function, njit(**_COMMON, cache=True)(function))


def part(function: Function) -> Function:
    """A part of a kernel, compiled once for itself and once more into each function that calls it:
    keep the calls shallow."""
    return cast(Function, njit(**_COMMON)(function))


def inlined(function: Function) -> Function:
    """A few lines of a kernel, compiled where they are called and nowhere else."""
    return cast(Function, njit(**_COMMON, inline="always")(function))


def _lanes() -> int:
    features = binding.get_host_cpu_features()
    if all(features.get(name) for name in ("avx512f", "avx512bw", "avx512vl")):
        return 16
    return 8 if features.get("avx2") else 4


LANES: Final = _lanes()
"""float32 elements of this machine's vector registers."""
REGISTERS: Final = 32 if LANES == 16 or platform.machine() == "aarch64" else 16
"""How many of them there are (AVX-512 and NEON have 32, AVX2 and SSE 16)."""
CONVERTS_FLOAT16: Final = platform.machine() != "x86_64" or binding.get_host_cpu_features().get(
    "f16c", False
)
"""Whether float16 can be loaded and stored; without the instructions the code would crash."""
