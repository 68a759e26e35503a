"""Logprobs on a device against their reference."""

from __future__ import annotations

import math

import pytest
import torch

from pagemesh.kernels import logprobs as reference
from pagemesh.kernels.gpu.logprobs import token_logprobs

ON_CARD = torch.cuda.is_available()


def random_logits(n_rows: int, vocab_tokens: int, device: str, dtype: torch.dtype) -> torch.Tensor:
    torch.manual_seed(3)
    return (torch.randn(n_rows, vocab_tokens) * 6).to(device, dtype)


@pytest.mark.parametrize("vocab_tokens", [50, 5000, *([151936] if ON_CARD else [])])
@pytest.mark.parametrize("top", [0, 4, 64])
def test_logprobs_are_those_of_the_reference(
    device: str, dtype: torch.dtype, vocab_tokens: int, top: int
) -> None:
    """Of some rows, in any order; rows that are not finite count as zeros."""
    logits = random_logits(6, vocab_tokens, device, dtype)
    logits[4, 7], logits[5, vocab_tokens - 1] = math.nan, -math.inf
    rows = torch.tensor([3, 0, 0, 5, 4, 1], device=device)
    chosen = torch.tensor([0, vocab_tokens - 1, 17, 5, 7, 1], device=device)
    chosen[-1] = logits[1].argmax()
    before = logits.clone()
    (ids, values, ranks), finite = token_logprobs(logits, rows, chosen, top)
    expected, expected_finite = reference.token_logprobs(
        logits.float().cpu(), rows.cpu(), chosen.cpu(), top
    )
    torch.testing.assert_close(values.cpu(), expected.values, atol=2e-5, rtol=1e-5)
    assert torch.equal(ranks.cpu(), expected.ranks)
    assert finite.tolist() == expected_finite.tolist() == [True, True, True, False, False, True]
    assert torch.equal(ids[:, 0].cpu(), expected.ids[:, 0])
    # Equal logits may stand in any order.
    wide = logits.float()[rows].nan_to_num(0, 0, 0)
    wide[~finite] = 0
    listed = wide.gather(1, ids[:, 1:].to(torch.int64))
    assert torch.equal(listed, wide.topk(min(top, vocab_tokens), dim=1).values)
    assert torch.equal(logits.nan_to_num(), before.nan_to_num())


def test_no_rows(device: str) -> None:
    none = torch.empty(0, dtype=torch.int64, device=device)
    (ids, values, ranks), finite = token_logprobs(torch.ones(2, 9, device=device), none, none, 3)
    assert ids.shape == values.shape == (0, 4)
    assert len(ranks) == len(finite) == 0


@pytest.mark.gpu
def test_the_rows_beside_a_row_change_no_bit_of_it(dtype: torch.dtype) -> None:
    logits = random_logits(8, 151936, "cuda", dtype)
    rows, chosen = torch.arange(8, device="cuda"), torch.arange(8, device="cuda")
    (_, together, _), _ = token_logprobs(logits, rows, chosen, 0)
    for row in range(8):
        one = slice(row, row + 1)
        (_, alone, _), _ = token_logprobs(logits, rows[one], chosen[one], 0)
        assert torch.equal(alone, together[one])
