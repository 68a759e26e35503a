"""Staged writes and gathered inputs against their references."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pagemesh.kernels import batch as reference
from pagemesh.kernels.batch import BatchState, StepBuffers
from pagemesh.kernels.gpu.batch import gather_rows, scatter_writes

SLOTS, TOKENS, BLOCKS, WORDS = 5, 700, 48, 16


def random_state(device: str, seed: int) -> BatchState:
    rng = torch.Generator().manual_seed(seed)

    def ints(*shape: int) -> torch.Tensor:
        return torch.randint(0, 1000, shape, generator=rng, dtype=torch.int32).to(device)

    return BatchState(ints(SLOTS, TOKENS), ints(SLOTS, BLOCKS), ints(SLOTS, WORDS))


@pytest.mark.parametrize("n_writes", [0, 1, 7])
def test_writes_land_where_they_should(device: str, n_writes: int) -> None:
    rng = np.random.default_rng(n_writes)
    state = random_state(device, 0)
    sizes = [field.numel() for field in state]
    header, values = [], []
    for write in range(n_writes):
        n = int(rng.integers(1, 3000 if write % 3 == 0 else 30))
        field = write % 3
        # Each write has a part of its field to itself.
        share = sizes[field] // 3
        n = min(n, share)
        header.append([field, (write // 3) * share, n_writes * 4 + sum(map(len, values)), n])
        values.append(rng.integers(-9, 9, n))
    flat = np.concatenate([np.ravel(np.array(header, int)), *values]) if header else np.zeros(1)
    words = torch.from_numpy(flat.astype(np.int32)).to(device)
    expected = BatchState(*(field.clone() for field in state))
    reference.scatter_writes(words, n_writes, expected)
    scatter_writes(words, n_writes, state)
    for mine, theirs in zip(state, expected, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("block_tokens", [16, 64])
def test_rows_are_gathered(device: str, block_tokens: int) -> None:
    """Decodes, chunks with and without a past, and padding."""
    state = random_state(device, 1)
    plan = [(3, 0, 1), (0, 517, 1), (4, 15, 1), (1, 0, 300), (2, 255, 258), (-1, 0, 1), (-1, 0, 1)]
    firsts = np.cumsum([0, *(n for *_, n in plan)])
    rows = torch.tensor(
        [[*row, first] for row, first in zip(plan, firsts, strict=False)], dtype=torch.int32
    ).to(device)
    n_tokens = int(firsts[-1])
    filled = [StepBuffers.empty(len(plan), n_tokens, BLOCKS, torch.device(device)) for _ in "ab"]
    for buffers in filled:
        for field in buffers:
            field.fill_(-7)
    moved = rows.clone()
    reference.gather_rows(rows, state, block_tokens, filled[0])
    gather_rows(moved, state, block_tokens, filled[1])
    assert torch.equal(rows, moved)
    for name, mine, theirs in zip(StepBuffers._fields, *filled, strict=True):
        assert torch.equal(mine, theirs), name
