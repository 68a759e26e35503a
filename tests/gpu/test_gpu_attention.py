"""The entry for mixed steps, against the torch reference of the same signature."""

from __future__ import annotations

import pytest
import torch
from paged_layout import Shape, counted, random_batch
from test_gpu_prefill_attention import on

from pagemesh.kernels import attention as reference
from pagemesh.kernels.gpu.attention import paged_attention

DECODES = [(1, 1), (1, 40), (1, 0), (1, 16)]
PREFILLS = [(9, 9), (0, 0), (17, 50), (3, 0)]


@pytest.mark.parametrize("window", [None, 13])
@pytest.mark.parametrize("decodes", [[], [*DECODES, (1, 900)]], ids=["prefill", "mixed"])
def test_counts_that_only_the_device_knows(device, dtype, decodes, window):
    """The same bits."""
    shape = Shape(n_kv_heads=2, group=2, head_dim=64, block_tokens=16)
    rows, n_decode = decodes + PREFILLS, len(decodes)
    batch = random_batch(shape, rows, n_decode=n_decode, seed=13, padding_tokens=5, dtype=dtype)
    plain, same = (
        paged_attention(b.q, b.k_cache, b.v_cache, b.inputs, scale=shape.scale, window=window)
        for b in (on(device, batch), on(device, counted(batch)))
    )
    assert torch.equal(plain, same)


@pytest.mark.parametrize("window", [None, 13])
@pytest.mark.parametrize("padding_tokens", [0, 5])
@pytest.mark.parametrize(
    ("decodes", "prefills"),
    [(DECODES, PREFILLS), (DECODES, []), ([], PREFILLS), ([], [])],
    ids=["mixed", "decode", "prefill", "none"],
)
def test_equals_the_reference(device, dtype, decodes, prefills, padding_tokens, window):
    shape = Shape(n_kv_heads=2, group=2, head_dim=64, block_tokens=16)
    batch = on(
        device,
        random_batch(
            shape,
            decodes + prefills,
            n_decode=len(decodes),
            seed=12,
            padding_tokens=padding_tokens,
            dtype=dtype,
        ),
    )
    args = (batch.q, batch.k_cache, batch.v_cache, batch.inputs)
    expected = reference.paged_attention(*args, scale=shape.scale, window=window)
    # Memory that is reused must not pass for zeros.
    torch.full_like(batch.q, torch.nan)
    out = paged_attention(*args, scale=shape.scale, window=window)
    assert out.dtype is dtype
    tolerance = 2e-5 if dtype is torch.float32 else 3e-2
    torch.testing.assert_close(out, expected, atol=tolerance, rtol=tolerance)
