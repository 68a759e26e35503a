"""The linear layer in bfloat16, on either side of the row count where it widens its weights."""

from __future__ import annotations

import pytest
import torch

from pagemesh.worker_svc.layers.linear import project


@pytest.mark.parametrize("rows", [1, 15, 16, 40])
@pytest.mark.parametrize("bias", [None, torch.linspace(-1, 1, 3000).bfloat16()])
def test_bfloat16_equals_the_exact_product(rows, bias):
    """3000 x 700 is more than is widened at once, and no multiple of it."""
    rng = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 700, generator=rng).bfloat16()
    weight = (torch.randn(3000, 700, generator=rng) / 26).bfloat16()
    expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    got = project(x, weight, bias)
    assert got.dtype is torch.bfloat16
    torch.testing.assert_close(got.double(), expected, atol=2e-2, rtol=1e-2)
