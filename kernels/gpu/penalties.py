"""kernels.penalties on the card, in place on a float32 copy of the logits.

Rows change only if they ask for it: the kernels read that from the rows' parameters.
"""

from __future__ import annotations

from typing import Final

import torch
import triton.language as tl
from torch import Tensor

from pagemesh.kernels.gpu.kernel import kernel
from pagemesh.kernels.gpu.launch import cdiv, pdl
from pagemesh.kernels.gpu.row_params import (
    COUNT_ROW,
    FREQUENCY,
    PRESENCE,
    REPETITION,
    SamplingRows,
    load_float,
    params_of,
)

_SLICE: Final = 2048
_EDITS: Final = 128


def widen(logits: Tensor) -> Tensor:
    """float32 copy of [R, V] `logits` to be edited. What is not finite is NaN in it, so that it can
    be told from what an edit made infinite."""
    n_rows, vocab_tokens = logits.shape
    wide = torch.empty_like(logits, dtype=torch.float32)
    if n_rows > 0:
        _widen_kernel[(cdiv(vocab_tokens, _SLICE), n_rows)](
            logits,
            wide,
            vocab_tokens,
            logits.stride(0),
            wide.stride(0),
            SLICE=_SLICE,
            PDL=pdl(),
            launch_pdl=pdl(),
        )
    return wide


def add_edits(logits: Tensor, edits: Tensor) -> None:
    """logits[row, token] += value for int32[3, N] rows, tokens, and the bits of float32 values.

    A value of -inf bans the token, whatever else is added to it. At most one value of a place may
    be finite: the order of additions is not fixed.
    """
    n_edits = edits.shape[1]
    if n_edits > 0:
        _edit_kernel[(cdiv(n_edits, _EDITS),)](
            logits,
            edits,
            n_edits,
            logits.stride(0),
            BLOCK=_EDITS,
            PDL=pdl(),
            launch_pdl=pdl(),
        )


def apply_penalties(
    logits: Tensor, rows: SamplingRows, seen: Tensor, output_counts: Tensor
) -> None:
    """Penalise float32[R, V] `logits` by bool[N, V] `seen` and int32[N, V] `output_counts`, of
    which each row names its own."""
    n_rows, vocab_tokens = logits.shape
    if n_rows > 0:
        _penalise_kernel[(cdiv(vocab_tokens, _SLICE), n_rows)](
            logits,
            rows.params,
            rows.slots,
            seen.view(torch.int8),
            output_counts,
            vocab_tokens,
            logits.stride(0),
            SLICE=_SLICE,
            PDL=pdl(),
            launch_pdl=pdl(),
        )


def count_tokens(tokens: Tensor, rows: SamplingRows, seen: Tensor, output_counts: Tensor) -> None:
    """Count the sampled tokens, int32[R], of penalised rows in `seen` and `output_counts`."""
    n_rows = tokens.shape[0]
    if n_rows > 0:
        _count_kernel[(n_rows,)](
            tokens,
            rows.params,
            rows.slots,
            seen.view(torch.int8),
            output_counts,
            seen.shape[1],
            PDL=pdl(),
            num_warps=1,
            launch_pdl=pdl(),
        )


@kernel()
def _widen_kernel(
    logits, wide, vocab_tokens, row_stride, wide_stride, SLICE: tl.constexpr, PDL: tl.constexpr
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(1).to(tl.int64)
    ids = tl.program_id(0) * SLICE + tl.arange(0, SLICE)
    is_token = ids < vocab_tokens
    x = tl.load(logits + row * row_stride + ids, mask=is_token, other=0.0).to(tl.float32)
    x = tl.where(tl.abs(x) < float("inf"), x, float("nan"))
    tl.store(wide + row * wide_stride + ids, x, mask=is_token)


@kernel(do_not_specialize=["n_edits"])
def _edit_kernel(logits, edits, n_edits, row_stride, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_edit = at < n_edits
    row = tl.load(edits + at, mask=is_edit, other=0).to(tl.int64)
    token = tl.load(edits + n_edits + at, mask=is_edit, other=0)
    value = tl.load(edits + 2 * n_edits + at, mask=is_edit, other=0).to(tl.float32, bitcast=True)
    tl.atomic_add(logits + row * row_stride + token, value, mask=is_edit)


@kernel()
def _penalise_kernel(
    logits, table, slots, seen, output_counts, vocab_tokens, row_stride,
    SLICE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + row)
    if slot < 0:
        return
    own = params_of(table, slot)
    count_row = tl.load(own + COUNT_ROW).to(tl.int64)
    if count_row < 0:
        return
    ids = tl.program_id(0) * SLICE + tl.arange(0, SLICE)
    is_token = ids < vocab_tokens
    known = count_row * vocab_tokens + ids
    was_seen = tl.load(seen + known, mask=is_token, other=0) != 0
    counts = tl.load(output_counts + known, mask=is_token, other=0)
    at = logits + row * row_stride + ids
    x = tl.load(at, mask=was_seen, other=0.0)
    repetition = load_float(own, REPETITION)
    x = tl.where(x > 0, x / repetition, x * repetition)
    presence = load_float(own, PRESENCE) * (counts > 0).to(tl.float32)
    x -= load_float(own, FREQUENCY) * counts.to(tl.float32) + presence
    tl.store(at, x, mask=was_seen)


@kernel()
def _count_kernel(tokens, table, slots, seen, output_counts, vocab_tokens, PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    if slot < 0:
        return
    count_row = tl.load(params_of(table, slot) + COUNT_ROW).to(tl.int64)
    if count_row < 0:
        return
    at = count_row * vocab_tokens + tl.load(tokens + row)
    tl.store(seen + at, 1)
    tl.store(output_counts + at, tl.load(output_counts + at) + 1)
