"""The CPU's matrix product, with all that may follow it, against torch in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cpu_programs import compute, dims, one_op, padded
from hypothesis import given, settings
from hypothesis import strategies as st

from pagemesh.kernels.activation import silu_mul
from pagemesh.kernels.cpu import matmul, program
from pagemesh.kernels.cpu.tile import PANEL
from pagemesh.worker_svc.models.packing import Packer, quantize_rows

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int8]
SIZES = st.one_of(st.integers(1, 2 * PANEL + 3), st.sampled_from([PANEL, 3 * PANEL, 200]))
ROWS = st.one_of(st.integers(1, 14), st.sampled_from([47, 48, 49, 97]))
THEN = st.sampled_from([matmul.STORE, matmul.ADD, matmul.GATED])
SEEDS = st.integers(0, 2**31)
UNTOUCHED = 77.0


def as_kept(weight, dtype):
    """float64 of what is left of a matrix when it is kept as `dtype`."""
    if dtype is torch.int8:
        values, scale = quantize_rows(weight)
        return values.double() * scale.double()[:, None]
    return weight.to(dtype).double()


def packed(weight, bias, then, dtype):
    packer = Packer(2 * Packer.elements((len(weight) + PANEL, weight.shape[1]), dtype), dtype)
    matrix = (packer.gated if then == matmul.GATED else packer.matrix)(weight, bias)
    return matrix, packer.weights()


def expected_of(x, weight, bias, then, before):
    product = x.double() @ weight.T
    if bias is not None:
        product += bias.double()
    if then == matmul.GATED:
        return silu_mul(product)
    return before.double() + product if then == matmul.ADD else product


@settings(max_examples=60)
@given(st.sampled_from(DTYPES), SIZES, SIZES, ROWS, THEN, st.booleans(), st.integers(1, 3), SEEDS)
def test_equals_torch(dtype, n, k, rows, then, has_bias, n_threads, seed):
    rng = torch.Generator().manual_seed(seed)
    parts = 2 if then == matmul.GATED else 1
    weight = torch.randn(parts * n, k, generator=rng)
    bias = torch.randn(parts * n, generator=rng) if has_bias else None
    capacity, width_x, width_out = rows + 2, padded(k), padded(n)
    buffers = torch.zeros(capacity * (width_x + width_out))
    x = buffers[: capacity * width_x].view(capacity, width_x)
    out = buffers[capacity * width_x :].view(capacity, width_out)
    x[:, :k] = torch.randn(capacity, k, generator=rng)
    out[:, :n] = torch.randn(capacity, n, generator=rng)
    x[rows:, :k], out[:, n:], out[rows:] = torch.nan, UNTOUCHED, UNTOUCHED
    before = out.clone()

    matrix, weights = packed(weight, bias, then, dtype)
    op = one_op(
        program.MATMUL,
        x_stride=width_x,
        out=capacity * width_x,
        out_stride=width_out,
        then=then,
        **matrix._asdict(),
    )
    compute(op, buffers, rows, shape=dims(), weights=weights, n_threads=n_threads)

    expected = expected_of(x[:rows, :k], as_kept(weight, dtype), bias, then, before[:rows, :n])
    torch.testing.assert_close(out[:rows, :n].double(), expected, atol=2e-4, rtol=2e-5)
    assert torch.equal(out[:, n:], before[:, n:])
    assert torch.equal(out[rows:], before[rows:])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_beside_any_others(dtype):
    """And in any place of the batch, on any number of threads."""
    n, k, rows = 3 * PANEL + 5, 131, 60
    rng = torch.Generator().manual_seed(0)
    x, weight = torch.randn(rows, k, generator=rng), torch.randn(n, k, generator=rng)
    matrix, weights = packed(weight, torch.randn(n, generator=rng), matmul.STORE, dtype)

    def product(chosen, n_threads):
        width = padded(k)
        buffers, logits = torch.zeros(len(chosen), width), torch.empty(len(chosen), n)
        buffers[:, :k] = x[chosen]
        op = one_op(program.MATMUL, x_stride=width, out_stride=n, to_logits=1, **matrix._asdict())
        compute(op, buffers, len(chosen), shape=dims(), weights=weights, logits=logits,
                n_threads=n_threads)  # fmt: skip
        return logits

    together = product(list(range(rows)), 2)
    for count in (1, 2, 3, 4, 5, 7, 8, 11, 12, 13, 49):
        for n_threads in (1, 3):
            chosen = torch.randperm(rows, generator=rng)[:count].tolist()
            assert torch.equal(product(chosen, n_threads), together[chosen])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_of_nan_stays_alone(dtype):
    weight = torch.randn(40, 33)
    matrix, weights = packed(weight, None, matmul.STORE, dtype)
    buffers, logits = torch.zeros(14, padded(33)), torch.empty(14, 40)
    buffers[:, :33] = torch.randn(14, 33)
    buffers[5, 7] = torch.nan
    op = one_op(program.MATMUL, x_stride=padded(33), out_stride=40, to_logits=1, **matrix._asdict())
    compute(op, buffers, 14, shape=dims(), weights=weights, logits=logits)
    assert logits[5].isnan().all()
    assert logits[[row for row in range(14) if row != 5]].isfinite().all()


def test_gate_of_large_numbers():
    """SiLU does not overflow where e**x does."""
    gates = torch.tensor([-1000.0, -100.0, -88.0, 0.0, 88.0, 1000.0])
    weight = torch.cat((torch.eye(6), torch.ones(6, 6) / 6))
    matrix, weights = packed(weight, None, matmul.GATED, torch.float32)
    buffers, logits = torch.zeros(6, padded(6)), torch.empty(6, 6)
    buffers[:, :6] = torch.diag(gates)
    op = one_op(program.MATMUL, x_stride=padded(6), out_stride=6, to_logits=1, then=matmul.GATED,
                **matrix._asdict())  # fmt: skip
    compute(op, buffers, 6, shape=dims(), weights=weights, logits=logits)
    expected = torch.nn.functional.silu(gates) * gates / 6
    torch.testing.assert_close(logits.diagonal(), expected, atol=1e-30, rtol=1e-5)


def test_int8_rows_keep_their_zeros_and_their_largest():
    weight = torch.tensor([[0.0, 0.0, 0.0], [-2.0, 1.0, 0.5], [1e-30, -3e-30, 0.0]])
    values, scale = quantize_rows(weight)
    assert values.tolist() == [[0, 0, 0], [-127, 64, 32], [42, -127, 0]]
    np.testing.assert_allclose(scale, [0, 2 / 127, 3e-30 / 127], rtol=1e-6)
