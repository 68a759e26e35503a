"""Sampling on a CPU: a team's threads take the rows of a step, one at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagemesh.kernels.cpu.jit import kernel
from pagemesh.kernels.cpu.sampling_noise import row_key
from pagemesh.kernels.cpu.sampling_row import clear, draw_filtered, penalise, score, survey
from pagemesh.kernels.cpu.sync import Steps, claim, finish, wait
from pagemesh.kernels.cpu.team import Team
from pagemesh.kernels.logprobs import Logprobs
from pagemesh.kernels.sample_rows import SamplingInputs

_INFINITY: Final = np.float32(np.inf)
_ROWS_ALONE: Final = 4
"""So few rows are done before another thread has woken."""


class CpuSampling:
    """kernels.sample_rows and kernels.logprobs by compiled kernels; without a team, alone."""

    def __init__(self, team: Team | None = None) -> None:
        self._team = team
        self._steps = Steps(1)

    def sample_rows(
        self, logits: Tensor, inputs: SamplingInputs
    ) -> tuple[Tensor, NDArray[np.bool_]]:
        """See kernels.sample_rows."""
        tokens, finite = np.empty(len(logits), np.int64), np.empty(len(logits), np.bool_)
        params, positions, edits, seen, output_counts = inputs
        counts = seen.numpy(), output_counts.numpy()
        arguments = logits.numpy(), params, positions, *edits, *counts, tokens, finite
        self._share(len(logits), _sample_rows, arguments)
        return torch.from_numpy(tokens), finite

    def token_logprobs(
        self, logits: Tensor, rows: Tensor, chosen: Tensor, top: int
    ) -> tuple[Logprobs, NDArray[np.bool_]]:
        """See kernels.logprobs. Clears the rows of `logits` that are not finite."""
        width = 1 + min(top, logits.shape[1])
        ids = np.empty((len(rows), width), np.int32)
        values = np.empty((len(rows), width), np.float32)
        ranks, finite = np.empty(len(rows), np.int32), np.empty(len(rows), np.bool_)
        arguments = logits.numpy(), rows.numpy(), chosen.numpy(), ids, values, ranks, finite
        self._share(len(rows), _score_rows, arguments)
        return Logprobs(*map(torch.from_numpy, (ids, values, ranks))), finite

    def _share(self, n_rows: int, share: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        """Call a kernel that computes a thread's share of the rows, on all threads."""
        words, tag = self._steps.words, self._steps.open(1)

        def job(rank: int) -> None:
            share(rank, tag, words, n_rows, *arguments)

        if self._team is None or n_rows <= _ROWS_ALONE:
            job(0)
        else:
            self._team.run(job)


@kernel
def _sample_rows(
    rank: int, tag: int, words: NDArray[np.int64], n_rows: int,
    logits: NDArray[np.float32], params: NDArray[np.void], positions: NDArray[np.int64],
    edit_starts: NDArray[np.int64], edit_ids: NDArray[np.int64], edit_values: NDArray[np.float32],
    seen: NDArray[np.bool_], output_counts: NDArray[np.int32],
    tokens: NDArray[np.int64], finite: NDArray[np.bool_],
) -> None:  # fmt: skip
    flat, n_tokens = logits.reshape(-1), logits.shape[1]
    flat_seen, flat_counts = seen.view(np.int8).reshape(-1), output_counts.reshape(-1)
    while True:
        row = claim(words, 0, tag, n_rows)
        if row < 0:
            break
        at = row * n_tokens
        top, token, finite[row] = clear(flat, at, n_tokens)
        first, last = edit_starts[row], edit_starts[row + 1]
        own = params[row]
        if last > first or own.count_row >= 0:
            for i in range(first, last):
                flat[at + edit_ids[i]] += edit_values[i]
            if own.count_row >= 0:
                penalise(flat, at, n_tokens, own, flat_seen, flat_counts)
            top, token, _ = survey(flat, at, n_tokens)
        # Where the best overflows when scaled, it is certain.
        if own.inverse_temperature > 0 and top * own.inverse_temperature < _INFINITY:
            key = row_key(own.seed, positions[row])
            token = draw_filtered(flat, at, n_tokens, top, own, key)
        tokens[row] = token
        finish(words, 0, tag)
    if rank == 0:
        wait(words, 0, tag, n_rows)


@kernel
def _score_rows(
    rank: int, tag: int, words: NDArray[np.int64], n_rows: int,
    logits: NDArray[np.float32], rows: NDArray[np.int64], chosen: NDArray[np.int64],
    ids: NDArray[np.int32], values: NDArray[np.float32], ranks: NDArray[np.int32],
    finite: NDArray[np.bool_],
) -> None:  # fmt: skip
    flat, n_tokens = logits.reshape(-1), logits.shape[1]
    while True:
        row = claim(words, 0, tag, n_rows)
        if row < 0:
            break
        at = rows[row] * n_tokens
        best, _, finite[row] = clear(flat, at, n_tokens)
        ranks[row] = score(flat, at, n_tokens, best, chosen[row], ids[row], values[row])
        finish(words, 0, tag)
    if rank == 0:
        wait(words, 0, tag, n_rows)
