"""kernels.sample_rows on the card: each row of logits to one token, without a word to the host.

Two launches: programs find the best of a slice of a row, then one program a row the best of its
slices. Rows that filter need two more before them (see filters.py). Neither the slices nor other
rows can change a result: a maximum has no order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagemesh.kernels.gpu.bisection import GROUP
from pagemesh.kernels.gpu.filters import Survey, survey, thresholds
from pagemesh.kernels.gpu.kernel import kernel
from pagemesh.kernels.gpu.launch import cdiv, next_power_of_2, pdl
from pagemesh.kernels.gpu.noise import gumbel_bound, gumbel_of_bits, row_key, token_bits
from pagemesh.kernels.gpu.row_params import SEED, SamplingRows, is_random, load_scale, params_of

_GROUP = tl.constexpr(GROUP)
# Tokens with one bound. A row of them is a few threads' vectors, so its maximum is cheap.
_NEAR = tl.constexpr(32)


@dataclass(frozen=True, slots=True)
class SampleConfig:
    slice_tokens: int
    num_warps: int


def choose_config(n_rows: int) -> SampleConfig:
    """Few rows are cut finer, to fill the card."""
    return SampleConfig(1024, 4) if n_rows < 16 else SampleConfig(4096, 8)


class SampledTokens(NamedTuple):
    """Where the samples go. `result` int32[2, R]: the tokens, and whether their logits were finite
    (the token is 0 where they were not). `token_ids` int32[slots, row_tokens]: the known tokens of
    every slot, where each sample takes the place of its position."""

    result: Tensor
    token_ids: Tensor


def sample_rows(
    logits: Tensor,
    rows: SamplingRows,
    out: SampledTokens,
    *,
    filtered: bool,
    edited: bool = False,
    config: SampleConfig | None = None,
) -> None:
    """Sample from [R, V] `logits` of any float type, which are left as they are.

    `filtered`: some row may have filters. `edited`: the logits are float32 and were changed, see
    penalties.widen.
    """
    n_rows, vocab_tokens = logits.shape
    if n_rows == 0:
        return
    config = config or choose_config(n_rows)
    found = survey(logits, rows, edited=edited) if filtered else None
    n_slices = cdiv(vocab_tokens, config.slice_tokens)
    best = logits.new_empty((n_rows, n_slices), dtype=torch.float32)
    best_ids = logits.new_empty((n_rows, n_slices), dtype=torch.int32)
    _draw(logits, rows, found, best, best_ids, edited, config)
    _reduce_kernel[(n_rows,)](
        best,
        best_ids,
        rows.slots,
        rows.positions,
        *out,
        n_slices,
        out.result.stride(0),
        out.token_ids.shape[1],
        SLICES=next_power_of_2(n_slices),
        PDL=pdl(),
        num_warps=1,
        launch_pdl=pdl(),
    )


def _draw(
    logits: Tensor,
    rows: SamplingRows,
    found: Survey | None,
    best: Tensor,
    best_ids: Tensor,
    edited: bool,
    config: SampleConfig,
) -> None:
    n_rows, n_slices = best.shape
    _draw_kernel[(n_slices, n_rows)](
        logits,
        *rows,
        found and thresholds(logits, rows, found),
        found and found.maxima,
        best,
        best_ids,
        logits.shape[1],
        logits.stride(0),
        found.maxima.shape[1] if found else 0,
        SLICE=config.slice_tokens,
        EDITED=edited,
        PDL=pdl(),
        num_warps=config.num_warps,
        launch_pdl=pdl(),
    )


@kernel()
def _draw_kernel(
    logits, table, slots, positions, smallest, maxima, best, best_ids,
    vocab_tokens, row_stride, n_groups,
    SLICE: tl.constexpr, EDITED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The best of a slice, and its id: -1 if the slice is spoiled."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    first = part * SLICE
    logits += row * row_stride
    ids = first + tl.arange(0, SLICE // _NEAR)[:, None] * _NEAR + tl.arange(0, _NEAR)[None, :]
    if smallest is None:
        # The longest wait begins first; what a padding row holds is not looked at.
        x = tl.load(logits + ids, mask=ids < vocab_tokens, other=0.0).to(tl.float32)
    slot = tl.load(slots + row)
    if slot < 0:
        return
    own = params_of(table, slot)
    at = row * tl.num_programs(0) + part
    floor = tl.full((), -float("inf"), tl.float32)
    if smallest is not None:
        floor = tl.load(smallest + row)
        if floor > -float("inf"):
            group = part * (SLICE // _GROUP) + tl.arange(0, SLICE // _GROUP)
            near = tl.load(maxima + row * n_groups + group, mask=group < n_groups, other=0.0)
            if tl.max(((near >= floor) & (group < n_groups)).to(tl.int32), axis=0) == 0:
                tl.store(best + at, -float("inf"))
                tl.store(best_ids + at, first)
                return
        x = tl.load(logits + ids, mask=ids < vocab_tokens, other=0.0).to(tl.float32)
    scale, random = load_scale(own), is_random(own)
    key = row_key(tl.load(own + SEED), tl.load(own + SEED + 1), tl.load(positions + row))
    # NaN and inf make NaN of the sum, at one operation an element.
    spoiled = tl.max((x != x).to(tl.int32)) > 0 if EDITED else tl.sum(x * 0.0) != 0.0
    bounds = x * scale
    if smallest is not None:
        bounds = tl.where(bounds >= floor, bounds, -float("inf"))
    if random:
        bounds += gumbel_bound(token_bits(key, ids))
    if first + SLICE > vocab_tokens:
        bounds = tl.where(ids < vocab_tokens, bounds, -float("inf"))
    # A maximum of NaN alone could hide the others from the search, again and again.
    near = tl.where(spoiled, -float("inf"), tl.max(bounds, axis=1))
    value, token = _best_of(logits, near, first, vocab_tokens, scale, floor, random, key)
    tl.store(best + at, value)
    tl.store(best_ids + at, tl.where(spoiled, -1, token))


@triton.jit
def _best_of(logits, near, first, vocab_tokens, scale, floor, random, key):
    """The best value, with its noise, and the lowest id that has it, of tokens from `first` on.

    No value is above the bound in `near` of the _NEAR tokens it is among. So the logarithms of the
    noise are worked out for the tokens of the largest bound, and seldom for more.
    """
    number = tl.arange(0, near.shape[0])
    best, token = tl.full((), -float("inf"), tl.float32), first
    left = tl.max(near, axis=0)
    while (left > best) | (random & (left == best) & (left > -float("inf"))):
        left, group = tl.max(near, axis=0, return_indices=True)
        ids = first + group * _NEAR + tl.arange(0, _NEAR)
        x = tl.load(logits + ids, mask=ids < vocab_tokens, other=-float("inf")).to(tl.float32)
        values = x * scale
        noise = tl.where(random, gumbel_of_bits(token_bits(key, ids)), 0.0)
        values = tl.where(values >= floor, values + noise, -float("inf"))
        value, place = tl.max(values, axis=0, return_indices=True)
        candidate = first + group * _NEAR + place
        if (value > best) | ((value == best) & (candidate < token)):
            best, token = value, candidate
        near = tl.where(number == group, -float("inf"), near)
        left = tl.max(near, axis=0)
    return best, token


@kernel(do_not_specialize=["result_stride"])
def _reduce_kernel(
    best, best_ids, slots, positions, result, token_ids, n_slices, result_stride, row_tokens,
    SLICES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    if slot < 0:
        return
    part = tl.arange(0, SLICES)
    at = row.to(tl.int64) * n_slices + part
    values = tl.load(best + at, mask=part < n_slices, other=-float("inf"))
    ids = tl.load(best_ids + at, mask=part < n_slices, other=0x7FFFFFFF)
    finite = tl.min(ids, axis=0) >= 0
    token = tl.min(tl.where(values == tl.max(values, axis=0), ids, 0x7FFFFFFF), axis=0)
    token = tl.where(finite, token, 0)
    tl.store(result + row, token)
    tl.store(result + result_stride + row, finite.to(tl.int32))
    position = tl.load(positions + row).to(tl.int64)
    place = token_ids + slot.to(tl.int64) * row_tokens + position
    tl.store(place, token, mask=position < row_tokens)
