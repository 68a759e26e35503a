"""Scoring a prompt: the token at position p by the logits at p - 1."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from pagemesh.kernels.logprobs import Logprobs
from pagemesh.worker_svc.batch import Batch, Rows
from pagemesh.worker_svc.sampling_state import PROMPT_LOGPROBS, Needs
from pagemesh.worker_svc.step_model import StepModel

# Positions whose full logits are held at once: 50 MB for a vocabulary of 49152.
_POSITIONS_AT_ONCE: Final = 256


class PromptScores(NamedTuple):
    """Logprobs of a row's prompt tokens from position `start` on. `row` is its place in the batch
    that was computed."""

    row: int
    start: int
    logprobs: Logprobs
    finite: Tensor
    """bool[]: whether all logits were."""


class PromptPart(NamedTuple):
    """Positions `start` to `stop` - 1 of a row, whose hidden states from `first` on score the
    prompt's tokens at `start` + 1 to `stop`."""

    row: int
    slot: int
    start: int
    stop: int
    first: int


def prompt_parts(rows: Rows, batch: Batch, needs: Needs) -> Iterator[PromptPart]:
    """What is to be scored of `rows`."""
    ends = np.cumsum(rows.n_tokens)
    for row in np.flatnonzero(needs[rows.slots] & PROMPT_LOGPROBS).tolist():
        slot, start, n = (int(part[row]) for part in (rows.slots, rows.starts, rows.n_tokens))
        stop = min(start + n, int(batch.n_prompt[slot]) - 1)
        if stop > start:
            yield PromptPart(row, slot, start, stop, int(ends[row]) - n)


class Scorer(Protocol):
    def score(self, logits: Tensor, targets: Tensor, top: int) -> tuple[Logprobs, Tensor]:
        """Logprobs of int64[N] `targets` and of the `top` best under [N, V] logits, and whether all
        were finite, bool[]."""


def score_prompt(
    model: StepModel, scorer: Scorer, hidden: Tensor, targets: Tensor, top: int
) -> tuple[Logprobs, Tensor]:
    """Logprobs of `targets` int[N] and of the `top` best, given the hidden states [N, H] of the
    positions before them; and whether all logits were finite."""
    parts, finite = [], torch.ones((), dtype=torch.bool, device=hidden.device)
    for first in range(0, len(targets), _POSITIONS_AT_ONCE):
        part = slice(first, first + _POSITIONS_AT_ONCE)
        logits = model.logits(hidden[part])
        logprobs, part_is_finite = scorer.score(logits, targets[part].to(torch.int64), top)
        finite = finite & part_is_finite
        parts.append(logprobs)
    return Logprobs(*(torch.cat(field) for field in zip(*parts, strict=True))), finite
