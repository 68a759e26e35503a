"""Batches on the shared folder, so that any gateway knows them and any may run them.

    {folder}/open/{id}                          those that have not ended; holds the owner
    {folder}/{owner}/batches/{id}/input.jsonl   a link to the file, which may be deleted meanwhile
                                  state-TERM.json, results-TERM.jsonl    of who ran it under TERM
                                  cancel        asked for, at this time

Only who holds the batch's lease writes, and only files of its own term (`shared/leases.py`; terms
grow). The state of the highest term counts. One who lost its lease without noticing thus harms
nobody: its later results are passed over where another has some.

Every method does disk work: call it in a thread.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
from msgspec import Raw, Struct

from pagemesh.gateway.batches.file_store import write_whole
from pagemesh.gateway.batches.names import is_name
from pagemesh.gateway.batches.record import BatchRecord
from pagemesh.shared.errors import PagemeshError, RequestError

BATCH: Final = "batch_"
FIRST_TERM: Final = 0
"""Of who creates a batch."""
_STATES: Final = "state-*.json"
_RESULTS: Final = "results-*.jsonl"


class LeaseLost(PagemeshError):
    """Another runs the batch. `batch` is its name."""

    def __init__(self, batch: str) -> None:
        super().__init__(f"{batch} is run by another gateway")
        self.batch = batch


class Result(Struct, frozen=True, array_like=True):
    """Of one line; `entry` is the JSON for the output or, unless it is `ok`, the error file."""

    line: int
    ok: bool
    entry: Raw


class OpenBatch(NamedTuple):
    owner: str
    id: str


class BatchStore:
    def __init__(self, folder: Path, ttl_s: float) -> None:
        self._folder = folder
        self._ttl_s = ttl_s

    def create(self, owner: str, record: BatchRecord, content: Path) -> None:
        """`content` is the input. Raises FileNotFoundError when it is gone."""
        batch = OpenBatch(owner, record.id)
        try:
            self._create(batch, record, content)
        except OSError:  # nobody would ever run it
            self.delete(batch)
            raise

    def _create(self, batch: OpenBatch, record: BatchRecord, content: Path) -> None:
        folder = self._of(batch)
        folder.mkdir(parents=True)
        os.link(content, folder / "input.jsonl")
        self._write(folder, record, FIRST_TERM)
        (self._folder / "open").mkdir(exist_ok=True)
        write_whole(self._folder / "open" / batch.id, batch.owner.encode())

    def load(self, batch: OpenBatch) -> BatchRecord:
        """As its runner left it, or as it was asked to be. Raises RequestError: 404, 409 for what
        another version wrote."""
        folder = self._of(batch)
        states = _by_term(folder, _STATES) if is_name(BATCH, batch.id) else {}
        if not states:
            message = f"No such Batch object: {batch.id[:64]}"
            raise RequestError(message, status=404, code="batch_not_found")
        found = states[max(states)].read_bytes()
        try:
            record = msgspec.json.decode(found, type=BatchRecord)
        except msgspec.MsgspecError as error:
            message = f"{batch.id} was written by another version: {error}"
            raise RequestError(message, status=409) from error
        cancelled_s = self.cancelled_s(batch)
        return record if cancelled_s is None else record.asked_to_cancel(cancelled_s)

    def names(self, owner: str) -> list[str]:
        try:
            return [name for name in os.listdir(self._batches(owner)) if is_name(BATCH, name)]
        except FileNotFoundError:
            return []

    def records(self, owner: str, names: Iterable[str]) -> Iterator[BatchRecord]:
        """In that order, but for those that are gone, are being created, or cannot be read."""
        for name in names:
            with suppress(RequestError, FileNotFoundError):
                yield self.load(OpenBatch(owner, name))

    def open_batches(self) -> list[OpenBatch]:
        """Those that have not ended, the oldest first."""
        folder = self._folder / "open"
        try:
            names = sorted(name for name in os.listdir(folder) if is_name(BATCH, name))
        except FileNotFoundError:
            return []
        return [OpenBatch(owner, name) for name in names if (owner := _text(folder / name))]

    def cancel(self, batch: OpenBatch, now_s: float) -> None:
        """Ask whoever runs it. The first time counts."""
        with suppress(FileExistsError), (self._of(batch) / "cancel").open("x") as file:
            file.write(str(now_s))

    def cancelled_s(self, batch: OpenBatch) -> float | None:
        text = _text(self._of(batch) / "cancel")
        return float(text) if text else None

    def delete(self, batch: OpenBatch) -> None:
        shutil.rmtree(self._of(batch), ignore_errors=True)

    def sweep(self, owners: Iterable[str], now_s: float) -> None:
        """Delete what ended longer than the time to live ago."""
        for owner in owners:
            for record in self.records(owner, self.names(owner)):
                if record.ended_s < now_s - self._ttl_s:
                    self.delete(OpenBatch(owner, record.id))

    # -- for who holds the lease ------------------------------------------------------------------

    def save(self, batch: OpenBatch, record: BatchRecord, term: int) -> None:
        """Raises LeaseLost when a later term has begun."""
        self.check_term(batch, term)
        self._write(self._of(batch), record, term)

    def check_term(self, batch: OpenBatch, term: int) -> None:
        """Raises LeaseLost when a later term has begun, or the batch is gone."""
        states = _by_term(self._of(batch), _STATES)
        if not states or max(states) > term:
            raise LeaseLost(batch.id)

    def input(self, batch: OpenBatch) -> Path:
        return self._of(batch) / "input.jsonl"

    def append(self, batch: OpenBatch, term: int, results: Iterable[Result]) -> None:
        """In one write: readers pass over what a full disk or a kill has cut off."""
        data = b"".join(msgspec.json.encode(result) + b"\n" for result in results)
        with (self._of(batch) / f"results-{term}.jsonl").open("ab") as file:
            file.write(data)

    def results(self, batch: OpenBatch) -> Iterator[tuple[Result, Path, int]]:
        """Of every line answered so far, once, and where it lies (bytes from the file's start)."""
        seen: set[int] = set()
        for _, path in sorted(_by_term(self._of(batch), _RESULTS).items()):
            for offset, raw in _whole_lines(path):
                result = _result(raw)
                if result is not None and result.line not in seen:
                    seen.add(result.line)
                    yield result, path, offset

    def close(self, batch: OpenBatch) -> None:
        """It has ended and its record says so: nobody needs to look at it again."""
        (self._folder / "open" / batch.id).unlink(missing_ok=True)
        folder = self._of(batch)
        for path in (folder / "input.jsonl", *_by_term(folder, _RESULTS).values()):
            path.unlink(missing_ok=True)

    def _write(self, folder: Path, record: BatchRecord, term: int) -> None:
        write_whole(folder / f"state-{term}.json", msgspec.json.encode(record))

    def _batches(self, owner: str) -> Path:
        return self._folder / owner / "batches"

    def _of(self, batch: OpenBatch) -> Path:
        return self._batches(batch.owner) / batch.id


def _by_term(folder: Path, kind: str) -> dict[int, Path]:
    return {int(path.stem.partition("-")[2]): path for path in folder.glob(kind)}


def _whole_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    offset = 0
    with path.open("rb") as file:
        for raw in file:
            if raw.endswith(b"\n"):
                yield offset, raw
            offset += len(raw)


def _result(raw: bytes) -> Result | None:
    try:
        return msgspec.json.decode(raw, type=Result)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None


def _text(path: Path) -> str | None:
    try:
        return path.read_text(errors="replace")
    except FileNotFoundError:
        return None
