"""min_p, top_k and top_p on the card: the smallest kept value of each row, without a sort.

Two launches. The survey finds the best value of every group of 64 tokens. The search, one program
a row, first makes a cut by those maxima alone: as many groups as top_k whose best reach the cut, or
groups whose best hold the fraction top_p of the probability, prove that no token below it is kept.
The groups that reach the cut, few where the distribution is peaked, are then searched for the
threshold itself, by bisection between values that occur: it is exact and takes few rounds.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagemesh.kernels.gpu.launch import pdl
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

GROUP: Final = 64
SLICE_GROUPS: Final = 64
"""Groups of a survey's program. The order of its sums follows from this."""
_NEAR_GROUPS: Final = 128
"""So few groups a search keeps in registers."""
_FAR_GROUPS: Final = 256
"""Of more it reads so many at a time."""

_GROUP = tl.constexpr(GROUP)
# More probability than asked, so that the rounding of a sum cannot make a cut too high.
_SURE = tl.constexpr(1.0001)


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
    slices = triton.cdiv(vocab_tokens, GROUP * SLICE_GROUPS)
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


def thresholds(logits: Tensor, rows: SamplingRows, found: Survey) -> Tensor:
    """The smallest kept value of each row's scaled logits, float32[R]; -inf if it has no filters.

    See kernels.sampling.thresholds.
    """
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
            GROUPS=triton.next_power_of_2(n_groups),
            SLICES=triton.next_power_of_2(n_slices),
            NEAR=_NEAR_GROUPS,
            FAR=_FAR_GROUPS,
            PDL=pdl(),
            num_warps=16,
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


@triton.jit
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


@triton.jit
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
    images, lowest = _image(best), _image(tl.full((), -float("inf"), tl.float32)).to(tl.int64)
    highest = _image(top).to(tl.int64)
    if has_top_k:
        if top_k * _GROUP <= vocab_tokens:
            ones = tl.full((GROUPS,), 1.0, tl.float32)
            kth = _bisect(images, ones, top_k.to(tl.float32), lowest, highest)
            cut = tl.maximum(floor, _value(kth.to(tl.int32)))
    elif (top_p < 1.0) & (floor == -float("inf")):
        # With another filter, tokens below a cut by top_p might count.
        total = _total_mass(masses + row * n_slices * 2, top, n_slices, SLICES)
        mass = tl.exp(best - top)
        sure = (top_p * total).to(tl.float32) * _SURE
        cut = _value(_bisect(images, mass, sure, lowest, highest).to(tl.int32))

    is_wanted = (best >= cut) & (group * _GROUP < vocab_tokens)
    wanted += row * n_groups
    tl.store(wanted + tl.cumsum(is_wanted.to(tl.int32), axis=0) - 1, group, mask=is_wanted)
    n_wanted = tl.sum(is_wanted.to(tl.int32), axis=0)
    tl.debug_barrier()  # the list is read by other threads than those that wrote it
    logits += row * row_stride
    scale = load_scale(own)
    if has_top_k:
        floor = tl.maximum(floor, _search(
            logits, wanted, n_wanted, vocab_tokens, scale, top, cut,
            top_k.to(tl.float32), NEAR, FAR, False,
        ))  # fmt: skip
    if top_p < 1.0:
        if floor > -float("inf"):
            total, _above, _below = _probe(
                logits, wanted, n_wanted, vocab_tokens, scale, top, _image(floor), FAR, True
            )
        floor = _search(
            logits, wanted, n_wanted, vocab_tokens, scale, top, tl.maximum(floor, cut),
            top_p.to(tl.float64) * total, NEAR, FAR, True,
        )  # fmt: skip
    tl.store(smallest, floor)


@triton.jit
def _total_mass(masses, top, n_slices, SLICES: tl.constexpr):
    """float64: the sum of exp(value - top) over all tokens."""
    part = tl.arange(0, SLICES)
    best = tl.load(masses + part * 2, mask=part < n_slices, other=-float("inf"))
    mass = tl.load(masses + part * 2 + 1, mask=part < n_slices, other=0.0)
    return tl.sum((tl.exp(best - top) * mass).to(tl.float64), axis=0)


@triton.jit
def _bisect(images, weights, target, low, high):
    """The largest of the images between `low` and `high` such that those no smaller weigh at least
    `target`; `low` if there is none. `high` must be one of them or more; int64 bounds."""
    while low < high:
        middle = (low + high + 1) >> 1
        inside = images >= middle.to(tl.int32)
        if tl.sum(tl.where(inside, weights, 0.0)) >= target:
            low = tl.min(tl.where(inside, images, 0x7FFFFFFF)).to(tl.int64)
        else:
            high = tl.max(tl.where(inside, -0x80000000, images)).to(tl.int64)
    return low


@triton.jit
def _search(
    logits, wanted, n_wanted, vocab_tokens, scale, top, start, target,
    NEAR: tl.constexpr, FAR: tl.constexpr, MASS: tl.constexpr,
):  # fmt: skip
    """The largest value of the wanted groups such that the tokens no smaller weigh at least
    `target`, or `start` if that is larger. Weights are exp(value - top) with MASS, else 1.

    Few groups stay in registers, more are read again in every round. Probabilities are added in
    float64: a long tail of small ones would drown in float32.
    """
    low, high = _image(start).to(tl.int64), _image(top).to(tl.int64)
    if n_wanted <= NEAR:
        x = _load_wanted(logits, wanted, 0, n_wanted, vocab_tokens, NEAR) * scale
        weights = tl.exp(x - top).to(tl.float64) if MASS else tl.full(x.shape, 1.0, tl.float32)
        low = _bisect(_image(x), weights, target, low, high)
    else:
        while low < high:
            middle = (low + high + 1) >> 1
            weight, above, below = _probe(
                logits, wanted, n_wanted, vocab_tokens, scale, top, middle.to(tl.int32), FAR, MASS
            )
            if weight >= target:
                low = above.to(tl.int64)
            else:
                high = below.to(tl.int64)
    return _value(low.to(tl.int32))


@triton.jit
def _probe(
    logits, wanted, n_wanted, vocab_tokens, scale, top, middle,
    CHUNK: tl.constexpr, MASS: tl.constexpr,
):  # fmt: skip
    """The weight of the values whose image is at least `middle`, the smallest of those images, and
    the largest image below."""
    weight = tl.zeros((), tl.float64)
    above, below = tl.full((), 0x7FFFFFFF, tl.int32), tl.full((), -0x80000000, tl.int32)
    first = 0
    while first < n_wanted:
        x = _load_wanted(logits, wanted, first, n_wanted, vocab_tokens, CHUNK) * scale
        image = _image(x)
        inside = image >= middle
        of_group = tl.sum(tl.where(inside, tl.exp(x - top) if MASS else 1.0, 0.0), axis=1)
        weight += tl.sum(of_group.to(tl.float64))
        above = tl.minimum(above, tl.min(tl.where(inside, image, 0x7FFFFFFF)))
        below = tl.maximum(below, tl.max(tl.where(inside, -0x80000000, image)))
        first += CHUNK
    return weight, above, below


@triton.jit
def _load_wanted(logits, wanted, first, n_wanted, vocab_tokens, CHUNK: tl.constexpr):
    """float32[CHUNK, GROUP] logits of the listed groups from the first on; -inf past the end."""
    place = first + tl.arange(0, CHUNK)
    group = tl.load(wanted + place, mask=place < n_wanted, other=0)
    ids = group[:, None] * _GROUP + tl.arange(0, _GROUP)[None, :]
    is_token = (place < n_wanted)[:, None] & (ids < vocab_tokens)
    return tl.load(logits + ids, mask=is_token, other=-float("inf")).to(tl.float32)


@triton.jit
def _image(x):
    """int32 in the order of float32 `x`; the zeros have one image."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _value(image):
    """Inverse of `_image`."""
    return (image ^ ((image >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
