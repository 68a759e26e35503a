"""What the gateway knows about each message it waits on, so that another link can take over."""

from __future__ import annotations

import asyncio
from typing import Protocol

import msgspec

from pagemesh.gateway.generation import ID_BYTES, Generation, PromptState
from pagemesh.gateway.open_requests import CANCELLED
from pagemesh.gateway.request_metrics import ChoiceTiming, ModelTally
from pagemesh.shared.errors import RequestError
from pagemesh.shared.messages import (
    Accepted,
    Begun,
    CacheReset,
    Delta,
    Detokenize,
    Detokenized,
    Generate,
    Render,
    Rendered,
    ResetCache,
    Tokenize,
    Tokenized,
)
from pagemesh.shared.wire import Message

Question = Tokenize | Detokenize | Render | ResetCache
Reply = Tokenized | Detokenized | Rendered | CacheReset


class Pending(Protocol):
    """An entry of the request table. `link` is the name of the link it was sent on, or None;
    `fruitless_losses` counts the links lost since the last token came."""

    request_id: str
    model: str
    link: str | None
    fruitless_losses: int

    def frame(self) -> Message:
        """What to send to the next link."""

    def link_lost(self) -> None:
        """The link it was sent on is gone."""

    def fail(self, error: RequestError) -> None:
        """Nothing more will come."""

    def abandon(self) -> None:
        """Nobody waits for it any more."""


class PendingGeneration:
    """One prompt on its way. Its truth (prompt, generated ids, seed) lives here.

    Its choices count as received when it is made, and as finished one by one. All times are
    seconds of one monotonic clock.
    """

    def __init__(
        self,
        generate: Generate,
        prompt_index: int,
        generation: Generation,
        tally: ModelTally,
        now_s: float,
    ) -> None:
        self.request_id = generate.request_id
        self.model = generate.model
        self.link: str | None = None
        self.fruitless_losses = 0
        self.generation = generation
        self._generate = generate
        self._prompt_index = prompt_index
        self._prompt_counted = False
        n = generate.params.n
        self._ids = [bytearray() for _ in range(n)]
        self._timings = [ChoiceTiming(tally, now_s) for _ in range(n)]
        self._open = set(range(n))
        tally.received(n)

    @property
    def done(self) -> bool:
        return not self._open

    def frame(self) -> Generate:
        return self._generate

    def link_lost(self) -> None:
        """The next attempt goes on after what every choice has already generated."""
        self.fruitless_losses += 1
        prior_ids = [bytes(ids) for ids in self._ids] if any(self._ids) else []
        self._generate = msgspec.structs.replace(
            self._generate, attempt=self._generate.attempt + 1, prior_ids=prior_ids
        )

    def accept(self, accepted: Accepted) -> None:
        self.generation.accept(self._prompt_index, accepted)

    def begin(self, begun: Begun) -> None:
        """An engine has the first token of a choice."""
        if begun.choice in self._open:
            self._timings[begun.choice].begin(begun)

    def add(self, delta: Delta, now_s: float) -> None:
        """Deltas of a choice that has finished (a resumed one runs again) change nothing."""
        choice = delta.choice
        if choice not in self._open:
            return
        if delta.error is not None or delta.finish_reason == "abort":
            self._lose(choice, _why_lost(delta))
            return
        timing = self._timings[choice]
        self._ids[choice] += delta.token_ids
        self.fruitless_losses = 0
        if not self._prompt_counted:
            self._count_prompt(timing, delta.cached_tokens)
        timing.gained(len(delta.token_ids) // ID_BYTES, now_s)
        if delta.finish_reason is not None:
            timing.completed(now_s, self._prompt.n_tokens)
            self._end(choice, delta.finish_reason)
        self.generation.add(self._prompt_index, delta)

    def fail(self, error: RequestError) -> None:
        self._end_all("error" if self._prompt.accepted else "refused")
        self.generation.fail(error)

    def abandon(self) -> None:
        self._end_all(_outcome_of(self.generation.error))

    @property
    def _prompt(self) -> PromptState:
        return self.generation.prompts[self._prompt_index]

    def _count_prompt(self, timing: ChoiceTiming, cached_tokens: int) -> None:
        self._prompt_counted = True
        params, n_tokens = self._generate.params, self._prompt.n_tokens
        timing.tally.prompt_begun(n_tokens, cached_tokens, params)

    def _lose(self, choice: int, error: RequestError) -> None:
        """One choice failed, and with it the answer. The others run until they are abandoned."""
        self._end(choice, "error")
        self.generation.fail(error)

    def _end(self, choice: int, reason: str) -> None:
        timing = self._timings[choice]
        self._open.discard(choice)
        if self._prompt_counted and not self._open:
            longest = max([timing.n_tokens for timing in self._timings])
            timing.tally.longest_choice_tokens.observe(longest)
        timing.ended(reason)

    def _end_all(self, reason: str) -> None:
        for choice in sorted(self._open):
            self._end(choice, reason)


def _outcome_of(error: RequestError | None) -> str:
    """Of what is left open when nobody waits for it any more."""
    return "abort" if error is None or error.status == CANCELLED else "error"


def _why_lost(delta: Delta) -> RequestError:
    if delta.error is not None:
        return RequestError.from_wire(delta.error)
    return RequestError("The server stopped this request.", status=503, code="aborted")


class PendingCall:
    """One question with one answer."""

    def __init__(self, question: Question) -> None:
        self.request_id = question.request_id
        self.model = question.model
        self.link: str | None = None
        self.fruitless_losses = 0
        self.answer: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._question = question

    def frame(self) -> Question:
        return self._question

    def link_lost(self) -> None:
        """Asking twice is harmless."""
        self.fruitless_losses += 1

    def resolve(self, answer: Reply) -> None:
        if not self.answer.done():
            self.answer.set_result(answer)

    def fail(self, error: RequestError) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)

    def abandon(self) -> None:
        self.answer.cancel()
