"""What is done to a token's row: embedding, RMSNorm, rotation and the store into the KV pool.

Activations are float32 rows of one array; the pool, the weights and the tables keep the model's
dtype (see simd). Signatures: `x` is the array, `at` the element where the row begins.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from pagemesh.kernels.cpu.jit import LANES, part
from pagemesh.kernels.cpu.simd import (
    add,
    fma,
    load,
    load_one,
    mul,
    splat,
    store,
    store_one,
    sub,
    sum_of,
)
from pagemesh.kernels.cpu.tile import PANEL

ONE: Final = np.float32(1.0)
ZERO: Final = np.float32(0.0)


@part
def embed(weights, first, pair, scales, scale_at, token, features, out, at):
    """Row `token` of the packed matrix at `first` (see tile.pack); `pair` inputs lie together.

    `scale_at` is where the scales of an int8 matrix begin in `scales`, or negative.
    """
    panel, lane = token // PANEL, token % PANEL
    panel_at = first + panel * PANEL * ((features + pair - 1) // pair * pair)
    scale = scales[scale_at + token] if scale_at >= 0 else ONE
    for i in range(features):
        place = panel_at + (i // pair * PANEL + lane) * pair + i % pair
        out[at + i] = load_one(weights, place) * scale


@part
def rms_norm(x, at, features, weight, weight_at, eps, out, out_at):
    """RMSNorm of `features` numbers; `out` may be the row itself."""
    total = splat(ZERO)
    for c in range(0, features, LANES):
        lanes = load(x, at + c, features - c)
        total = fma(lanes, lanes, total)
    scale = splat(ONE / np.sqrt(sum_of(total) / np.float32(features) + eps))
    for c in range(0, features, LANES):
        lanes = mul(load(x, at + c, features - c), scale)
        store(out, out_at + c, features - c, mul(lanes, load(weight, weight_at + c, features - c)))


@part
def angles(position, frequencies, first, half, factor, out, at):
    """`half` cosines, then as many sines, of the position times each of `half` frequencies."""
    for i in range(half):
        angle = np.float32(position) * frequencies[first + i]
        out[at + i] = np.cos(angle) * factor
        out[at + half + i] = np.sin(angle) * factor


@part
def rotate(x, at, half, turn):
    """Turn element i of a head with element i + half, in place, by the `angles` at `turn`."""
    for c in range(0, half, LANES):
        left = half - c
        low, high = load(x, at + c, left), load(x, at + half + c, left)
        cosine, sine = load(x, turn + c, left), load(x, turn + half + c, left)
        store(x, at + c, left, sub(mul(low, cosine), mul(high, sine)))
        store(x, at + half + c, left, add(mul(high, cosine), mul(low, sine)))


@part
def store_key(x, at, head_dim, pool, page, offset, block_tokens):
    """Into a page [head_dim, block_tokens]: a token is a column, so that a row of the page meets
    one number of the query with many keys at once."""
    for d in range(head_dim):
        store_one(pool, page + d * block_tokens + offset, x[at + d])


@part
def store_value(x, at, head_dim, pool, page, offset):
    """Into a page [block_tokens, head_dim]."""
    for c in range(0, head_dim, LANES):
        store(pool, page + offset * head_dim + c, head_dim - c, load(x, at + c, head_dim - c))
