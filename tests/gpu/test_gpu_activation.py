"""The gated activation against its reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from elementwise_checks import (
    DTYPES,
    ON_CARD,
    SPLITS,
    assert_rounded_alike,
    linear_output,
    tokens_of,
)

from pagemesh.kernels import activation as reference
from pagemesh.kernels.gpu.activation import silu_mul
from pagemesh.kernels.linear import join_splits

INNER = [24, 1030, 3072, 14336] if ON_CARD else [24, 1030]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("splits", SPLITS)
@pytest.mark.parametrize("inner", INNER)
def test_silu_mul_is_that_of_the_joined_splits(inner, splits, dtype, device):
    gate_up = linear_output(5, 2 * inner, splits, dtype, device)
    expected = reference.silu_mul(join_splits(gate_up, dtype))
    got = silu_mul(gate_up, dtype=dtype)
    assert_rounded_alike(got, expected)
    one = slice(2, 3)
    assert torch.equal(silu_mul(tokens_of(gate_up, one), dtype=dtype), got[one])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_gate_far_below_zero_closes_and_one_far_above_opens(dtype, device):
    gate_up = torch.tensor([[-200.0, -30.0, 0.0, 200.0, 2.0, 2.0, 2.0, 2.0]], device=device)
    with np.errstate(over="ignore"):
        got = silu_mul(gate_up.to(dtype))
    assert_rounded_alike(got, reference.silu_mul(gate_up.to(dtype)))


def test_whole_rows_keep_their_dtype(device):
    gate_up = torch.randn(2, 48, device=device)
    assert silu_mul(gate_up).dtype is torch.float32
    assert silu_mul(gate_up[:0]).shape == (0, 24)
