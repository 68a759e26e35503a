"""The answer to one HTTP request while it grows: a bounded, coalescing buffer.

Link readers put deltas in, synchronously; one handler takes them out. What arrived since the last
take leaves as one delta per choice, so a client that reads slowly gets bigger chunks instead of a
longer queue. What waits is bounded by `max_pending_bytes`.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import msgspec

from pagemesh.shared.errors import RequestError
from pagemesh.shared.messages import Accepted, Delta, TokenLogprob

ID_BYTES = 4
_DELTA_OVERHEAD_BYTES = 256
_LOGPROB_BYTES = 256
# So many pending deltas of a choice become one: a token then costs little more than its text.
_COMPACT_AT_DELTAS = 64


class PromptState(msgspec.Struct):
    """What came back about one prompt. `ids` are int32-LE bytes, empty until accepted."""

    ids: bytes = b""
    n_tokens: int = 0
    text: str | None = None
    accepted: bool = False
    in_reasoning: bool = False
    cached_tokens: int = 0
    logprobs: list[TokenLogprob | None] | None = None
    scored: bool = False
    began: bool = False
    vector: bytes = b""

    @property
    def first_id(self) -> bytes:
        return self.ids[:ID_BYTES]


class Generation:
    """Choice `i` of prompt `p` has the number `p * n + i`.

    What waits to be taken is bounded by `max_pending_bytes`; with the prompts' logprobs, which stay
    until released, it is bounded by `max_held_bytes`. Over a bound everything pending is dropped,
    and `on_overflow` called once. `prompt_logprob_copies` is how often the answer holds those of a
    prompt at the same time.
    """

    def __init__(
        self,
        n_prompts: int,
        n: int,
        *,
        needs_prompt_logprobs: bool = False,
        prompt_logprob_copies: int = 0,
        max_pending_bytes: float = math.inf,
        max_held_bytes: float = math.inf,
        on_overflow: Callable[[Generation], None] | None = None,
    ) -> None:
        self.prompts = [PromptState() for _ in range(n_prompts)]
        self.n = n
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.completion_tokens = 0
        self.reasoning_tokens = 0
        self.error: RequestError | None = None
        self.nudged = False
        self.nudge_at_s = 0.0
        self._needs_prompt_logprobs = needs_prompt_logprobs
        self._prompt_logprob_copies = prompt_logprob_copies
        self._max_pending_bytes = max_pending_bytes
        self._on_overflow = on_overflow
        self._pending: dict[int, list[Delta]] = {}
        self._max_held_bytes = max_held_bytes
        self._pending_bytes = 0
        self._prompt_logprob_bytes = 0
        self._hold(0)
        self._overflowed = False
        self._unfinished = n_prompts * n
        self._changed = False
        self._waiter: asyncio.Future[None] | None = None
        self._waits_for_end = False
        self._on_change: Callable[[], None] | None = None

    # -- written by the upstream ------------------------------------------------------------------

    def accept(self, prompt_index: int, accepted: Accepted) -> None:
        prompt = self.prompts[prompt_index]
        if not prompt.accepted:
            prompt.accepted = True
            prompt.ids, prompt.text = accepted.prompt_ids, accepted.prompt_text
            prompt.n_tokens = len(prompt.ids) // ID_BYTES
            prompt.in_reasoning = accepted.in_reasoning
            self.prompt_tokens += prompt.n_tokens
            self._wake()

    def add(self, prompt_index: int, delta: Delta) -> None:
        if self._overflowed:
            return
        if delta.choice == 0:
            prompt = self.prompts[prompt_index]
            if not prompt.began or delta.prompt_logprobs is not None:
                delta = self._note_prompt(prompt, delta)
        self.completion_tokens += len(delta.token_ids) // ID_BYTES
        if delta.finish_reason is not None:
            self._unfinished -= 1
        if prompt_index:
            delta = delta._replace(choice=prompt_index * self.n + delta.choice)
        deltas = self._pending.get(delta.choice)
        if deltas is None:
            self._pending[delta.choice] = [delta]
        else:
            self._pile_up(deltas, delta)
        self._pending_bytes += _size_bytes(delta)
        if self._pending_bytes > self._room_bytes:
            self._overflow()
        if self._on_change is None:
            self._wake()
        else:
            self._changed = True
            self._on_change()

    def fail(self, error: RequestError) -> None:
        """The first error wins; it ends the whole answer."""
        if self.error is None:
            self.error = error
            self._wake()

    def nudge(self) -> None:
        """Wake the handler although nothing came, so that it can tell the client it is alive."""
        self.nudged = True
        self._wake()

    def _note_prompt(self, prompt: PromptState, delta: Delta) -> Delta:
        """Keep what is of the prompt; the rest of the delta."""
        if not prompt.began:
            prompt.began = True
            prompt.cached_tokens = delta.cached_tokens
            self.cached_tokens += delta.cached_tokens
            prompt.vector = delta.vector
        if delta.prompt_logprobs is None:
            return delta
        if not prompt.scored:
            # Another attempt may bring them again, when these are released already.
            prompt.scored, prompt.logprobs = True, delta.prompt_logprobs
            self._hold(self._size_of_prompt_logprobs(prompt))
        return delta._replace(prompt_logprobs=None)

    def _hold(self, prompt_logprob_bytes: int) -> None:
        """What prompts' logprobs take is no room for what waits."""
        self._prompt_logprob_bytes += prompt_logprob_bytes
        left_bytes = self._max_held_bytes - self._prompt_logprob_bytes
        self._room_bytes = min(self._max_pending_bytes, left_bytes)

    def _size_of_prompt_logprobs(self, prompt: PromptState) -> int:
        return self._prompt_logprob_copies * logprob_bytes(prompt.logprobs)

    def _pile_up(self, deltas: list[Delta], delta: Delta) -> None:
        deltas.append(delta)
        if len(deltas) >= _COMPACT_AT_DELTAS:
            self._pending_bytes -= _DELTA_OVERHEAD_BYTES * (len(deltas) - 1)
            deltas[:] = [_merged(deltas)]

    def _overflow(self) -> None:
        self._overflowed = True
        self._pending.clear()
        if self._on_overflow is not None:
            self._on_overflow(self)

    def _wake(self) -> None:
        self._changed = True
        if self._on_change is not None:
            self._on_change()
        elif self._waiter is not None and self._ends_wait() and not self._waiter.done():
            self._waiter.set_result(None)

    def _ends_wait(self) -> bool:
        return not self._waits_for_end or self._unfinished == 0 or self.error is not None

    # -- read by the handler ----------------------------------------------------------------------

    @property
    def held_bytes(self) -> int:
        """About what waits to be taken, and the prompts' logprobs."""
        return self._pending_bytes + self._prompt_logprob_bytes

    @property
    def accepted(self) -> bool:
        return all(prompt.accepted for prompt in self.prompts)

    @property
    def begun(self) -> bool:
        return bool(self._pending)

    @property
    def done(self) -> bool:
        """Every choice has its finish reason (which may still wait to be taken)."""
        return self._unfinished == 0

    @property
    def wants_handler(self) -> bool:
        """More is to be done than to pass on what came."""
        return self.nudged or self._unfinished == 0 or self.error is not None

    async def changed(self) -> None:
        """Return once something happened since the last call. Raises the error that ended it."""
        if not self._changed:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
            self._waiter = None
        self._changed = False
        if self.error is not None:
            raise self.error

    @contextmanager
    def telling(self, on_change: Callable[[], None]) -> Iterator[None]:
        """While the block lasts, call `on_change` for each change, and for one since the handler
        last looked, instead of waking the handler."""
        self._on_change = on_change
        if self._changed:
            on_change()
        try:
            yield
        finally:
            self._on_change = None

    async def completed(self) -> None:
        """Return once everything is there to be taken. Raises the error that ended it."""
        self._waits_for_end = True
        while not self.done:
            await self.changed()
        self._waits_for_end = False

    def take(self) -> list[Delta]:
        """What each choice gained since the last take, as one delta. Raises the error that ended
        it. Choices are numbered over all prompts; prompt logprobs stay with their prompt."""
        if self.error is not None:
            raise self.error
        taken, self._pending, self._pending_bytes = self._pending, {}, 0
        if self._needs_prompt_logprobs:
            self._put_back(taken)
        if len(taken) == 1:
            (deltas,) = taken.values()
            return deltas if len(deltas) == 1 else [_merged(deltas)]
        return [deltas[0] if len(deltas) == 1 else _merged(deltas) for deltas in taken.values()]

    def _put_back(self, taken: dict[int, list[Delta]]) -> None:
        """Those that must wait, out of what was taken."""
        for choice in [choice for choice in taken if self._must_wait(choice)]:
            self._pending[choice] = deltas = taken.pop(choice)
            self._pending_bytes += sum(map(_size_bytes, deltas))

    def release_prompt_logprobs(self, prompt_index: int) -> None:
        """Nobody reads them any more."""
        prompt = self.prompts[prompt_index]
        self._hold(-self._size_of_prompt_logprobs(prompt))
        prompt.logprobs = None

    def _must_wait(self, choice: int) -> bool:
        """Prompt logprobs come with choice 0; an echo of another choice waits for them."""
        return not self.prompts[choice // self.n].began


def _merged(deltas: list[Delta]) -> Delta:
    last = deltas[-1]
    with_logprobs = [delta.logprobs for delta in deltas if delta.logprobs is not None]
    return last._replace(
        text="".join([delta.text for delta in deltas]),
        token_ids=b"".join([delta.token_ids for delta in deltas]),
        logprobs=[row for rows in with_logprobs for row in rows] if with_logprobs else None,
    )


def _size_bytes(delta: Delta) -> int:
    """About what the delta holds in memory."""
    size = _DELTA_OVERHEAD_BYTES + len(delta.text) + len(delta.token_ids)
    return size if delta.logprobs is None else size + logprob_bytes(delta.logprobs)


def logprob_bytes(rows: Iterable[TokenLogprob | None] | None) -> int:
    """About what the rows hold in memory."""
    return sum(_LOGPROB_BYTES * (1 + len(row.top)) for row in rows or () if row is not None)
