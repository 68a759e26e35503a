"""Decode attention on the card against the reference and the definition."""

from __future__ import annotations

import pytest
import torch
from paged_layout import Shape, dense_attention, random_batch

from pagemesh.kernels.attention import paged_attention
from pagemesh.kernels.gpu.decode_attention import decode_attention
from pagemesh.kernels.gpu.decode_plan import DecodeConfig

SMALL = DecodeConfig(tile_tokens=16, chunk_tokens=32, max_chunks=3)


def test_smoke():
    shape = Shape(2, 2, 64, 16)
    b = random_batch(shape, [(1, n) for n in [1, 16, 17, 0, 200, 40]], n_decode=6, seed=0)
    for window in (None, 20, 70):
        out = decode_attention(
            b.q, b.k_cache, b.v_cache, b.inputs, scale=shape.scale, window=window, config=SMALL
        )
        torch.testing.assert_close(out.double(), dense_attention(b, window), atol=1e-5, rtol=1e-5)
