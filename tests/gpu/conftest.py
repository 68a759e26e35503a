"""Triton kernels: on a card if there is one, in Triton's interpreter otherwise."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

ON_CARD = torch.cuda.is_available()
if not ON_CARD:
    # Read when a kernel is defined, so before anything imports one.
    os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(Path(__file__).parents[1] / "kernels"))


@pytest.fixture
def device() -> str:
    return "cuda" if ON_CARD else "cpu"


@pytest.fixture(params=[torch.float32, torch.bfloat16] if ON_CARD else [torch.float32], ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    """The interpreter's bfloat16 products are wrong, so it gets float32 only."""
    chosen: torch.dtype = request.param
    return chosen


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not ON_CARD:
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))
