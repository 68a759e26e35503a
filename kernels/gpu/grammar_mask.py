"""kernels.grammar_mask on the card."""

from __future__ import annotations

from typing import Final

import triton.language as tl
from torch import Tensor

from pagemesh.kernels.gpu.kernel import kernel
from pagemesh.kernels.gpu.launch import cdiv, pdl

_SLICE: Final = 2048


def apply_masks(logits: Tensor, rows: Tensor, masks: Tensor) -> None:
    """See the reference. `logits` may be strided by row."""
    n_rows, vocab_tokens = rows.shape[0], logits.shape[1]
    if n_rows > 0:
        _mask_kernel[(cdiv(vocab_tokens, _SLICE), n_rows)](
            logits,
            rows,
            masks,
            vocab_tokens,
            logits.stride(0),
            masks.stride(0),
            SLICE=_SLICE,
            PDL=pdl(),
            launch_pdl=pdl(),
        )


@kernel()
def _mask_kernel(
    logits, rows, masks, vocab_tokens, row_stride, mask_stride,
    SLICE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    ruled = tl.program_id(1).to(tl.int64)
    row = tl.load(rows + ruled).to(tl.int64)
    ids = tl.program_id(0) * SLICE + tl.arange(0, SLICE)
    is_token = ids < vocab_tokens
    words = tl.load(masks + ruled * mask_stride + ids // 32, mask=is_token, other=-1)
    banned = is_token & (((words >> (ids % 32)) & 1) == 0)
    at = logits + row * row_stride + ids
    x = tl.load(at, mask=banned, other=0.0)
    tl.store(at, tl.where(x == x, float("-inf"), x), mask=banned)
