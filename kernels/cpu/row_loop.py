"""Generates the product of a few rows with columns that are held in vectors.

The outer-product kernel of Goto and van de Geijn (2008): for each input, vectors of weights meet
one number of each row; the accumulators stay in registers over all inputs. Every output is summed
over the inputs in order with fused multiply-adds, so its bits do not depend on how many rows are
computed together, nor on where the weights come from.
"""

from __future__ import annotations

from typing import Any, Final, Protocol

from llvmlite import ir
from numba.core import cgutils

from pagemesh.kernels.cpu.jit import LANES, REGISTERS
from pagemesh.kernels.cpu.simd import F32S, I64, call, splat_value


class Columns(Protocol):
    """Where weights come from. `inputs` of them come at once, LANES * `vectors` columns of each."""

    inputs: int
    vectors: int

    def weights(self, builder: Any, step: Any) -> list[list[Any]]:
        """float32 vectors [input][vector] of inputs step * self.inputs and following."""


# By registers and vectors: rows at once, largest first; then accumulators, weights and a spare fill
# the registers. Not every number, since each is code to be compiled: five rows are four and one.
_SIZES: Final = {
    (32, 2): (12, 8, 4, 3, 2, 1),
    (32, 4): (4, 3, 2, 1),
    (16, 2): (6, 4, 3, 2, 1),
    (16, 4): (2, 1),
}


class RowLoop:
    """out[r * ldc + j] (+)= Σ x[r * lda + i] · column j of input i, for i < k."""

    def __init__(
        self, builder: Any, columns: Columns, *, accumulate: bool, ldc: Any, lda: Any, k: Any
    ) -> None:
        self._builder = builder
        self._columns = columns
        self._accumulate = accumulate
        self._ldc, self._lda = ldc, lda
        more = I64(columns.inputs - 1)
        self._steps = builder.sdiv(builder.add(k, more), I64(columns.inputs))

    def emit(self, out: Any, x: Any, rows: Any) -> None:
        """As many rows as fit at a time, then the few that are left."""
        builder = self._builder
        most, *fewer = _SIZES[REGISTERS, self._columns.vectors]
        full = builder.sdiv(rows, I64(most))
        with cgutils.for_range(builder, full) as loop:
            self._rows_from(builder.mul(loop.index, I64(most)), most, out, x)
        done = cgutils.alloca_once_value(builder, builder.mul(full, I64(most)))
        for n in fewer:
            first = builder.load(done)
            following = builder.add(first, I64(n))
            with builder.if_then(builder.icmp_signed("<=", following, rows)):
                self._rows_from(first, n, out, x)
                builder.store(following, done)

    def _rows_from(self, first: Any, n: int, out: Any, x: Any) -> None:
        self._tile(n, self._row(out, first, self._ldc), self._row(x, first, self._lda))

    def _row(self, pointer: Any, index: Any, stride: Any) -> Any:
        return self._builder.gep(pointer, [self._builder.mul(index, stride)])

    def _tile(self, rows: int, out: Any, x: Any) -> None:
        """`rows` rows times the columns: accumulators stay in registers over all of k."""
        builder = self._builder
        outs = self._places(out, rows)
        xs = [self._row(x, I64(r), self._lda) for r in range(rows)]
        zero = ir.Constant(F32S, None)
        starts = [builder.load(at, align=4) if self._accumulate else zero for at in outs]
        before, body = builder.block, builder.append_basic_block("k")
        after = builder.append_basic_block("k_done")
        builder.cbranch(builder.icmp_signed(">", self._steps, I64(0)), body, after)

        builder.position_at_end(body)
        step = builder.phi(I64)
        sums = [builder.phi(F32S) for _ in outs]
        ends = self._multiply(sums, xs, step)
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

    def _multiply(self, sums: list[Any], xs: list[Any], step: Any) -> list[Any]:
        builder, inputs = self._builder, self._columns.inputs
        weights = self._columns.weights(builder, step)
        ends = list(sums)
        for row, x in enumerate(xs):
            at = builder.gep(x, [builder.mul(step, I64(inputs))])
            for which in range(inputs):
                number = builder.load(builder.gep(at, [I64(which)]), align=4)
                lanes = splat_value(builder, number)
                for v, column in enumerate(weights[which]):
                    place = row * self._columns.vectors + v
                    args = (lanes, column, ends[place])
                    ends[place] = call(builder, f"llvm.fma.v{LANES}f32", F32S, *args)
        return ends

    def _places(self, out: Any, rows: int) -> list[Any]:
        """Pointers to the result's vectors, row by row."""
        return [
            vector_at(self._builder, self._row(out, I64(row), self._ldc), v)
            for row in range(rows)
            for v in range(self._columns.vectors)
        ]


def vector_at(builder: Any, pointer: Any, v: int, kind: Any = F32S, inputs: int = 1) -> Any:
    """A pointer to the v-th vector from `pointer` on, whose lanes hold `inputs` elements each."""
    at = builder.gep(pointer, [I64(v * LANES * inputs)])
    return builder.bitcast(at, kind.as_pointer())


def _join(phi: Any, *incoming: tuple[Any, Any]) -> None:
    for value, block in incoming:
        phi.add_incoming(value, block)
