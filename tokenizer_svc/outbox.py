"""Deltas on their way to one gateway: one frame per tick, merged while the gateway is behind."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import Final

import structlog

from pagemesh.shared.distribution import Observations
from pagemesh.shared.errors import LinkClosed
from pagemesh.shared.link import Link
from pagemesh.shared.messages import Begun, Delta, Deltas, TokenLogprob, WireError
from pagemesh.shared.wire import BadFrame, Message

MAX_PENDING_BYTES: Final = 64 * 2**20
_LOGPROB_BYTES: Final = 64

log = structlog.get_logger(__name__)


class Outbox:
    """The way to one gateway. Owner of nothing but the pending deltas; the link is its reader's.

    While the link is busy, what a choice gains is merged into one delta. When even that grows past
    MAX_PENDING_BYTES the gateway is not reading at all, and only its own link is closed.
    """

    def __init__(self, link: Link, token_s: Observations) -> None:
        self.link = link
        self._token_s = token_s
        self._since_s: float | None = None
        self._pending: dict[tuple[str, int], Delta] = {}
        self._begun: list[Begun] = []
        self._pending_bytes = 0
        self._wake = asyncio.Event()

    async def run(self) -> None:
        """Send until the link is gone. A link without a sender is no use, so both end together."""
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                self._flush()
                await self.link.drained()
        except LinkClosed:
            pass
        except Exception:
            log.exception("outbox_failed", gateway=self.link.name)
            self.link.abort("its sender failed")

    def send(self, message: Message) -> None:
        """Send what is no delta, now. Silent on a closed link: its reader cleans up."""
        with suppress(LinkClosed):
            self.link.send(message)

    def begin(self, begun: Begun) -> None:
        """To go ahead of the choice's next delta."""
        self._begun.append(begun)

    def arrived(self, now_s: float) -> None:
        """Deltas are about to be added whose tokens arrived at `now_s`, of time.monotonic."""
        if self._since_s is None:
            self._since_s = now_s

    def add(self, delta: Delta) -> None:
        """Queue one delta, behind all that was queued for its choice."""
        place = (delta.request_id, delta.choice)
        before = self._pending.get(place)
        if before is not None and delta.error is not None:
            self.flush()
            before = None
        self._pending[place] = delta if before is None else merge(before, delta)
        self._pending_bytes += size_bytes(delta)
        if self._pending_bytes > MAX_PENDING_BYTES:
            self._give_up()
        self._wake.set()

    def forget(self, request_id: str) -> None:
        """Drop what is pending for a request that nobody waits for any more."""
        for place in [place for place in self._pending if place[0] == request_id]:
            self._pending_bytes -= size_bytes(self._pending.pop(place))
        self._begun = [begun for begun in self._begun if begun.request_id != request_id]
        if not self._pending:
            self._since_s = None

    def flush(self) -> None:
        """Hand all that is pending to the link, now. Silent on a closed link."""
        with suppress(LinkClosed):
            self._flush()

    def _flush(self) -> None:
        rows, begun = list(self._pending.values()), self._begun
        if not rows:
            return
        self._pending.clear()
        self._pending_bytes = 0
        self._begun = []
        try:
            self.link.send(Deltas(rows, begun))
        except BadFrame:
            if begun:
                self.link.send(Deltas([], begun))
            self._send_apart(rows)
        if self._since_s is not None:
            self._token_s.observe(time.monotonic() - self._since_s)
            self._since_s = None

    def _send_apart(self, rows: list[Delta]) -> None:
        """Too much for one frame together. A row that is so alone ends its choice."""
        for row in rows:
            try:
                self.link.send(Deltas([row]))
            except BadFrame as error:
                log.error("delta_too_large", request_id=row.request_id, reason=str(error))
                fault = WireError(500, "answer_too_large", None, str(error))
                self.link.send(Deltas([Delta(row.request_id, row.choice, "", b"", error=fault)]))

    def _give_up(self) -> None:
        log.error("gateway_too_slow", gateway=self.link.name, pending_bytes=self._pending_bytes)
        self._pending.clear()
        self._pending_bytes = 0
        self.link.abort("the gateway reads too slowly")


def merge(first: Delta, second: Delta) -> Delta:
    """Both deltas of one choice as one."""
    return Delta(
        second.request_id,
        second.choice,
        first.text + second.text,
        first.token_ids + second.token_ids,
        _joined(first.logprobs, second.logprobs),
        second.finish_reason,
        second.stop_reason,
        second.cached_tokens,
        first.prompt_logprobs or second.prompt_logprobs,
        second.error,
        first.vector or second.vector,
    )


def _joined(
    first: list[TokenLogprob] | None, second: list[TokenLogprob] | None
) -> list[TokenLogprob] | None:
    return (first or []) + (second or []) if first or second else None


def size_bytes(delta: Delta) -> int:
    """Roughly what the delta weighs; additive under merging."""
    size = len(delta.text) + len(delta.token_ids) + len(delta.vector)
    for entries in (delta.logprobs, delta.prompt_logprobs):
        if entries is not None:
            size += _LOGPROB_BYTES * sum(1 + len(entry.top) for entry in entries if entry)
    return size
