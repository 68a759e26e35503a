"""The engine's log lines: what an operator should know, and what to do about it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import structlog

from pagemesh.scheduler_svc.request import Request
from pagemesh.scheduler_svc.tally import Tally

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


def displaced(newcomer: Request, displaced: Sequence[Request]) -> None:
    log.warning(
        "displaced",
        requests=[request.request_id for request in displaced],
        by=newcomer.request_id,
        cause="the queue is full (--max-waiting, --max-waiting-tokens) and its priority is higher",
    )


def waited_too_long(late: Sequence[Request], longest_s: float) -> None:
    log.warning(
        "waited_too_long",
        requests=[request.request_id for request in late],
        cause=f"none was begun within --queue-timeout-s {longest_s:g}",
    )


def snapshot(engine_id: str, last_step: int, sent: int) -> None:
    log.warning("snapshot_asked_for", engine=engine_id, last_step=last_step, sent=sent)


def request_ended(engine_id: str, tally: Tally) -> None:
    log.info(
        "request_ended",
        request_id=tally.request_id,
        engine=engine_id,
        finish_reason=",".join(sorted(tally.finish_reasons)),
        choices=tally.choices,
        prompt_tokens=tally.prompt_tokens,
        generated_tokens=tally.generated_tokens,
        cached_tokens=tally.cached_tokens,
        preemptions=tally.preemptions,
    )


def rows_failed(step: int, failed: Sequence[tuple[Request, str]]) -> None:
    """One line per step: the worker's words are for the operator, not for clients."""
    log.error(
        "rows_failed",
        step=step,
        requests=[request.request_id for request, _ in failed],
        reasons=sorted({reason for _, reason in failed}),
    )
