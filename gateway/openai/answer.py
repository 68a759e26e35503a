"""What chat and completions share: the job, its run, and the frame around streamed chunks."""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from functools import partial
from operator import attrgetter
from typing import Any, Final, Protocol

import msgspec
import structlog
from aiohttp import web

from pagemesh.gateway.backend import Backend
from pagemesh.gateway.directory import ServedModel
from pagemesh.gateway.generation import Generation
from pagemesh.gateway.headers import REQUEST_ID
from pagemesh.gateway.offload import LARGE_BYTES
from pagemesh.gateway.open_requests import OpenRequest
from pagemesh.gateway.openai.deadline import cut_off, timeout_of
from pagemesh.gateway.openai.limits import TIERS
from pagemesh.gateway.openai.params import Seeds
from pagemesh.gateway.openai.schema import CompletionRequest, GenerationRequest, StreamOptions
from pagemesh.gateway.openai.sse import Chunks, stream
from pagemesh.gateway.openai.tools import ToolUse
from pagemesh.gateway.openai.usage import usage
from pagemesh.gateway.whole import json_answer
from pagemesh.shared.errors import RequestError
from pagemesh.shared.messages import Delta, Generate, Prompt
from pagemesh.shared.sampling import SamplingParams
from pagemesh.shared.wire import unpack_ids

# A client that reads nothing while this much gathers is given up.
MAX_PENDING_BYTES: Final = 4 * 2**20
# An answer that is not streamed must gather until it is whole; a stream holds prompt logprobs until
# their last echo.
MAX_WHOLE_BYTES: Final = 256 * 2**20

log = structlog.get_logger(__name__)
encode_json: Final = msgspec.json.Encoder().encode


class Job(msgspec.Struct, frozen=True):
    """One HTTP request, checked. Prompt `p` travels under the id `{id}` or `{id}-{p}`.

    `keeps_marks`: calls or reasoning will be told apart from the text."""

    id: str
    created_s: int
    served: ServedModel
    body: GenerationRequest
    prompts: list[Prompt]
    params: SamplingParams
    want_prompt_text: bool = False
    tool_use: ToolUse | None = None
    keeps_marks: bool = False

    def generates(self, seeds: Seeds) -> list[Generate]:
        if len(self.prompts) == 1:
            return [self._generate(self.id, self.prompts[0], seeds)]
        return [
            self._generate(f"{self.id}-{index}", prompt, seeds)
            for index, prompt in enumerate(self.prompts)
        ]

    def _generate(self, request_id: str, prompt: Prompt, seeds: Seeds) -> Generate:
        return Generate(
            request_id=request_id,
            attempt=0,
            model=self.served.card.names[0],
            prompt=prompt,
            params=seeds.seeded(self.params),
            priority=self._priority,
            arrival_s=time.time(),
            cache_salt=self.body.cache_salt or "",
            want_prompt_text=self.want_prompt_text,
            cache_key=self.body.prompt_cache_key or "",
            keeps_marks=self.keeps_marks,
        )

    @property
    def _priority(self) -> int:
        if self.body.priority is None and self.body.service_tier is not None:
            return TIERS[self.body.service_tier]
        return self.body.priority or 0

    @property
    def echoes(self) -> dict[str, Any]:
        """What an answer repeats of its request; nothing for most."""
        tier = self.body.service_tier
        return {} if tier is None else {"service_tier": "default" if tier == "auto" else tier}

    def generation(self, on_overflow: Callable[[Generation], None]) -> Generation:
        """Whole completions repeat the prompt's logprobs in each choice; streams word one choice
        after the other."""
        streamed = bool(self.body.stream)
        copies = self.params.n if isinstance(self.body, CompletionRequest) else 1
        return Generation(
            len(self.prompts),
            self.params.n,
            needs_prompt_logprobs=self.params.prompt_logprobs is not None,
            prompt_logprob_copies=1 if streamed else copies,
            max_pending_bytes=MAX_PENDING_BYTES if streamed else MAX_WHOLE_BYTES,
            max_held_bytes=MAX_WHOLE_BYTES,
            on_overflow=on_overflow,
        )


def named_ids(name: bytes, packed: bytes) -> bytes:
    """A field of token ids, behind a comma."""
    return b',"%b":%b' % (name, encode_json(unpack_ids(packed)))


def new_id(prefix: str) -> str:
    return f"{prefix}-{os.urandom(16).hex()}"


class Answer(Chunks, Protocol):
    """Both wordings of one answer."""

    async def prepare(self) -> None:
        """Fetch what `whole` needs; nothing if it is quick."""

    def whole(self, gains: list[Delta]) -> dict[str, Any]:
        """The body of an answer that is not streamed. Pure."""


class QuickAnswer(ABC):
    """An Answer of which every gain is worded at once, and nothing but the gains is needed."""

    quick: Final = True

    async def prepare(self) -> None:  # noqa: B027, nothing is to be fetched
        """Everything comes with the gains."""

    @abstractmethod
    def event(self, gain: Delta) -> bytes: ...

    async def gain(self, gain: Delta) -> bytes:
        return self.event(gain)


async def respond(
    backend: Backend,
    request: web.Request,
    job: Job,
    answer_of: Callable[[Generation], Answer],
    settle: Callable[[bytes], Awaitable[bytes]] | None = None,
) -> web.StreamResponse:
    """Run `job` and answer it. Leaving by any way (a hang-up too) cancels what still runs.

    `settle` gets a whole body before it leaves, and returns what leaves.
    """
    timeout_s = timeout_of(request, job.body.timeout)
    generation = job.generation(partial(_overflowed, backend, request, job))
    answer = answer_of(generation)
    opened = OpenRequest(request, job.id, generation)
    backend.open_requests.enter(opened)
    try:
        entries = backend.upstream.open(generation, job.generates(backend.seeds))
        timers = cut_off(generation, timeout_s)
        try:
            if job.body.stream:
                return await stream(request, generation, answer, backend)
            body = await _whole(backend, generation, answer)
            if settle is not None:
                body = await settle(body)
        finally:
            for timer in timers:
                timer.cancel()
            backend.upstream.close(entries)
    finally:
        backend.open_requests.leave(opened)
        log_end(job, generation, request[REQUEST_ID])
    return json_answer(request, body)


async def _whole(backend: Backend, generation: Generation, answer: Answer) -> bytes:
    await generation.completed()
    if not answer.quick:
        await answer.prepare()
    size_bytes, gains = generation.held_bytes, generation.take()
    if len(gains) > 1:
        gains.sort(key=attrgetter("choice"))
    if size_bytes <= LARGE_BYTES:
        return encode_json(answer.whole(gains))
    return await backend.offload.run(size_bytes, lambda: encode_json(answer.whole(gains)))


def _overflowed(backend: Backend, request: web.Request, job: Job, generation: Generation) -> None:
    if generation.held_bytes > MAX_WHOLE_BYTES:
        generation.fail(too_large())
    else:
        _give_up(backend, request, job)


def too_large() -> RequestError:
    """More than MAX_WHOLE_BYTES would have to be held."""
    return RequestError(
        f"The answer grew over {MAX_WHOLE_BYTES >> 20} MiB, more than is kept for one request. "
        "Stream it, or ask for fewer prompts, choices, tokens or logprobs.",
        code="answer_too_large",
    )


def _give_up(backend: Backend, request: web.Request, job: Job) -> None:
    """The client does not read: cut the connection, which cancels the handler."""
    log.warning("slow_client_aborted", request_id=job.id, limit_bytes=MAX_PENDING_BYTES)
    backend.metrics.slow_clients.inc()
    if request.transport is not None:
        request.transport.abort()


def log_end(job: Job, generation: Generation, x_request_id: str | None = None) -> None:
    log.info(
        "generation_ended",
        request_id=job.id,
        x_request_id=x_request_id,
        model=job.served.name,
        served_by=job.served.card.names[0],
        prompt_tokens=generation.prompt_tokens,
        completion_tokens=generation.completion_tokens,
        complete=generation.done,
    )


class ChunkFrame:
    """The JSON around each chunk's choice, built once."""

    def __init__(self, job: Job, object_name: str, generation: Generation) -> None:
        self._options = job.body.stream_options or StreamOptions()
        self.counts_each = bool(self._options.continuous_usage_stats)
        self._generation = generation
        envelope = {
            "id": job.id,
            "object": object_name,
            "created": job.created_s,
            "model": job.served.name,
            **job.echoes,
        }
        self._head = b"data: " + encode_json(envelope)[:-1] + b',"choices":['
        self._tail = b'],"usage":null}\n\n' if self._options.include_usage else b"]}\n\n"

    def around(self, before: bytes, after: bytes) -> tuple[bytes, bytes]:
        """What stands around the middle of a choice that is `before`, middle, `after` each time.
        Not for answers that count in each chunk."""
        return self._head + before, after + self._tail

    def event(self, choice: bytes, more: bytes = b"") -> bytes:
        """One chunk with one choice. `more` fields of the chunk begin with a comma."""
        tail = self._usage_tail() if self.counts_each else self._tail
        return self._head + choice + (b"]" + more + tail[1:] if more else tail)

    def usage_event(self) -> bytes:
        """The chunk without choices that ends a stream, if asked for."""
        return self._head + self._usage_tail() if self._options.include_usage else b""

    def _usage_tail(self) -> bytes:
        return b'],"usage":' + encode_json(usage(self._generation)) + b"}\n\n"
