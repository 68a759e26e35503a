"""A batch as it is kept and as it is shown. Pure: times are seconds since 1970, and come in."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Any, Final, Literal

import msgspec
from msgspec import Struct
from msgspec.structs import replace

WINDOW: Final = "24h"
WINDOW_S: Final = 24 * 3600
Status = Literal[
    "validating",
    "in_progress",
    "finalizing",
    "completed",
    "failed",
    "expired",
    "cancelling",
    "cancelled",
]
ENDED: Final = frozenset({"completed", "failed", "expired", "cancelled"})
CANCELLABLE: Final = frozenset({"validating", "in_progress"})


class Fault(Struct, frozen=True):
    """Why a batch failed; `line` counts from 1."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class Counts(Struct, frozen=True):
    total: int = 0
    completed: int = 0
    failed: int = 0


class BatchRecord(Struct, frozen=True, kw_only=True):
    """`output_id` and `error_id` are the files' names from the start, so that writing them twice
    makes no other files; they are shown once there is something in them."""

    id: str
    endpoint: str
    input_file_id: str
    completion_window: str = WINDOW
    metadata: dict[str, str] | None = None
    output_expires_after_s: int | None = None
    output_id: str
    error_id: str
    status: Status = "validating"
    times: dict[str, int]
    counts: Counts = Counts()
    faults: list[Fault] = []
    has_output: bool = False
    has_errors: bool = False

    @property
    def ended(self) -> bool:
        return self.status in ENDED

    @property
    def ended_s(self) -> float:
        """When it ended; inf while it has not."""
        return self.times[f"{self.status}_at"] if self.ended else inf

    @property
    def expires_at_s(self) -> int:
        return self.times["expires_at"]

    def moved(self, status: Status, now_s: float, **fields: Any) -> BatchRecord:
        """In another status since `now_s`."""
        times = {**self.times, f"{status}_at": int(now_s)}
        return replace(self, status=status, times=times, **fields)

    def asked_to_cancel(self, at_s: float) -> BatchRecord:
        """As `cancelling`, unless it is too late for that."""
        return self.moved("cancelling", at_s) if self.status in CANCELLABLE else self

    def failed(self, faults: Sequence[Fault], now_s: float) -> BatchRecord:
        return self.moved("failed", now_s, faults=list(faults))

    def shown(self) -> dict[str, Any]:
        """OpenAI's batch object."""
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "errors": _shown_faults(self.faults),
            "input_file_id": self.input_file_id,
            "completion_window": self.completion_window,
            "status": self.status,
            "output_file_id": self.output_id if self.has_output else None,
            "error_file_id": self.error_id if self.has_errors else None,
            **{name: self.times.get(name) for name in _TIMES},
            "request_counts": msgspec.to_builtins(self.counts),
            "metadata": self.metadata,
        }


_TIMES: Final = (
    "created_at",
    "in_progress_at",
    "expires_at",
    "finalizing_at",
    "completed_at",
    "failed_at",
    "expired_at",
    "cancelling_at",
    "cancelled_at",
)


def _shown_faults(faults: Sequence[Fault]) -> dict[str, Any] | None:
    return {"object": "list", "data": msgspec.to_builtins(faults)} if faults else None
