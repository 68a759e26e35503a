"""The product of a few rows with a panel of a matrix, held in registers.

A matrix [n, k] is packed into panels of PANEL outputs: per input the panel's weights lie side by
side, so that two vectors of them meet one number of each row (the outer-product kernel of Goto and
van de Geijn, 2008). Every output is summed over k in order with fused multiply-adds, so its bits do
not depend on how many rows are computed together.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

from pagemesh.kernels.cpu.jit import LANES, REGISTERS
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
    splat_value,
    widen,
)

VECTORS: Final = 2
PANEL: Final = VECTORS * LANES
_ROWS: Final = (12, 8, 4, 3, 2, 1) if REGISTERS == 32 else (6, 4, 3, 2, 1)
"""Rows at once, largest first: then the accumulators, the weights and one spare fill the registers.
Not every number, since each is code to be compiled: five rows are four and one."""
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
            loop = _RowLoop(builder, w.dtype, accumulate, ldc=args[2], lda=args[5], k=args[8])
            loop.emit(out_at, x_at, w_at, args[9])
            return context.get_dummy_value()

        n = types.intp
        return types.void(out, n, n, x, n, n, w, n, n, n), generate

    return product


class _RowLoop:
    """Generates the loop over rows: as many as fit at a time, then the few that are left."""

    def __init__(
        self, builder: Any, stored: Any, accumulate: bool, *, ldc: Any, lda: Any, k: Any
    ) -> None:
        self._builder = builder
        self._stored = stored
        self._accumulate = accumulate
        self._ldc, self._lda = ldc, lda
        pair = inputs_at_once(stored)
        self._steps = builder.sdiv(builder.add(k, I64(pair - 1)), I64(pair))

    def emit(self, out: Any, x: Any, w: Any, rows: Any) -> None:
        builder = self._builder
        full = builder.sdiv(rows, I64(_ROWS[0]))
        with cgutils.for_range(builder, full) as loop:
            self._rows_from(builder.mul(loop.index, I64(_ROWS[0])), _ROWS[0], out, x, w)
        done = cgutils.alloca_once_value(builder, builder.mul(full, I64(_ROWS[0])))
        for n in _ROWS[1:]:
            first = builder.load(done)
            following = builder.add(first, I64(n))
            with builder.if_then(builder.icmp_signed("<=", following, rows)):
                self._rows_from(first, n, out, x, w)
                builder.store(following, done)

    def _rows_from(self, first: Any, n: int, out: Any, x: Any, w: Any) -> None:
        self._tile(n, self._row(out, first, self._ldc), self._row(x, first, self._lda), w)

    def _row(self, pointer: Any, index: Any, stride: Any) -> Any:
        return self._builder.gep(pointer, [self._builder.mul(index, stride)])

    def _tile(self, rows: int, out: Any, x: Any, w: Any) -> None:
        """`rows` rows times the panel: accumulators stay in registers over all of k."""
        builder = self._builder
        outs = [self._vector_at(self._row(out, I64(r), self._ldc), v) for r, v in _places(rows)]
        xs = [self._row(x, I64(r), self._lda) for r in range(rows)]
        zero = ir.Constant(F32S, None)
        starts = [builder.load(at, align=4) if self._accumulate else zero for at in outs]
        before, body = builder.block, builder.append_basic_block("k")
        after = builder.append_basic_block("k_done")
        builder.cbranch(builder.icmp_signed(">", self._steps, I64(0)), body, after)

        builder.position_at_end(body)
        step = builder.phi(I64)
        sums = [builder.phi(F32S) for _ in outs]
        ends = self._multiply(sums, xs, w, step)
        following = builder.add(step, I64(1))
        builder.cbranch(builder.icmp_signed("<", following, self._steps), body, after)
        _join(step, (I64(0), before), (following, body))
        for total, start, end in zip(sums, starts, ends, strict=True):
            _join(total, (start, before), (end, body))

        builder.position_at_end(after)
        results = [builder.phi(F32S) for _ in outs]
        for result, at, start, end in zip(results, outs, starts, ends, strict=True):
            _join(result, (start, before), (end, body))
            builder.store(result, at, align=4)

    def _multiply(self, sums: list[Any], xs: list[Any], w: Any, step: Any) -> list[Any]:
        builder, pair = self._builder, inputs_at_once(self._stored)
        weights = self._weights(w, step)
        ends = list(sums)
        for row, x in enumerate(xs):
            at = builder.gep(x, [builder.mul(step, I64(pair))])
            for which in range(pair):
                number = builder.load(builder.gep(at, [I64(which)]), align=4)
                lanes = splat_value(builder, number)
                for v in range(VECTORS):
                    place = row * VECTORS + v
                    args = (lanes, weights[which][v], ends[place])
                    ends[place] = call(builder, f"llvm.fma.v{LANES}f32", F32S, *args)
        return ends

    def _weights(self, w: Any, step: Any) -> list[list[Any]]:
        """The panel's weights of this step's inputs, float32: [input][vector]."""
        builder, pair = self._builder, inputs_at_once(self._stored)
        line = builder.gep(w, [builder.mul(step, I64(PANEL * pair))])
        self._prefetch(line, PANEL * pair * self._stored.bitwidth // 8)
        if pair == 2:
            both = [self._vector_at(line, v, I32S, 2) for v in range(VECTORS)]
            raw = [builder.load(at, align=2) for at in both]
            low = [builder.shl(lanes, repeat(I32S, 16)) for lanes in raw]
            high = [builder.and_(lanes, repeat(I32S, -0x10000)) for lanes in raw]
            return [[builder.bitcast(lanes, F32S) for lanes in half] for half in (low, high)]
        kind = {types.float32: F32S, types.int16: I16S, types.int8: I8S}[self._stored]
        raw = [
            builder.load(self._vector_at(line, v, kind), align=self._stored.bitwidth // 8)
            for v in range(VECTORS)
        ]
        return [[widen(builder, lanes, self._stored) for lanes in raw]]

    def _prefetch(self, line: Any, n_bytes: int) -> None:
        byte = self._builder.bitcast(line, I8.as_pointer())
        for offset in range(0, n_bytes, _CACHE_LINE_BYTES):
            at = self._builder.gep(byte, [I64(_PREFETCH_BYTES + offset)])
            read, keep, data = I32(0), I32(3), I32(1)
            call(self._builder, "llvm.prefetch.p0", ir.VoidType(), at, read, keep, data)

    def _vector_at(self, pointer: Any, v: int, kind: Any = F32S, pair: int = 1) -> Any:
        at = self._builder.gep(pointer, [I64(v * LANES * pair)])
        return self._builder.bitcast(at, kind.as_pointer())


def _places(rows: int) -> list[tuple[int, int]]:
    return [(row, v) for row in range(rows) for v in range(VECTORS)]


def _join(phi: Any, *incoming: tuple[Any, Any]) -> None:
    for value, block in incoming:
        phi.add_incoming(value, block)


product = _product(accumulate=False)
add_product = _product(accumulate=True)
