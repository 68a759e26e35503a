"""Products with pages as they lie in the KV pool, for the few rows of a decode step: a copy of the
keys and values in float32 would cost more than it saves."""

from __future__ import annotations

from typing import Any, Final

from numba import types
from numba.extending import intrinsic

from pagemesh.kernels.cpu.jit import LANES
from pagemesh.kernels.cpu.row_loop import RowLoop
from pagemesh.kernels.cpu.simd import I64, STORED, element_pointer, widen

PAGE_VECTORS: Final = 4
PAGE_COLUMNS: Final = PAGE_VECTORS * LANES


@intrinsic
def score_keys(
    typing: Any, out: Any, c: Any, ldc: Any, x: Any, a: Any, lda: Any, pool: Any,
    b0: Any, b1: Any, b2: Any, b3: Any, stride: Any, k: Any, rows: Any,
) -> Any:  # fmt: skip
    """out[c + r * ldc + j] = Σ x[a + r * lda + i] · pool[b + i * stride + j % LANES], for i < k,
    r < rows and j < PAGE_COLUMNS, where b is b0 for the first LANES columns, b1 for the next …"""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        starts = [element_pointer(context, builder, pool, args[6], at) for at in args[7:11]]
        _emit(context, builder, signature, args, starts, accumulate=False)
        return context.get_dummy_value()

    n = types.intp
    return types.void(out, n, n, x, n, n, pool, n, n, n, n, n, n, n), generate


@intrinsic
def add_values(
    typing: Any, out: Any, c: Any, ldc: Any, x: Any, a: Any, lda: Any, pool: Any, b: Any,
    stride: Any, k: Any, rows: Any,
) -> Any:  # fmt: skip
    """out[c + r * ldc + j] += Σ x[a + r * lda + i] · pool[b + i * stride + j], for i < k, r < rows
    and j < PAGE_COLUMNS."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        start = element_pointer(context, builder, pool, args[6], args[7])
        starts = [builder.gep(start, [I64(v * LANES)]) for v in range(PAGE_VECTORS)]
        _emit(context, builder, signature, args, starts, accumulate=True)
        return context.get_dummy_value()

    n = types.intp
    return types.void(out, n, n, x, n, n, pool, n, n, n, n), generate


def _emit(
    context: Any, builder: Any, signature: Any, args: Any, starts: list[Any], *, accumulate: bool
) -> None:
    """The last three arguments are the stride between inputs, k and the number of rows."""
    out_at = element_pointer(context, builder, signature.args[0], args[0], args[1])
    x_at = element_pointer(context, builder, signature.args[3], args[3], args[4])
    stride, k, rows = args[-3:]
    columns = _Pages(starts, stride, signature.args[6].dtype)
    loop = RowLoop(builder, columns, accumulate=accumulate, ldc=args[2], lda=args[5], k=k)
    loop.emit(out_at, x_at, rows)


class _Pages:
    """row_loop.Columns that lie in up to four places."""

    inputs = 1
    vectors = PAGE_VECTORS

    def __init__(self, starts: list[Any], stride: Any, stored: Any) -> None:
        self._starts = starts
        self._stride = stride
        self._stored = stored

    def weights(self, builder: Any, step: Any) -> list[list[Any]]:
        offset = builder.mul(step, self._stride)
        kind, align = STORED[self._stored], self._stored.bitwidth // 8
        vectors = []
        for start in self._starts:
            at = builder.bitcast(builder.gep(start, [offset]), kind.as_pointer())
            vectors.append(widen(builder, builder.load(at, align=align), self._stored))
        return [vectors]
