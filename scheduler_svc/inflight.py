"""Steps sent and not yet answered."""

from __future__ import annotations

from typing import NamedTuple

from pagemesh.scheduler_svc.request import Request, Status


class Chunk(NamedTuple):
    """`n_tokens` of a prompt; `samples` says whether the worker samples a token after them."""

    request: Request
    n_tokens: int
    samples: bool


class InFlight(NamedTuple):
    """What a sent step computes, in the order of its rows: one token of each of `decodes`, then
    `chunks`. Steps with the same decodes share the list."""

    step: int
    decodes: list[Request]
    chunks: list[Chunk]
    planned_s: float

    @property
    def n_rows(self) -> int:
        return len(self.decodes) + len(self.chunks)

    @property
    def n_tokens(self) -> int:
        return len(self.decodes) + sum(chunk.n_tokens for chunk in self.chunks)

    def take_back(self) -> list[Request]:
        """The worker never ran this step: undo its counts. Returns the requests that entered in
        it; their blocks may lack what it should have copied or computed."""
        for request in self.decodes:
            if request.status is Status.RUNNING:
                request.computed -= 1
                request.length -= 1
        entered = []
        for request, n, samples in self.chunks:
            if request.status is Status.RUNNING:
                request.computed -= n
                request.length -= samples
                if request.admitted_step == self.step:
                    entered.append(request)
        return entered
