"""Rows of `pagemesh bench` from one engine in this process, and what its machine gives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from pagemesh.bench.engine import computes_on_gpu, offline_llm
from pagemesh.bench.environment import sampled_card
from pagemesh.bench.offline import OfflineBench, warmups
from pagemesh.bench.report_local import Row, sampled_rows
from pagemesh.bench.workloads import STEP_BATCHES
from pagemesh.prepare import prepare
from pagemesh.shared.settings import Settings
from pagemesh.worker_svc.models.config import DecoderConfig
from parts.linear_layers import linear_layers_ms


def machine_ms(settings: Settings) -> dict[int, float]:
    """Milliseconds of all linear layers through cuBLAS by rows of a step; empty without a card."""
    if not torch.cuda.is_available():
        return {}
    config = DecoderConfig.from_folder(prepare(settings.model))
    return linear_layers_ms(config, list(STEP_BATCHES))


def engine_rows(
    settings: Settings, rows_of: Callable[[OfflineBench], Iterator[Row]]
) -> Iterator[tuple[Row, dict[str, Any]]]:
    """Each row when it is there, and its JSON with what the card did meanwhile."""
    bench = OfflineBench(
        offline_llm(settings), warmups=warmups(gpu=computes_on_gpu(settings)), show=False
    )
    with sampled_card() as card:
        yield from sampled_rows(rows_of(bench), card)
