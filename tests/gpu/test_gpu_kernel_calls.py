"""The calls that compute-sanitizer watches on a card: they run, and they reach every kernel."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from parts.kernel_calls import kernel_calls

from pagemesh.kernels.gpu.kernel import Kernel

SLOW = ["window 20", "window 13", "128) pages", "256"]
"""In the interpreter, and other calls reach the same kernels."""
KERNELS = Path(__file__).parents[2] / "kernels" / "gpu"


def all_kernels() -> set[str]:
    """The functions that `kernel` makes launchable."""
    return {
        node.name
        for file in KERNELS.glob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef)
        and any(ast.unparse(one).startswith("kernel(") for one in node.decorator_list)
    }


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Names of the kernels that were launched since."""
    names: set[str] = set()
    if torch.cuda.is_available():
        # Triton's own hook sees the first launch of a variant only, which may be another test's.
        prepare = Kernel.__getitem__

        def noted(kernel: Kernel, grid: tuple[int, ...]) -> Any:
            names.add(kernel.jit.fn.__name__)
            return prepare(kernel, grid)

        monkeypatch.setattr(Kernel, "__getitem__", noted)
        return names
    from triton.runtime.interpreter import GridExecutor

    launch = GridExecutor.__call__

    def noted_launch(executor: Any, *args: Any, **options: Any) -> Any:
        names.add(executor.fn.__name__)
        return launch(executor, *args, **options)

    monkeypatch.setattr(GridExecutor, "__call__", noted_launch)
    return names


def test_every_kernel_is_launched(device, dtype, launched):
    calls = list(kernel_calls(device, dtype))
    assert len({call.name for call in calls}) == len(calls)
    for call in calls:
        if device == "cuda" or not any(part in call.name for part in SLOW):
            call.run()
    expected = all_kernels()
    assert {"_decode_kernel", "_survey_kernel", "_norm_kernel"} <= expected
    assert launched >= expected
