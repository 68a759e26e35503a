"""Steps sent and not yet answered."""

from __future__ import annotations

from typing import NamedTuple

from pagemesh.scheduler_svc.request import Request, Status


class InFlight(NamedTuple):
    """What a sent step computes. Row i: `n_tokens[i]` tokens of `rows[i]`, which was then in
    `incarnations[i]`; `samples[i]` says whether the worker samples a token after them. For the
    requests in `starts` that is the first one since their admission. It was decided at
    `planned_s`."""

    step: int
    rows: list[Request]
    incarnations: list[int]
    n_tokens: list[int]
    samples: list[bool]
    starts: list[Request]
    planned_s: float

    def take_back(self) -> list[Request]:
        """The worker never ran this step: undo its counts. Returns the requests that entered in
        it; their blocks may lack what it should have copied or computed."""
        entered = []
        for request, incarnation, n, sampled in zip(
            self.rows, self.incarnations, self.n_tokens, self.samples, strict=True
        ):
            if request.incarnation == incarnation and request.status is Status.RUNNING:
                request.computed -= n
                request.length -= sampled
                if request.admitted_step == self.step:
                    entered.append(request)
        return entered
