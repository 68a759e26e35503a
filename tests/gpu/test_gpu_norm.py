"""RMSNorm with its addition and with the embedding, against the references."""

from __future__ import annotations

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

from pagemesh.kernels import norm as reference
from pagemesh.kernels.gpu.embedding import embed_rms_norm
from pagemesh.kernels.gpu.norm import add_rms_norm, rms_norm
from pagemesh.kernels.linear import join_splits

HIDDEN = [48, 576, 1024, 4096, 5120, 16384] if ON_CARD else [48, 128]
EPS = 1e-5


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("splits", SPLITS)
@pytest.mark.parametrize("hidden", HIDDEN)
def test_add_rms_norm_is_that_of_the_joined_splits(hidden, splits, dtype, device):
    x = linear_output(5, hidden, splits, dtype, device)
    residual, weight = (torch.randn(n, hidden, device=device).to(dtype) for n in (5, 1))
    joined = join_splits(x, dtype)
    expected, expected_total = reference.add_rms_norm(joined, residual, weight[0], EPS)
    normed, total = add_rms_norm(x, residual, weight[0], EPS)
    assert total is residual
    assert torch.equal(total, expected_total)
    assert_rounded_alike(normed, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("splits", SPLITS)
def test_rms_norm_is_that_of_the_joined_splits(splits, dtype, device):
    x, weight = linear_output(3, 80, splits, dtype, device), torch.randn(80, device=device)
    expected = reference.rms_norm(join_splits(x, dtype), weight.to(dtype), EPS)
    assert_rounded_alike(rms_norm(x, weight.to(dtype), EPS), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("id_type", [torch.int32, torch.int64])
@pytest.mark.parametrize("hidden", HIDDEN)
def test_embedding_is_gathered_and_normalised(hidden, id_type, dtype, device):
    token_ids = torch.tensor([6, 0, 3, 3], dtype=id_type, device=device)
    table, weight = (torch.randn(n, hidden, device=device).to(dtype) for n in (7, 1))
    normed, total = embed_rms_norm(token_ids, table, weight[0], EPS)
    assert torch.equal(total, table[token_ids])
    assert_rounded_alike(normed, reference.rms_norm(total, weight[0], EPS))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("splits", SPLITS)
@pytest.mark.parametrize("hidden", HIDDEN)
def test_a_row_has_the_same_bits_alone_and_beside_nan(hidden, splits, dtype, device):
    x = linear_output(9, hidden, splits, dtype, device)
    residual, weight = (torch.randn(n, hidden, device=device).to(dtype) for n in (9, 1))
    x[..., 3, :] = torch.nan
    one = slice(4, 5)
    alone, alone_total = add_rms_norm(tokens_of(x, one), tokens_of(residual, one), weight[0], EPS)
    normed, total = add_rms_norm(x, residual, weight[0], EPS)
    assert torch.equal(normed[one], alone)
    assert torch.equal(total[one], alone_total)
    assert normed.isnan().any(-1).tolist() == [row == 3 for row in range(9)]


def test_no_rows(device):
    x, weight = torch.empty(0, 48, device=device), torch.ones(48, device=device)
    assert rms_norm(x, weight, EPS).shape == (0, 48)
    normed, total = embed_rms_norm(x[:, 0].long(), weight[None], weight, EPS)
    assert normed.shape == total.shape == (0, 48)
