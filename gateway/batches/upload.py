"""A file as it comes: multipart/form-data, written to the disk piece by piece."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import BinaryIO, Final

from aiohttp import BodyPartReader, web
from aiohttp.http_exceptions import HttpProcessingError

from pagemesh.gateway.batches.disk import on_disk
from pagemesh.gateway.batches.file_store import FileStore
from pagemesh.gateway.openai.errors import bad
from pagemesh.shared.errors import RequestError

PIECE_BYTES: Final = 2**20
MAX_FIELD_BYTES: Final = 1024
MAX_PARTS: Final = 16
MAX_FILENAME_CHARS: Final = 255
# Of a body, at most what is not the file.
_FORM_BYTES: Final = 2**16
# What aiohttp raises for what is no form.
_UNREADABLE: Final = (*(ValueError, AssertionError, LookupError, RuntimeError), HttpProcessingError)


class Form:
    """What came beside the content: fields by name, the file's name and size (-1: none came)."""

    def __init__(self) -> None:
        self.fields: dict[str, str] = {}
        self.filename = ""
        self.n_bytes = -1


async def read_form(request: web.Request, store: FileStore, owner: str, out: BinaryIO) -> Form:
    """Write the part `file` to `out`. Raises RequestError: 400 for what is no such form, 413 for a
    file that is too large, as soon as it is."""
    if request.content_type != "multipart/form-data":
        raise RequestError(
            "Send the file as multipart/form-data, with the parts purpose and file.", param="file"
        )
    room_bytes = await on_disk(store.room_bytes, owner)
    store.check_size((request.content_length or 0) - _FORM_BYTES, room_bytes)
    form = Form()
    try:
        async for part in _parts(request):
            if part.name == "file":
                form.filename = _readable(part.filename or "file")[:MAX_FILENAME_CHARS]
                form.n_bytes = await _write(part, store, room_bytes, out)
            else:
                form.fields[_readable(part.name or "")] = await _text(part)
    except _UNREADABLE as error:
        reason = _readable(str(error))
        raise RequestError(f"The form could not be read: {reason}", param="file") from error
    return form


async def _parts(request: web.Request) -> AsyncIterator[BodyPartReader]:
    n_parts = 0
    async for part in await request.multipart():
        n_parts += 1
        if not isinstance(part, BodyPartReader):
            raise ValueError("a part has parts of its own")
        if n_parts > MAX_PARTS:
            raise ValueError(f"it has more than {MAX_PARTS} parts")
        yield part


async def _write(part: BodyPartReader, store: FileStore, room_bytes: int, out: BinaryIO) -> int:
    """Over what an earlier part of that name has written. Returns the size in bytes."""
    out.seek(0)
    await on_disk(out.truncate)
    n_bytes, pieces = 0, bytearray()
    while chunk := await part.read_chunk():
        n_bytes += len(chunk)
        store.check_size(n_bytes, room_bytes)
        pieces += chunk
        if len(pieces) >= PIECE_BYTES:
            await on_disk(out.write, bytes(pieces))
            pieces.clear()
    await on_disk(out.write, bytes(pieces))
    return n_bytes


async def _text(part: BodyPartReader) -> str:
    data = bytearray()
    while chunk := await part.read_chunk():
        data += chunk
        if len(data) > MAX_FIELD_BYTES:
            raise bad(_readable(part.name or "")[:64], f"must have at most {MAX_FIELD_BYTES} bytes")
    return data.decode()


def _readable(header: str) -> str:
    """What was no UTF-8 stands as lone surrogates in what comes from a header: no JSON."""
    return header.encode(errors="surrogateescape").decode(errors="replace")
