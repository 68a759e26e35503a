"""Names that the tests of `prepare` share."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

from pagemesh.shared.settings import ModelSettings

TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}{{ eos_token }}{% endfor %}"
WORDS = "a page table maps the tokens of a sequence to the blocks of the pool, page by page"

Options = Callable[..., ModelSettings]
RunPython = Callable[..., subprocess.CompletedProcess[str]]
