"""From a step's logits to one token per row, and the logprobs of the rows that want them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagemesh.kernels import logprobs as reference_logprobs
from pagemesh.kernels import sample_rows as reference
from pagemesh.kernels.cpu.sampling import CpuSampling
from pagemesh.kernels.cpu.team import Team
from pagemesh.kernels.logprobs import Logprobs
from pagemesh.kernels.sample_rows import SamplingInputs
from pagemesh.worker_svc.batch import Ints
from pagemesh.worker_svc.sampling_state import ADJUSTED, LOGPROBS, Needs, SamplingState


@dataclass(frozen=True, slots=True)
class SampledRows:
    """Tokens int64[R] on the device, bool[R] whether a row's logits were finite, and the logprobs
    of the rows that asked: entry i of `logprobs` belongs to row `logprob_rows[i]`, which wants its
    first `1 + logprob_tops[i]` columns."""

    tokens: Tensor
    finite: NDArray[np.bool_]
    logprob_rows: Ints
    logprob_tops: Ints
    logprobs: Logprobs | None


def no_rows(device: torch.device) -> SampledRows:
    none = np.empty(0, np.int64)
    tokens = torch.empty(0, dtype=torch.int64, device=device)
    return SampledRows(tokens, np.empty(0, np.bool_), none, none, None)


class Sampler:
    """Owner of the kernels that read logits: compiled ones on a CPU, which run on the threads of
    `team` (alone without one), the references on other devices."""

    def __init__(self, state: SamplingState, team: Team | None = None) -> None:
        self._state = state
        self._cpu = CpuSampling(team)

    def __call__(self, logits: Tensor, slots: Ints, positions: Ints, n_output: Ints) -> SampledRows:
        """Sample from float32[R, V] logits, which are overwritten.

        `positions` are those the tokens will have, `n_output` how many tokens each row has
        generated so far. Changes no state.
        """
        needs = self._state.needs[slots]
        inputs = self._state.inputs(slots, positions, n_output)
        rows = np.flatnonzero(needs & LOGPROBS)
        if len(rows) == 0:
            return SampledRows(*self._sample(logits, inputs), rows, rows, None)
        raw, raw_rows = _raw_logits(logits, rows, needs)
        tokens, finite = self._sample(logits, inputs)
        tops = self._state.logprobs[slots[rows]]
        chosen = tokens[torch.from_numpy(rows).to(tokens.device)]
        logprobs, _ = self._logprobs(raw, raw_rows, chosen, int(tops.max()))
        return SampledRows(tokens, finite, rows, tops, logprobs)

    def score(self, logits: Tensor, targets: Tensor, top: int) -> tuple[Logprobs, Tensor]:
        """Logprobs of int64[N] `targets` and of the `top` best under float32[N, V] logits, and
        whether all were finite, bool[]; rows that were not count as zeros."""
        logprobs, finite = self._logprobs(logits, np.arange(len(logits)), targets, top)
        return logprobs, torch.tensor(finite.all())

    def _sample(self, logits: Tensor, inputs: SamplingInputs) -> tuple[Tensor, NDArray[np.bool_]]:
        if logits.device.type == "cpu":
            return self._cpu.sample_rows(logits, inputs)
        return reference.sample_rows(logits, inputs)

    def _logprobs(
        self, logits: Tensor, rows: Ints, chosen: Tensor, top: int
    ) -> tuple[Logprobs, NDArray[np.bool_]]:
        index = torch.from_numpy(rows).to(logits.device)
        if logits.device.type == "cpu":
            return self._cpu.token_logprobs(logits, index, chosen, top)
        return reference_logprobs.token_logprobs(logits, index, chosen, top)


def _raw_logits(logits: Tensor, rows: Ints, needs: Needs) -> tuple[Tensor, Ints]:
    """Where the logits of `rows` stay as the model gave them: a tensor and the rows in it. They are
    copied if some will be changed."""
    if not (needs[rows] & ADJUSTED).any():
        return logits, rows
    return logits[torch.from_numpy(rows).to(logits.device)], np.arange(len(rows))
