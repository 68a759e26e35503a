"""POST /v1/chat/completions/render and /v1/completions/render: prompts as an engine would get them,
in vLLM's shapes. What they answer can be sent to /inference/v1/generate as it is."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final

import msgspec
from aiohttp import web

from pagemesh.gateway.backend import Backend
from pagemesh.gateway.openai.answer import Job, encode_json
from pagemesh.gateway.whole import json_answer
from pagemesh.shared.messages import Generate, Render, Rendered
from pagemesh.shared.sampling import SamplingParams
from pagemesh.shared.structured_outputs import KINDS
from pagemesh.shared.wire import unpack_ids

_DEFAULTS: Final = msgspec.structs.asdict(SamplingParams())
# What the tokenizer service made of other fields.
_DERIVED: Final = frozenset({"bad_word_ids", "thinking"})


class RenderEndpoint:
    """`chat` and `completions` read requests as the endpoints that generate do."""

    def __init__(
        self,
        backend: Backend,
        chat: Callable[[web.Request], Awaitable[Job]],
        completions: Callable[[web.Request], Awaitable[Job]],
    ) -> None:
        self._backend = backend
        self._chat = chat
        self._completions = completions

    async def chat(self, request: web.Request) -> web.StreamResponse:
        job = await self._chat(request)
        [prompt] = await self._rendered(job)
        return json_answer(request, encode_json(prompt))

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """A list, of one or more prompts."""
        job = await self._completions(request)
        return json_answer(request, encode_json(await self._rendered(job)))

    async def _rendered(self, job: Job) -> list[dict[str, Any]]:
        wanted = msgspec.structs.replace(job, want_prompt_text=True)
        generates = wanted.generates(self._backend.seeds)
        return [await self._ask(job, generate) for generate in generates]

    async def _ask(self, job: Job, generate: Generate) -> dict[str, Any]:
        answer = await self._backend.upstream.ask(Render(generate))
        assert isinstance(answer, Rendered)
        # The seed that was drawn is nobody's wish.
        params = msgspec.structs.replace(answer.params, seed=job.params.seed)
        return {
            "request_id": answer.request_id,
            "model": job.served.name,
            "token_ids": unpack_ids(answer.prompt_ids),
            "text": answer.prompt_text,
            "sampling_params": shown_params(params),
            "stream": bool(job.body.stream),
            "priority": generate.priority,
            "cache_salt": job.body.cache_salt,
        }


def shown_params(params: SamplingParams) -> dict[str, Any]:
    """What differs from the defaults, and max_tokens."""
    given = msgspec.structs.asdict(params)
    shown = {
        key: value
        for key, value in given.items()
        if value != _DEFAULTS[key] and key not in _DERIVED
    }
    rule = params.structured_outputs
    if rule is not None:
        kinds = {kind: getattr(rule, kind) for kind in KINDS}
        shown["structured_outputs"] = {
            kind: value for kind, value in kinds.items() if value not in (None, False)
        }
    return {"max_tokens": params.max_tokens, **shown}
