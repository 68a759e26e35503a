"""Rows to sample, for kernels on a device and for the reference that runs on the host."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pagemesh.kernels.gpu.row_params import PARAM_WORDS, ROW_WORDS, SamplingRows
from pagemesh.kernels.gpu.sampling import SampledTokens
from pagemesh.kernels.sample_rows import PARAMS, Edits, SamplingInputs
from pagemesh.kernels.sample_rows import sample_rows as reference
from pagemesh.kernels.sampling import Filters

ROW_TOKENS = 40


class Way(NamedTuple):
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


def params_of(ways: Sequence[Way]) -> np.ndarray:
    params = np.zeros(len(ways), PARAMS)
    for row, way in enumerate(ways):
        log_min_p = math.log(way.min_p) if way.min_p > 0 else -math.inf
        inverse = 1 / way.temperature if way.temperature > 0 else 0.0
        params[row] = (row * 7919 - 50, way.top_k, -1, inverse, way.top_p, log_min_p, 1, 0, 0)
    return params


def positions_of(ways: Sequence[Way]) -> np.ndarray:
    return np.arange(len(ways)) % ROW_TOKENS


def rows_of(ways: Sequence[Way], device: str) -> SamplingRows:
    words = np.zeros((len(ways), ROW_WORDS), np.int32)
    words[:, :PARAM_WORDS] = params_of(ways).view(np.int32).reshape(len(ways), PARAM_WORDS)
    slots = np.arange(len(ways), dtype=np.int32)
    parts = words, slots, positions_of(ways).astype(np.int32)
    return SamplingRows(*(torch.from_numpy(part).to(device) for part in parts))


def filters_of(ways: Sequence[Way]) -> Filters:
    params = params_of(ways)
    return Filters(*(torch.from_numpy(params[name].copy()) for name in Filters._fields))


def poisoned(n_rows: int, device: str) -> SampledTokens:
    """Results and known tokens of as many slots as rows; -7 where nothing has been written."""
    shapes = (2, n_rows), (n_rows, ROW_TOKENS)
    return SampledTokens(
        *(torch.full(shape, -7, dtype=torch.int32, device=device) for shape in shapes)
    )


def expected_tokens(logits: Tensor, ways: Sequence[Way]) -> list[int]:
    """By the reference, in float32 on the host."""
    wide = logits.to("cpu", torch.float32, copy=True)
    n_rows, vocab_tokens = wide.shape
    none = np.empty(0, np.int64)
    edits = Edits(np.zeros(n_rows + 1, np.int64), none, none.astype(np.float32))
    counts = torch.zeros((0, vocab_tokens), dtype=torch.bool)
    inputs = SamplingInputs(params_of(ways), positions_of(ways), edits, counts, counts.int())
    return reference(wide, inputs)[0].tolist()
