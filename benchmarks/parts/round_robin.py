"""A tokenizer service that gives requests to the engines in turn: python -m parts.round_robin
tokenizer."""

from __future__ import annotations

import sys

from pagemesh.cli import main
from pagemesh.tokenizer_svc import placement
from pagemesh.tokenizer_svc.dispatch import Ask, Chosen, Depths, Dispatch


class RoundRobin(Dispatch):
    def __init__(self) -> None:
        super().__init__()
        self._turn = 0

    def choose(self, ask: Ask, depths: Depths | None, now_s: float) -> Chosen | None:
        places = sorted(self.candidates(ask.need))
        self._turn += 1
        return Chosen(places[self._turn % len(places)], 0) if places else None


if __name__ == "__main__":
    placement.Dispatch = RoundRobin  # type: ignore[misc]
    sys.exit(main(sys.argv[1:]))
