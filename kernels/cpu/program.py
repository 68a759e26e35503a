"""A decoder as a list of operations, run by a team of threads in one call.

The CPU's counterpart of a captured graph: the list is made once, a step brings its batch, and no
Python stands between two operations. Between them threads wait for each other (see sync).
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pagemesh.kernels.cpu.attention import attend
from pagemesh.kernels.cpu.jit import inlined, kernel
from pagemesh.kernels.cpu.matmul import matmul, matmul_items
from pagemesh.kernels.cpu.rows import angles, embed, rms_norm, rotate, store_key, store_value
from pagemesh.kernels.cpu.sync import claim, finish, wait
from pagemesh.kernels.cpu.tile import PANEL

EMBED: Final = 0
NORM: Final = 1
MATMUL: Final = 2
ROTATE: Final = 3
ATTEND: Final = 4
ANGLES: Final = 5

_FIELDS: Final = (
    "kind", "layer", "x", "x_stride", "out", "out_stride", "weight", "scale", "bias", "n", "k",
    "panel_elements", "then", "window", "to_logits",
)  # fmt: skip
OP: Final = np.dtype([(field, np.int64) for field in _FIELDS])
"""An operation. `x` and `out` are where the first row begins in the buffers, strides the elements
between rows; `weight` is a place in the weights (EMBED, MATMUL) or the constants (NORM; ANGLES: the
rotary frequencies; ROTATE: the query norm, followed by the key norm), negative for none; `scale`
and `bias` are places in the constants, negative for none. MATMUL: [n, k], `then` as in matmul; with
`to_logits` the result goes to the logits instead of the buffers. EMBED: rows of k features. ANGLES
gives head_dim / 2 cosines and as many sines, which are ROTATE's `out`. ATTEND: `window` tokens,
0: all."""

_ROWS_PER_ITEM: Final = 4


class Dims(NamedTuple):
    """What all operations of a model share."""

    hidden_size: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    rms_norm_eps: np.float32
    attention_scale: np.float32
    rotary_factor: np.float32
    inputs_at_once: int


class Weights(NamedTuple):
    """`matrices`: packed (see tile) in the dtype they are kept in; `constants`: float32 norms,
    biases and scales."""

    matrices: NDArray[np.generic]
    constants: NDArray[np.float32]


class Pages(NamedTuple):
    """The KV pool, one-dimensional: [layer][K or V][block][KV head][page]. A page of K is
    [head_dim, block_tokens], one of V [block_tokens, head_dim]."""

    pool: NDArray[np.generic]
    num_blocks: int
    block_tokens: int


class Rows(NamedTuple):
    """A step's batch of T tokens and R sequences.

    token_ids, positions and slot_mapping int64[T]; tables int32[R, blocks]; work int64[W, 4]: row,
    first token in the batch, its position in the sequence, how many tokens. Each entry is computed
    once for every KV head.
    """

    token_ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    slot_mapping: NDArray[np.int64]
    tables: NDArray[np.int32]
    work: NDArray[np.int64]


class Space(NamedTuple):
    """float32 memory of a step: buffers between operations, logits, and scratch [thread, …]."""

    buffers: NDArray[np.float32]
    logits: NDArray[np.float32]
    scratch: NDArray[np.float32]


@inlined
def _items(op, n_rows, n_threads, dims, rows):
    if op.kind == MATMUL:
        return matmul_items((op.n + PANEL - 1) // PANEL, n_rows, n_threads)
    if op.kind == ATTEND:
        return len(rows.work) * dims.n_kv_heads
    return (n_rows + _ROWS_PER_ITEM - 1) // _ROWS_PER_ITEM


@inlined
def _compute(op, item, n_rows, n_threads, dims, weights, pages, rows, space, s):
    if op.kind == MATMUL:
        out = space.logits if op.to_logits else space.buffers
        matmul(op, item, n_rows, n_threads, space.buffers, weights.matrices, weights.constants,
               out, space.scratch, s)  # fmt: skip
    elif op.kind == ATTEND:
        _attend(op, item, dims, pages, rows, space, s)
    else:
        for row in range(item * _ROWS_PER_ITEM, min(n_rows, (item + 1) * _ROWS_PER_ITEM)):
            _row(op, row, dims, weights, pages, rows, space.buffers)


@inlined
def _row(op, row, dims, weights, pages, rows, buffers):
    x, out = op.x + row * op.x_stride, op.out + row * op.out_stride
    if op.kind == NORM:
        rms_norm(buffers, x, dims.hidden_size, weights.constants, op.weight,
                 dims.rms_norm_eps, buffers, out)  # fmt: skip
    elif op.kind == EMBED:
        embed(weights.matrices, op.weight, dims.inputs_at_once, weights.constants, op.scale,
              rows.token_ids[row], dims.hidden_size, buffers, out)  # fmt: skip
    elif op.kind == ANGLES:
        angles(rows.positions[row], weights.constants, op.weight, dims.head_dim // 2,
               dims.rotary_factor, buffers, out)  # fmt: skip
    else:
        _rotate(op, x, out, dims, weights.constants, buffers)
        if rows.slot_mapping[row] >= 0:
            _store(op, row, x, dims, pages, rows, buffers)


@inlined
def _rotate(op, x, turn, dims, constants, buffers):
    """Norm (where the model has one) and turn the heads of q and k."""
    half = dims.head_dim // 2
    for head in range(dims.n_heads + dims.n_kv_heads):
        at = x + head * dims.head_dim
        if op.weight >= 0:
            norm = op.weight + (0 if head < dims.n_heads else dims.head_dim)
            rms_norm(buffers, at, dims.head_dim, constants, norm, dims.rms_norm_eps, buffers, at)
        rotate(buffers, at, half, turn)


@inlined
def _store(op, row, x, dims, pages, rows, buffers):
    block, offset = divmod(rows.slot_mapping[row], pages.block_tokens)
    page_elements = pages.block_tokens * dims.head_dim
    for head in range(dims.n_kv_heads):
        k = x + (dims.n_heads + head) * dims.head_dim
        v = k + dims.n_kv_heads * dims.head_dim
        k_page = _page(op.layer, 0, block, head, dims, pages, page_elements)
        v_page = _page(op.layer, 1, block, head, dims, pages, page_elements)
        store_key(buffers, k, dims.head_dim, pages.pool, k_page, offset, pages.block_tokens)
        store_value(buffers, v, dims.head_dim, pages.pool, v_page, offset)


@inlined
def _page(layer, which, block, head, dims, pages, page_elements):
    place = (layer * 2 + which) * pages.num_blocks + block
    return (place * dims.n_kv_heads + head) * page_elements


@inlined
def _attend(op, item, dims, pages, rows, space, s):
    row, token, first, count = rows.work[item // dims.n_kv_heads]
    head = item % dims.n_kv_heads
    group = dims.n_heads // dims.n_kv_heads
    page_elements = pages.block_tokens * dims.head_dim
    k_pages = _page(op.layer, 0, 0, head, dims, pages, page_elements)
    v_pages = _page(op.layer, 1, 0, head, dims, pages, page_elements)
    columns = head * group * dims.head_dim
    attend(
        space.buffers, op.x + token * op.x_stride + columns, op.x_stride,
        first, count, group, dims.head_dim, dims.attention_scale, op.window,
        pages.pool, k_pages, v_pages, dims.n_kv_heads * page_elements, rows.tables[row],
        pages.block_tokens, space.scratch, s,
        space.buffers, op.out + token * op.out_stride + columns, op.out_stride,
    )  # fmt: skip


@kernel
def run(
    rank: int, n_threads: int, tag: int, words: NDArray[np.int64], ops: NDArray[np.void],
    n_rows: int, dims: Dims, weights: Weights, pages: Pages, rows: Rows, space: Space,
) -> None:  # fmt: skip
    """One thread's share of all operations on `n_rows` rows."""
    s = rank * (len(space.scratch) // n_threads)
    for phase in range(len(ops)):
        op = ops[phase]
        items = _items(op, n_rows, n_threads, dims, rows)
        while True:
            item = claim(words, phase, tag, items)
            if item < 0:
                break
            _compute(op, item, n_rows, n_threads, dims, weights, pages, rows, space, s)
            finish(words, phase, tag)
        if not wait(words, phase, tag, items):
            return
