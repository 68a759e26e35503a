"""Staged writes and the gathering of a step's inputs, one launch each."""

from __future__ import annotations

from typing import Final

import triton.language as tl
from torch import Tensor

from pagemesh.kernels.batch import BatchState, StepBuffers
from pagemesh.kernels.gpu.kernel import kernel
from pagemesh.kernels.gpu.launch import pdl

_BLOCK: Final = 1024
_TOKENS: Final = 256


def scatter_writes(words: Tensor, n_writes: int, state: BatchState) -> None:
    """See `kernels.batch.scatter_writes`."""
    if n_writes > 0:
        _scatter[(n_writes,)](words, *state, BLOCK=_BLOCK)


@kernel()
def _scatter(words, field_0, field_1, field_2, BLOCK: tl.constexpr):
    write = words + tl.program_id(0) * 4
    field, first = tl.load(write), tl.load(write + 1).to(tl.int64)
    source, n = tl.load(write + 2), tl.load(write + 3)
    target = field_0
    if field == 1:
        target = field_1
    elif field == 2:
        target = field_2
    for done in range(0, n, BLOCK):
        i = done + tl.arange(0, BLOCK)
        tl.store(target + first + i, tl.load(words + source + i, mask=i < n), mask=i < n)


def gather_rows(rows: Tensor, state: BatchState, block_tokens: int, out: StepBuffers) -> None:
    """See `kernels.batch.gather_rows`."""
    n_rows = rows.shape[0]
    if n_rows > 0:
        _gather[(n_rows,)](
            rows,
            state.token_ids,
            state.tables,
            *out,
            state.token_ids.stride(0),
            state.tables.stride(0),
            out.block_tables.stride(0),
            BLOCK_TOKENS=block_tokens,
            BLOCK=_TOKENS,
            PDL=pdl(),
            launch_pdl=pdl(),
            num_warps=1,
        )


@kernel()
def _gather(
    rows, ids, tables,
    token_ids, positions, slot_mapping, query_start, seq_lens, block_tables, slots, next_positions,
    ids_stride, tables_stride, block_tables_stride,
    BLOCK_TOKENS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0)
    slot, start = tl.load(rows + row * 4), tl.load(rows + row * 4 + 1)
    n, first = tl.load(rows + row * 4 + 2), tl.load(rows + row * 4 + 3)
    live = slot >= 0
    n_live = tl.where(live, n, 0)
    end = tl.where(live, start + n, 0)
    tl.store(query_start + row, first)
    tl.store(query_start + row + 1, first + n)  # the next row stores the same
    tl.store(seq_lens + row, end)
    tl.store(slots + row, slot)
    tl.store(next_positions + row, end)
    tl.debug_barrier()  # every thread has read the row
    tl.store(rows + row * 4 + 1, end)
    source = tl.maximum(slot, 0).to(tl.int64)
    ids += source * ids_stride
    table = tables + source * tables_stride
    for done in range(0, n, BLOCK):
        i = done + tl.arange(0, BLOCK)
        wanted = i < n
        position = tl.where(live, start + i, 0)
        token = tl.load(ids + position, mask=i < n_live, other=0)
        block = tl.load(table + position // BLOCK_TOKENS, mask=i < n_live, other=0)
        place = block.to(tl.int64) * BLOCK_TOKENS + position % BLOCK_TOKENS
        tl.store(token_ids + first + i, token.to(tl.int64), mask=wanted)
        tl.store(positions + first + i, position.to(tl.int64), mask=wanted)
        tl.store(slot_mapping + first + i, tl.where(live, place, -1), mask=wanted)
    used = (end + BLOCK_TOKENS - 1) // BLOCK_TOKENS
    n_blocks = tl.maximum(used, 1)
    block_tables += row.to(tl.int64) * block_tables_stride
    for done in range(0, n_blocks, BLOCK):
        i = done + tl.arange(0, BLOCK)
        blocks = tl.load(table + i, mask=i < used, other=0)
        tl.store(block_tables + i, blocks, mask=i < n_blocks)
