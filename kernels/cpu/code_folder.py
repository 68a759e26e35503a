"""Where compiled kernels are kept.

numba keeps compiled code by the file that a function stands in and does not notice when a function
it calls has changed in another file. So the folder is named after the source of all kernels.
"""

from __future__ import annotations

import os
from hashlib import blake2b
from pathlib import Path
from typing import Final

from pagemesh.kernels.kept_code import default_folder, writable


def _digest() -> str:
    digest = blake2b(digest_size=8)
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    return digest.hexdigest()


CODE_FOLDER: Final = writable(Path(os.environ.get("NUMBA_CACHE_DIR", default_folder()), _digest()))
"""None where no folder can be written."""
