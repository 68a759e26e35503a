"""What the methods of `LLM` return, in the shape of vLLM's outputs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol, Self

from pagemesh.shared.errors import RequestError
from pagemesh.shared.messages import Delta, TokenLogprob
from pagemesh.shared.pooling import unpack_floats
from pagemesh.shared.wire import unpack_ids
from pagemesh.tokenizer_svc.admission import Prepared


class Output(Protocol):
    """Of one prompt."""

    request_id: str
    prompt_token_ids: list[int]
    finished: bool

    def add(self, delta: Delta) -> None:
        """Take in what one choice gained."""


@dataclass(frozen=True, slots=True)
class Logprob:
    """One token's natural-log probability under the raw model. Rank 1 is the most probable."""

    logprob: float
    rank: int
    decoded_token: str


TokenLogprobs = dict[int, Logprob]
"""Token id -> logprob: the token of that position first, then the most probable ones."""


@dataclass(slots=True)
class CompletionOutput:
    """One choice of an answer.

    `token_ids` are all generated ids, an end-of-sequence token included. `logprobs` has an entry a
    token and `cumulative_logprob` is the sum over the chosen ones; both are None unless asked for.
    `finish_reason` is stop, length or error; `stop_reason` is the stop string or stop token id that
    ended the choice, or what went wrong.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True)
class RequestOutput:
    """The answer to one prompt. `prompt` is None when token ids were given.

    `prompt_logprobs` has an entry a prompt token, None for the first. `num_cached_tokens` of the
    prompt were found in the prefix cache.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    finished: bool = False
    num_cached_tokens: int = 0

    def add(self, delta: Delta) -> None:
        output = self.outputs[delta.choice]
        output.text += delta.text
        output.token_ids += unpack_ids(delta.token_ids)
        _add_logprobs(output, delta.logprobs or [])
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = [
                None if entry is None else _by_id(entry) for entry in delta.prompt_logprobs
            ]
        if delta.choice == 0 and delta.cached_tokens:
            self.num_cached_tokens = delta.cached_tokens
        _finish(output, delta)
        self.finished = all(output.finish_reason is not None for output in self.outputs)


@dataclass(slots=True)
class EmbeddingOutput:
    embedding: list[float]


@dataclass(slots=True)
class EmbeddingRequestOutput:
    """The vector of one prompt. `prompt` is None when token ids were given. `num_cached_tokens` of
    the prompt were found in the prefix cache."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: EmbeddingOutput
    finished: bool = False
    num_cached_tokens: int = 0

    @classmethod
    def of(cls, asked: Prepared) -> Self:
        """Still empty."""
        prompt_ids = unpack_ids(asked.prompt_ids)
        return cls(asked.generate.request_id, asked.prompt_text, prompt_ids, EmbeddingOutput([]))

    def add(self, delta: Delta) -> None:
        """Raises RequestError when there will be none."""
        if delta.error is not None:
            raise RequestError.from_wire(delta.error)
        self.outputs.embedding = unpack_floats(delta.vector)
        self.num_cached_tokens = delta.cached_tokens
        self.finished = delta.finish_reason is not None


def _add_logprobs(output: CompletionOutput, entries: list[TokenLogprob]) -> None:
    if output.logprobs is None or output.cumulative_logprob is None:
        return
    output.logprobs += [_by_id(entry) for entry in entries]
    output.cumulative_logprob += sum(entry.logprob for entry in entries)


def _by_id(entry: TokenLogprob) -> TokenLogprobs:
    chosen = {entry.token_id: Logprob(entry.logprob, entry.rank, entry.token)}
    top = {
        token_id: Logprob(logprob, rank, token)
        for token_id, token, _, logprob, rank in entry.top
        if token_id != entry.token_id
    }
    return chosen | top


def _finish(output: CompletionOutput, delta: Delta) -> None:
    if delta.error is not None:
        output.finish_reason = "error"
        output.stop_reason = RequestError.from_wire(delta.error).message
    elif delta.finish_reason is not None:
        output.finish_reason, output.stop_reason = delta.finish_reason, delta.stop_reason
