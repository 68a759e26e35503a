"""Rows times a packed matrix, with what follows the product done while the result is in cache."""

from __future__ import annotations

from typing import Final

import numpy as np

from pagemesh.kernels.cpu.exponential import exp
from pagemesh.kernels.cpu.jit import LANES, inlined, part
from pagemesh.kernels.cpu.simd import add, div, load, mul, splat, store, sub
from pagemesh.kernels.cpu.tile import PANEL, product

# What follows: the result replaces `out`, is added to it, or is SiLU(gate) * up of a pair of
# panels (gate and up are packed in turn).
STORE: Final = 0
ADD: Final = 1
GATED: Final = 2

ROW_BLOCK: Final = 48
"""Rows of one item: four tiles of rows, whose results stay in the first cache."""
SCRATCH_ELEMENTS: Final = 2 * ROW_BLOCK * PANEL
_ITEMS_PER_THREAD: Final = 8
_ZERO: Final = np.float32(0.0)
_ONE: Final = np.float32(1.0)


@inlined
def matmul_items(n_panels, rows, n_threads):
    """How many items a product is cut into: blocks of rows times groups of panels."""
    blocks = (rows + ROW_BLOCK - 1) // ROW_BLOCK
    group = _group(n_panels, blocks, n_threads)
    return blocks * ((n_panels + group - 1) // group)


@inlined
def _group(n_panels, blocks, n_threads):
    return max(1, n_panels * blocks // (n_threads * _ITEMS_PER_THREAD))


@part
def matmul(op, item, rows, n_threads, buffers, weights, constants, out, scratch, s):
    """One item of `op`, an entry of a program (see program.OP): out = x · W, scaled and biased.

    `scratch` from `s` on belongs to this thread: SCRATCH_ELEMENTS.
    """
    n_panels = (op.n + PANEL - 1) // PANEL
    blocks = (rows + ROW_BLOCK - 1) // ROW_BLOCK
    group = _group(n_panels, blocks, n_threads)
    first_row, first_panel = item % blocks * ROW_BLOCK, item // blocks * group
    n_rows = min(ROW_BLOCK, rows - first_row)
    x = op.x + first_row * op.x_stride
    for panel in range(first_panel, min(first_panel + group, n_panels)):
        to = op.out + first_row * op.out_stride + panel * PANEL
        left = op.n - panel * PANEL
        if op.then == GATED:
            for which in range(2):
                _panel(op, 2 * panel + which, x, n_rows, buffers, weights, constants, scratch,
                       s + which * ROW_BLOCK * PANEL)  # fmt: skip
            _gate(scratch, s, n_rows, out, to, op.out_stride, left)
        else:
            _panel(op, panel, x, n_rows, buffers, weights, constants, scratch, s)
            _put(scratch, s, n_rows, out, to, op.out_stride, left, op.then == ADD)


@inlined
def _panel(op, panel, x, n_rows, buffers, weights, constants, scratch, s):
    """The rows times one panel, scaled and biased, to scratch [n_rows, PANEL]."""
    b = op.weight + panel * op.panel_elements
    product(scratch, s, PANEL, buffers, x, op.x_stride, weights, b, op.k, n_rows)
    if op.scale < 0 and op.bias < 0:
        return
    for c in range(0, PANEL, LANES):
        at = panel * PANEL + c
        scale = load(constants, op.scale + at, LANES) if op.scale >= 0 else splat(_ONE)
        bias = load(constants, op.bias + at, LANES) if op.bias >= 0 else splat(_ZERO)
        for r in range(n_rows):
            place = s + r * PANEL + c
            store(scratch, place, LANES, add(mul(load(scratch, place, LANES), scale), bias))


@inlined
def _put(scratch, s, n_rows, out, to, stride, left, adds):
    for r in range(n_rows):
        for c in range(0, PANEL, LANES):
            value = load(scratch, s + r * PANEL + c, LANES)
            if adds:
                value = add(value, load(out, to + r * stride + c, left - c))
            store(out, to + r * stride + c, left - c, value)


@part
def _gate(scratch, s, n_rows, out, to, stride, left):
    zero, one = splat(_ZERO), splat(_ONE)
    for r in range(n_rows):
        for c in range(0, PANEL, LANES):
            gate = load(scratch, s + r * PANEL + c, LANES)
            up = load(scratch, s + (ROW_BLOCK + r) * PANEL + c, LANES)
            silu = div(gate, add(one, exp(sub(zero, gate))))
            store(out, to + r * stride + c, left - c, mul(silu, up))
