"""One link upstream: its requests, and the frame being filled for it (one Tokens per step)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pagemesh.shared.engine_messages import (
    Ended,
    LogprobRow,
    Pooled,
    PromptLogprobs,
    Started,
    Tokens,
)
from pagemesh.shared.messages import WireError
from pagemesh.shared.wire import pack_ids

if TYPE_CHECKING:
    from pagemesh.scheduler_svc.request import Request
    from pagemesh.scheduler_svc.tally import Tally

_INT32_BYTES: Final = 4
_ONE: Final = pack_ids([1])


class Client:
    """Owner of the keys of one link. Rows of the frame stand in the order they were produced."""

    __slots__ = (
        "ended",
        "failed",
        "ids",
        "keys",
        "leaders",
        "logprobs",
        "pooled",
        "prompt_logprobs",
        "requests",
        "started",
        "tallies",
    )

    def __init__(self) -> None:
        self.requests: dict[int, Request] = {}
        self.leaders: dict[str, Request] = {}
        """Choice 0 of each group that still runs or waits."""
        self.tallies: dict[str, Tally] = {}
        """By request id, of every request with a choice that has not ended."""
        self._clear()

    def take_frame(self, engine_id: str) -> Tokens | None:
        """The frame, or None when there is nothing to say. It is empty afterwards."""
        n = len(self.keys)
        if not (n or self.ended or self.failed or self.started or self.prompt_logprobs):
            return None
        tokens = Tokens(
            engine_id,
            keys=pack_ids(self.keys),
            counts=_ONE * n,
            ids=pack_ids(self.ids),
            ended=self.ended,
            started=self.started,
            logprobs=self.logprobs,
            prompt_logprobs=self.prompt_logprobs,
            failed=self.failed,
            pooled=self.pooled,
        )
        self._clear()
        return tokens

    def fail_all(self, error: WireError) -> list[Request]:
        """Say of every request that it failed. Returns which they were; `forget_all` is next."""
        self.failed += [(key, error) for key in self.requests]
        return list(self.requests.values())

    def forget_all(self) -> None:
        """Without a look at what is forgotten, which may be half written."""
        self.requests.clear()
        self.leaders.clear()
        self.tallies.clear()

    def add_prompt_logprobs(self, key: int, rows: PromptLogprobs, wanted_from: int) -> int:
        """Pass on the rows from position `wanted_from` on; return the next position wanted.

        Positions computed again after a preemption were delivered before.
        """
        n_rows = len(rows.ranks) // _INT32_BYTES
        skip = wanted_from - rows.start
        if not 0 <= skip < n_rows:
            return wanted_from
        row_bytes = rows.width * _INT32_BYTES
        self.prompt_logprobs.append(
            rows._replace(
                key=key,
                start=wanted_from,
                ids=rows.ids[skip * row_bytes :],
                values=rows.values[skip * row_bytes :],
                ranks=rows.ranks[skip * _INT32_BYTES :],
            )
        )
        return rows.start + n_rows

    def tell_start(self, request: Request, now_s: float) -> None:
        """Its first token is about to be added."""
        request.start_told = True
        queue_s = request.scheduled_s - request.queued_s
        prefill_s = now_s - request.scheduled_s
        self.started.append(Started(request.key, request.cached_tokens or 0, queue_s, prefill_s))

    def _clear(self) -> None:
        self.keys: list[int] = []
        self.ids: list[int] = []
        self.ended: list[Ended] = []
        self.started: list[Started] = []
        self.logprobs: list[LogprobRow] = []
        self.prompt_logprobs: list[PromptLogprobs] = []
        self.failed: list[tuple[int, WireError]] = []
        self.pooled: list[Pooled] = []
