"""What sampling does to one row of logits: passes over it in vectors, none of which sorts.

A row is `logits` (float32, one-dimensional, all rows one after another), the element `at` where it
begins and its `n` tokens. Its scaled logits are `logits * scale`.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from pagemesh.kernels.cpu.exponential import exp
from pagemesh.kernels.cpu.jit import LANES, inlined, part
from pagemesh.kernels.cpu.sampling_lanes import (
    add_doubles,
    any_above,
    any_from,
    count_from,
    first_equal,
    load_or,
    no_doubles,
    only_from,
    order_of,
    sum_of_doubles,
    value_of_order,
)
from pagemesh.kernels.cpu.sampling_noise import MOST_NOISE, gumbel, gumbel_bound, magnitudes
from pagemesh.kernels.cpu.simd import (
    add,
    fma,
    largest_of,
    load,
    mul,
    splat,
    sub,
    sum_of,
    zero_below,
)

_ZERO, _ONE, _TWO = np.float32(0.0), np.float32(1.0), np.float32(2.0)
_NONE: Final = np.float32(-np.inf)
_NAN: Final = np.float32(np.nan)


@part
def survey(logits, at, n):
    """Largest logit, the first token that has it, and whether all are finite, in one pass.

    Of a row that is not finite, the first two mean nothing. (x * 0 is NaN for NaN and infinity.)
    """
    best, token = logits[at], 0
    zeros = splat(_ZERO)
    for i in range(0, n, LANES):
        x = load_or(logits, at + i, n - i, best)
        zeros = fma(x, splat(_ZERO), zeros)
        if any_above(x, best):
            best = largest_of(x)
            token = i + first_equal(x, best)
    return best, token, sum_of(zeros) == _ZERO


@inlined
def clear(logits, at, n):
    """As survey; a row that is not finite becomes zeros."""
    best, token, is_finite = survey(logits, at, n)
    if not is_finite:
        for i in range(at, at + n):
            logits[i] = _ZERO
        best, token = _ZERO, 0
    return best, token, is_finite


@part
def count_tokens(logits, at, n, scale, floor):
    """How many scaled logits are `floor` or more."""
    count = 0
    for i in range(0, n, LANES):
        count += count_from(mul(load_or(logits, at + i, n - i, _NAN), splat(scale)), floor)
    return count


@part
def masses(logits, at, n, scale, best, floor, higher):
    """The sums of exp(scaled - best) over the scaled logits of `floor` or more, and of those of
    `higher` or more; in float64, since a long tail of small probabilities drowns in float32."""
    total, better = no_doubles(), no_doubles()
    for i in range(0, n, LANES):
        x = mul(load_or(logits, at + i, n - i, _NONE), splat(scale))
        if any_from(x, floor):
            weights = exp(sub(x, splat(best)))
            total = add_doubles(total, zero_below(weights, x, splat(floor)))
            better = add_doubles(better, zero_below(weights, x, splat(higher)))
    return sum_of_doubles(total), sum_of_doubles(better)


@part
def draw(logits, at, n, scale, floor, key):
    """The token with the largest sum of scaled logit and noise, of those of `floor` or more; the
    first of equals. 0 if all are -inf.

    Noise is computed only where it could win: a token needs best - MOST_NOISE before its noise is
    known, and with the noise's bound more than the best so far.
    """
    best, token, least = _NONE, 0, floor
    for i in range(0, n, LANES):
        x = mul(load_or(logits, at + i, n - i, _NONE), splat(scale))
        if not any_from(x, least):
            continue
        magnitude = magnitudes(key, i)
        if any_above(add(x, gumbel_bound(magnitude)), best):
            noisy = add(only_from(x, floor), gumbel(magnitude))
            if any_above(noisy, best):
                best = largest_of(noisy)
                token = i + first_equal(noisy, best)
                least = max(floor, best - MOST_NOISE)
    return token


@inlined
def top_k_floor(logits, at, n, scale, best, k):
    """A bound that as many scaled logits reach as reach the k-th largest.

    Gallops down from the best until k tokens are above, then halves what lies between in the
    order of float32, until the count is k or, where equals make it more, nothing lies between.
    """
    step, high, low = _ONE, best, best - _ONE
    count = count_tokens(logits, at, n, scale, low)
    while count < k:
        step, high = step * _TWO, low
        low = best - step
        count = count_tokens(logits, at, n, scale, low)
    below, above = np.int64(order_of(low)), np.int64(order_of(high)) + 1
    while count > k and above - below > 1:
        middle = (below + above) // 2
        reached = count_tokens(logits, at, n, scale, value_of_order(np.int32(middle)))
        if reached >= k:
            below, count = middle, reached
        else:
            above = middle
    return value_of_order(np.int32(below))


@inlined
def next_up(value):
    """The least float32 above a finite one. (Adding 0.0 makes a 0.0 of -0.0.)"""
    return value_of_order(np.int32(order_of(value + _ZERO) + 1))


@inlined
def draw_filtered(logits, at, n, top, params, key):
    """A draw from what min_p, top_k and top_p keep (see kernels.sampling); `top` is the largest
    logit.

    top_p's threshold is never looked for. The winner among all tokens has it kept or not, which
    the mass above it tells; if not, neither is any token as small, and the winner among the larger
    ones is tried. Each try leaves about half the mass of the one before.
    """
    scale = params.inverse_temperature
    best = top * scale
    floor = best + params.log_min_p
    if 0 < params.top_k < n:
        floor = max(floor, top_k_floor(logits, at, n, scale, best, params.top_k))
    token = draw(logits, at, n, scale, floor, key)
    if params.top_p >= _ONE:
        return token
    higher = next_up(logits[at + token] * scale)
    total, better = masses(logits, at, n, scale, best, floor, higher)
    # A top_p too small for float32 is zero: then the best alone is kept.
    while better > 0 and better >= np.float64(params.top_p) * total:
        token = draw(logits, at, n, scale, higher, key)
        higher = next_up(logits[at + token] * scale)
        _, better = masses(logits, at, n, scale, best, higher, higher)
    return token


@inlined
def penalise(logits, at, n, params, seen, output_counts):
    """See kernels.penalties. The row's counts stand in row `params.count_row`."""
    counts_at = np.int64(params.count_row) * n
    for i in range(0, n, LANES):
        if any_above(load(seen, counts_at + i, n - i), _ZERO):
            for token in range(i, min(i + LANES, n)):
                if seen[counts_at + token]:
                    count = np.float32(output_counts[counts_at + token])
                    logits[at + token] = _penalised(logits[at + token], count, params)


@inlined
def _penalised(logit, count, params):
    after = logit / params.repetition if logit > _ZERO else logit * params.repetition
    present = params.presence if count > _ZERO else _ZERO
    return np.float32(after - (params.frequency * count + present))


@inlined
def score(logits, at, n, best, chosen, ids, values):
    """Logprobs into ids int32[1 + k] and values float32[1 + k] (see kernels.logprobs), given the
    largest logit; the rank."""
    total, _ = masses(logits, at, n, _ONE, best, _NONE, _NONE)
    normaliser = np.float32(best + np.log(total))
    k = len(ids) - 1
    ids[0], values[0] = chosen, logits[at + chosen]
    top_tokens(logits, at, n, k, ids, values)
    for i in range(1 + k):
        values[i] -= normaliser
    return 1 + count_tokens(logits, at, n, _ONE, next_up(logits[at + chosen]))


@inlined
def top_tokens(logits, at, n, k, ids, values):
    """The k best tokens and their logits into ids[1:] and values[1:], best first, equal ones in
    order. Few tokens get in once the first have, so those are sorted in one by one."""
    for token in range(k):
        _sort_in(logits[at + token], token, token, ids, values)
    for i in range(k, n if k > 0 else 0, LANES):
        if any_above(load_or(logits, at + i, n - i, _NONE), values[k]):
            for token in range(i, min(i + LANES, n)):
                if logits[at + token] > values[k]:
                    _sort_in(logits[at + token], token, k - 1, ids, values)


@part
def _sort_in(value, token, place, ids, values):
    """Into the sorted entries 1 to `place`; the one behind them is lost."""
    while place > 0 and values[place] < value:
        ids[place + 1], values[place + 1] = ids[place], values[place]
        place -= 1
    ids[place + 1], values[place + 1] = token, value
