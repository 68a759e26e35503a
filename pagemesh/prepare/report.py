"""What the person in front of the terminal is told while a model is prepared."""

from __future__ import annotations

from collections.abc import Callable

import structlog

Report = Callable[[str], None]
"""Takes one sentence about the step that begins now."""


def log_report(sentence: str) -> None:
    structlog.get_logger(__name__).info("prepare", step=sentence)
