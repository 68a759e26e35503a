"""POST /v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from aiohttp import web

from pagemesh.gateway.backend import Backend
from pagemesh.gateway.directory import ServedModel
from pagemesh.gateway.offload import LARGE_BYTES
from pagemesh.gateway.openai.answer import Job, respond
from pagemesh.gateway.openai.body import check_plain
from pagemesh.gateway.openai.chat_answer import ChatAnswer
from pagemesh.gateway.openai.chat_options import with_options
from pagemesh.gateway.openai.errors import bad
from pagemesh.gateway.openai.fields import CHAT_REFUSED
from pagemesh.gateway.openai.forced_calls import with_forced_calls
from pagemesh.gateway.openai.known_params import KnownParams
from pagemesh.gateway.openai.messages import checked_messages, unknown_fields
from pagemesh.gateway.openai.params import chat_params, check_cache_names, split_key
from pagemesh.gateway.openai.parsed_chat import ParsedChatAnswer
from pagemesh.gateway.openai.schema import ChatRequest, TokenizeRequest
from pagemesh.gateway.openai.tools import tool_use
from pagemesh.gateway.random_ids import RandomIds
from pagemesh.gateway.request_body import read_body
from pagemesh.shared.messages import ModelCard, Prompt
from pagemesh.shared.sampling import SamplingParams
from pagemesh.shared.text_parsers import NONE


class ChatEndpoint:
    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._on_unknown = partial(backend.metrics.unknown_field, "chat")
        self._reader = backend.body_reader("chat", ChatRequest, CHAT_REFUSED)
        self._new_id = RandomIds("chatcmpl-")
        self._params_of = KnownParams(ChatRequest, chat_params)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        job = await self.job(request)
        kind = ParsedChatAnswer if job.keeps_marks else ChatAnswer
        return await respond(self._backend, request, job, partial(kind, job))

    async def job(self, request: web.Request) -> Job:
        """What the request asks for. Raises RequestError."""
        raw = await read_body(request)
        body = await self._reader.read(raw)
        served = self._backend.router.resolve(body.model, split_key(request, body))
        trusts = self._backend.trusts_chat_templates
        params_of = self._params_of.for_body(len(raw))
        made_of = body, served, self._new_id(), trusts, params_of
        if len(raw) <= LARGE_BYTES:
            job = chat_job(*made_of)
        else:
            job = await self._backend.offload.run(len(raw), chat_job, *made_of)
        for name in unknown_fields(job.prompts[0].messages or []):
            self._on_unknown(f"messages.{name}")
        return job


def chat_job(
    body: ChatRequest,
    served: ServedModel,
    answer_id: str,
    trusts_templates: bool = False,
    params_of: Callable[[ChatRequest, ModelCard], SamplingParams] = chat_params,
) -> Job:
    """Raises RequestError (400) naming the field at fault."""
    use = tool_use(body, served.card)
    params = params_of(body, served.card)
    check_cache_names(body)
    if use is not None and use.is_forced:
        params = with_forced_calls(params, use)
    prompt = chat_prompt(body, body.messages, use.tools if use else None)
    return Job(
        id=answer_id,
        created_s=int(time.time()),
        served=served,
        body=body,
        prompts=[with_options(prompt, body, trusts_templates=trusts_templates)],
        params=params,
        tool_use=use,
        keeps_marks=use is not None or served.card.parsers.reasoning != NONE,
    )


def chat_prompt(
    body: ChatRequest | TokenizeRequest,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None = None,
) -> Prompt:
    """Raises RequestError (400) for messages or template options of the wrong shape."""
    continues = bool(body.continue_final_message)
    generates = not continues if body.add_generation_prompt is None else body.add_generation_prompt
    if continues and generates:
        raise bad("continue_final_message", "excludes add_generation_prompt")
    template_kwargs = body.chat_template_kwargs or {}
    check_plain(template_kwargs, "chat_template_kwargs")
    return Prompt(
        messages=checked_messages(messages),
        # Templates write their own BOS.
        add_special_tokens=bool(body.add_special_tokens),
        add_generation_prompt=generates,
        continue_final_message=continues,
        template_kwargs=template_kwargs,
        tools=tools or [],
    )
