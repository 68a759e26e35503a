"""A step's rows checked and laid out, and its attention cut into items."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagemesh.kernels.cpu.staging import (
    FEW_BLOCKS,
    FITS,
    NO_TOKENS,
    NOT_KNOWN,
    NOT_LIVE,
    TWICE,
    Inputs,
    Slots,
    admit_rows,
    lay_out,
)
from pagemesh.kernels.cpu.work import attention_work

BLOCK_TOKENS = 4
MOST_TOKENS = 30


def state() -> Slots:
    """Slots 1, 2 and 4 hold requests of 9, 1 and 30 known tokens."""
    live = np.array([False, True, True, False, True])
    known, computed = np.array([0, 9, 1, 0, 30]), np.array([0, 5, 0, 0, 12])
    return Slots(live, known, computed, np.array([0, 2, 1, 0, 8]), np.zeros(5, np.int64))


def admit(slots: list[int], n_tokens: list[int], slots_state: Slots | None = None):
    starts, samples = np.full(len(slots), -1), np.zeros(len(slots), np.bool_)
    found = admit_rows(
        np.array(slots), np.array(n_tokens), slots_state or state(), MOST_TOKENS, BLOCK_TOKENS,
        starts, samples,
    )  # fmt: skip
    return found, starts.tolist(), samples.tolist()


def test_rows_that_fit():
    assert admit([4, 1, 2], [17, 3, 1]) == (FITS, [12, 5, 0], [False, False, True])
    assert admit([4], [18]) == (FITS, [12], [True])


@pytest.mark.parametrize(
    ("slots", "n_tokens", "found"),
    [
        ([4, 1], [1, 0], NO_TOKENS),
        ([4, 1], [1, -3], NO_TOKENS),
        ([4, 3], [1, 1], NOT_LIVE),
        ([5], [1], NOT_LIVE),
        ([-1], [1], NOT_LIVE),
        ([4, 1, 4], [1, 1, 2], TWICE),
        ([2], [2], NOT_KNOWN),
        ([4], [19], NOT_KNOWN),
        ([1], [4], FEW_BLOCKS),
    ],
)
def test_rows_that_do_not(slots, n_tokens, found):
    assert admit(slots, n_tokens)[0] == found


def test_the_longest_length_counts_though_more_is_known():
    slots = state()._replace(known=np.array([0, 9, 1, 0, 40]))
    assert admit([4], [18], slots)[0] == FITS
    assert admit([4], [19], slots)[0] == NOT_KNOWN


ROWS = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 30)), min_size=1, max_size=6)


@given(ROWS, st.sampled_from([1, 5, 16]), st.integers(0, 2**31))
def test_inputs_are_laid_out_token_by_token(rows, block_tokens, seed):
    """`rows`: first position, tokens."""
    rng = np.random.default_rng(seed)
    row_tokens = 80
    slots = rng.permutation(8)[: len(rows)]
    starts, n_tokens = map(np.array, zip(*rows, strict=True))
    blocks = rng.integers(1, 1000, (8, row_tokens), dtype=np.int32)
    tokens, width = n_tokens.sum(), -(-(starts + n_tokens).max() // block_tokens)
    inputs = Inputs(
        *np.full((3, tokens), -7),
        np.full(len(rows) + 1, -7, np.int32),
        np.full(len(rows), -7, np.int32),
        np.full((len(rows), width), -7, np.int32),
    )
    lay_out(slots, n_tokens, starts, blocks, row_tokens, block_tokens, inputs)
    expected = [
        (
            slot * row_tokens + position,
            position,
            blocks[slot, position // block_tokens] * block_tokens + position % block_tokens,
        )
        for slot, start, n in zip(slots, starts, n_tokens, strict=True)
        for position in range(start, start + n)
    ]
    got = zip(inputs.places, inputs.positions, inputs.slot_mapping, strict=True)
    assert list(got) == expected
    assert inputs.query_start.tolist() == [0, *n_tokens.cumsum()]
    assert inputs.seq_lens.tolist() == (starts + n_tokens).tolist()
    assert np.array_equal(inputs.tables, blocks[slots, :width])


BATCHES = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 90)), max_size=8)


@given(BATCHES, st.integers(1, 48))
def test_every_query_is_in_one_piece_of_work(rows, most):
    """`rows`: query tokens, and tokens before them; padding rows of one token see nothing."""
    rows = [*rows, (1, None)]
    counts = np.array([n for n, _ in rows])
    starts = np.concatenate(([0], counts.cumsum())).astype(np.int32)
    lens = np.array([0 if before is None else n + before for n, before in rows], np.int32)
    room = np.full((len(rows) + starts[-1] // most, 4), -7)
    work = room[: attention_work(starts, lens, most, room)]
    expected = {
        (row, starts[row] + i, before + i)
        for row, (n, before) in enumerate(rows)
        if before is not None
        for i in range(n)
    }
    queries = [(row, token + i, position + i) for row, token, position, n in work for i in range(n)]
    assert len(queries) == len(expected)
    assert set(queries) == expected
    assert (work[:, 3] <= most).all()
    singles = counts[work[:, 0]] == 1
    assert (np.sort(singles) == singles).all(), "decodes come last"
