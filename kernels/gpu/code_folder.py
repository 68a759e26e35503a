"""Where Triton keeps what it compiles. Imports no Triton: what it reads must be set before."""

from __future__ import annotations

import os
from pathlib import Path
from tempfile import mkdtemp
from typing import Final

from pagemesh.kernels.kept_code import default_folder, writable

VARIABLE: Final = "TRITON_CACHE_DIR"


def keep_compiled() -> Path | None:
    """Choose the folder for this process and those it starts, unless the user has; it is returned,
    if it can be written.

    Triton names what it compiles after its source, the compiler and the card, so that one folder
    serves them all. Where none can be kept it is a temporary one.
    """
    given = os.environ.get(VARIABLE)
    if given:
        return writable(Path(given))
    folder = writable(default_folder() / "triton") or Path(mkdtemp(prefix="pagemesh-kernels-"))
    os.environ[VARIABLE] = str(folder)
    return folder
