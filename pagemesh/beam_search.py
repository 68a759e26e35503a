"""Beam search over one prompt: which sequences go on, which are done. Pure.

The rules are those of transformers' `generate(num_beams=…, early_stopping=False)`, so that results
are the same: of all continuations of all beams the best `width` that do not end the text go on;
those that end it count if they are among the best `width`. A score is the sum of log probabilities
over the number of generated tokens, the end included, to the power of the length penalty. It is
over when there are `width` results and the best beam, ended now, would not be among them.
(vLLM counts the prompt's tokens too, takes every end, and never stops early.)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Beam(NamedTuple):
    """`ids` were generated; `logprob` is the sum over them."""

    ids: list[int]
    logprob: float


class Hypothesis(NamedTuple):
    """A result. `finish_reason` is stop or length."""

    ids: list[int]
    logprob: float
    score: float
    finish_reason: str


class _Candidate(NamedTuple):
    logprob: float
    parent: int
    token: int


class BeamSearch:
    """`beams` go on, the best first; `results` are at most `width`, the best first."""

    def __init__(
        self, width: int, max_tokens: int, length_penalty: float, end_ids: Iterable[int]
    ) -> None:
        self.beams = [Beam([], 0.0)]
        self.results: list[Hypothesis] = []
        self._width = width
        self._max_tokens = max_tokens
        self._length_penalty = length_penalty
        self._end_ids = frozenset(end_ids)
        self._n_tokens = 0

    @property
    def n_next(self) -> int:
        """How many of the most probable tokens of each beam must be known: among so many, `width`
        end nothing."""
        return self._width + len(self._end_ids)

    def advance(self, nexts: Sequence[Sequence[tuple[int, float]]]) -> list[int]:
        """By one token: `nexts` holds, for each of `beams`, its `n_next` most probable tokens and
        their log probabilities. Returns, for each beam there is then, which one it goes on from;
        without any the search is over."""
        self._n_tokens += 1
        candidates = self._ranked(nexts)
        at_limit = self._n_tokens == self._max_tokens
        self._add_results(
            one for one in candidates[: self._width] if at_limit or one.token in self._end_ids
        )
        going = [one for one in candidates if one.token not in self._end_ids][: self._width]
        over = at_limit or not self._improves(going)
        parents, before = [] if over else going, self.beams
        self.beams = [Beam([*before[one.parent].ids, one.token], one.logprob) for one in parents]
        return [one.parent for one in parents]

    def _ranked(self, nexts: Sequence[Sequence[tuple[int, float]]]) -> list[_Candidate]:
        return sorted(
            (
                _Candidate(beam.logprob + logprob, parent, token)
                for parent, (beam, tokens) in enumerate(zip(self.beams, nexts, strict=True))
                for token, logprob in tokens
            ),
            key=lambda one: -one.logprob,
        )

    def _add_results(self, ended: Iterable[_Candidate]) -> None:
        for logprob, parent, token in ended:
            reason = "stop" if token in self._end_ids else "length"
            ids = [*self.beams[parent].ids, token]
            self.results.append(Hypothesis(ids, logprob, self._score(logprob), reason))
        self.results.sort(key=lambda result: -result.score)
        del self.results[self._width :]

    def _improves(self, going: Sequence[_Candidate]) -> bool:
        """Whether one that goes on may become a result."""
        if not going:
            return False
        full = len(self.results) == self._width
        return not full or self._score(going[0].logprob) > self.results[-1].score

    def _score(self, logprob: float) -> float:
        """Of a sequence as long as those of this step."""
        return logprob / math.pow(self._n_tokens, self._length_penalty)
