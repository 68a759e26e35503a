"""Fixtures shared by every room's tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from pagemesh.prepare import prepare
from pagemesh.shared.settings import ModelSettings


@pytest.fixture(scope="session")
def smollm2_folder() -> Path:
    """The prepared folder of the real SmolLM2-135M-Instruct, kept in the user's cache."""
    return prepare(ModelSettings())
