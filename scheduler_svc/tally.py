"""What a request came to, for the one log line at its end."""

from __future__ import annotations

from collections.abc import Callable

from pagemesh.scheduler_svc.request import Request


class Tally:
    """The choices of one request on one engine; token counts are summed over them."""

    __slots__ = (
        "begun",
        "cached_tokens",
        "choices",
        "finish_reasons",
        "generated_tokens",
        "preemptions",
        "prompt_tokens",
        "request_id",
        "unended",
    )

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.begun = False
        """Whether a choice was ever admitted to a step."""
        self.choices = 0
        self.unended = 0
        self.finish_reasons: set[str] = set()
        self.prompt_tokens = 0
        self.generated_tokens = 0
        self.cached_tokens = 0
        self.preemptions = 0

    def enter(self) -> None:
        self.choices += 1
        self.unended += 1

    def end(self, request: Request, reason: str) -> None:
        self.unended -= 1
        self.finish_reasons.add(reason)
        self.prompt_tokens += request.n_prompt
        self.generated_tokens += len(request.ids) - request.n_prompt
        self.cached_tokens += request.cached_tokens or 0
        self.preemptions += request.preemptions


ReportEnded = Callable[[Tally], None]


def unreported(_: Tally) -> None:
    """For engines whose requests nobody follows by log."""
