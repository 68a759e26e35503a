"""A matrix in panels, and the product of a few rows with one panel.

A matrix [n, k] is packed into panels of PANEL outputs: per input the panel's weights lie side by
side, so that a kernel reads memory in order.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from pagemesh.kernels.cpu.jit import LANES
from pagemesh.kernels.cpu.row_loop import RowLoop, vector_at
from pagemesh.kernels.cpu.simd import (
    F32S,
    I8,
    I8S,
    I16S,
    I32,
    I32S,
    I64,
    call,
    element_pointer,
    repeat,
    widen,
)

VECTORS: Final = 2
PANEL: Final = VECTORS * LANES
# Far enough ahead of the loop that memory answers in time (measured: 1 KiB and none are up to twice
# slower at 8 rows). Past the end nothing is read: a prefetch never faults.
_PREFETCH_BYTES: Final = 4096
_CACHE_LINE_BYTES: Final = 64


def inputs_at_once(stored: Any) -> int:
    """bfloat16 come in pairs of neighbouring inputs: one 32-bit lane holds both."""
    return 2 if stored in (types.uint16, np.dtype(np.uint16)) else 1


def pack(matrix: NDArray[Any], panels: NDArray[Any]) -> None:
    """Write a matrix [n, k] as panels, an array [⌈n / PANEL⌉, panel_elements]. Rows past n become
    zeros; so does a column past k, if k is odd and stored as bfloat16 (uint16)."""
    n, k = matrix.shape
    if inputs_at_once(matrix.dtype) == 2:
        matrix = np.pad(matrix, ((0, 0), (0, 1))) if k % 2 else np.ascontiguousarray(matrix)
        matrix, panels = matrix.view(np.uint32), panels.view(np.uint32)
    by_input = panels.reshape(len(panels), -1, PANEL)
    whole = n // PANEL
    rows = matrix[: whole * PANEL].reshape(whole, PANEL, matrix.shape[1])
    by_input[:whole] = rows.transpose(0, 2, 1)
    if n % PANEL:
        by_input[whole] = 0
        by_input[whole, :, : n % PANEL] = matrix[whole * PANEL :].T


def panel_elements(k: int, stored: Any) -> int:
    """Elements of one panel of a packed matrix with k inputs."""
    pair = inputs_at_once(stored)
    return -(-k // pair) * pair * PANEL


def _product(accumulate: bool) -> Any:
    @intrinsic
    def product(
        typing: Any, out: Any, c: Any, ldc: Any, x: Any, a: Any, lda: Any, w: Any, b: Any, k: Any,
        rows: Any,
    ) -> Any:  # fmt: skip
        """out[c + r * ldc + j] (+)= Σ x[a + r * lda + i] · panel[i, j], for r < rows, j < PANEL.

        `out` and `x` are float32; the panel starts at w[b].
        """

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            out_at, x_at, w_at = (
                element_pointer(context, builder, signature.args[n], args[n], args[n + 1])
                for n in (0, 3, 6)
            )
            loop = RowLoop(
                builder, _Panel(w_at, w.dtype), accumulate=accumulate,
                ldc=args[2], lda=args[5], k=args[8],
            )  # fmt: skip
            loop.emit(out_at, x_at, args[9])
            return context.get_dummy_value()

        n = types.intp
        return types.void(out, n, n, x, n, n, w, n, n, n), generate

    return product


class _Panel:
    """A panel as row_loop.Columns."""

    vectors = VECTORS

    def __init__(self, start: Any, stored: Any) -> None:
        self.inputs = inputs_at_once(stored)
        self._start = start
        self._stored = stored

    def weights(self, builder: Any, step: Any) -> list[list[Any]]:
        line = builder.gep(self._start, [builder.mul(step, I64(PANEL * self.inputs))])
        self._prefetch(builder, line)
        if self.inputs == 2:
            return _halves(builder, line)
        align = self._stored.bitwidth // 8
        kind = {types.float32: F32S, types.int16: I16S, types.int8: I8S}[self._stored]
        raw = [builder.load(vector_at(builder, line, v, kind), align=align) for v in range(VECTORS)]
        return [[widen(builder, lanes, self._stored) for lanes in raw]]

    def _prefetch(self, builder: Any, line: Any) -> None:
        byte = builder.bitcast(line, I8.as_pointer())
        n_bytes = PANEL * self.inputs * self._stored.bitwidth // 8
        for offset in range(0, n_bytes, _CACHE_LINE_BYTES):
            at = builder.gep(byte, [I64(_PREFETCH_BYTES + offset)])
            read, keep, data = I32(0), I32(3), I32(1)
            call(builder, "llvm.prefetch.p0", ir.VoidType(), at, read, keep, data)


def _halves(builder: Any, line: Any) -> list[list[Any]]:
    """Of 32-bit lanes that hold two bfloat16: the lower is the earlier input."""
    raw = [builder.load(vector_at(builder, line, v, I32S, 2), align=2) for v in range(VECTORS)]
    low = [builder.shl(lanes, repeat(I32S, 16)) for lanes in raw]
    high = [builder.and_(lanes, repeat(I32S, -0x10000)) for lanes in raw]
    return [[builder.bitcast(lanes, F32S) for lanes in half] for half in (low, high)]


product = _product(accumulate=False)
add_product = _product(accumulate=True)
