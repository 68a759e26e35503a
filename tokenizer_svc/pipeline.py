"""The synchronous core of the tokenizer service.

`admit` turns a request into placements, `feed` turns an engine's tokens into deltas, `resume` moves
choices whose engine is gone. No I/O, no clock; the service and the offline class drive it alike.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

import structlog

from pagemesh.shared.engine_messages import Ended, LogprobRow, PromptLogprobs, Submit, Tokens
from pagemesh.shared.errors import RequestError
from pagemesh.shared.messages import Accepted, Begun, Delta, Generate, ModelCard, WireError
from pagemesh.shared.wire import unpack_ids
from pagemesh.tokenizer_svc.admission import Prepared, prepare_request, submit_of_choice
from pagemesh.tokenizer_svc.choice import Choice, Finish
from pagemesh.tokenizer_svc.logprobs import prompt_token_logprobs, token_logprob
from pagemesh.tokenizer_svc.text_models import TextModels

log = structlog.get_logger(__name__)

MAX_FRUITLESS_LOSSES: Final = 3
_KEY_MASK: Final = 2**31 - 1
_ID_BYTES: Final = 4

# What one choice gained: its key, the ids, the ids as on the wire, logprobs if asked for.
_Row = tuple[int, Sequence[int], bytes, Sequence[LogprobRow]]


class Admitted(NamedTuple):
    """`submits` are to be placed. `deltas` end choices that a resumed request had already done."""

    request_id: str
    prompt_ids: bytes
    prompt_text: str | None
    in_reasoning: bool
    submits: list[Submit]
    deltas: list[Delta]

    @property
    def accepted(self) -> Accepted:
        return Accepted(self.request_id, self.prompt_ids, self.prompt_text, self.in_reasoning)


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

    def __init__(self, text_models: TextModels) -> None:
        self.text_models = text_models
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
        """Every check, the encoding and the hashes, for an engine of `card`, whose model is known;
        touches no state of the pipeline."""
        return prepare_request(self.text_models.of(card), generate, card)

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
        prompt = prepared.prompt_ids, prepared.prompt_text, prepared.in_reasoning
        return Admitted(request_id, *prompt, submits, deltas)

    def feed(self, tokens: Tokens) -> Fed:
        """What one frame of an engine brought. Keys that are not in flight are passed over."""
        fed = Fed([], [], self._begin(tokens))
        for chunk in tokens.prompt_logprobs:
            self.add_prompt_logprobs(chunk)
        for key, vector in tokens.pooled:
            if key in self._choices:
                self._choices[key].vector = vector
        ended = {end.key: end for end in tokens.ended}
        for row in _rows(tokens):
            self._advance_safely(row, ended.get(row[0]), fed)
        for end in tokens.ended:
            self._advance_safely((end.key, (), b"", ()), end, fed)
        for key, error in tokens.failed:
            fed.deltas.extend(self.fail([key], error))
        return fed

    def add_prompt_logprobs(self, chunk: PromptLogprobs) -> None:
        """Part of `feed`, for whoever takes a frame in pieces. They wait for the first delta."""
        choice = self._choices.get(chunk.key)
        if choice is not None:
            entries = prompt_token_logprobs(choice.text_model, chunk)
            choice.add_prompt_logprobs(chunk.start, entries)

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
        places = [(choice.request_id, choice.index) for choice in choices]
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
        choice = Choice(
            submit,
            prepared.params,
            prepared.text_model,
            eos_token_ids,
            keeps_marks=prepared.generate.keeps_marks,
        )
        choice.push(unpack_ids(submit.prior_ids))
        self._remember(choice)
        return choice

    def _close_if_done(self, choice: Choice) -> Delta | None:
        """A choice that comes with prior ids may have nothing left to generate."""
        finish = choice.finish_of_generated() if choice.generated else None
        return None if finish is None else self._finish(choice, "", b"", finish)

    def _give_up(self, choice: Choice) -> Delta | None:
        if choice.fruitless_losses < MAX_FRUITLESS_LOSSES:
            return None
        message = f"{MAX_FRUITLESS_LOSSES + 1} engines were lost while serving this request"
        error = RequestError(message, status=503, code="engine_unavailable").to_wire()
        return self.fail([choice.submit.key], error)[0]

    def _begin(self, tokens: Tokens) -> list[Begun]:
        begun = []
        for key, cached_tokens, queue_s, prefill_s in tokens.started:
            choice = self._choices.get(key)
            if choice is not None:
                choice.cached_tokens = cached_tokens
                place = choice.request_id, choice.index, tokens.engine_id
                begun.append(Begun(*place, cached_tokens, queue_s, prefill_s))
        return begun

    def _advance_safely(self, row: _Row, end: Ended | None, fed: Fed) -> None:
        """Ids that cannot be decoded are the fault of one choice, and end that one."""
        key, ids, _, _ = row
        choice = self._choices.get(key)
        if choice is None:
            return
        try:
            self._advance(choice, row, end, fed)
        except Exception:
            log.exception("undecodable_tokens", request_id=choice.request_id, token_ids=ids)
            message = "the engine's tokens cannot be decoded"
            fault = RequestError(message, status=500, code="internal_error")
            fed.deltas.extend(self.fail([key], fault.to_wire()))
            fed.end_keys.append(key)

    def _advance(self, choice: Choice, row: _Row, end: Ended | None, fed: Fed) -> None:
        _, ids, packed_ids, logprob_rows = row
        text, n_tokens = choice.push(ids)
        packed_ids = packed_ids[: n_tokens * _ID_BYTES]
        finish = Finish(end.finish_reason, end.stop_reason) if end is not None else None
        if choice.matched_stop is not None:
            if end is None:
                fed.end_keys.append(choice.submit.key)
            finish = Finish("stop", choice.matched_stop)
        if finish is None:
            delta = _delta(choice, text, packed_ids)
        else:
            delta = self._finish(choice, text, packed_ids, finish)
        if logprob_rows:
            top = choice.params.logprobs or 0
            logprobs = [
                token_logprob(choice.text_model, entry, top) for entry in logprob_rows[:n_tokens]
            ]
            delta = delta._replace(logprobs=logprobs)
        fed.deltas.append(delta)

    def _finish(self, choice: Choice, text: str, ids: bytes, finish: Finish) -> Delta:
        """The last delta of a choice. The held-back tail may yet complete a stop string."""
        if choice.matched_stop is None:
            text += choice.flush()
            if choice.matched_stop is not None:
                finish = Finish("stop", choice.matched_stop)
        self._forget(choice)
        return _delta(choice, text, ids)._replace(
            finish_reason=finish.reason, stop_reason=finish.stop_reason, vector=choice.vector
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


def _rows(tokens: Tokens) -> Iterator[_Row]:
    keys, counts, ids = (unpack_ids(each) for each in (tokens.keys, tokens.counts, tokens.ids))
    logprobs: defaultdict[int, list[LogprobRow]] = defaultdict(list)
    for entry in tokens.logprobs:
        logprobs[entry.key].append(entry)
    end = 0
    for key, count in zip(keys, counts, strict=True):
        start, end = end, end + count
        packed_ids = tokens.ids[start * _ID_BYTES : end * _ID_BYTES]
        yield key, ids[start:end], packed_ids, logprobs.get(key, ())


def _delta(choice: Choice, text: str, packed_ids: bytes) -> Delta:
    """By position, which costs half as much as by name."""
    prompt_logprobs = choice.take_prompt_logprobs()
    return Delta(
        choice.request_id,
        choice.index,
        text,
        packed_ids,
        None,
        None,
        None,
        choice.cached_tokens,
        prompt_logprobs,
    )
