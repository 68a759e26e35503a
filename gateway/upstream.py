"""The request table: what the gateway asked of the tokenizer services, and over which link.

One reader per link delivers whatever comes. A lost link costs its requests nothing but time: each
goes to another service, or waits for one, for at most `timeout_s`, with its generated ids.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from itertools import count
from typing import Final

import structlog

from pagemesh.gateway.directory import ModelDirectory, not_ready
from pagemesh.gateway.generation import Generation
from pagemesh.gateway.metrics import GatewayMetrics
from pagemesh.gateway.parting import LAST_REQUEST
from pagemesh.gateway.pause_store import ended_by_pause, paused_too_long
from pagemesh.gateway.pending import Pending, PendingCall, PendingGeneration, Question, Reply
from pagemesh.shared.errors import SHUTTING_DOWN, LinkClosed, RequestError
from pagemesh.shared.link import Link
from pagemesh.shared.messages import (
    Accepted,
    CacheReset,
    Cancel,
    Delta,
    Deltas,
    Detokenized,
    Engines,
    Failed,
    Generate,
    Rendered,
    Tokenized,
    WireError,
)
from pagemesh.shared.pause_keys import Mode
from pagemesh.shared.wire import BadFrame, Message

# A request that ends every service it is sent to must not end them all.
MAX_FRUITLESS_LOSSES: Final = 3
MAX_HELD: Final = 1024
"""Requests that wait for the end of a pause."""

log = structlog.get_logger(__name__)


class Upstream:
    """Owner of the table and of the order in which links are used. Peers owns the links."""

    def __init__(
        self, directory: ModelDirectory, metrics: GatewayMetrics, *, timeout_s: float
    ) -> None:
        self._directory = directory
        self._metrics = metrics
        self._timeout_s = timeout_s
        self._links: dict[str, Link] = {}
        self._table: dict[str, Pending] = {}
        self._in_flight: Counter[str] = Counter()
        self._last_use: Counter[str] = Counter()
        self._uses = count(1)
        self._parked: dict[str, asyncio.TimerHandle] = {}
        self._open_blocks = 0
        self._idle = asyncio.Event()
        self.draining = False
        self._paused = False

    # -- what handlers use ------------------------------------------------------------------------

    def open(
        self, generation: Generation, generates: Sequence[Generate]
    ) -> list[PendingGeneration]:
        """Run one generate per prompt, until what this returns is closed.

        Raises what `check_open` raises.
        """
        self.check_open()
        now_s, entries = time.monotonic(), []
        self._begin()
        try:
            for index, generate in enumerate(generates):
                tally = self._metrics.requests.of(generate.model)
                entry = PendingGeneration(generate, index, generation, tally, now_s)
                entries.append(entry)
                self._enter(entry)
        except BaseException:
            self.close(entries)
            raise
        return entries

    def close(self, entries: Sequence[PendingGeneration]) -> None:
        """Cancel what still runs."""
        for entry in entries:
            self._abandon(entry)
        self._end()

    def check_open(self) -> None:
        """Raises RequestError (503) while draining, but for the last request of a connection, and
        while so many are held by a pause."""
        if self.draining and not LAST_REQUEST.get():
            raise not_ready("it is shutting down")
        if self._paused and len(self._parked) >= MAX_HELD:
            raise paused_too_long(self._timeout_s)

    async def ask(self, question: Question) -> Reply:
        """The answer to one question. Raises the RequestError it was refused with.

        Whoever stops waiting cancels the question.
        """
        call = PendingCall(question)
        self._begin()
        try:
            self._enter(call)
            return await call.answer
        finally:
            self._abandon(call)
            self._end()

    def pause(self, mode: Mode | None) -> None:
        """Hold new generations from now on, in mode abort ending the others; None lets all go."""
        self._paused = mode is not None
        if mode == "abort":
            for entry in self._generations():
                entry.generation.fail(ended_by_pause())
        if mode is None:
            self._place_parked()

    def _generations(self) -> list[PendingGeneration]:
        return [each for each in self._table.values() if isinstance(each, PendingGeneration)]

    async def drain(self) -> None:
        """Take no new generations; return when every open one is answered, every question too."""
        self.draining = True
        while self._open_blocks:
            await self._idle.wait()

    def _begin(self) -> None:
        """An answer is still worded, and read by its client, when the table is empty."""
        self._open_blocks += 1
        self._idle.clear()

    def _end(self) -> None:
        self._open_blocks -= 1
        if not self._open_blocks:
            self._idle.set()

    def fail_all(self, error: RequestError) -> None:
        """End every request: the service stops."""
        for entry in list(self._table.values()):
            self._leave(entry)
            entry.fail(error)

    # -- links ------------------------------------------------------------------------------------

    async def serve_link(self, link: Link) -> None:
        """Read `link` until it ends, then place its requests elsewhere."""
        self._links[link.name] = link
        self._learn(link, Engines(link.peer.engines))
        try:
            async for message in link:
                self._receive(link, message)
        except Exception:
            # A message that makes no sense: its sender's requests are safer elsewhere.
            log.exception("link_failed", peer=link.name)
        finally:
            del self._links[link.name]
            self._directory.drop(link.name)
            self._replace_lost(link.name)

    def _learn(self, link: Link, news: Engines) -> None:
        self._directory.update(link.name, news.engines, draining=news.draining, names=news.names)
        self._place_parked()

    def _place_parked(self) -> None:
        for request_id in list(self._parked):
            self._place(self._table[request_id])

    def _receive(self, link: Link, message: Message) -> None:
        match message:
            case Deltas(rows, begun):
                for each in begun:
                    entry = self._entry(link, each.request_id)
                    if isinstance(entry, PendingGeneration):
                        entry.begin(each)
                self._deliver(link, rows)
            case Accepted():
                entry = self._entry(link, message.request_id)
                if isinstance(entry, PendingGeneration):
                    entry.accept(message)
            case Failed(request_id, error):
                entry = self._entry(link, request_id)
                if entry is not None:
                    self._fail(entry, error)
            case Tokenized() | Detokenized() | Rendered() | CacheReset():
                entry = self._entry(link, message.request_id)
                if isinstance(entry, PendingCall):
                    self._leave(entry)
                    entry.resolve(message)
            case Engines():
                self._learn(link, message)
            case _:
                log.warning("unexpected_message", peer=link.name, kind=type(message).__name__)

    def _deliver(self, link: Link, rows: list[Delta]) -> None:
        now_s, table, name = time.monotonic(), self._table, link.name
        for row in rows:
            entry = table.get(row.request_id)
            if isinstance(entry, PendingGeneration) and entry.link == name:
                entry.add(row, now_s)
                if (row.finish_reason is not None or row.error is not None) and entry.done:
                    self._leave(entry)

    def _entry(self, link: Link, request_id: str) -> Pending | None:
        """The entry that waits on this link; None for a late word about a request now gone."""
        entry = self._table.get(request_id)
        return entry if entry is not None and entry.link == link.name else None

    def _fail(self, entry: Pending, error: WireError) -> None:
        """A service that drains refuses what was sent before its word arrived: ask another."""
        if error.code == SHUTTING_DOWN and entry.link is not None:
            self._directory.update(entry.link, [], draining=True)
            self._unplace(entry)
            self._place(entry)
        else:
            self._leave(entry)
            entry.fail(RequestError.from_wire(error))

    # -- the table --------------------------------------------------------------------------------

    def _enter(self, entry: Pending) -> None:
        self._table[entry.request_id] = entry
        self._place(entry)

    def _leave(self, entry: Pending) -> None:
        """The one way out of the table."""
        if self._table.pop(entry.request_id, None) is None:
            return
        self._unpark(entry)
        self._unplace(entry)

    def _abandon(self, entry: Pending) -> None:
        """Cancel what is still open."""
        if entry.request_id not in self._table:
            return
        link = self._links.get(entry.link or "")
        self._leave(entry)
        entry.abandon()
        if link is not None:
            with suppress(LinkClosed):
                link.send(Cancel(entry.request_id))

    def _place(self, entry: Pending) -> None:
        """Send `entry` over the least loaded link that serves its model, or park it.

        Of equals, over the one that has rested longest: every gateway knows the links in the same
        order.
        """
        for name in self._by_load(self._links_for(entry)):
            try:
                self._links[name].send(entry.frame())
            except LinkClosed:
                continue
            except BadFrame as error:
                self._leave(entry)
                entry.fail(RequestError(f"The request cannot be sent on: {error}", status=413))
                return
            self._unpark(entry)
            entry.link = name
            self._in_flight[name] += 1
            self._last_use[name] = next(self._uses)
            return
        self._park(entry)

    def _links_for(self, entry: Pending) -> list[str]:
        held = self._paused and isinstance(entry, PendingGeneration)
        return [] if held else self._directory.links_serving(entry.model)

    def _by_load(self, names: list[str]) -> list[str]:
        if len(names) < 2:
            return names
        return sorted(names, key=lambda name: (self._in_flight[name], self._last_use[name]))

    def _replace_lost(self, name: str) -> None:
        lost = [entry for entry in self._table.values() if entry.link == name]
        if lost:
            log.warning("tokenizer_lost", peer=name, requests=len(lost), effect="resubmitted")
        for entry in lost:
            self._unplace(entry)
            entry.link_lost()
            self._place_again(entry)
        del self._in_flight[name], self._last_use[name]

    def _unplace(self, entry: Pending) -> None:
        if entry.link is not None:
            self._in_flight[entry.link] -= 1
            entry.link = None

    def _place_again(self, entry: Pending) -> None:
        if entry.fruitless_losses > MAX_FRUITLESS_LOSSES:
            self._leave(entry)
            log.error("request_given_up", request_id=entry.request_id, lost=entry.fruitless_losses)
            entry.fail(not_ready(f"{entry.fruitless_losses} services were lost with this request"))
        else:
            self._metrics.resubmitted.inc()
            self._place(entry)

    # -- waiting for a link -----------------------------------------------------------------------

    def _park(self, entry: Pending) -> None:
        if entry.request_id not in self._parked:
            loop = asyncio.get_running_loop()
            self._parked[entry.request_id] = loop.call_later(self._timeout_s, self._expire, entry)

    def _unpark(self, entry: Pending) -> None:
        if not self._parked:
            return
        timer = self._parked.pop(entry.request_id, None)
        if timer is not None:
            timer.cancel()

    def _expire(self, entry: Pending) -> None:
        self._leave(entry)
        log.error("request_given_up", request_id=entry.request_id, waited_s=self._timeout_s)
        late = not_ready(f"no service took the request within {self._timeout_s:g} s")
        entry.fail(paused_too_long(self._timeout_s) if self._paused else late)
