"""/v1/files: what batches read and write, and what clients keep."""

from __future__ import annotations

import time
from contextlib import ExitStack
from itertools import islice
from typing import Any, Final

from aiohttp import web

from pagemesh.gateway.batches.disk import on_disk
from pagemesh.gateway.batches.file_store import FILE, FileRecord, FileStore
from pagemesh.gateway.batches.names import new_name
from pagemesh.gateway.batches.pages import Page, page_of
from pagemesh.gateway.batches.upload import Form, read_form
from pagemesh.gateway.openai.answer import encode_json
from pagemesh.gateway.openai.errors import bad
from pagemesh.shared.access import OWNER

PURPOSES: Final = ("batch", "assistants", "evals", "user_data", "vision")
MOST_LISTED: Final = 10_000
# OpenAI's, in seconds.
SHORTEST_LIFE_S: Final = 3600
LONGEST_LIFE_S: Final = 30 * 24 * 3600


class FilesEndpoint:
    def __init__(self, store: FileStore) -> None:
        self._store = store

    async def create(self, request: web.Request) -> web.Response:
        owner = request[OWNER]
        with ExitStack() as stack:
            out = await on_disk(stack.enter_context, self._store.part(owner))
            form = await read_form(request, self._store, owner, out)
            await on_disk(self._store.check_room, owner, out)
            record = self._record(form, time.time())
            await on_disk(self._store.publish, owner, out, record)
        return _json(record.shown())

    async def list_files(self, request: web.Request) -> web.Response:
        page, purpose = (
            page_of(request.query, MOST_LISTED, MOST_LISTED),
            request.query.get("purpose"),
        )
        found = await on_disk(self._listed, request[OWNER], page, purpose)
        return _json(page.shown([record.shown() for record in found]))

    async def retrieve(self, request: web.Request) -> web.Response:
        return _json((await self._found(request)).shown())

    async def content(self, request: web.Request) -> web.StreamResponse:
        record = await self._found(request)
        return web.FileResponse(
            self._store.content(request[OWNER], record.id),
            headers={"content-type": "application/octet-stream"},
        )

    async def delete(self, request: web.Request) -> web.Response:
        record = await self._found(request)
        await on_disk(self._store.delete, request[OWNER], record.id)
        return _json({"id": record.id, "object": "file", "deleted": True})

    async def _found(self, request: web.Request) -> FileRecord:
        file_id = request.match_info["file_id"]
        return await on_disk(self._store.record, request[OWNER], file_id, time.time())

    def _listed(self, owner: str, page: Page, purpose: str | None) -> list[FileRecord]:
        names, now_s = self._store.names(owner), time.time()
        found = self._store.records(owner, page.beyond(names), now_s)
        wanted = (record for record in found if purpose in (None, record.purpose))
        return list(islice(wanted, page.limit + 1))

    def _record(self, form: Form, now_s: float) -> FileRecord:
        purpose = checked_purpose(form.fields.get("purpose"))
        if form.n_bytes < 1:
            raise bad("file", "is missing" if form.n_bytes < 0 else "is empty")
        after_s = checked_life_s(
            form.fields.get("expires_after[anchor]"), form.fields.get("expires_after[seconds]")
        )
        return FileRecord(
            id=new_name(FILE, now_s),
            bytes=form.n_bytes,
            created_at=int(now_s),
            expires_at=self._store.expires_at_s(now_s, after_s),
            filename=form.filename,
            purpose=purpose,
        )


def checked_purpose(purpose: str | None) -> str:
    """Raises RequestError (400)."""
    if purpose == "fine-tune":
        raise bad("purpose", "fine-tune is not served: nothing is trained here")
    if purpose not in PURPOSES:
        raise bad("purpose", f"must be one of {', '.join(PURPOSES)}")
    return purpose


def checked_life_s(anchor: object, seconds: object) -> int | None:
    """Raises RequestError (400)."""
    if anchor is None and seconds is None:
        return None
    if anchor != "created_at":
        raise bad("expires_after.anchor", "must be created_at")
    text = str(seconds)
    if not (text.isascii() and text.isdigit() and len(text) < 9):
        raise bad("expires_after.seconds", "must be a whole number of seconds")
    if not SHORTEST_LIFE_S <= int(text) <= LONGEST_LIFE_S:
        rule = f"must be between {SHORTEST_LIFE_S} and {LONGEST_LIFE_S}"
        raise bad("expires_after.seconds", rule)
    return int(text)


def _json(body: dict[str, Any]) -> web.Response:
    return web.Response(body=encode_json(body), content_type="application/json")
