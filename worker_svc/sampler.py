"""From a step's logits to one token per row, and the logprobs of the rows that want them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagemesh.kernels import logprobs as reference_logprobs
from pagemesh.kernels import sample_rows as reference
from pagemesh.kernels.cpu.sampling import CpuSampling
from pagemesh.kernels.cpu.team import Team
from pagemesh.kernels.logprobs import Logprobs, with_tokens
from pagemesh.kernels.sample_rows import SamplingInputs
from pagemesh.worker_svc.batch import Ints
from pagemesh.worker_svc.sampling_state import ADJUSTED, LOGPROBS, Needs, SamplingState


class LogprobRows(NamedTuple):
    """Who wants which logprobs: entry i of them belongs to row `rows[i]`, which wants its first
    `1 + tops[i]` columns, and `more[i]` of the last `more.max()`."""

    rows: Ints
    tops: Ints
    more: Ints


NO_LOGPROBS: Final = LogprobRows(*np.empty((3, 0), np.int64))


@dataclass(frozen=True, slots=True)
class SampledRows:
    """Tokens int64[R] on the device, bool[R] whether a row's logits were finite, and the logprobs
    of the rows that asked (see LogprobRows)."""

    tokens: Tensor
    finite: NDArray[np.bool_]
    asked: LogprobRows
    logprobs: Logprobs | None


def no_rows(device: torch.device) -> SampledRows:
    tokens = torch.empty(0, dtype=torch.int64, device=device)
    return SampledRows(tokens, np.empty(0, np.bool_), NO_LOGPROBS, None)


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
            return SampledRows(*self._sample(logits, inputs), NO_LOGPROBS, None)
        raw, raw_rows = _raw_logits(logits, rows, needs)
        tokens, finite = self._sample(logits, inputs)
        tops = self._state.logprobs[slots[rows]]
        chosen = tokens[torch.from_numpy(rows).to(tokens.device)]
        logprobs, _ = self._logprobs(raw, raw_rows, chosen, int(tops.max()))
        more, wanted = self._state.logprob_ids(slots[rows])
        if wanted.size > 0:
            at = torch.from_numpy(raw_rows).to(raw.device)
            logprobs = with_tokens(logprobs, raw, at, torch.from_numpy(wanted).to(raw.device))
        return SampledRows(tokens, finite, LogprobRows(rows, tops, more), logprobs)

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
