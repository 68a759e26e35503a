"""POST /inference/v1/generate: token ids in, token ids out, in vLLM's shapes."""

from __future__ import annotations

from functools import partial
from typing import Any, Final

import msgspec
from aiohttp import web

from pagemesh.gateway.backend import Backend
from pagemesh.gateway.directory import ServedModel
from pagemesh.gateway.generation import Generation
from pagemesh.gateway.headers import REQUEST_ID, is_sane_id
from pagemesh.gateway.openai.answer import Job, QuickAnswer, encode_json, new_id, respond
from pagemesh.gateway.openai.body import IdLimit
from pagemesh.gateway.openai.completions import completion_job
from pagemesh.gateway.openai.errors import bad
from pagemesh.gateway.openai.fields import COMPLETION_REFUSED
from pagemesh.gateway.openai.logprobs import chat_logprobs, prompt_logprobs
from pagemesh.gateway.openai.params import split_key
from pagemesh.gateway.openai.prompts import check_vocabulary
from pagemesh.gateway.openai.schema import CompletionRequest, GenerateRequest
from pagemesh.gateway.openai.sse import OPENAI, event
from pagemesh.gateway.openai.usage import usage
from pagemesh.gateway.request_body import read_body
from pagemesh.shared.messages import Delta
from pagemesh.shared.wire import unpack_ids


class TokensEndpoint:
    """A completion of token ids, whose text nobody asks for."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._outer = backend.body_reader("generate", GenerateRequest, {})
        self._inner = backend.body_reader("generate", CompletionRequest, COMPLETION_REFUSED)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        raw = await read_body(request)
        asked = await self._outer.read(raw, self._id_limit())
        if not asked.token_ids:
            raise bad("token_ids", "must not be empty")
        if asked.request_id is not None:
            request[REQUEST_ID] = _sane(asked.request_id)
        body = await self._inner.read(encode_json(_completion(asked)))
        served = self._backend.router.resolve(body.model, split_key(request, body))
        check_vocabulary(asked.token_ids, served.card, "token_ids")
        job = await self._backend.offload.run(len(raw), _job, body, served)
        answer_of = partial(TokensAnswer, request[REQUEST_ID], job)
        return await respond(self._backend, request, job, answer_of)

    def _id_limit(self) -> IdLimit | None:
        longest_tokens = self._backend.directory.longest_context_tokens
        return None if longest_tokens is None else IdLimit("token_ids", longest_tokens, _check_ids)


def _check_ids(limit: int, n_lists: int, longest: int) -> None:
    if n_lists == 1 and longest > limit:
        raise bad(
            "token_ids",
            f"has {longest} tokens, over the maximum context length of {limit} tokens",
            code="context_length_exceeded",
        )


def _sane(request_id: str) -> str:
    if not is_sane_id(request_id):
        raise bad("request_id", "must have 1 to 128 letters, digits and the signs . _ : -")
    return request_id


def _completion(asked: GenerateRequest) -> dict[str, Any]:
    own = {
        "prompt": asked.token_ids,
        "echo": None,
        **{
            name: getattr(asked, name)
            for name in ("model", "stream", "stream_options", "cache_salt", "priority", "timeout")
        },
    }
    return {**(asked.sampling_params or {}), **own}


def _job(body: CompletionRequest, served: ServedModel) -> Job:
    """Text is made only where stop strings are looked for in it."""
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise bad("best_of", "is supported only when it equals n", code="unsupported_parameter")
    job = completion_job(body, served, new_id("cmpl"))
    params = job.params
    if params.stop:
        return job
    return msgspec.structs.replace(job, params=msgspec.structs.replace(params, detokenize=False))


class TokensAnswer(QuickAnswer):
    """Ids of each choice, as they come."""

    framing: Final = OPENAI

    def __init__(self, request_id: str, job: Job, generation: Generation) -> None:
        self._request_id = request_id
        self._job = job
        self._generation = generation

    def whole(self, gains: list[Delta]) -> dict[str, Any]:
        return {
            "request_id": self._request_id,
            "model": self._job.served.name,
            "choices": [self._choice(gain) for gain in gains],
            "prompt_logprobs": prompt_logprobs(self._generation.prompts[0].logprobs),
            "usage": usage(self._generation),
        }

    def _choice(self, gain: Delta) -> dict[str, Any]:
        wanted = self._job.params.logprobs is not None
        return {
            "index": gain.choice,
            "token_ids": unpack_ids(gain.token_ids),
            "logprobs": chat_logprobs(gain.logprobs or []) if wanted else None,
            "finish_reason": gain.finish_reason,
            "stop_reason": gain.stop_reason,
        }

    async def opening(self) -> bytes:
        return b""

    def event(self, gain: Delta) -> bytes:
        return event({"request_id": self._request_id, "choices": [self._choice(gain)]})

    async def closing(self) -> bytes:
        options = self._job.body.stream_options
        if options is None or not options.include_usage:
            return b""
        last = {"choices": [], "usage": usage(self._generation)}
        return event({"request_id": self._request_id, **last})
