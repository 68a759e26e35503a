"""The engine's log lines: what an operator should know, and what to do about it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import structlog

from pagemesh.scheduler_svc.request import Request

_REMEDIES: Final = (
    "lower --max-num-seqs, shorten --max-model-len, add tensor parallelism or replicas"
)

log = structlog.get_logger(__name__)


def preempted(engine_id: str, victims: Sequence[Request], total: int, device: str) -> None:
    """One line per step that took the blocks of running requests."""
    pool = "--kv-cache-memory" if device.startswith("cpu") else "--gpu-memory-utilization"
    log.warning(
        "preempted",
        engine=engine_id,
        requests=[request.request_id for request in victims],
        total=total,
        cause="the KV cache is full; these requests are computed again later",
        remedies=f"raise {pool}, {_REMEDIES}",
    )


def snapshot(engine_id: str, last_step: int, sent: int) -> None:
    log.warning("snapshot_asked_for", engine=engine_id, last_step=last_step, sent=sent)
