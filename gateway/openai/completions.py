"""POST /v1/completions."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cached_property, partial
from math import inf
from typing import Any, Final

from aiohttp import web

from pagemesh.gateway.backend import Backend
from pagemesh.gateway.directory import ServedModel
from pagemesh.gateway.generation import Generation, logprob_bytes
from pagemesh.gateway.offload import LARGE_BYTES
from pagemesh.gateway.openai.answer import (
    ChunkFrame,
    Job,
    encode_json,
    named_ids,
    respond,
)
from pagemesh.gateway.openai.fields import COMPLETION_REFUSED
from pagemesh.gateway.openai.known_params import KnownParams
from pagemesh.gateway.openai.logprobs import (
    CompletionLogprobs,
    id_as_text,
    prompt_logprobs,
    with_ids_as_text,
)
from pagemesh.gateway.openai.params import check_cache_names, completion_params, split_key
from pagemesh.gateway.openai.prompts import (
    PROMPT,
    check_choices,
    completion_prompts,
    id_limit,
)
from pagemesh.gateway.openai.schema import CompletionRequest
from pagemesh.gateway.openai.sse import OPENAI
from pagemesh.gateway.openai.usage import usage
from pagemesh.gateway.random_ids import RandomIds
from pagemesh.gateway.request_body import read_body
from pagemesh.shared.messages import (
    Delta,
    ModelCard,
    Prompt,
    Tokenize,
    Tokenized,
    TokenLogprob,
)
from pagemesh.shared.sampling import SamplingParams
from pagemesh.shared.wire import unpack_ids

_GOES_ON: Final = b'"finish_reason":null,"stop_reason":null'
_PLAIN: Final = b',"logprobs":null,' + _GOES_ON + b"}"


class CompletionsEndpoint:
    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._reader = backend.body_reader("completions", CompletionRequest, COMPLETION_REFUSED)
        self._new_id = RandomIds("cmpl-")
        self._params_of = KnownParams(CompletionRequest, completion_params)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        job = await self.job(request)
        answer_of = partial(CompletionAnswer, self._backend, job)
        return await respond(self._backend, request, job, answer_of)

    async def job(self, request: web.Request) -> Job:
        """What the request asks for. Raises RequestError."""
        raw = await read_body(request)
        limit = id_limit(PROMPT, raw, self._backend.directory.longest_context_tokens)
        body = await self._reader.read(raw, limit)
        served = self._backend.router.resolve(body.model, split_key(request, body))
        made_of = body, served, self._new_id(), self._params_of.for_body(len(raw))
        if len(raw) <= LARGE_BYTES:
            return completion_job(*made_of)
        return await self._backend.offload.run(len(raw), completion_job, *made_of)


def completion_job(
    body: CompletionRequest,
    served: ServedModel,
    answer_id: str,
    params_of: Callable[[CompletionRequest, ModelCard], SamplingParams] = completion_params,
) -> Job:
    """Raises RequestError (400) naming the field at fault."""
    params = params_of(body, served.card)
    check_cache_names(body)
    prompts = completion_prompts(body, served.card)
    check_choices(len(prompts), params.n)
    return Job(
        id=answer_id,
        created_s=int(time.time()),
        served=served,
        body=body,
        prompts=prompts,
        params=params,
        want_prompt_text=bool(body.echo),
    )


class CompletionAnswer:
    """Chunks of text; the first of each choice begins with the prompt when it is echoed."""

    framing: Final = OPENAI

    def __init__(self, backend: Backend, job: Job, generation: Generation) -> None:
        body = job.body
        assert isinstance(body, CompletionRequest)
        self._backend = backend
        self._job = job
        self._generation = generation
        self._n_shown = body.n or 1
        """Of a prompt's choices; all but of those that `best_of` asks for."""
        self._shows_ids = bool(body.return_token_ids)
        self._ids_as_text = bool(body.return_tokens_as_token_ids)
        self._shows_logprobs = body.logprobs is not None
        n_choices = len(job.prompts) * job.params.n
        self._to_echo = set(range(n_choices)) if job.want_prompt_text else set()
        self._logprobs: list[CompletionLogprobs] = []
        if self._shows_logprobs:
            self._logprobs = [CompletionLogprobs() for _ in range(n_choices)]
        self._first_tokens: dict[bytes, str] = {}
        self._prompt_ids_of = set(range(n_choices)) if self._shows_ids else set()
        """Choices whose first chunk is to come."""

    async def prepare(self) -> None:
        """The first prompt token has no logprob row, so its text must be asked for: those of all
        prompts at once, since each question may be refused when many wait."""
        if self._to_echo and self._shows_logprobs:
            first_ids = list({prompt.first_id for prompt in self._generation.prompts})
            tokens = await self._tokens(b"".join(first_ids))
            self._first_tokens = dict(zip(first_ids, tokens, strict=True))

    def whole(self, gains: list[Delta]) -> dict[str, Any]:
        scored = [prompt_logprobs(prompt.logprobs) for prompt in self._generation.prompts]
        n = self._job.params.n
        if n > self._n_shown:
            gains = best_choices(gains, n, self._n_shown)
        return {
            "id": self._job.id,
            "object": "text_completion",
            "created": self._job.created_s,
            "model": self._job.served.name,
            "choices": [
                self._choice(index, gain, scored[gain.choice // n])
                for index, gain in enumerate(gains)
            ],
            "usage": usage(self._generation),
            **self._job.echoes,
        }

    def _choice(self, index: int, gain: Delta, scored_prompt: list[Any] | None) -> dict[str, Any]:
        text, logprobs = self._text_and_logprobs(gain)
        return {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": gain.finish_reason,
            "stop_reason": gain.stop_reason,
            "prompt_logprobs": scored_prompt,
            **(self._ids_of(gain) if self._shows_ids else {}),
        }

    def _ids_of(self, gain: Delta) -> dict[str, list[int]]:
        prompt = self._generation.prompts[gain.choice // self._job.params.n]
        prompt_ids = unpack_ids(prompt.ids)
        return {"prompt_token_ids": prompt_ids, "token_ids": unpack_ids(gain.token_ids)}

    @cached_property
    def _frame(self) -> ChunkFrame:
        return ChunkFrame(self._job, "text_completion", self._generation)

    @cached_property
    def _plain(self) -> tuple[bytes, bytes] | None:
        """Around index and text, if nothing else of a chunk may change while the choice goes on."""
        if self._job.want_prompt_text or self._shows_logprobs or self._shows_ids:
            return None
        return None if self._frame.counts_each else self._frame.around(b'{"index":', _PLAIN)

    async def opening(self) -> bytes:
        await self.prepare()
        return b""

    async def gain(self, gain: Delta) -> bytes:
        if gain.choice not in self._to_echo:
            return self.event(gain)
        index, n = gain.choice // self._job.params.n, self._job.params.n
        size_bytes = logprob_bytes(self._generation.prompts[index].logprobs)
        event = await self._backend.offload.run(size_bytes, self.event, gain)
        if self._to_echo.isdisjoint(range(index * n, index * n + n)):
            self._generation.release_prompt_logprobs(index)
        return event

    @property
    def quick(self) -> bool:
        """An echo may be long."""
        return not self._to_echo

    def event(self, gain: Delta) -> bytes:
        """No chunk for a gain without text, logprobs or finish (half a character, say)."""
        if self._plain is not None and gain.text and gain.finish_reason is None:
            before, after = self._plain
            return b'%b%d,"text":%b%b' % (before, gain.choice, encode_json(gain.text), after)
        text, logprobs = self._text_and_logprobs(gain)
        ids = self._new_ids(gain) if self._shows_ids else b""
        if not (text or gain.logprobs or ids) and gain.finish_reason is None:
            return b""
        return self._frame.event(
            b'{"index":%d,"text":%b,"logprobs":%b,%b%b}'
            % (
                gain.choice,
                encode_json(text),
                b"null" if logprobs is None else encode_json(logprobs),
                _GOES_ON if gain.finish_reason is None else _ending(gain),
                ids,
            )
        )

    def _new_ids(self, gain: Delta) -> bytes:
        """Those of the prompt come with a choice's first chunk."""
        ids = named_ids(b"token_ids", gain.token_ids)
        if gain.choice not in self._prompt_ids_of:
            return ids
        self._prompt_ids_of.discard(gain.choice)
        prompt = self._generation.prompts[gain.choice // self._job.params.n]
        return named_ids(b"prompt_token_ids", prompt.ids) + ids

    async def closing(self) -> bytes:
        return self._frame.usage_event()

    def _text_and_logprobs(self, gain: Delta) -> tuple[str, dict[str, Any] | None]:
        """The choice's new text, and its logprobs if asked for."""
        if gain.choice in self._to_echo:
            self._to_echo.discard(gain.choice)
            return self._with_echo(gain)
        if not self._shows_logprobs:
            return gain.text, None
        return gain.text, self._logprobs[gain.choice].piece(self._rows(gain.logprobs or []))

    def _rows(self, rows: list[TokenLogprob]) -> list[TokenLogprob]:
        return with_ids_as_text(rows) if self._ids_as_text else rows

    def _with_echo(self, gain: Delta) -> tuple[str, dict[str, Any] | None]:
        prompt_index = gain.choice // self._job.params.n
        prompt = self._generation.prompts[prompt_index]
        prompt_text = prompt.text or ""
        logprobs = None
        if self._shows_logprobs:
            scored = [row for row in prompt.logprobs or [] if row is not None]
            logprobs = self._logprobs[gain.choice].piece(
                self._rows([*scored, *(gain.logprobs or [])]),
                first_prompt_token=self._first_tokens[prompt.first_id],
                prompt_text=prompt_text,
            )
            if self._ids_as_text:
                logprobs["tokens"][0] = id_as_text(*unpack_ids(prompt.first_id))
        return prompt_text + gain.text, logprobs

    async def _tokens(self, ids: bytes) -> list[str]:
        answer = await self._backend.upstream.ask(
            Tokenize(
                request_id=f"{self._job.id}-first",
                model=self._job.served.card.names[0],
                prompt=Prompt(token_ids=ids, add_special_tokens=False),
                want_token_strs=True,
            )
        )
        assert isinstance(answer, Tokenized)
        return answer.token_strs or []


def best_choices(gains: list[Delta], n: int, best: int) -> list[Delta]:
    """Of each `n` choices, those of a prompt, the `best` ones by the mean logprob of their tokens,
    best first. `gains` stand in the order of their choices and have logprobs."""
    each = [gains[first : first + n] for first in range(0, len(gains), n)]
    return [gain for own in each for gain in sorted(own, key=_mean_logprob, reverse=True)[:best]]


def _mean_logprob(gain: Delta) -> float:
    values = [row.logprob for row in gain.logprobs or []]
    return sum(values) / len(values) if values else -inf


def _ending(gain: Delta) -> bytes:
    return b'"finish_reason":%b,"stop_reason":%b' % (
        encode_json(gain.finish_reason),
        encode_json(gain.stop_reason),
    )
