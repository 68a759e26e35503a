"""One choice of one request: generated ids in, visible text out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from pagemesh.shared.engine_messages import Submit
from pagemesh.shared.messages import TokenLogprob
from pagemesh.shared.sampling import SamplingParams
from pagemesh.shared.wire import pack_ids
from pagemesh.tokenizer_svc.decode import NoText
from pagemesh.tokenizer_svc.stops import StopFilter
from pagemesh.tokenizer_svc.text_model import TextModel


class Finish(NamedTuple):
    reason: str
    stop_reason: str | int | None = None


class Choice:
    """State of a choice across engines: what it has generated, and where its text stands.

    `submit` is the current placement. The state after some ids depends on those ids alone, never
    on how they were cut into steps, so a choice resumed elsewhere goes on at the same character.
    """

    def __init__(
        self,
        submit: Submit,
        params: SamplingParams,
        text_model: TextModel,
        eos_token_ids: Sequence[int],
        *,
        keeps_marks: bool = False,
    ) -> None:
        self.submit = submit
        self.text_model = text_model
        self.request_id = submit.request_id
        self.index = submit.choice
        self.params = params
        self.generated: list[int] = []
        self.cached_tokens = 0
        self.vector = b""
        """Of a prompt that is pooled, once it is."""
        self.fruitless_losses = 0
        self._prompt_logprobs: list[TokenLogprob | None] = [None]
        self._decoder = (
            text_model.decoder(
                skip_special_tokens=params.skip_special_tokens, keeps_marks=keeps_marks
            )
            if params.detokenize
            else NoText()
        )
        self._stops = StopFilter(params.stop, include_stop=params.include_stop_str_in_output)
        eos = () if params.ignore_eos else eos_token_ids
        self._eos = frozenset(eos)
        self._stop_ids = frozenset(params.stop_token_ids) | self._eos
        self._seeks_stops = bool(params.stop)

    @property
    def matched_stop(self) -> str | None:
        return self._stops.matched

    def push(self, token_ids: Sequence[int]) -> tuple[str, int]:
        """Text that became visible, and how many of the ids count: none once a stop string has
        matched."""
        n = len(token_ids)
        if self._seeks_stops or not self._stop_ids.isdisjoint(token_ids):
            if n > 1 and not self._seeks_stops and self._stop_ids.isdisjoint(token_ids[:-1]):
                return self.push(token_ids[:-1])[0] + self.push(token_ids[-1:])[0], n
            return self._push_watching(token_ids)
        self.generated.extend(token_ids)
        if n == 1:  # as almost always where answers are streamed
            return self._decoder.push(token_ids[0]), 1
        return self._decoder.push_many(token_ids), n

    def _push_watching(self, token_ids: Sequence[int]) -> tuple[str, int]:
        """`push` where any id may end the choice."""
        pieces: list[str] = []
        n_before = len(self.generated)
        for token_id in token_ids:
            if self.matched_stop is not None:
                break
            self.generated.append(token_id)
            if not self._is_hidden(token_id):
                pieces.append(self._filter(self._decoder.push(token_id)))
        return "".join(pieces), len(self.generated) - n_before

    def flush(self) -> str:
        """The held-back text, now that the choice is at its end. A stop string may end in it."""
        tail = self._filter(self._decoder.flush())
        return tail if self.matched_stop is not None else tail + self._stops.flush()

    def resume(self, key: int) -> Submit:
        """A new placement with everything generated so far; the old key is void.

        It stands apart from its group, whose other choices may be done or elsewhere.
        """
        prior_ids = pack_ids(self.generated)
        progressed = len(prior_ids) > len(self.submit.prior_ids)
        self.fruitless_losses = 0 if progressed else self.fruitless_losses + 1
        attempt = self.submit.attempt + 1
        self.submit = self.submit._replace(key=key, attempt=attempt, prior_ids=prior_ids, group="")
        return self.submit

    def add_prompt_logprobs(self, start: int, entries: Sequence[TokenLogprob]) -> None:
        """Entries of positions `start` on; an engine that recomputes sends positions again."""
        self._prompt_logprobs[start:] = entries

    def take_prompt_logprobs(self) -> list[TokenLogprob | None] | None:
        """All of them, once, when they were asked for; never asked for again by a resume."""
        if self.submit.params.prompt_logprobs is None:
            return None
        params = msgspec.structs.replace(self.submit.params, prompt_logprobs=None)
        self.submit = self.submit._replace(params=params)
        return self._prompt_logprobs

    def finish_of_generated(self) -> Finish | None:
        """Why nothing is left to generate, by the generated ids alone; None when it goes on."""
        if self.matched_stop is not None:
            return Finish("stop", self.matched_stop)
        if self.generated and self._ends(self.generated[-1]):
            last = self.generated[-1]
            return Finish("stop", None if last in self._eos else last)
        limit_tokens = self.params.max_tokens
        if limit_tokens is not None and len(self.generated) >= limit_tokens:
            return Finish("length")
        return None

    def _filter(self, text: str) -> str:
        """Stop strings are not looked for in the first `min_tokens` tokens."""
        if len(self.generated) <= self.params.min_tokens:
            return text
        return self._stops.push(text)

    def _ends(self, token_id: int) -> bool:
        return token_id in self._stop_ids and len(self.generated) > self.params.min_tokens

    def _is_hidden(self, token_id: int) -> bool:
        """A stop token ends the text and is no part of it, unless asked for."""
        return self._ends(token_id) and not self.params.include_stop_str_in_output
