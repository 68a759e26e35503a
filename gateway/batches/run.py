"""One batch at the gateway that holds its lease: check, run, finish."""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final, Literal, NamedTuple, TypeVar

import structlog
from msgspec import Raw
from msgspec.structs import replace

from pagemesh.gateway.batches.batch_store import BatchStore, OpenBatch, Result
from pagemesh.gateway.batches.checks import checked
from pagemesh.gateway.batches.file_store import FileStore
from pagemesh.gateway.batches.finish import publish_results
from pagemesh.gateway.batches.inner import InnerRequests
from pagemesh.gateway.batches.lines import (
    Answered,
    Line,
    Lines,
    answered_entry,
    raw_lines,
    with_fields,
)
from pagemesh.gateway.batches.record import BatchRecord, Counts, Fault
from pagemesh.gateway.batches.slots import Slots
from pagemesh.gateway.pause_store import PauseStore
from pagemesh.shared.errors import PagemeshError
from pagemesh.shared.messages import LAST_PRIORITY

WATCH_PERIOD_S: Final = 0.25
SAVE_PERIOD_S: Final = 1.0
MAX_UNAVAILABLE: Final = 5
"""So often is 503 tried again, each time once there is an engine: a request that ends every worker
must not do so for a day. A pause of the mesh is no fault of the request."""
FIRST_WAIT_S: Final = 0.5
LONGEST_WAIT_S: Final = 30.0
_LAST: Final = {"priority": LAST_PRIORITY}
_STORAGE_FULL: Final = Fault(
    "storage_full", "The files of this key have grown over what it may keep; delete some."
)

End = Literal["completed", "cancelled", "expired", "failed"]
T = TypeVar("T")
log = structlog.get_logger(__name__)


class AnswersLost(PagemeshError):
    """The disk did not take them. Whoever runs the batch next asks again."""

    def __init__(self, batch: str) -> None:
        super().__init__(f"not all answers of {batch} could be written")
        self.batch = batch


class Means(NamedTuple):
    """What all batches of a gateway use."""

    batches: BatchStore
    files: FileStore
    inner: InnerRequests
    slots: Slots
    pause: PauseStore
    max_line_bytes: int


class BatchRun:
    """Owner of the batch's record while the lease of `term` lasts.

    A thread of its own does the disk's work in order, so that what was handed over is written
    before the results are read again.
    """

    def __init__(self, means: Means, batch: OpenBatch, term: int) -> None:
        self._means = means
        self._store = means.batches
        self._batch = batch
        self._term = term
        self._disk = ThreadPoolExecutor(1, thread_name_prefix="batch")
        self._done: set[int] = set()
        self._n_ok = 0
        self._n_out = 0
        self._withdrawn: deque[Line] = deque()
        self._one_ended = asyncio.Event()
        self._saved_s = 0.0
        self._record: BatchRecord

    async def run(self) -> None:
        """Until it has ended. Raises LeaseLost, AnswersLost, OSError.

        Cancelled: another may go on.
        """
        try:
            await self._save(await self._do(self._store.load, self._batch))
            if self._record.status == "validating":
                await self._save(await self._do(self._checked))
            if not self._record.ended:
                await self._do(self._recall)
                await self._finish(await self._run_lines())
            await self._do(self._store.close, self._batch)
        finally:
            self._disk.shutdown(wait=False)
        log.info("batch_ended", batch=self._batch.id, status=self._record.status)

    def _checked(self) -> BatchRecord:
        return checked(self._record, self._raw_lines(), time.time())

    def _raw_lines(self) -> Iterator[tuple[int, bytes]]:
        with self._store.input(self._batch).open("rb") as file:
            yield from raw_lines(file, self._means.max_line_bytes)

    def _recall(self) -> None:
        """What was answered, here or elsewhere."""
        results = [result for result, _, _ in self._store.results(self._batch)]
        self._done = {result.line for result in results}
        self._n_ok = sum(result.ok for result in results)

    # -- running ----------------------------------------------------------------------------------

    async def _run_lines(self) -> End:
        """How it ends. Whatever is still out then is cancelled."""
        early = await self._early_end()
        if early is not None:
            return early
        feeding, watching = asyncio.create_task(self._feed()), asyncio.create_task(self._watch())
        tasks = {feeding, watching}
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            end = feeding.result() if feeding in done else watching.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._do(self._recall)
        if end == "completed" and len(self._done) < self._record.counts.total:
            raise AnswersLost(self._batch.id)
        return end

    async def _feed(self) -> End:
        raw, reader, slots = self._raw_lines(), Lines(self._record.endpoint), self._means.slots
        async with asyncio.TaskGroup() as group:
            while (line := await self._next_to_ask(raw, reader)) is not None:
                await slots.until_free(line.model)
                task = group.create_task(self._answer(line))
                slots.hold(task, line.model)
                self._n_out += 1
                task.add_done_callback(partial(self._ended, line))
        return "completed"

    async def _next_to_ask(self, raw: Iterator[tuple[int, bytes]], reader: Lines) -> Line | None:
        """None once nothing is out that might be withdrawn."""
        while not self._withdrawn:
            line = await self._do(self._next_line, raw, reader)
            if line is not None:
                return line
            if not self._n_out and not self._withdrawn:
                return None
            self._one_ended.clear()
            await self._one_ended.wait()
        return self._withdrawn.popleft()

    def _ended(self, line: Line, task: asyncio.Task[None]) -> None:
        self._n_out -= 1
        if task.cancelled() and line.number not in self._done:
            self._withdrawn.append(line)
        self._one_ended.set()

    def _next_line(self, raw: Iterator[tuple[int, bytes]], reader: Lines) -> Line | None:
        """The next one that has no answer."""
        for number, text in raw:
            if number not in self._done:
                return reader.read(number, text)
        return None

    async def _answer(self, line: Line) -> None:
        answered = await self._ask(line)
        entry = Raw(answered_entry(line.custom_id, answered))
        result = Result(line.number, answered.ok, entry)
        self._done.add(line.number)
        self._n_ok += answered.ok
        # It is written even if this task is withdrawn while the disk's work waits for its turn.
        await asyncio.shield(self._do(self._store.append, self._batch, self._term, [result]))

    async def _ask(self, line: Line) -> Answered:
        """A refusal that is of the moment is tried again."""
        body, n_unavailable, wait_s = with_fields(line.body, _LAST), 0, FIRST_WAIT_S
        request_id, owner = f"{self._batch.id}-{line.number}", self._batch.owner
        while True:
            answered = await self._means.inner.post(line.url, body, request_id, owner)
            n_unavailable += answered.status == 503 and not self._means.pause.paused
            if answered.status not in (429, 503) or n_unavailable > MAX_UNAVAILABLE:
                return answered
            await asyncio.sleep(wait_s * random.uniform(0.5, 1.0))
            await self._means.slots.until_served(line.model)
            wait_s = min(2 * wait_s, LONGEST_WAIT_S)

    async def _watch(self) -> End:
        """Save what is done, until the batch must end early. Raises LeaseLost."""
        while (early := await self._early_end()) is None:
            if time.time() >= self._saved_s + SAVE_PERIOD_S:
                await self._save(replace(self._record, counts=self._counts()))
                if await self._do(self._means.files.room_bytes, self._batch.owner) < 0:
                    return "failed"
            await asyncio.sleep(WATCH_PERIOD_S)
        return early

    async def _early_end(self) -> End | None:
        if await self._do(self._store.cancelled_s, self._batch) is not None:
            return "cancelled"
        if time.time() >= self._record.expires_at_s:
            return "expired"
        return None

    def _counts(self) -> Counts:
        n_failed = len(self._done) - self._n_ok
        return Counts(self._record.counts.total, self._n_ok, n_failed)

    # -- finishing --------------------------------------------------------------------------------

    async def _finish(self, end: End) -> None:
        record, now_s = replace(self._record, counts=self._counts()), time.time()
        if end == "failed":
            record = replace(record, faults=[_STORAGE_FULL])
        elif end == "cancelled":
            record = record.asked_to_cancel(now_s)
        else:
            record = record.moved("finalizing", now_s)
        await self._save(record)
        await self._save(await self._do(self._published, end))

    def _published(self, end: End) -> BatchRecord:
        self._store.check_term(self._batch, self._term)
        missing, now_s = self._missing() if end == "expired" else (), time.time()
        means = self._means
        record = publish_results(
            means.batches, means.files, self._batch, self._record, missing, now_s
        )
        return record.moved(end, now_s)

    def _missing(self) -> Iterator[Line]:
        raw, reader = self._raw_lines(), Lines(self._record.endpoint)
        while (line := self._next_line(raw, reader)) is not None:
            yield line

    async def _save(self, record: BatchRecord) -> None:
        await self._do(self._store.save, self._batch, record, self._term)
        self._record, self._saved_s = record, time.time()

    async def _do(self, call: Callable[..., T], *args: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._disk, call, *args)
