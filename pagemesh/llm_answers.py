"""The answers to one call of the offline class, from the frames of its engine."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain, repeat
from types import TracebackType
from typing import Final, Self

from pagemesh.llm_progress import Progress
from pagemesh.outputs import CompletionOutput, Output, RequestOutput
from pagemesh.shared.engine_messages import LogprobRow, Submit, Tokens
from pagemesh.shared.wire import pack_ids, unpack_ids
from pagemesh.tokenizer_svc.admission import Prepared
from pagemesh.tokenizer_svc.pipeline import Pipeline
from pagemesh.tokenizer_svc.stops import StopEnds

_ONE: Final = pack_ids([1])


class _Keepers(dict[int, Callable[[int], None]]):
    """By key: what keeps a token of it. An engine that was interrupted may still speak of choices
    that are over."""

    def __missing__(self, key: int) -> Callable[[int], None]:
        return _pass_over


def _pass_over(token_id: int) -> None: ...


class WholeAnswers:
    """Nobody reads an answer before it is whole, so tokens are kept until their choice ends, and
    its text is made at once: a step then does next to nothing for a token.

    A choice with stop strings may end in its text, so what was kept of it passes on whenever one
    may just have ended.
    """

    def __init__(self) -> None:
        self._keep = _Keepers()
        self._ids: dict[int, list[int]] = {}
        self._logprobs: dict[int, list[LogprobRow]] = {}
        self._due: list[int] = []
        """Choices in whose text a stop string may have ended with this step."""

    def open(self, key: int, stop_ends: StopEnds | None) -> None:
        ids = self._ids[key] = []
        if stop_ends is None:
            self._keep[key] = ids.append
        else:
            self._keep[key] = partial(self._watch, key, ids, stop_ends)

    def _watch(self, key: int, ids: list[int], stop_ends: StopEnds, token_id: int) -> None:
        ids.append(token_id)
        if stop_ends[token_id]:
            self._due.append(key)

    def close(self, keys: Iterable[int]) -> None:
        """What else the engine says of these is passed over."""
        for key in keys:
            self._keep.pop(key, None)
            self._ids.pop(key, None)
            self._logprobs.pop(key, None)

    def take(self, tokens: Tokens) -> Tokens | None:
        """A frame with all the tokens of the choices that `tokens` ends; None if there is nothing
        to say yet."""
        keep = self._keep
        for key, token_id in zip(_key_of_each(tokens), unpack_ids(tokens.ids), strict=True):
            keep[key](token_id)
        for row in tokens.logprobs:
            self._logprobs.setdefault(row.key, []).append(row)
        over = [*(end.key for end in tokens.ended), *(key for key, _ in tokens.failed)]
        if not (over or self._due or tokens.started or tokens.prompt_logprobs):
            return None
        frame = self._frame(tokens, dict.fromkeys([*over, *self._due]))
        self._due.clear()
        self.close(over)
        return frame

    def _frame(self, tokens: Tokens, of: Iterable[int]) -> Tokens:
        """`tokens`, with what was kept of those keys as its rows. It is kept no longer."""
        keys = [key for key in of if self._ids.get(key)]
        kept = [self._ids[key] for key in keys]
        logprobs = [row for key in keys for row in self._logprobs.pop(key, ())]
        frame = tokens._replace(
            keys=pack_ids(keys),
            counts=pack_ids(map(len, kept)),
            ids=b"".join(map(pack_ids, kept)),
            logprobs=logprobs,
        )
        for ids in kept:
            ids.clear()
        return frame


def _key_of_each(tokens: Tokens) -> list[int]:
    keys = unpack_ids(tokens.keys)
    if tokens.counts == _ONE * len(keys):
        return keys
    return [*chain.from_iterable(map(repeat, keys, unpack_ids(tokens.counts)))]


class Answers:
    """Fills the outputs of one call. A context manager: within, the pipeline knows its requests."""

    def __init__(
        self,
        pipeline: Pipeline,
        checked: Sequence[Prepared],
        outputs: Sequence[Output],
        progress: Progress,
    ) -> None:
        """`outputs` of the `checked` requests, still empty."""
        self._pipeline = pipeline
        self._progress = progress
        self._whole = WholeAnswers()
        self._stop_ends: dict[tuple[tuple[str, ...], bool], StopEnds] = {}
        self._outputs = {output.request_id: output for output in outputs}
        self._checked = checked

    def submits(self) -> deque[Submit]:
        """Take in every request: its choices are to be computed."""
        return deque(submit for one in self._checked for submit in self._open(one))

    def take(self, tokens: Tokens) -> list[int]:
        """What a step brought. Returns the keys of choices that ended in their text."""
        self._progress.note(len(tokens.ids) // 4)
        frame = self._whole.take(tokens)
        if frame is None:
            return []
        fed = self._pipeline.feed(frame)
        self._whole.close(fed.end_keys)
        for delta in fed.deltas:
            output = self._outputs[delta.request_id]
            output.add(delta)
            if output.finished:
                self._progress.note_finished(output)
        return fed.end_keys

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for request_id in self._outputs:
            self._pipeline.close(request_id)

    def _open(self, checked: Prepared) -> list[Submit]:
        submits = self._pipeline.open(checked).submits
        for submit in submits:
            self._whole.open(submit.key, self._stop_ends_of(checked))
        return submits

    def _stop_ends_of(self, checked: Prepared) -> StopEnds | None:
        """Requests with the same stop strings share what is found out about tokens."""
        params = checked.params
        if not params.stop:
            return None
        stops, skip = tuple(params.stop), params.skip_special_tokens
        if (stops, skip) not in self._stop_ends:
            vocabulary = checked.text_model.vocabulary
            self._stop_ends[stops, skip] = StopEnds(stops, vocabulary, skip_special_tokens=skip)
        return self._stop_ends[stops, skip]


def empty_output(checked: Prepared) -> RequestOutput:
    asked = checked.params.logprobs is not None
    outputs = [
        CompletionOutput(
            index=index,
            cumulative_logprob=0.0 if asked else None,
            logprobs=[] if asked else None,
        )
        for index in range(checked.params.n)
    ]
    request_id = checked.generate.request_id
    prompt_ids = unpack_ids(checked.prompt_ids)
    return RequestOutput(request_id, checked.prompt_text, prompt_ids, outputs)
