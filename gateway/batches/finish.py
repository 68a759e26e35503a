"""From the results of a batch to its output and error files, in the order of its lines."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from functools import partial
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from pagemesh.gateway.batches.batch_store import BatchStore, OpenBatch, Result
from pagemesh.gateway.batches.file_store import FileRecord, FileStore
from pagemesh.gateway.batches.lines import Line, failed_entry
from pagemesh.gateway.batches.record import BatchRecord

_EXPIRED = "This request could not be executed before the completion window expired."


class _Place(NamedTuple):
    """Where the result of a line lies: sorting these costs little, whatever was answered."""

    line: int
    path: Path
    offset: int


def publish_results(
    batches: BatchStore,
    files: FileStore,
    batch: OpenBatch,
    record: BatchRecord,
    missing: Iterable[Line],
    now_s: float,
) -> BatchRecord:
    """Make the files that have something in them; the record that names them. `missing` lines were
    not run in time. Twice makes no other files."""
    ok, others = list[_Place](), list[_Place]()
    for result, path, offset in batches.results(batch):
        (ok if result.ok else others).append(_Place(result.line, path, offset))
    late = (failed_entry(line.custom_id, "batch_expired", _EXPIRED) for line in missing)
    write = partial(_write, files, batch.owner, record, now_s)
    return replace(
        record,
        has_output=write("output", record.output_id, _entries(ok)),
        has_errors=write("error", record.error_id, chain(_entries(others), late)),
    )


def _entries(places: list[_Place]) -> Iterator[bytes]:
    with ExitStack() as stack:
        paths = {place.path for place in places}
        files = {path: stack.enter_context(path.open("rb")) for path in paths}
        for place in sorted(places):
            file = files[place.path]
            file.seek(place.offset)
            yield bytes(msgspec.json.decode(file.readline(), type=Result).entry)


def _write(
    files: FileStore,
    owner: str,
    record: BatchRecord,
    now_s: float,
    kind: str,
    file_id: str,
    entries: Iterable[bytes],
) -> bool:
    """Whether there were any."""
    with files.part(owner) as part:
        part.writelines(entry + b"\n" for entry in entries)
        n_bytes = part.tell()
        if n_bytes:
            name, purpose = f"{record.id}_{kind}.jsonl", "batch_output"
            expires_at = files.expires_at_s(now_s, record.output_expires_after_s)
            about = FileRecord(file_id, n_bytes, int(now_s), expires_at, name, purpose)
            files.publish(owner, part, about)
    return n_bytes > 0
