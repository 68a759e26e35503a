"""Triton kernels: on a card if there is one, in Triton's interpreter otherwise."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch


def _accept_scalar_bounds() -> None:
    """Let loops have bounds that are known at run time: Triton 3.6's interpreter keeps a scalar as
    an array of one element, which numpy 2.4 no longer takes for an index."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patch_and_index(tensor: type, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda scalar: scalar.handle.data.item())

    interpreter._patch_lang_tensor = patch_and_index


ON_CARD = torch.cuda.is_available()
if not ON_CARD:
    os.environ["TRITON_INTERPRET"] = "1"  # as tests/conftest.py does, for this folder by itself
    _accept_scalar_bounds()
sys.path.insert(0, str(Path(__file__).parents[1] / "kernels"))

# The references compute on the CPU, in as many processes at once as there are workers.
workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
torch.set_num_threads(max(1, (os.cpu_count() or 1) // workers))


@pytest.fixture
def device() -> str:
    return "cuda" if ON_CARD else "cpu"


@pytest.fixture(params=[torch.float32, torch.bfloat16] if ON_CARD else [torch.float32], ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    """The interpreter's bfloat16 products are wrong, so it gets float32 only."""
    chosen: torch.dtype = request.param
    return chosen
