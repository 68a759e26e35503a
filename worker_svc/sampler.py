"""From a step's logits to one token per row."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagemesh.kernels.logprobs import Logprobs, token_logprobs
from pagemesh.kernels.noise import row_keys
from pagemesh.kernels.penalties import add_bias, apply_penalties, ban
from pagemesh.kernels.sampling import sample, sample_filtered
from pagemesh.kernels.search import argmax
from pagemesh.worker_svc.batch import Ints
from pagemesh.worker_svc.sampling_state import (
    BIASED,
    FILTERED,
    LOGPROBS,
    MIN_TOKENS,
    PENALISED,
    RANDOM,
    Needs,
    SamplingState,
)


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
    """Applies each row's parameters in vLLM's order: bias and bans, penalties, temperature, min_p,
    top_k, top_p. What no row of the batch needs is not computed."""

    def __init__(self, state: SamplingState) -> None:
        self._state = state

    def __call__(self, logits: Tensor, slots: Ints, positions: Ints, n_output: Ints) -> SampledRows:
        """Sample from float32[R, V] logits, which are overwritten.

        `positions` are those the tokens will have, `n_output` how many tokens each row has
        generated so far. Changes no state.
        """
        row_needs = self._state.needs[slots]
        needs = int(np.bitwise_or.reduce(row_needs))
        finite = clear_nonfinite(logits)
        logprob_rows = np.flatnonzero(row_needs & LOGPROBS)
        raw = logits[torch.from_numpy(logprob_rows)] if len(logprob_rows) else None
        if needs & (BIASED | MIN_TOKENS | PENALISED):
            self._adjust(logits, slots, n_output, row_needs)
        if needs & RANDOM:
            tokens = self._choose(logits, slots, positions, row_needs)
        else:
            tokens = argmax(logits)
        tops = self._state.logprobs[slots[logprob_rows]]
        logprobs = None
        if raw is not None:
            chosen = tokens[torch.from_numpy(logprob_rows).to(tokens.device)]
            logprobs = token_logprobs(raw, chosen, int(tops.max()))
        return SampledRows(tokens, finite, logprob_rows, tops, logprobs)

    def _adjust(self, logits: Tensor, slots: Ints, n_output: Ints, row_needs: Needs) -> None:
        state = self._state
        biased = np.flatnonzero(row_needs & BIASED)
        if len(biased):
            add_bias(logits, *state.biases(biased, slots[biased]))
        early = (row_needs & MIN_TOKENS > 0) & (n_output < state.min_tokens[slots])
        rows = np.flatnonzero(early)
        if len(rows):
            ban(logits, *state.banned(rows, slots[rows]))
        rows = np.flatnonzero(row_needs & PENALISED)
        if len(rows):
            self._penalise(logits, rows, slots[rows])

    def _penalise(self, logits: Tensor, rows: Ints, slots: Ints) -> None:
        counts = self._state.counts
        apply_penalties(
            logits,
            torch.from_numpy(rows).to(logits.device),
            counts.seen,
            counts.output_counts,
            counts.rows(slots),
            self._state.penalties(slots),
        )

    def _choose(self, logits: Tensor, slots: Ints, positions: Ints, row_needs: Needs) -> Tensor:
        """Greedy, plain and filtered rows apart: each pays for its own work only."""
        random, filtered = row_needs & RANDOM > 0, row_needs & FILTERED > 0
        tokens = torch.empty(len(slots), dtype=torch.int64, device=logits.device)
        for mask, draw in (
            (~random, None),
            (random & ~filtered, self._draw),
            (filtered, self._draw_filtered),
        ):
            rows = np.flatnonzero(mask)
            if len(rows) == 0:
                continue
            index = torch.from_numpy(rows).to(logits.device)
            part = logits if len(rows) == len(slots) else logits[index]
            tokens[index] = (
                argmax(part) if draw is None else draw(part, slots[rows], positions[rows])
            )
        return tokens

    def _draw(self, logits: Tensor, slots: Ints, positions: Ints) -> Tensor:
        return sample(self._scale(logits, slots), self._keys(slots, positions, logits.device))

    def _draw_filtered(self, logits: Tensor, slots: Ints, positions: Ints) -> Tensor:
        keys = self._keys(slots, positions, logits.device)
        return sample_filtered(self._scale(logits, slots), keys, self._state.filters(slots))

    def _scale(self, logits: Tensor, slots: Ints) -> Tensor:
        return logits.div_(self._state.temperatures(slots).unsqueeze(1))

    def _keys(self, slots: Ints, positions: Ints, device: torch.device) -> Tensor:
        return row_keys(self._state.seeds(slots), torch.from_numpy(positions).to(device))


def clear_nonfinite(logits: Tensor) -> NDArray[np.bool_]:
    """Whether each row of `logits` is finite, bool[R]; rows that are not become zeros.

    One sum per row shows it, since NaN and inf survive addition.
    """
    finite = logits.sum(dim=1).isfinite()
    if not finite.all():
        logits[~finite] = 0.0
    array: NDArray[np.bool_] = finite.numpy(force=True)
    return array
