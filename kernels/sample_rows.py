"""A step's rows of logits to one token each: bias and bans, penalties, then the draw.

The order is vLLM's: bias and bans, penalties, temperature, min_p, top_k, top_p. This is the
reference, for any device; kernels.cpu.sampling does the same on a CPU.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagemesh.kernels.noise import row_keys
from pagemesh.kernels.penalties import Penalties, add_bias, apply_penalties
from pagemesh.kernels.sampling import Filters, sample, sample_filtered
from pagemesh.kernels.search import argmax, clear_nonfinite

PARAMS: Final = np.dtype(
    [
        ("seed", np.int64),
        ("top_k", np.int32),
        ("count_row", np.int32),
        ("inverse_temperature", np.float32),
        ("top_p", np.float32),
        ("log_min_p", np.float32),
        ("repetition", np.float32),
        ("frequency", np.float32),
        ("presence", np.float32),
    ],
    align=True,
)
"""How a row is sampled. Off: inverse_temperature 0 (greedy), top_k 0, top_p 1, log_min_p -inf,
count_row -1 (no penalties; else the row of the token counts)."""


class Edits(NamedTuple):
    """What is added to logits: entries starts[r] to starts[r + 1] - 1 belong to row r.

    starts int64[R + 1], token_ids int64[N], values float32[N]; -inf bans the token.
    """

    starts: NDArray[np.int64]
    token_ids: NDArray[np.int64]
    values: NDArray[np.float32]


class SamplingInputs(NamedTuple):
    """PARAMS[R] and int64[R] positions that the sampled tokens will have, edits of the logits, and
    the counts that penalties look at: seen bool[N, V] (prompt and output), output_counts
    int32[N, V]."""

    params: NDArray[np.void]
    positions: NDArray[np.int64]
    edits: Edits
    seen: Tensor
    output_counts: Tensor


def sample_rows(logits: Tensor, inputs: SamplingInputs) -> tuple[Tensor, NDArray[np.bool_]]:
    """int64[R] tokens, and bool[R] whether a row of float32[R, V] `logits` was finite.

    Rows that are not become zeros; edits and penalties change the others in place.
    """
    finite = clear_nonfinite(logits)
    params = inputs.params
    _edit(logits, inputs.edits)
    _penalise(logits, inputs)
    random = params["inverse_temperature"] > 0
    filtered = (params["top_k"] > 0) | (params["top_p"] < 1) | (params["log_min_p"] > -np.inf)
    tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    for mask, choose in (
        (~random, _greedy),
        (random & ~filtered, _draw),
        (random & filtered, _draw_filtered),
    ):
        rows = np.flatnonzero(mask)
        if len(rows) > 0:
            index = _on(logits, rows)
            tokens[index] = choose(logits[index], params[rows], inputs.positions[rows])
    return tokens, finite


def _edit(logits: Tensor, edits: Edits) -> None:
    if len(edits.token_ids) > 0:
        rows = np.repeat(np.arange(len(logits)), np.diff(edits.starts))
        add_bias(logits, *(_on(logits, part) for part in (rows, edits.token_ids, edits.values)))


def _penalise(logits: Tensor, inputs: SamplingInputs) -> None:
    rows = np.flatnonzero(inputs.params["count_row"] >= 0)
    if len(rows) == 0:
        return
    params = inputs.params[rows]
    apply_penalties(
        logits,
        _on(logits, rows),
        inputs.seen,
        inputs.output_counts,
        _on(logits, params["count_row"].astype(np.int64)),
        Penalties(*(_column(logits, params, name) for name in Penalties._fields)),
    )


def _greedy(logits: Tensor, params: NDArray[np.void], positions: NDArray[np.int64]) -> Tensor:
    return argmax(logits)


def _draw(logits: Tensor, params: NDArray[np.void], positions: NDArray[np.int64]) -> Tensor:
    return sample(_scaled(logits, params), _keys(logits, params, positions))


def _draw_filtered(
    logits: Tensor, params: NDArray[np.void], positions: NDArray[np.int64]
) -> Tensor:
    filters = Filters(*(_column(logits, params, name) for name in Filters._fields))
    return sample_filtered(_scaled(logits, params), _keys(logits, params, positions), filters)


def _scaled(logits: Tensor, params: NDArray[np.void]) -> Tensor:
    return logits * _column(logits, params, "inverse_temperature").unsqueeze(1)


def _keys(logits: Tensor, params: NDArray[np.void], positions: NDArray[np.int64]) -> Tensor:
    return row_keys(_column(logits, params, "seed"), _on(logits, positions))


def _column(logits: Tensor, params: NDArray[np.void], name: str) -> Tensor:
    return _on(logits, np.ascontiguousarray(params[name]))


def _on(logits: Tensor, array: NDArray[np.generic]) -> Tensor:
    return torch.from_numpy(array).to(logits.device)
