"""Which configuration a linear layer takes for each number of rows: now, and by times of many."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Final

import torch

from pagemesh.kernels.gpu.launch import multiprocessors
from pagemesh.kernels.gpu.skinny_config import SkinnyConfig, choose_config, choose_gated_config
from parts.linear_shapes import Linear

FEW_ROWS: Final = [1, 8, 32, 64]
"""A row's bits are to be the same for each of these: one order of sums."""
MORE_ROWS: Final = [128, 256]

Times = dict[SkinnyConfig | None, float]
"""Microseconds by configuration; None is cuBLAS."""
Order = tuple[int, bool]
"""Of sums: see SkinnyConfig."""


def present_config(layer: Linear, rows: int, dtype: torch.dtype) -> SkinnyConfig | None:
    """What the worker chooses now; None: cuBLAS."""
    n, k, sms = layer.n, layer.k, multiprocessors()
    if layer.gated:
        return choose_gated_config(rows, n // 2, k, dtype, sms)
    return choose_config(rows, n, k, dtype, sms, max_splits=layer.max_splits)


def chosen(all_times: Mapping[int, Times]) -> dict[int, SkinnyConfig | None]:
    """What is best by rows: one for 1 and 8, cuBLAS where that is better with many."""
    order = _best_order({rows: all_times[rows] for rows in FEW_ROWS})
    fewest = {config: us + all_times[8][config] for config, us in all_times[1].items()}
    found: dict[int, SkinnyConfig | None] = dict.fromkeys((1, 8), _best(fewest, order))
    found |= {rows: _best(all_times[rows], order) for rows in FEW_ROWS[2:]}
    return found | {
        rows: min(all_times[rows], key=all_times[rows].__getitem__) for rows in MORE_ROWS
    }


def _best(times: Times, order: Order | None = None) -> SkinnyConfig:
    """The fastest of our own, of those with such an order of sums if given."""
    own = [c for c in times if c is not None and order in (None, c.order)]
    return min(own, key=times.__getitem__)


def _best_order(few: Mapping[int, Times]) -> Order:
    """For all of few rows at once, by the sum of their times relative to the fastest."""
    totals: dict[Order, float] = defaultdict(float)
    for order in {c.order for times in few.values() for c in times if c is not None}:
        for times in few.values():
            totals[order] += times[_best(times, order)] / times[_best(times)]
    return min(totals, key=totals.__getitem__)
