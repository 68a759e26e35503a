"""Programs of one operation, on arrays laid out as a decoder lays them out."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from pagemesh.kernels.cpu import matmul
from pagemesh.kernels.cpu.attention import scratch_elements
from pagemesh.kernels.cpu.program import OP, Dims, Pages, Rows, Space, Weights, run
from pagemesh.kernels.cpu.sync import open_phases, phase_words
from pagemesh.kernels.cpu.team import Team
from pagemesh.kernels.cpu.tile import PANEL
from pagemesh.worker_svc.models.packing import as_bits

EPS = 1e-3
ROTARY_FACTOR = 1.25
_POOL_BESIDE = {
    "float32": torch.float32,
    "uint16": torch.bfloat16,
    "int16": torch.float16,
    "int8": torch.bfloat16,
}
TEAMS = {n: Team(n) for n in (1, 2, 3)}


def padded(width: int) -> int:
    return -(-width // PANEL) * PANEL


def dims(*, hidden_size: int = 1, n_heads: int = 1, n_kv_heads: int = 1, head_dim: int = 2) -> Dims:
    """As if weights were float32: `_replace` inputs_at_once for others."""
    scale = np.float32(head_dim**-0.5)
    factor = np.float32(ROTARY_FACTOR)
    return Dims(hidden_size, n_heads, n_kv_heads, head_dim, np.float32(EPS), scale, factor, 1)


def one_op(kind: int, **fields: Any) -> np.ndarray:
    op = np.zeros(1, OP)
    op["kind"] = kind
    op["weight"] = op["scale"] = op["bias"] = -1
    for name, value in fields.items():
        op[name] = value
    return op


def no_rows() -> Rows:
    ints = np.empty(0, np.int64)
    return Rows(ints, ints, ints, np.empty((0, 0), np.int32), np.empty((0, 4), np.int64))


def weights_of(matrices: np.ndarray | None = None, constants: np.ndarray | None = None) -> Weights:
    nothing = np.zeros(0, np.float32)
    return Weights(
        nothing if matrices is None else matrices, nothing if constants is None else constants
    )


def compute(
    op: np.ndarray,
    buffers: Tensor,
    n_rows: int,
    *,
    shape: Dims,
    weights: Weights | None = None,
    pool: Tensor | None = None,
    num_blocks: int = 0,
    block_tokens: int = 1,
    rows: Rows | None = None,
    logits: Tensor | None = None,
    n_threads: int = 1,
) -> None:
    """Run one operation on the float32 `buffers` (and `logits`, `pool`) in place."""
    weights = weights or weights_of()
    if pool is None:  # of the type it has beside these weights, so that no kernel is compiled anew
        pool = torch.empty(0, dtype=_POOL_BESIDE[weights.matrices.dtype.name])
    group = shape.n_heads // shape.n_kv_heads
    most = max(matmul.SCRATCH_ELEMENTS, scratch_elements(group, shape.head_dim))
    scratch = np.full(n_threads * most, np.nan, np.float32)
    space = Space(
        buffers.numpy().reshape(-1),
        (torch.empty(0) if logits is None else logits).numpy().reshape(-1),
        scratch,
    )
    words = phase_words(1)
    open_phases(words, 1, 1)
    pages = Pages(as_bits(pool).reshape(-1), num_blocks, block_tokens)
    rows = rows or no_rows()
    TEAMS[n_threads].run(
        lambda rank: run(rank, n_threads, 1, words, op, n_rows, shape, weights, pages, rows, space)
    )
