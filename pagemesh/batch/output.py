"""What a batch has come to: one line for each request, as each is answered."""

from __future__ import annotations

import sys
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Final, Self

import msgspec
from msgspec import Raw, Struct

from pagemesh.shared.errors import StartupError

STANDARD: Final = "-"


class _Error(Struct):
    line: int | None = None


class _Entry(Struct):
    """All fields are there: what lacks one is another kind of file."""

    custom_id: str | None
    response: Raw
    error: _Error | None


class Output:
    """A file that only grows, a whole line at a time: a process that is killed leaves what it had
    finished. A context manager.

    Raises StartupError for a file that is there already, unless it is to be resumed and holds
    nothing but answers.
    """

    def __init__(self, name: str, *, resume: bool) -> None:
        self.done_ids: set[str] = set()
        self.done_lines: set[int] = set()
        self._file = _standard(resume) if name == STANDARD else self._opened(Path(name), resume)

    def write(self, entry: bytes) -> None:
        self._file.write(entry + b"\n")
        self._file.flush()

    def _opened(self, path: Path, resume: bool) -> BinaryIO:
        try:
            file = path.open("r+b" if path.exists() else "x+b")
        except OSError as error:
            raise StartupError(f"cannot write {path}: {error.strerror}") from error
        if file.read(1) and not resume:
            file.close()
            raise StartupError(f"{path} is there already: --resume goes on with it")
        try:
            file.seek(self._recall(file))
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            file.close()
            raise StartupError(f"{path} holds something else than answers: {error}") from error
        file.truncate()
        return file

    def _recall(self, file: BinaryIO) -> int:
        """Note what is done; where the last whole line ends."""
        end = 0
        file.seek(0)
        for raw in file:
            if raw.endswith(b"\n"):
                end += len(raw)
                self._note(msgspec.json.decode(raw, type=_Entry))
        return end

    def _note(self, entry: _Entry) -> None:
        if entry.error is not None and entry.error.line is not None:
            self.done_lines.add(entry.error.line)
        elif entry.custom_id is not None:
            self.done_ids.add(entry.custom_id)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._file is not sys.stdout.buffer:
            self._file.close()


def _standard(resume: bool) -> BinaryIO:
    if resume:
        raise StartupError("--resume needs an output file, not the standard output")
    return sys.stdout.buffer
