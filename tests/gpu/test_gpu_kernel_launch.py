"""Launches find the variant that Triton would choose."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from pagemesh.kernels.gpu import kernel as launching
from pagemesh.kernels.gpu.kernel import Kernel, kernel

STREAM = 7


class FakeJit:
    """Compiles every launch anew and notes it; what it compiled notes its launches."""

    def __init__(self) -> None:
        names = ["x", "n", "scale", "BLOCK", "PDL"]
        defaults = {"PDL": False}
        self.params = [SimpleNamespace(name=name, default=defaults.get(name)) for name in names]
        self.compiled: list[tuple[Any, ...]] = []
        self.launched: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def compile_and_launch(*arguments: Any, **options: Any) -> FakeCompiled:
            self.compiled.append((grid, arguments, options))
            return FakeCompiled(self, len(self.compiled) - 1)

        return compile_and_launch


class FakeCompiled:
    function, packed_metadata = "code", "metadata"

    def __init__(self, jit: FakeJit, number: int) -> None:
        self._jit, self._number = jit, number

    def run(self, x: int, y: int, z: int, stream: int, *rest: Any) -> None:
        assert (stream, *rest[:5]) == (STREAM, "code", "metadata", None, None, None)
        self._jit.launched.append((self._number, (x, y, z), rest[5:]))


@pytest.fixture(autouse=True)
def no_card(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if not request.node.get_closest_marker("gpu"):
        active = SimpleNamespace(
            get_current_device=lambda: 0, get_current_stream=lambda device: STREAM
        )
        monkeypatch.setattr(launching, "driver", SimpleNamespace(active=active))


def test_a_second_launch_takes_what_the_first_compiled() -> None:
    jit = FakeJit()
    launched = Kernel(jit)
    x, y = torch.zeros(64), torch.ones(64)
    launched[(4,)](x, 32, 0.5, BLOCK=16, num_warps=2)
    launched[(5, 2)](y, 48, 0.25, BLOCK=16, num_warps=2)
    assert len(jit.compiled) == 1
    [(number, grid, arguments)] = jit.launched
    assert (number, grid) == (0, (5, 2, 1))
    assert arguments[0] is y
    assert arguments[1:] == (48, 0.25, 16, False)


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        ((torch.zeros(64), 33, 0.5), {"BLOCK": 16}),
        ((torch.zeros(64), 1, 0.5), {"BLOCK": 16}),
        ((torch.zeros(64), 2**32, 0.5), {"BLOCK": 16}),
        ((torch.zeros(64)[1:], 32, 0.5), {"BLOCK": 16}),
        ((torch.zeros(64, dtype=torch.bfloat16), 32, 0.5), {"BLOCK": 16}),
        ((None, 32, 0.5), {"BLOCK": 16}),
        ((torch.zeros(64), 32, 0.5), {"BLOCK": 32}),
        ((torch.zeros(64), 32, 0.5), {"BLOCK": 16, "PDL": True}),
        ((torch.zeros(64), 32, 0.5), {"BLOCK": 16, "num_warps": 8}),
    ],
)
def test_what_triton_tells_apart_is_compiled_apart(
    arguments: tuple[Any, ...], options: dict[str, Any]
) -> None:
    jit = FakeJit()
    launched = Kernel(jit)
    launched[(1,)](torch.zeros(64), 32, 0.5, BLOCK=16)
    launched[(1,)](*arguments, **options)
    assert (len(jit.compiled), jit.launched) == (2, [])


def tiles(*box: int, rows: int = 64) -> TensorDescriptor:
    layout = gl.NVMMASharedLayout.get_default_for([*box], gl.bfloat16)
    x = torch.zeros(rows, 64, dtype=torch.bfloat16)
    return TensorDescriptor(x, [*x.shape], [*x.stride()], [*box], layout)


def test_tensor_maps_of_one_box_are_one_variant() -> None:
    jit = FakeJit()
    launched = Kernel(jit)
    for given in (tiles(16, 64), tiles(16, 64, rows=8), tiles(32, 64)):
        launched[(1,)](given, 32, 0.5, BLOCK=16)
    assert (len(jit.compiled), len(jit.launched)) == (2, 1)


@pytest.mark.gpu
def test_on_a_card() -> None:
    import triton.language as tl

    @kernel()
    def add(x, out, n, by, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
        i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.store(out + i, tl.load(x + i, mask=i < n) + by, mask=i < n)

    for n in (1, 16, 17, 4096, 5000, 5000, 1):
        x = torch.randn(n + 1, device="cuda")[1:]
        out = torch.full_like(x, torch.nan)
        add[(-(-n // 256),)](x, out, n, 2, BLOCK=256)
        assert torch.equal(out, x + 2)
