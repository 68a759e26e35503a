"""Norm, rotary embedding and activation against their definitions in float64."""

from __future__ import annotations

import pytest
import torch

from pagemesh.kernels.activation import silu_mul
from pagemesh.kernels.norm import add_rms_norm, rms_norm
from pagemesh.kernels.rope import apply_rope, rope_cos_sin

TOLERANCES = [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)]


@pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES)
def test_rms_norm(dtype, tolerance):
    x, weight = torch.randn(5, 3, 16).to(dtype), torch.randn(16).to(dtype)
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 0.1).sqrt() * weight.double()
    got = rms_norm(x, weight, 0.1)
    assert got.dtype is dtype
    torch.testing.assert_close(got.double(), expected, atol=tolerance, rtol=tolerance)


def test_add_rms_norm_is_the_sum_then_the_norm():
    x, residual, weight = torch.randn(5, 16), torch.randn(5, 16), torch.randn(16)
    normed, total = add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, rms_norm(x + residual, weight, 1e-6))


@pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES)
def test_rope_turns_each_pair_as_a_complex_number(dtype, tolerance):
    positions = torch.tensor([0, 1, 7, 1000])
    inv_freq = torch.tensor([1.0, 0.1, 0.01])
    q, k = torch.randn(4, 3, 6).to(dtype), torch.randn(4, 1, 6).to(dtype)
    cos, sin = rope_cos_sin(positions, inv_freq, 1.5)
    angles = positions[:, None, None].double() * inv_freq.double()
    turn = 1.5 * torch.polar(torch.ones_like(angles), angles)
    for got, x in zip(apply_rope(q, k, cos, sin), (q, k), strict=True):
        turned = torch.complex(*x.double().chunk(2, dim=-1)) * turn
        expected = torch.cat((turned.real, turned.imag), dim=-1)
        assert got.dtype is dtype
        torch.testing.assert_close(got.double(), expected, atol=tolerance, rtol=1e-4 + tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES)
def test_silu_mul(dtype, tolerance):
    gate_up = torch.randn(4, 12).to(dtype)
    gate, up = gate_up.double().chunk(2, dim=-1)
    expected = gate / (1 + (-gate).exp()) * up
    torch.testing.assert_close(silu_mul(gate_up).double(), expected, atol=tolerance, rtol=tolerance)
