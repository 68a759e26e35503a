"""Whether the input of a batch can be run. Pure: the lines and the time come in."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from pagemesh.gateway.batches.lines import MAX_LINES, Lines
from pagemesh.gateway.batches.record import BatchRecord, Counts, Fault
from pagemesh.shared.errors import RequestError

MAX_SHOWN_FAULTS: Final = 100


def checked(record: BatchRecord, raw: Iterable[tuple[int, bytes]], now_s: float) -> BatchRecord:
    """The record, failed or in progress. `raw` are the lines by number."""
    faults, n_lines, lines = list[Fault](), 0, Lines(record.endpoint)
    for number, text in raw:
        n_lines += 1
        try:
            lines.read(number, text)
        except RequestError as error:
            faults.append(Fault(error.code or "invalid", error.message, number, error.param))
        if len(faults) == MAX_SHOWN_FAULTS or n_lines > MAX_LINES:
            break
    faults += _faults_of_size(n_lines)
    if faults:
        return record.failed(faults, now_s)
    return record.moved("in_progress", now_s, counts=Counts(total=n_lines))


def _faults_of_size(n_lines: int) -> list[Fault]:
    if n_lines == 0:
        return [Fault("empty_file", "The input file holds no requests.")]
    if n_lines > MAX_LINES:
        return [Fault("too_many_requests", f"A batch may hold {MAX_LINES} requests.")]
    return []
