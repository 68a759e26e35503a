"""Fixtures of the scheduler's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from structlog.testing import capture_logs
from structlog.typing import EventDict


@pytest.fixture(autouse=True)
def log_lines() -> Iterator[list[EventDict]]:
    """What was logged; nothing is printed."""
    with capture_logs() as lines:
        yield lines
