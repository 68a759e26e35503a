"""min_p, top_k and top_p on the card: the smallest kept value of each row, without a sort.

Two launches. The survey finds the best value of every group of 64 tokens. The search, one program
a row, first makes a cut by those maxima alone: as many groups as top_k whose best reach the cut, or
groups whose best hold the fraction top_p of the probability, prove that no token below it is kept.
The groups that reach the cut, few where the distribution is peaked, are then searched for the
threshold itself, by bisection between values that occur: it is exact and takes few rounds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagemesh.kernels.gpu.bisection import GROUP, bisect, probe, search
from pagemesh.kernels.gpu.kernel import kernel
from pagemesh.kernels.gpu.launch import cdiv, next_power_of_2, pdl
from pagemesh.kernels.gpu.row_params import (
    LOG_MIN_P,
    TOP_K,
    TOP_P,
    SamplingRows,
    has_filters,
    load_float,
    load_scale,
    params_of,
)

SLICE_GROUPS: Final = 64
"""Groups of a survey's program. The order of its sums follows from this."""

_GROUP = tl.constexpr(GROUP)
# More probability than asked, so that the rounding of a sum cannot make a cut too high.
_SURE = tl.constexpr(1.0001)


@dataclass(frozen=True, slots=True)
class SearchConfig:
    """Up to `near_groups` stay in registers; of more, `far_groups` are read at a time. A row's sums
    follow from both."""

    near_groups: int = 128
    far_groups: int = 256
    num_warps: int = 16


class Survey(NamedTuple):
    """Of each row that filters, its logits scaled by its temperature: `maxima` float32[R, G] of
    every GROUP tokens, NaN where one is not finite, and `masses` float32[R, S, 2]: of every slice
    of SLICE_GROUPS groups the best value and the sum of exp(value - best)."""

    maxima: Tensor
    masses: Tensor


def survey(logits: Tensor, rows: SamplingRows, *, edited: bool) -> Survey:
    """Survey of [R, V] `logits`. Those that were `edited` may hold infinities; what was not finite
    before is NaN in them."""
    n_rows, vocab_tokens = logits.shape
    slices = cdiv(vocab_tokens, GROUP * SLICE_GROUPS)
    maxima = logits.new_empty((n_rows, slices * SLICE_GROUPS), dtype=torch.float32)
    masses = logits.new_empty((n_rows, slices, 2), dtype=torch.float32)
    if n_rows > 0:
        _survey_kernel[(slices, n_rows)](
            logits,
            rows.params,
            rows.slots,
            maxima,
            masses,
            vocab_tokens,
            logits.stride(0),
            GROUPS=SLICE_GROUPS,
            EDITED=edited,
            PDL=pdl(),
            num_warps=4,
            launch_pdl=pdl(),
        )
    return Survey(maxima, masses)


def thresholds(
    logits: Tensor, rows: SamplingRows, found: Survey, config: SearchConfig | None = None
) -> Tensor:
    """The smallest kept value of each row's scaled logits, float32[R]; -inf if it has no filters.

    See kernels.sampling.thresholds.
    """
    config = config or SearchConfig()
    n_rows, vocab_tokens = logits.shape
    n_groups, n_slices = found.maxima.shape[1], found.masses.shape[1]
    smallest = logits.new_empty(n_rows, dtype=torch.float32)
    wanted = logits.new_empty((n_rows, n_groups), dtype=torch.int32)
    if n_rows > 0:
        _search_kernel[(n_rows,)](
            logits,
            rows.params,
            rows.slots,
            *found,
            wanted,
            smallest,
            vocab_tokens,
            logits.stride(0),
            n_groups,
            n_slices,
            GROUPS=next_power_of_2(n_groups),
            SLICES=next_power_of_2(n_slices),
            NEAR=config.near_groups,
            FAR=config.far_groups,
            PDL=pdl(),
            num_warps=config.num_warps,
            launch_pdl=pdl(),
        )
    return smallest


@triton.jit
def is_spoiled(x, EDITED: tl.constexpr):
    """Whether raw logits are not finite, or were not before they were edited."""
    return x != x if EDITED else ~(tl.abs(x) < float("inf"))


@triton.jit
def centre(top):
    """What to subtract before exp: the largest value, unless that is infinite."""
    return tl.where(tl.abs(top) < float("inf"), top, 0.0)


@kernel()
def _survey_kernel(
    logits, table, slots, maxima, masses, vocab_tokens, row_stride,
    GROUPS: tl.constexpr, EDITED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + row)
    if slot < 0:
        return
    own = params_of(table, slot)
    if not has_filters(own):
        return
    scale = load_scale(own)
    group = part * GROUPS + tl.arange(0, GROUPS)
    ids = group[:, None] * _GROUP + tl.arange(0, _GROUP)[None, :]
    is_token = ids < vocab_tokens
    x = tl.load(logits + row * row_stride + ids, mask=is_token, other=0.0).to(tl.float32)
    values = tl.where(is_token, x * scale, -float("inf"))
    best = tl.max(values, axis=1)
    spoiled = tl.max(is_spoiled(x, EDITED).to(tl.int32), axis=1) > 0
    at = row * tl.num_programs(0) + part
    tl.store(maxima + at * GROUPS + tl.arange(0, GROUPS), tl.where(spoiled, float("nan"), best))
    if load_float(own, TOP_P) < 1.0:
        top = tl.max(best, axis=0)
        tl.store(masses + at * 2, top)
        mass = tl.sum(tl.exp(values - centre(top)), axis=1)
        tl.store(masses + at * 2 + 1, tl.sum(mass, axis=0))


@kernel()
def _search_kernel(
    logits, table, slots, maxima, masses, wanted, smallest,
    vocab_tokens, row_stride, n_groups, n_slices,
    GROUPS: tl.constexpr, SLICES: tl.constexpr, NEAR: tl.constexpr, FAR: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    if slot < 0:
        return
    own = params_of(table, slot)
    smallest += row
    if not has_filters(own):
        tl.store(smallest, -float("inf"))
        return
    group = tl.arange(0, GROUPS)
    best = tl.load(maxima + row * n_groups + group, mask=group < n_groups, other=-float("inf"))
    top = tl.max(best, axis=0)
    spoiled = tl.max((best != best).to(tl.int32), axis=0) > 0
    if spoiled | (tl.abs(top) == float("inf")):
        # Where the best overflows it is certain.
        tl.store(smallest, tl.where(spoiled, -float("inf"), top))
        return

    top_k, top_p = tl.load(own + TOP_K), load_float(own, TOP_P)
    has_top_k = (top_k > 0) & (top_k < vocab_tokens)
    floor = top + load_float(own, LOG_MIN_P)
    cut = floor
    total = tl.zeros((), tl.float64)
    if top_p < 1.0:
        total = _total_mass(masses + row * n_slices * 2, top, n_slices, SLICES)
    if has_top_k:
        if top_k * _GROUP <= vocab_tokens:
            ones = tl.full((GROUPS,), 1.0, tl.float32)
            cut = bisect(best, ones, top_k.to(tl.float32), -float("inf"), top)
            cut = tl.maximum(floor, cut)
    elif (top_p < 1.0) & (floor == -float("inf")):
        # With another filter, tokens below a cut by top_p might count.
        target = (top_p * total).to(tl.float32) * _SURE
        cut = bisect(best, tl.exp(best - top), target, -float("inf"), top)

    is_wanted = (best >= cut) & (group * _GROUP < vocab_tokens)
    wanted += row * n_groups
    tl.store(wanted + tl.cumsum(is_wanted.to(tl.int32), axis=0) - 1, group, mask=is_wanted)
    n_wanted = tl.sum(is_wanted.to(tl.int32), axis=0)
    tl.debug_barrier()  # the list is read by other threads than those that wrote it
    logits += row * row_stride
    scale = load_scale(own)
    if has_top_k:
        k = top_k.to(tl.float32)
        kth = search(
            logits, wanted, n_wanted, vocab_tokens, scale, top, cut, k, k / (n_wanted * _GROUP),
            NEAR, FAR, False,
        )  # fmt: skip
        floor = tl.maximum(floor, kth)
    if top_p < 1.0:
        if floor > -float("inf"):
            total, _above, _below = probe(
                logits, wanted, n_wanted, vocab_tokens, scale, top, floor, FAR, True
            )
        target = top_p.to(tl.float64) * total
        floor = search(
            logits, wanted, n_wanted, vocab_tokens, scale, top, tl.maximum(floor, cut), target,
            top_p, NEAR, FAR, True,
        )  # fmt: skip
    tl.store(smallest, floor)


@triton.jit
def _total_mass(masses, top, n_slices, SLICES: tl.constexpr):
    """float64: the sum of exp(value - top) over all tokens."""
    part = tl.arange(0, SLICES)
    best = tl.load(masses + part * 2, mask=part < n_slices, other=-float("inf"))
    mass = tl.load(masses + part * 2 + 1, mask=part < n_slices, other=0.0)
    return tl.sum((tl.exp(best - top) * mass).to(tl.float64), axis=0)
