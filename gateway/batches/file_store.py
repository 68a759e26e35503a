"""Files that clients upload and batches write: a folder that all gateways of a mesh share.

    {folder}/{owner}/files/{id}.data   the content
    {folder}/{owner}/files/{id}.json   the record: with it the file exists
    {folder}/{owner}/files/*.part      what is still being written

Nobody finds what is another owner's. Every method does disk work: call it in a thread.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple

import msgspec
from msgspec import Struct

from pagemesh.gateway.batches.names import is_name
from pagemesh.shared.errors import RequestError

FILE: Final = "file-"
FILE_COST_BYTES: Final = 4096
"""Each counts as at least this much, so that their number is bounded too."""
ABANDONED_S: Final = 3600.0
"""After that a part that nobody writes to is of a process that is gone."""


class FileRecord(Struct, frozen=True):
    id: str
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: str

    def shown(self) -> dict[str, Any]:
        """OpenAI's file object."""
        kept = msgspec.to_builtins(self)
        return {**kept, "object": "file", "status": "processed", "status_details": None}


class Limits(NamedTuple):
    file_bytes: int
    owner_bytes: int
    ttl_s: float


class FileStore:
    def __init__(self, folder: Path, limits: Limits) -> None:
        self.limits = limits
        self.folder = folder

    @contextmanager
    def part(self, owner: str) -> Iterator[BinaryIO]:
        """Something to write to. What is not published when the block ends is gone."""
        # What is in the files is no other user's business, unless the folder was there before.
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder = self._of(owner)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{os.urandom(12).hex()}.part"
        try:
            with path.open("wb") as out:
                yield out
        finally:
            path.unlink(missing_ok=True)

    def publish(self, owner: str, part: BinaryIO, record: FileRecord) -> None:
        """Make a file of a part. One of that name that is there already stays as it is."""
        part.flush()
        os.fsync(part.fileno())
        with suppress(FileExistsError):
            os.link(part.name, self.content(owner, record.id))
        write_whole(self._of(owner) / f"{record.id}.json", msgspec.json.encode(record))

    def expires_at_s(self, now_s: float, after_s: int | None) -> int:
        """Of a file that shall live for `after_s`; none lives longer than `ttl_s`."""
        return int(now_s + min(self.limits.ttl_s, after_s or self.limits.ttl_s))

    def record(self, owner: str, file_id: str, now_s: float) -> FileRecord:
        """Raises RequestError (404)."""
        found = self._read(owner, file_id, now_s) if is_name(FILE, file_id) else None
        if found is None:
            raise RequestError(
                f"No such File object: {file_id[:64]}", status=404, code="file_not_found"
            )
        return found

    def names(self, owner: str) -> list[str]:
        return [path.stem for path in self._of(owner).glob(f"{FILE}*.json")]

    def records(self, owner: str, names: Iterable[str], now_s: float) -> Iterator[FileRecord]:
        """In that order, but for those that are gone meanwhile."""
        found = (self._read(owner, name, now_s) for name in names)
        return (record for record in found if record is not None)

    def content(self, owner: str, file_id: str) -> Path:
        return self._of(owner) / f"{file_id}.data"

    def delete(self, owner: str, file_id: str) -> None:
        (self._of(owner) / f"{file_id}.json").unlink(missing_ok=True)
        self.content(owner, file_id).unlink(missing_ok=True)

    def room_bytes(self, owner: str) -> int:
        """What the owner may still keep."""
        return self.limits.owner_bytes - used_bytes(self.folder / owner)

    def check_room(self, owner: str, part: BinaryIO) -> None:
        """Raises RequestError (413) when `part` and whatever came beside it are too much."""
        part.flush()
        self.check_size(0, self.room_bytes(owner))

    def check_size(self, n_bytes: int, room_bytes: int) -> None:
        """Raises RequestError (413) for a file of `n_bytes`, or of more."""
        if n_bytes > self.limits.file_bytes:
            raise _too_large(f"one may have {self.limits.file_bytes} bytes")
        if n_bytes > room_bytes:
            total = self.limits.owner_bytes
            raise _too_large(f"those of one key may have {total} bytes together; delete some")

    def owners(self) -> list[str]:
        with suppress(FileNotFoundError):
            return [path.name for path in self.folder.iterdir() if (path / "files").is_dir()]
        return []

    def sweep(self, now_s: float) -> None:
        """Delete what has expired, and parts that nobody writes to any more."""
        for owner in self.owners():
            for path in self._of(owner).iterdir():
                with suppress(FileNotFoundError):
                    self._sweep(owner, path, now_s)

    def _sweep(self, owner: str, path: Path, now_s: float) -> None:
        if path.suffix == ".json":
            if self._read(owner, path.stem, now_s) is None:
                self.delete(owner, path.stem)
        elif now_s - path.stat().st_mtime > ABANDONED_S and not path.with_suffix(".json").exists():
            path.unlink()

    def _read(self, owner: str, file_id: str, now_s: float) -> FileRecord | None:
        try:
            found = (self._of(owner) / f"{file_id}.json").read_bytes()
            record = msgspec.json.decode(found, type=FileRecord)
        except (FileNotFoundError, msgspec.MsgspecError):
            return None
        return record if record.expires_at > now_s else None

    def _of(self, owner: str) -> Path:
        return self.folder / owner / "files"


def _too_large(rule: str) -> RequestError:
    return RequestError(f"The file is too large: {rule}.", status=413, param="file")


def write_whole(path: Path, data: bytes) -> None:
    """All of it or nothing, whoever reads or writes meanwhile."""
    part = path.with_name(f"{path.name}.{os.urandom(6).hex()}.part")
    try:
        part.write_bytes(data)
        part.replace(path)
    except OSError:
        part.unlink(missing_ok=True)
        raise


def used_bytes(folder: Path) -> int:
    """Of what lies in `folder` and below; a content that has two names counts once."""
    sizes: dict[int, int] = {}
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                status = os.stat(os.path.join(parent, name))
                sizes[status.st_ino] = max(status.st_size, FILE_COST_BYTES)
    return sum(sizes.values())
