"""POST /v1/embeddings."""

from __future__ import annotations

import asyncio
import time
from binascii import b2a_base64
from typing import Any, Final

import msgspec
import structlog
from aiohttp import web

from pagemesh.gateway.backend import Backend
from pagemesh.gateway.directory import ServedModel
from pagemesh.gateway.generation import Generation, PromptState
from pagemesh.gateway.headers import REQUEST_ID
from pagemesh.gateway.open_requests import OpenRequest
from pagemesh.gateway.openai.answer import encode_json, new_id
from pagemesh.gateway.openai.deadline import timeout_of, too_late
from pagemesh.gateway.openai.errors import bad
from pagemesh.gateway.openai.fields import EMBEDDING_REFUSED
from pagemesh.gateway.openai.params import check_cache_names, split_key
from pagemesh.gateway.openai.prompts import PromptField, id_limit, split_prompts
from pagemesh.gateway.openai.schema import EmbeddingRequest
from pagemesh.gateway.request_body import read_body
from pagemesh.gateway.whole import json_answer
from pagemesh.shared.messages import Generate, ModelCard, Prompt
from pagemesh.shared.pooling import NO_TOKENS, PoolingParams, unpack_floats

# OpenAI's limit, which clients know.
INPUT: Final = PromptField("input", 2048)
# Of all vectors together: the answer is held whole, and as JSON a number takes some twenty bytes.
MAX_NUMBERS: Final = 2**22
# Inputs of a request that are below: a quarter of what one tokenizer service lets wait.
_AT_ONCE: Final = 256
_NUMBER_BYTES: Final = 20

log = structlog.get_logger(__name__)


class _Job(msgspec.Struct, frozen=True):
    """One HTTP request, checked. Input `i` travels under the id `{id}-{i}`."""

    id: str
    created_s: int
    served: ServedModel
    body: EmbeddingRequest
    prompts: list[Prompt]
    pooling: PoolingParams

    def generates(self) -> list[Generate]:
        return [self._generate(index, prompt) for index, prompt in enumerate(self.prompts)]

    def _generate(self, index: int, prompt: Prompt) -> Generate:
        return Generate(
            request_id=f"{self.id}-{index}",
            attempt=0,
            model=self.served.card.names[0],
            prompt=prompt,
            params=NO_TOKENS,
            priority=self.body.priority or 0,
            arrival_s=time.time(),
            cache_salt=self.body.cache_salt or "",
            cache_key=self.body.prompt_cache_key or "",
            pooling=self.pooling,
        )


class EmbeddingsEndpoint:
    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._reader = backend.body_reader("embeddings", EmbeddingRequest, EMBEDDING_REFUSED)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        raw = await read_body(request)
        limit = id_limit(INPUT, raw, self._backend.directory.longest_context_tokens)
        body = await self._reader.read(raw, limit)
        served = self._backend.router.resolve(body.model, split_key(request, body))
        job = await self._backend.offload.run(len(raw), _job, body, served)
        pooled = list[PromptState]()
        try:
            await self._pool(request, job, pooled)
        finally:
            _log_end(request, job, pooled)
        size_bytes = _NUMBER_BYTES * sum(len(prompt.vector) // 4 for prompt in pooled)
        return json_answer(
            request, await self._backend.offload.run(size_bytes, _answer, job, pooled)
        )

    async def _pool(self, request: web.Request, job: _Job, pooled: list[PromptState]) -> None:
        """Adds what came back about each input. Raises the RequestError that ended it; leaving by
        any way (a hang-up too) cancels what still runs."""
        timeout_s, generates = timeout_of(request, job.body.timeout), job.generates()
        try:
            async with asyncio.timeout(timeout_s):
                for first in range(0, len(generates), _AT_ONCE):
                    part = generates[first : first + _AT_ONCE]
                    generation = Generation(len(part), 1)
                    opened = OpenRequest(request, job.id, generation)
                    await self._pool_part(opened, part)
                    pooled += generation.prompts
        except TimeoutError as error:
            raise too_late(timeout_s or 0.0) from error

    async def _pool_part(self, opened: OpenRequest, generates: list[Generate]) -> None:
        self._backend.open_requests.enter(opened)
        try:
            entries = self._backend.upstream.open(opened.generation, generates)
            try:
                await opened.generation.completed()
            finally:
                self._backend.upstream.close(entries)
        finally:
            self._backend.open_requests.leave(opened)


def _job(body: EmbeddingRequest, served: ServedModel) -> _Job:
    check_cache_names(body)
    prompts = split_prompts(INPUT, body.input, body, served.card)
    _check_numbers(len(prompts), body.dimensions or served.card.hidden_size)
    return _Job(
        id=new_id("embd"),
        created_s=int(time.time()),
        served=served,
        body=body,
        prompts=prompts,
        pooling=_pooling(body, served.card),
    )


def _check_numbers(n_inputs: int, dimensions: int) -> None:
    if n_inputs * dimensions > MAX_NUMBERS:
        most = MAX_NUMBERS // dimensions
        raise bad(INPUT.name, f"must hold at most {most} inputs of {dimensions} dimensions")


def _pooling(body: EmbeddingRequest, card: ModelCard) -> PoolingParams:
    if body.dimensions is not None and not 1 <= body.dimensions <= card.hidden_size:
        rule = f"must be between 1 and {card.hidden_size}, got {body.dimensions}"
        raise bad("dimensions", rule)
    return PoolingParams(
        pooling=body.pooling,
        dimensions=body.dimensions,
        normalize=body.normalize is not False,
    )


def _answer(job: _Job, pooled: list[PromptState]) -> bytes:
    worded = _base64 if job.body.encoding_format == "base64" else unpack_floats
    data = [
        {"object": "embedding", "index": index, "embedding": worded(prompt.vector)}
        for index, prompt in enumerate(pooled)
    ]
    n_tokens = sum(prompt.n_tokens for prompt in pooled)
    cached_tokens = sum(prompt.cached_tokens for prompt in pooled)
    usage = {
        "prompt_tokens": n_tokens,
        "total_tokens": n_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }
    answer: dict[str, Any] = {
        "id": job.id,
        "object": "list",
        "created": job.created_s,
        "model": job.served.name,
        "data": data,
        "usage": usage,
    }
    return encode_json(answer)


def _base64(vector: bytes) -> str:
    return b2a_base64(vector, newline=False).decode()


def _log_end(request: web.Request, job: _Job, pooled: list[PromptState]) -> None:
    log.info(
        "embedding_ended",
        request_id=job.id,
        x_request_id=request[REQUEST_ID],
        model=job.served.name,
        served_by=job.served.card.names[0],
        inputs=len(job.prompts),
        prompt_tokens=sum(prompt.n_tokens for prompt in pooled),
        complete=len(pooled) == len(job.prompts),
    )
