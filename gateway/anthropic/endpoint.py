"""POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from aiohttp import web

from pagemesh.gateway.anthropic.answer import MessagesAnswer
from pagemesh.gateway.anthropic.requests import chat_request, prompt_request, renamed
from pagemesh.gateway.anthropic.schema import REFUSED, CountTokensRequest, MessagesRequest
from pagemesh.gateway.backend import Backend
from pagemesh.gateway.directory import ServedModel
from pagemesh.gateway.headers import REQUEST_ID
from pagemesh.gateway.openai.answer import Job, encode_json, new_id, respond
from pagemesh.gateway.openai.chat import chat_job, chat_prompt
from pagemesh.gateway.openai.tools import tool_use
from pagemesh.gateway.request_body import read_body
from pagemesh.gateway.whole import json_answer
from pagemesh.shared.errors import RequestError
from pagemesh.shared.messages import Prompt, Tokenize, Tokenized
from pagemesh.shared.text_parsers import NONE
from pagemesh.shared.wire import ID_BYTES


class MessagesEndpoint:
    """A message is a chat completion in other words."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._messages = backend.body_reader("messages", MessagesRequest, REFUSED)
        self._counts = backend.body_reader("messages", CountTokensRequest, REFUSED)

    async def create(self, request: web.Request) -> web.StreamResponse:
        raw = await read_body(request)
        body = await self._messages.read(raw)
        user = (body.metadata or {}).get("user_id")
        served = self._backend.router.resolve(body.model, str(user or request[REQUEST_ID]))
        with _in_our_names():
            job = await self._backend.offload.run(len(raw), _job, body, served)
            return await respond(self._backend, request, job, partial(MessagesAnswer, job))

    async def count_tokens(self, request: web.Request) -> web.StreamResponse:
        raw = await read_body(request)
        body = await self._counts.read(raw)
        served = self._backend.router.resolve(body.model, request[REQUEST_ID])
        with _in_our_names():
            prompt = await self._backend.offload.run(len(raw), _prompt, body, served)
            question = Tokenize(new_id("count"), served.card.names[0], prompt)
            answer = await self._backend.upstream.ask(question)
        assert isinstance(answer, Tokenized)
        n_tokens = len(answer.token_ids) // ID_BYTES
        return json_answer(request, encode_json({"input_tokens": n_tokens}))


@contextmanager
def _in_our_names() -> Iterator[None]:
    try:
        yield
    except RequestError as error:
        raise renamed(error) from error


def _job(body: MessagesRequest, served: ServedModel) -> Job:
    thinks = served.card.parsers.reasoning != NONE
    return chat_job(chat_request(body, thinks=thinks), served, new_id("msg"))


def _prompt(body: CountTokensRequest, served: ServedModel) -> Prompt:
    asked = prompt_request(body)
    use = tool_use(asked, served.card)
    return chat_prompt(asked, asked.messages, use.tools if use else None)
