"""The CPU's kernels: compiled by numba, one call per step for all threads of a team.

numba keeps compiled code by the file that a function stands in and does not notice when a function
it calls has changed in another file. So the folder is named after the source of all kernels; numba
reads its name when it is first imported, which is after this.
"""

import os
from hashlib import blake2b
from pathlib import Path


def _code_folder() -> Path:
    digest = blake2b(digest_size=8)
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache, "pagemesh", "kernels", digest.hexdigest()).expanduser()


os.environ.setdefault("NUMBA_CACHE_DIR", str(_code_folder()))
