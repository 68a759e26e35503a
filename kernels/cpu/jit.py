"""How the CPU's kernels are compiled, and what the machine's registers hold."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar, cast

from llvmlite import binding
from numba import njit

Function = TypeVar("Function", bound=Callable[..., Any])
# Without Python's exception for a division by zero: IEEE's inf or NaN goes where it belongs, and no
# thread leaves a step with an item undone, for which the others would wait for ever.
_COMMON: Final[dict[str, Any]] = {"nogil": True, "error_model": "numpy"}


def _keeps_code() -> bool:
    folder = Path(os.environ["NUMBA_CACHE_DIR"])
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK)


_KEEPS_CODE: Final = _keeps_code()


def kernel(function: Function) -> Function:
    """Compile at the first call, without the GIL; the code is kept for the next process, unless
    there is no place that may be written."""
    return cast(Function, njit(**_COMMON, cache=_KEEPS_CODE)(function))


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
REGISTERS: Final = 16 if LANES == 8 else 32
"""How many of them there are (AVX-512 and NEON have 32, AVX2 has 16)."""
