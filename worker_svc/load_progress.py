"""How far the weights are: a bar in a terminal, elsewhere a line of the log now and then."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Final

import structlog
from tqdm import tqdm

_PERIOD_S: Final = 3.0
_LINE: Final = "{percentage:.0f}% of {total_fmt}B, {rate_fmt}, {remaining} left"

Tell = Callable[[str], None]
log = structlog.get_logger(__name__)


def loading_bar(
    name: str, total_bytes: int, tell: Tell, *, period_s: float = _PERIOD_S
) -> tqdm[Any]:
    """To be updated with the bytes loaded. Lines go to the log and, as a sentence, to `tell`: none
    of what takes less than `period_s`."""
    if sys.stderr.isatty():
        return tqdm(
            desc="Loading weights", total=total_bytes, unit="B", unit_scale=True, leave=False
        )
    return tqdm(
        total=total_bytes,
        unit="B",
        unit_scale=True,
        leave=False,
        file=_Lines(name, tell),
        bar_format=_LINE,
        mininterval=period_s,
        miniters=1,
        delay=period_s,
    )


class _Lines:
    """What tqdm draws, as lines."""

    def __init__(self, name: str, tell: Tell) -> None:
        self._name = name
        self._tell = tell

    def write(self, drawn: str) -> None:
        line = drawn.strip()
        if line:
            log.info("loading_weights", progress=line)
            self._tell(f"loading the weights of {self._name}: {line}")

    def flush(self) -> None:
        """Lines are whole."""
