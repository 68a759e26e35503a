"""The synchronous core of the tokenizer service for one model.

`admit` turns a request into placements, `feed` turns an engine's tokens into deltas, `resume` moves
choices whose engine is gone. No I/O, no clock; the service and the offline class drive it alike.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from itertools import islice
from typing import Final, NamedTuple

import structlog

from pagemesh.shared.errors import RequestError
from pagemesh.shared.wire import (
    Begun,
    Delta,
    Ended,
    Generate,
    LogprobRow,
    ModelCard,
    PromptLogprobs,
    Submit,
    Tokens,
    WireError,
    pack_ids,
    unpack_ids,
)
from pagemesh.tokenizer_svc.admission import Prepared, prepare_request, submit_of_choice
from pagemesh.tokenizer_svc.choice import Choice, Finish
from pagemesh.tokenizer_svc.logprobs import prompt_token_logprobs, token_logprob
from pagemesh.tokenizer_svc.text_model import TextModel

log = structlog.get_logger(__name__)

MAX_FRUITLESS_LOSSES: Final = 3
_KEY_MASK: Final = 2**31 - 1


class Admitted(NamedTuple):
    """`submits` are to be placed. `deltas` end choices that a resumed request had already done."""

    request_id: str
    prompt_ids: bytes
    prompt_text: str | None
    submits: list[Submit]
    deltas: list[Delta]


class Fed(NamedTuple):
    """`end_keys` are choices that ended here, mostly by a stop string, and not yet below."""

    deltas: list[Delta]
    end_keys: list[int]
    begun: list[Begun]


class Resumed(NamedTuple):
    submits: list[Submit]
    deltas: list[Delta]


class Pipeline:
    """Owner of the state of every choice in flight. Only `prepare` may run in another thread."""

    def __init__(self, text_model: TextModel) -> None:
        self.text_model = text_model
        self._choices: dict[int, Choice] = {}
        self._keys: defaultdict[str, set[int]] = defaultdict(set)
        self._last_key = 0

    def __len__(self) -> int:
        """Requests in flight."""
        return len(self._keys)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._keys

    def admit(self, generate: Generate, card: ModelCard) -> Admitted:
        """`prepare` and `open` in one. Raises RequestError and keeps nothing of what it refuses."""
        return self.open(self.prepare(generate, card))

    def prepare(self, generate: Generate, card: ModelCard) -> Prepared:
        """Every check, the encoding and the hashes; touches no state of the pipeline."""
        return prepare_request(self.text_model, generate, card)

    def open(self, prepared: Prepared) -> Admitted:
        """Take the request in. Raises RequestError (409) when its id is in use."""
        request_id = prepared.generate.request_id
        if request_id in self._keys:
            raise RequestError(f"request id {request_id!r} is in use", status=409)
        submits, deltas = [], []
        for index in range(prepared.params.n):
            choice = self._open_choice(prepared, index)
            done = self._close_if_done(choice)
            if done is None:
                submits.append(choice.submit)
            else:
                deltas.append(done)
        return Admitted(request_id, prepared.prompt_ids, prepared.prompt_text, submits, deltas)

    def feed(self, tokens: Tokens) -> Fed:
        """What one frame of an engine brought. Keys that are not in flight are passed over."""
        fed = Fed([], [], self._begin(tokens))
        for chunk in tokens.prompt_logprobs:
            self.add_prompt_logprobs(chunk)
        ended = {end.key: end for end in tokens.ended}
        for key, ids, rows in _rows(tokens):
            self._advance_safely(key, ids, rows, ended.get(key), fed)
        for end in tokens.ended:
            self._advance_safely(end.key, [], [], end, fed)
        for key, error in tokens.failed:
            fed.deltas.extend(self.fail([key], error))
        return fed

    def add_prompt_logprobs(self, chunk: PromptLogprobs) -> None:
        """Part of `feed`, for whoever takes a frame in pieces. They wait for the first delta."""
        if chunk.key in self._choices:
            entries = prompt_token_logprobs(self.text_model, chunk)
            self._choices[chunk.key].add_prompt_logprobs(chunk.start, entries)

    def resume(self, keys: Iterable[int]) -> Resumed:
        """New placements for choices whose engine is gone, under new keys."""
        resumed = Resumed([], [])
        for choice in [self._choices[key] for key in keys if key in self._choices]:
            done = self._close_if_done(choice) or self._give_up(choice)
            if done is not None:
                resumed.deltas.append(done)
            else:
                self._forget(choice)
                resumed.submits.append(choice.resume(self._next_key()))
                self._remember(choice)
        return resumed

    def fail(self, keys: Iterable[int], error: WireError) -> list[Delta]:
        """End choices in error."""
        choices = [self._choices[key] for key in keys if key in self._choices]
        for choice in choices:
            self._forget(choice)
        places = [(choice.submit.request_id, choice.submit.choice) for choice in choices]
        return [Delta(*place, text="", token_ids=b"", error=error) for place in places]

    def close(self, request_id: str) -> list[int]:
        """Forget a request; returns the keys that engines may still be working on."""
        keys = sorted(self._keys.get(request_id, ()))
        for key in keys:
            self._forget(self._choices[key])
        return keys

    def _open_choice(self, prepared: Prepared, index: int) -> Choice:
        submit = submit_of_choice(prepared, index, self._next_key())
        eos_token_ids = prepared.card.eos_token_ids
        choice = Choice(submit, prepared.params, self.text_model, eos_token_ids)
        choice.push(unpack_ids(submit.prior_ids))
        self._remember(choice)
        return choice

    def _close_if_done(self, choice: Choice) -> Delta | None:
        """A choice that comes with prior ids may have nothing left to generate."""
        finish = choice.finish_of_generated() if choice.generated else None
        return None if finish is None else self._finish(choice, "", [], finish)

    def _give_up(self, choice: Choice) -> Delta | None:
        if choice.fruitless_losses < MAX_FRUITLESS_LOSSES:
            return None
        message = f"{MAX_FRUITLESS_LOSSES + 1} engines were lost while serving this request"
        error = RequestError(message, status=503, code="engine_unavailable").to_wire()
        return self.fail([choice.submit.key], error)[0]

    def _begin(self, tokens: Tokens) -> list[Begun]:
        begun = []
        for key, *start in tokens.started:
            choice = self._choices.get(key)
            if choice is not None:
                choice.cached_tokens = start[0]
                place = choice.submit.request_id, choice.submit.choice, tokens.engine_id
                begun.append(Begun(*place, *start))
        return begun

    def _advance_safely(
        self, key: int, ids: list[int], rows: list[LogprobRow], end: Ended | None, fed: Fed
    ) -> None:
        """Ids that cannot be decoded are the fault of one choice, and end that one."""
        if key not in self._choices:
            return
        try:
            self._advance(self._choices[key], ids, rows, end, fed)
        except Exception:
            request_id = self._choices[key].submit.request_id
            log.exception("undecodable_tokens", request_id=request_id, token_ids=ids)
            message = "the engine's tokens cannot be decoded"
            fault = RequestError(message, status=500, code="internal_error")
            fed.deltas.extend(self.fail([key], fault.to_wire()))
            fed.end_keys.append(key)

    def _advance(
        self, choice: Choice, ids: list[int], rows: list[LogprobRow], end: Ended | None, fed: Fed
    ) -> None:
        text, n_tokens = choice.push(ids)
        finish = Finish(end.finish_reason, end.stop_reason) if end is not None else None
        if choice.matched_stop is not None:
            if end is None:
                fed.end_keys.append(choice.submit.key)
            finish = Finish("stop", choice.matched_stop)
        if finish is None:
            delta = _delta(choice, text, ids[:n_tokens])
        else:
            delta = self._finish(choice, text, ids[:n_tokens], finish)
        if rows:
            logprobs = [token_logprob(self.text_model, row) for row in rows[:n_tokens]]
            delta = delta._replace(logprobs=logprobs)
        fed.deltas.append(delta)

    def _finish(self, choice: Choice, text: str, ids: list[int], finish: Finish) -> Delta:
        """The last delta of a choice. The held-back tail may yet complete a stop string."""
        if choice.matched_stop is None:
            text += choice.flush()
            if choice.matched_stop is not None:
                finish = Finish("stop", choice.matched_stop)
        self._forget(choice)
        return _delta(choice, text, ids)._replace(
            finish_reason=finish.reason, stop_reason=finish.stop_reason
        )

    def _remember(self, choice: Choice) -> None:
        self._choices[choice.submit.key] = choice
        self._keys[choice.submit.request_id].add(choice.submit.key)

    def _forget(self, choice: Choice) -> None:
        """The one way out of the tables."""
        submit = choice.submit
        del self._choices[submit.key]
        self._keys[submit.request_id].discard(submit.key)
        if not self._keys[submit.request_id]:
            del self._keys[submit.request_id]

    def _next_key(self) -> int:
        """Keys are int32 on the wire and never shared by two choices in flight."""
        self._last_key = (self._last_key + 1) & _KEY_MASK
        while self._last_key in self._choices:
            self._last_key = (self._last_key + 1) & _KEY_MASK
        return self._last_key


def _rows(tokens: Tokens) -> list[tuple[int, list[int], list[LogprobRow]]]:
    """Key, ids and logprob rows of each choice in the frame."""
    ids = iter(unpack_ids(tokens.ids))
    logprobs: defaultdict[int, list[LogprobRow]] = defaultdict(list)
    for row in tokens.logprobs:
        logprobs[row.key].append(row)
    counts = zip(unpack_ids(tokens.keys), unpack_ids(tokens.counts), strict=True)
    return [(key, list(islice(ids, count)), logprobs[key]) for key, count in counts]


def _delta(choice: Choice, text: str, ids: list[int]) -> Delta:
    submit = choice.submit
    return Delta(
        request_id=submit.request_id,
        choice=submit.choice,
        text=text,
        token_ids=pack_ids(ids),
        cached_tokens=choice.cached_tokens,
        prompt_logprobs=choice.take_prompt_logprobs(),
    )
