"""Scoring a prompt: the token at position p by the logits at p - 1."""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
from torch import Tensor

from pagemesh.kernels.logprobs import Logprobs
from pagemesh.worker_svc.sampler import Sampler
from pagemesh.worker_svc.step_model import StepModel

# Positions whose full logits are held at once: 50 MB for a vocabulary of 49152.
_POSITIONS_AT_ONCE: Final = 256


class PromptScores(NamedTuple):
    """Logprobs of a row's prompt tokens from position `start` on. `row` is its place in the batch
    that was computed."""

    row: int
    start: int
    logprobs: Logprobs
    finite: bool


def score_prompt(
    model: StepModel, sampler: Sampler, hidden: Tensor, targets: Tensor, top: int
) -> tuple[Logprobs, bool]:
    """Logprobs of `targets` int[N] and of the `top` best, given the hidden states [N, H] of the
    positions before them; and whether all logits were finite."""
    parts, finite = [], True
    for first in range(0, len(targets), _POSITIONS_AT_ONCE):
        part = slice(first, first + _POSITIONS_AT_ONCE)
        logits = model.logits(hidden[part])
        logprobs, part_is_finite = sampler.score(logits, targets[part].to(torch.int64), top)
        finite = finite and part_is_finite
        parts.append(logprobs)
    return Logprobs(*(torch.cat(field) for field in zip(*parts, strict=True))), finite
