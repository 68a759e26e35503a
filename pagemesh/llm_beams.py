"""Beam searches of one call of the offline class, on the pages of its engine.

A beam is a request that gets one token, with the log probabilities of the best ones, and parks with
its pages. Beams of the next token are requests that fork them: they share its full pages, copy the
last one, and compute one token. When those have theirs, the old ones are let go. Where the pool or
the slots are too small to keep both, the engine lets parked ones go before: what they held is then
found in the prefix cache, or computed again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from pagemesh.beam_search import BeamSearch, Hypothesis
from pagemesh.llm_progress import Progress
from pagemesh.outputs import CompletionOutput, RequestOutput
from pagemesh.shared.engine_messages import LogprobRow, Submit, Tokens
from pagemesh.shared.errors import RequestError
from pagemesh.shared.sampling import MAX_LOGPROBS, SamplingParams
from pagemesh.shared.wire import pack_ids, unpack_ids
from pagemesh.tokenizer_svc.admission import Prepared

_MAX_KEY: Final = 2**31 - 1
Nexts = list[tuple[int, float]]


def check_beams(width: int, max_tokens: int, n_ends: int) -> None:
    """Raises RequestError for a search that cannot be done: the best tokens of each beam are asked
    for, as many as there are beams and tokens that end a text."""
    most = MAX_LOGPROBS - n_ends
    if not 1 <= width <= most:
        raise RequestError(
            f"beam_width must be between 1 and {most}, got {width}", param="beam_width"
        )
    if max_tokens < 1:
        raise RequestError(f"max_tokens must be at least 1, got {max_tokens}", param="max_tokens")


class _Run:
    """One prompt's search, and the keys of its beams' requests."""

    def __init__(self, asked: Prepared, search: BeamSearch) -> None:
        self.asked = asked
        self.search = search
        self.keys: list[int] = []
        self.parents: list[int] = []
        """Keys of the beams before, which park."""
        self.nexts: dict[int, Nexts] = {}
        """By key, as they come."""


class BeamSearches:
    """Owner of the searches. `n_at_once` of them are computed together."""

    def __init__(
        self,
        asked: Sequence[Prepared],
        new_search: Callable[[], BeamSearch],
        *,
        n_at_once: int,
        progress: Progress,
    ) -> None:
        self.queue: deque[Submit] = deque()
        self._progress = progress
        self._runs = [_Run(one, new_search()) for one in asked]
        self._waiting = deque(self._runs)
        self._by_key: dict[int, _Run] = {}
        self._last_key = 0
        for _ in range(n_at_once):
            self._begin_next()

    def outputs(self) -> list[RequestOutput]:
        """In the order of the prompts; the beams are the choices, the best first."""
        return [_output(run) for run in self._runs]

    def take(self, tokens: Tokens) -> list[int]:
        """What a step brought. Returns the keys of beams that are needed no longer. Raises
        RequestError for a beam that cannot be computed."""
        for _, error in tokens.failed:
            raise RequestError.from_wire(error)
        ended: list[int] = []
        for row in tokens.logprobs:
            run = self._by_key.pop(row.key)
            run.nexts[row.key] = _nexts(row)
            self._progress.note(1)
            if len(run.nexts) == len(run.keys):
                ended += self._advance(run)
        return ended

    def _begin_next(self) -> None:
        if self._waiting:
            run = self._waiting.popleft()
            self._submit(run, [-1])

    def _advance(self, run: _Run) -> list[int]:
        """All beams of a prompt have their next tokens. Those before them have been forked."""
        goes_on_from = run.search.advance([run.nexts[key] for key in run.keys])
        ended, run.parents, run.nexts = run.parents, run.keys, {}
        if goes_on_from:
            self._submit(run, [run.parents[place] for place in goes_on_from])
            return ended
        self._progress.note_finished(_output(run))
        self._begin_next()
        return ended + run.parents

    def _submit(self, run: _Run, parents: list[int]) -> None:
        params = SamplingParams(
            max_tokens=1,
            temperature=0.0,
            ignore_eos=True,
            logprobs=run.search.n_next,
            detokenize=False,
        )
        run.keys = []
        for beam, parent in zip(run.search.beams, parents, strict=True):
            self._last_key = self._last_key % _MAX_KEY + 1
            run.keys.append(self._last_key)
            self._by_key[self._last_key] = run
            self.queue.append(
                Submit(
                    key=self._last_key,
                    request_id=run.asked.generate.request_id,
                    attempt=0,
                    engine_id="",
                    prompt_ids=run.asked.prompt_ids + pack_ids(beam.ids),
                    prior_ids=b"",
                    seed=0,
                    params=params,
                    hashes=b"",
                    parks=True,
                    parent=parent,
                )
            )


def _nexts(row: LogprobRow) -> Nexts:
    """The row's best tokens, before which stands the one that was drawn."""
    logprobs = np.frombuffer(row.values, "<f4").tolist()
    return list(zip(unpack_ids(row.ids), logprobs, strict=True))[1:]


def _output(run: _Run) -> RequestOutput:
    asked = run.asked
    return RequestOutput(
        request_id=asked.generate.request_id,
        prompt=asked.prompt_text,
        prompt_token_ids=unpack_ids(asked.prompt_ids),
        outputs=[_choice(run, *each) for each in enumerate(run.search.results)],
        finished=True,
    )


def _choice(run: _Run, index: int, result: Hypothesis) -> CompletionOutput:
    return CompletionOutput(
        index=index,
        text=run.asked.text_model.decode(result.ids),
        token_ids=result.ids,
        cumulative_logprob=result.logprob,
        finish_reason=result.finish_reason,
    )
