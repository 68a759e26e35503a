"""kernels.logprobs on the card: the log-sum-exp of slices of a row, then of the row."""

from __future__ import annotations

from typing import Final

import torch
import triton.language as tl
from torch import Tensor

from pagemesh.kernels.gpu.filters import centre, is_spoiled
from pagemesh.kernels.gpu.kernel import kernel
from pagemesh.kernels.gpu.launch import cdiv, next_power_of_2, pdl
from pagemesh.kernels.logprobs import Logprobs

_SLICE: Final = 4096
"""The order of a row's sum follows from this."""


def token_logprobs(
    logits: Tensor, rows: Tensor, chosen: Tensor, top: int
) -> tuple[Logprobs, Tensor]:
    """Logprobs of `chosen` tokens int[N] under the rows int[N] of [R, V] logits, and bool[N]
    whether those are finite, all on the device; see kernels.logprobs.

    `logits` are raw, of any float type, and stay as they are. Which of equal tokens are among the
    best is not defined.
    """
    n, vocab_tokens = len(rows), logits.shape[1]
    ranks = logits.new_empty(n, dtype=torch.int32)
    finite = logits.new_empty(n, dtype=torch.int32)
    scores = logits.new_empty((n, 2), dtype=torch.float32)
    if n > 0:
        _score(logits, rows, chosen, scores, ranks, finite)
    normaliser = scores[:, 1:]
    is_finite = finite != 0
    best = logits.index_select(0, rows).masked_fill_(~is_finite.unsqueeze(1), 0.0)
    best_values, best_ids = best.topk(min(top, vocab_tokens), dim=1)
    ids = torch.cat((chosen.unsqueeze(1).to(torch.int32), best_ids.to(torch.int32)), dim=1)
    values = torch.cat((scores[:, :1], best_values.to(torch.float32)), dim=1) - normaliser
    return Logprobs(ids, values, ranks), is_finite


def _score(
    logits: Tensor, rows: Tensor, chosen: Tensor, scores: Tensor, ranks: Tensor, finite: Tensor
) -> None:
    n, vocab_tokens = len(rows), logits.shape[1]
    n_slices = cdiv(vocab_tokens, _SLICE)
    sums = logits.new_empty((n, n_slices, 2), dtype=torch.float32)
    above = logits.new_empty((n, n_slices), dtype=torch.int32)
    _slice_kernel[(n_slices, n)](
        logits,
        rows,
        chosen,
        sums,
        above,
        vocab_tokens,
        logits.stride(0),
        SLICE=_SLICE,
        PDL=pdl(),
        num_warps=8,
        launch_pdl=pdl(),
    )
    _join_kernel[(n,)](
        logits,
        rows,
        chosen,
        sums,
        above,
        scores,
        ranks,
        finite,
        vocab_tokens,
        logits.stride(0),
        n_slices,
        SLICES=next_power_of_2(n_slices),
        PDL=pdl(),
        num_warps=1,
        launch_pdl=pdl(),
    )


@kernel()
def _slice_kernel(
    logits, rows, chosen, sums, above, vocab_tokens, row_stride,
    SLICE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The best of a slice, the sum of exp(logit - best), and how many are above the chosen token's;
    -1 if one is not finite."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    part, entry = tl.program_id(0), tl.program_id(1)
    logits += tl.load(rows + entry).to(tl.int64) * row_stride
    ids = part * SLICE + tl.arange(0, SLICE)
    is_token = ids < vocab_tokens
    x = tl.load(logits + ids, mask=is_token, other=0.0).to(tl.float32)
    spoiled = tl.max(is_spoiled(x, False).to(tl.int32), axis=0) > 0
    value = tl.load(logits + tl.load(chosen + entry)).to(tl.float32)
    x = tl.where(is_token, x, -float("inf"))
    n_above = tl.sum((x > value).to(tl.int32), axis=0)
    top = tl.max(x, axis=0)
    at = entry.to(tl.int64) * tl.num_programs(0) + part
    tl.store(sums + at * 2, top)
    tl.store(sums + at * 2 + 1, tl.sum(tl.exp(x - centre(top)), axis=0))
    tl.store(above + at, tl.where(spoiled, -1, n_above))


@kernel()
def _join_kernel(
    logits, rows, chosen, sums, above, scores, ranks, finite, vocab_tokens, row_stride, n_slices,
    SLICES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The chosen logit, the row's log-sum-exp, and the rank; those of zeros if it is spoiled."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    entry = tl.program_id(0).to(tl.int64)
    logits += tl.load(rows + entry).to(tl.int64) * row_stride
    part = tl.arange(0, SLICES)
    is_slice = part < n_slices
    at = entry * n_slices + part
    best = tl.load(sums + at * 2, mask=is_slice, other=-float("inf"))
    mass = tl.load(sums + at * 2 + 1, mask=is_slice, other=0.0)
    n_above = tl.load(above + at, mask=is_slice, other=0)
    is_finite = tl.min(n_above, axis=0) >= 0
    top = centre(tl.max(best, axis=0))
    normaliser = top + tl.log(tl.sum(tl.exp(best - top) * mass, axis=0))
    value = tl.load(logits + tl.load(chosen + entry)).to(tl.float32)
    of_zeros = tl.log(vocab_tokens.to(tl.float32))
    tl.store(scores + entry * 2, tl.where(is_finite, value, 0.0))
    tl.store(scores + entry * 2 + 1, tl.where(is_finite, normaliser, of_zeros))
    tl.store(ranks + entry, tl.where(is_finite, tl.sum(n_above, axis=0) + 1, 1))
    tl.store(finite + entry, is_finite.to(tl.int32))
