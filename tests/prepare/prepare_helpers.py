"""Names that the tests of `prepare` share."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

from pagemesh.shared.settings import ModelSettings

Options = Callable[..., ModelSettings]
RunPython = Callable[..., subprocess.CompletedProcess[str]]
