"""/v1/batches: many requests at once, answered when there is room."""

from __future__ import annotations

import time
from itertools import islice
from typing import Any, Final

from aiohttp import web

from pagemesh.gateway.backend import Backend
from pagemesh.gateway.batches.batch_store import BATCH, OpenBatch
from pagemesh.gateway.batches.disk import on_disk
from pagemesh.gateway.batches.file_store import FILE
from pagemesh.gateway.batches.lines import ENDPOINTS
from pagemesh.gateway.batches.names import new_name
from pagemesh.gateway.batches.pages import Page, page_of
from pagemesh.gateway.batches.record import ENDED, WINDOW, WINDOW_S, BatchRecord
from pagemesh.gateway.batches.run import Means
from pagemesh.gateway.openai.answer import encode_json
from pagemesh.gateway.openai.errors import bad
from pagemesh.gateway.openai.files import checked_life_s
from pagemesh.gateway.openai.schema import BatchRequest
from pagemesh.gateway.request_body import read_body
from pagemesh.shared.access import OWNER
from pagemesh.shared.errors import RequestError

MOST_LISTED: Final = 100
LISTED: Final = 20
MAX_BATCHES: Final = 1000
"""Of one key, those that have ended and are still kept as well."""
MAX_METADATA: Final = 16
MAX_METADATA_KEY_CHARS: Final = 64
MAX_METADATA_VALUE_CHARS: Final = 512


class BatchesEndpoint:
    def __init__(self, backend: Backend, means: Means) -> None:
        self._means = means
        self._reader = backend.body_reader("batches", BatchRequest, {})

    async def create(self, request: web.Request) -> web.Response:
        body = await self._reader.read(await read_body(request))
        self._check(body)
        record = await on_disk(self._created, request[OWNER], body, time.time())
        return _json(record.shown())

    async def list_batches(self, request: web.Request) -> web.Response:
        page = page_of(request.query, MOST_LISTED, LISTED)
        found = await on_disk(self._listed, request[OWNER], page)
        return _json(page.shown([record.shown() for record in found]))

    async def retrieve(self, request: web.Request) -> web.Response:
        return _json((await on_disk(self._means.batches.load, _batch(request))).shown())

    async def cancel(self, request: web.Request) -> web.Response:
        record = await on_disk(self._cancelled, _batch(request), time.time())
        return _json(record.shown())

    def _check(self, body: BatchRequest) -> None:
        known = [path for path in ENDPOINTS if self._means.inner.knows(path)]
        if body.endpoint not in known:
            raise bad("endpoint", f"must be one of {', '.join(known)}")
        if body.completion_window != WINDOW:
            raise bad("completion_window", f"must be {WINDOW}")
        _check_metadata(body.metadata or {})

    def _created(self, owner: str, body: BatchRequest, now_s: float) -> BatchRecord:
        files, batches = self._means.files, self._means.batches
        if len(batches.names(owner)) >= MAX_BATCHES:
            message = f"This key has {MAX_BATCHES} batches: wait until some are deleted."
            raise RequestError(message, status=429, code="too_many_batches")
        file = files.record(owner, body.input_file_id, now_s)
        if file.purpose != "batch":
            raise bad("input_file_id", "names a file whose purpose is not batch")
        record = _new_record(body, now_s)
        try:
            batches.create(owner, record, files.content(owner, file.id))
        except FileNotFoundError as error:
            raise bad("input_file_id", "names a file that was just deleted") from error
        return record

    def _listed(self, owner: str, page: Page) -> list[BatchRecord]:
        batches = self._means.batches
        found = batches.records(owner, page.beyond(batches.names(owner)))
        return list(islice(found, page.limit + 1))

    def _cancelled(self, batch: OpenBatch, now_s: float) -> BatchRecord:
        batches = self._means.batches
        record = batches.load(batch)
        if record.status in ENDED or record.status == "finalizing":
            raise RequestError(f"Cannot cancel a batch with status '{record.status}'.")
        batches.cancel(batch, now_s)
        return batches.load(batch)


def _new_record(body: BatchRequest, now_s: float) -> BatchRecord:
    kept = body.output_expires_after
    return BatchRecord(
        id=new_name(BATCH, now_s),
        endpoint=body.endpoint,
        input_file_id=body.input_file_id,
        metadata=body.metadata,
        output_expires_after_s=None if kept is None else checked_life_s(kept.anchor, kept.seconds),
        output_id=new_name(FILE, now_s),
        error_id=new_name(FILE, now_s),
        times={"created_at": int(now_s), "expires_at": int(now_s) + WINDOW_S},
    )


def _check_metadata(metadata: dict[str, str]) -> None:
    if len(metadata) > MAX_METADATA:
        raise bad("metadata", f"must have at most {MAX_METADATA} entries")
    for key, value in metadata.items():
        if len(key) > MAX_METADATA_KEY_CHARS or len(value) > MAX_METADATA_VALUE_CHARS:
            sizes = f"{MAX_METADATA_KEY_CHARS} and {MAX_METADATA_VALUE_CHARS} characters"
            raise bad("metadata", f"may have keys and values of at most {sizes}")


def _batch(request: web.Request) -> OpenBatch:
    return OpenBatch(request[OWNER], request.match_info["batch_id"])


def _json(body: dict[str, Any]) -> web.Response:
    return web.Response(body=encode_json(body), content_type="application/json")
