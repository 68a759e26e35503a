"""Masks of grammars against their reference."""

from __future__ import annotations

import pytest
import torch

from pagemesh.kernels.gpu.grammar_mask import apply_masks
from pagemesh.kernels.grammar_mask import apply_masks as reference


@pytest.mark.parametrize("vocab_tokens", [1, 31, 32, 97, 2048, 5003])
def test_what_has_no_bit_is_banned_in_its_row_alone(device: str, vocab_tokens: int) -> None:
    rng = torch.Generator().manual_seed(vocab_tokens)
    logits = torch.randn(5, vocab_tokens, generator=rng)
    logits[3, -1] = torch.nan
    words = -(-vocab_tokens // 32)
    masks = torch.randint(-(2**31), 2**31, (3, words), generator=rng).to(torch.int32)
    rows = torch.tensor([3, 0, 4], dtype=torch.int32)
    expected, got = logits.clone(), logits.to(device, copy=True)
    reference(expected, rows, masks)
    apply_masks(got, rows.to(device), masks.to(device))
    assert torch.equal(got.cpu().nan_to_num(nan=7.0), expected.nan_to_num(nan=7.0))
    assert torch.equal(expected[1:3], logits[1:3])
    for row, mask in zip(rows.tolist(), masks.tolist(), strict=True):
        for token in range(vocab_tokens):
            allowed = mask[token // 32] >> token % 32 & 1
            assert (expected[row, token] == -torch.inf) == (
                not allowed and not logits[row, token].isnan()
            )


def test_rows_of_a_wider_table(device: str) -> None:
    logits = torch.zeros(2, 64, device=device)[:, :40]
    rows, masks = torch.tensor([1], dtype=torch.int32), torch.tensor([[5, 0]], dtype=torch.int32)
    apply_masks(logits, rows.to(device), masks.to(device))
    assert (logits[1] == 0).nonzero().flatten().tolist() == [0, 2]
    assert (logits[0] == 0).all()


def test_no_rows(device: str) -> None:
    none = torch.zeros((0, 2), dtype=torch.int32, device=device)
    apply_masks(torch.zeros(1, 40, device=device), none[:, 0], none)
