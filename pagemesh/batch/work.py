"""The requests of a batch file, so many at a time, and a line of output for each."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import aiohttp
from tqdm import tqdm

from pagemesh.batch.client import NotAnswered, ask
from pagemesh.batch.output import Output
from pagemesh.gateway.batches.lines import Line, Lines, answered_entry, custom_id_of, failed_entry
from pagemesh.shared.errors import RequestError


class Work:
    """`raw` are the lines by number; `n_lines` of them, if that is known. A line that cannot be
    asked gets an entry that says so, with its number, and the others go on."""

    def __init__(
        self, raw: Iterator[tuple[int, bytes]], output: Output, n_lines: int | None
    ) -> None:
        self.n_failed = 0
        self._n_answered = 0
        self._n_before = 0
        self._raw = raw
        self._reading = asyncio.Lock()
        self._reader = Lines()
        self._output = output
        self._bar = tqdm(total=n_lines, desc="Batch", unit="request", disable=None)

    async def run(self, session: aiohttp.ClientSession, concurrency: int) -> None:
        """Until every line has its entry."""
        with self._bar:
            async with asyncio.TaskGroup() as group:
                for _ in range(concurrency):
                    group.create_task(self._ask_on(session))

    def summary(self) -> str:
        before = f", {self._n_before} were there already" if self._n_before else ""
        return f"{self._n_answered} requests answered, {self.n_failed} failed{before}"

    async def _ask_on(self, session: aiohttp.ClientSession) -> None:
        while (taken := await self._next()) is not None:
            number, raw = taken
            line = self._read(number, raw)
            if line is not None:
                await self._answer(session, line)
            self._bar.update()

    async def _next(self) -> tuple[int, bytes] | None:
        """The standard input may take its time."""
        async with self._reading:
            return await asyncio.to_thread(next, self._raw, None)

    def _read(self, number: int, raw: bytes) -> Line | None:
        """None when nothing is to be asked."""
        try:
            line = self._reader.read(number, raw)
        except RequestError as error:
            if number in self._output.done_lines:
                self._n_before += 1
            else:
                self._fail(custom_id_of(raw), error.code or "invalid", error.message, number)
            return None
        if line.custom_id in self._output.done_ids:
            self._n_before += 1
            return None
        return line

    async def _answer(self, session: aiohttp.ClientSession, line: Line) -> None:
        try:
            answered = await ask(session, line)
        except NotAnswered as error:
            self._fail(line.custom_id, "not_answered", str(error))
            return
        self._output.write(answered_entry(line.custom_id, answered))
        if answered.ok:
            self._n_answered += 1
        else:
            self._count_failure()

    def _fail(
        self, custom_id: str | None, code: str, message: str, number: int | None = None
    ) -> None:
        self._output.write(failed_entry(custom_id, code, message, number))
        self._count_failure()

    def _count_failure(self) -> None:
        self.n_failed += 1
        self._bar.set_postfix_str(f"{self.n_failed} failed", refresh=False)
