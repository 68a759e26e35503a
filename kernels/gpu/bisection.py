"""Where the largest values of a row reach a weight: bisection between values that occur.

Functions for the kernel of filters.py to call; none is launched by itself. Each round weighs what
is no smaller than the middle of the range, then moves a bound to the next value that occurs. So the
result is exact, and where values are few the rounds are.
"""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

GROUP: Final = 64
"""Tokens of a group, the unit in which a row's logits are chosen to be searched."""

_GROUP = tl.constexpr(GROUP)
# How far the share of a sample may be from that of all.
_DOUBT = tl.constexpr(0.02)


@triton.jit
def bisect(values, weights, target, low, high):
    """The largest of the values between `low` and `high` such that those no smaller weigh at least
    `target`; `low` if there is none. None is above `high`."""
    low = tl.full((), 0.0, tl.float32) + low
    while low < high:
        middle = _between(low, high)
        inside = values >= middle
        if tl.sum(tl.where(inside, weights, 0.0)) >= target:
            low = tl.min(tl.where(inside, values, float("inf")))
        else:
            high = tl.max(tl.where(inside, -float("inf"), values))
    return low


@triton.jit
def search(
    logits, wanted, n_wanted, vocab_tokens, scale, top, low, target, share,
    NEAR: tl.constexpr, FAR: tl.constexpr, MASS: tl.constexpr,
):  # fmt: skip
    """`bisect` over the tokens of the wanted groups, up to `top`. Weights are exp(value - top)
    with MASS, else 1; `target` is about the fraction `share` of all above `low`.

    Few groups stay in registers. More are read in every round, of which there are fewer if the
    first ones take the bounds that a sample of the groups suggests. Probabilities are added in
    float64: a long tail of small ones would drown in float32.
    """
    high = top
    place = tl.arange(0, NEAR) * tl.maximum(n_wanted // NEAR, 1)
    x = _load_wanted(logits, wanted, place, n_wanted, vocab_tokens) * scale
    weights = tl.exp(x - top).to(tl.float64) if MASS else tl.full(x.shape, 1.0, tl.float32)
    if n_wanted <= NEAR:
        low = bisect(x, weights, target, low, high)
    else:
        about = share * tl.sum(tl.where(x >= low, weights, 0.0))
        guess = bisect(x, weights, about * (1 - _DOUBT), low, high)
        next_guess = bisect(x, weights, about * (1 + _DOUBT), low, guess)
        while low < high:
            middle = tl.where((low < guess) & (guess < high), guess, _between(low, high))
            guess, next_guess = next_guess, low
            weight, above, below = probe(
                logits, wanted, n_wanted, vocab_tokens, scale, top, middle, FAR, MASS
            )
            if weight >= target:
                low = above
            else:
                high = below
    return low


@triton.jit
def probe(
    logits, wanted, n_wanted, vocab_tokens, scale, top, middle,
    CHUNK: tl.constexpr, MASS: tl.constexpr,
):  # fmt: skip
    """The weight of the values that are at least `middle`, the smallest of them, and the largest
    below."""
    weight = tl.zeros((), tl.float64)
    above = tl.full((), float("inf"), tl.float32)
    below = tl.full((), -float("inf"), tl.float32)
    first = 0
    while first < n_wanted:
        place = first + tl.arange(0, CHUNK)
        x = _load_wanted(logits, wanted, place, n_wanted, vocab_tokens) * scale
        inside = x >= middle
        of_group = tl.sum(tl.where(inside, tl.exp(x - top) if MASS else 1.0, 0.0), axis=1)
        weight += tl.sum(of_group.to(tl.float64))
        above = tl.minimum(above, tl.min(tl.where(inside, x, float("inf"))))
        below = tl.maximum(below, tl.max(tl.where(inside, -float("inf"), x)))
        first += CHUNK
    return weight, above, below


@triton.jit
def _load_wanted(logits, wanted, place, n_wanted, vocab_tokens):
    """float32[N, GROUP] logits of the groups at N places of the list; -inf past its end."""
    group = tl.load(wanted + place, mask=place < n_wanted, other=0)
    ids = group[:, None] * _GROUP + tl.arange(0, _GROUP)[None, :]
    is_token = (place < n_wanted)[:, None] & (ids < vocab_tokens)
    return tl.load(logits + ids, mask=is_token, other=-float("inf")).to(tl.float32)


@triton.jit
def _between(low, high):
    """The middle of the floats in (low, high]: of their bits, so every range is halved in as many
    rounds as there are bits."""
    return _value(((_image(low).to(tl.int64) + _image(high) + 1) >> 1).to(tl.int32))


@triton.jit
def _image(x):
    """int32 in the order of float32 `x`; the zeros have one image."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _value(image):
    """Inverse of `_image`."""
    return (image ^ ((image >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
