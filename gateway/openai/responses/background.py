"""Responses that run without anybody waiting: in the gateway that took them, and told by Redis."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Final, NamedTuple

import structlog

from pagemesh.gateway.generation import Generation
from pagemesh.gateway.openai.answer import Job, encode_json, log_end
from pagemesh.gateway.openai.params import Seeds
from pagemesh.gateway.openai.responses import objects
from pagemesh.gateway.openai.responses.answer import ResponseAnswer
from pagemesh.gateway.openai.responses.chat_form import renamed
from pagemesh.gateway.openai.responses.store import Draft, ResponseStore
from pagemesh.gateway.upstream import Upstream
from pagemesh.shared.errors import RequestError
from pagemesh.shared.registry import AWAY

TELL_PERIOD_S: Final = 0.1
BEAT_S: Final = 1.0
LAST_TRIES_S: Final = 30.0
"""How long the end of a response is kept for a Redis that is away."""
CLOSE_S: Final = 1.0

log = structlog.get_logger(__name__)


class Run(NamedTuple):
    job: Job
    draft: Draft
    answer: ResponseAnswer
    generation: Generation


class BackgroundResponses:
    """Owner of the tasks. `limit`: how many run at a time."""

    def __init__(self, upstream: Upstream, store: ResponseStore, seeds: Seeds, limit: int) -> None:
        self._upstream = upstream
        self._store = store
        self._seeds = seeds
        self._limit = limit
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._n_starting = 0

    def __len__(self) -> int:
        return len(self._tasks) + self._n_starting

    def _check_room(self) -> None:
        self._upstream.check_open()
        if len(self) >= self._limit:
            raise RequestError(
                f"This gateway runs {self._limit} responses in the background, which is the most. "
                "Try again later.",
                status=429,
                code="too_many_background_responses",
            )

    async def start(self, run: Run) -> None:
        """Return once it is stored as one that is queued. Raises RequestError: 503 while draining
        or with Redis away, 429 when too many run."""
        self._check_room()
        self._n_starting += 1
        try:
            told = [run.answer.told("created"), run.answer.told(objects.QUEUED)]
            await self._store.begin(run.draft, run.answer.begun, told)
        finally:
            self._n_starting -= 1
        task = asyncio.create_task(self._run(run), name=run.job.id)
        self._tasks[run.job.id] = task
        task.add_done_callback(lambda _: self._tasks.pop(run.job.id))

    def stop(self, response_id: str) -> None:
        """It was cancelled or deleted. One that another gateway runs, that one will stop."""
        task = self._tasks.get(response_id)
        if task is not None:
            task.cancel()

    async def close(self) -> None:
        """Let those that were failed say so."""
        if self._tasks:
            await asyncio.wait(self._tasks.values(), timeout=CLOSE_S)
        for task in self._tasks.values():
            task.cancel()

    async def _run(self, run: Run) -> None:
        generates = run.job.generates(self._seeds)
        try:
            entries = self._upstream.open(run.generation, generates)
            try:
                await _Telling(run, self._store).run()
            finally:
                self._upstream.close(entries)
        except (TimeoutError, RequestError) as error:
            reason = str(error) or "Redis is away"
            log.error("background_response_left", response_id=run.job.id, reason=reason)
        finally:
            log_end(run.job, run.generation)


class _Telling:
    """Tells the store how one response goes on, until it has ended or is no longer ours."""

    def __init__(self, run: Run, store: ResponseStore) -> None:
        self._run = run
        self._store = store
        self._untold: list[bytes] = []
        self._status: str | None = None
        self._began = False

    async def run(self) -> None:
        """Raises TimeoutError if Redis does not take the end within LAST_TRIES_S."""
        ended = await self._ended()
        if ended is not None:
            async with asyncio.timeout(LAST_TRIES_S):
                await self._tell_end(*ended)

    async def _ended(self) -> tuple[str, bytes] | None:
        """How it ended, and its object; None once it is no longer ours."""
        try:
            while await self._tell():
                await asyncio.sleep(TELL_PERIOD_S)
                if await self._gain():
                    return self._complete()
        except RequestError as error:
            return self._fail(renamed(error))
        except Exception:
            log.exception("background_response_failed", response_id=self._run.job.id)
            return self._fail(RequestError("Internal error", status=500))
        return None

    async def _gain(self) -> bool:
        """Wait for something to tell, or for the next beat; whether it was the last."""
        generation = self._run.generation
        with suppress(TimeoutError):
            async with asyncio.timeout(BEAT_S):
                await generation.changed()
        gains, done = generation.take(), generation.done
        if gains and not self._began:
            self._began, self._status = True, objects.IN_PROGRESS
            self._untold.append(self._run.answer.told("in_progress"))
        self._untold += self._run.answer.events(gains)
        return done

    async def _tell(self) -> bool:
        """False once the response is no longer ours. What Redis does not take waits."""
        try:
            ours = await self._go_on(self._status)
        except AWAY:
            return True
        self._untold, self._status = [], None
        return ours

    async def _go_on(self, status: str | None, body: bytes | None = None) -> bool:
        first_event = self._run.answer.n_worded - len(self._untold)
        return await self._store.go_on(
            self._run.job.id, self._untold, first_event=first_event, status=status, body=body
        )

    def _complete(self) -> tuple[str, bytes]:
        ended = self._run.answer.ended()
        body = encode_json(ended)
        self._store.check_kept(self._run.draft, body)
        self._untold.append(self._run.answer.last(body))
        return ended["status"], body

    def _fail(self, error: RequestError) -> tuple[str, bytes]:
        self._untold += self._run.answer.failing(error)
        return objects.FAILED, encode_json(objects.failed(self._run.answer.begun, error))

    async def _tell_end(self, status: str, body: bytes) -> None:
        while True:
            try:
                await self._go_on(status, body)
                return
            except AWAY:
                await asyncio.sleep(BEAT_S)
