"""/v1/responses: create, retrieve, follow, cancel, delete, and what one was made of."""

from __future__ import annotations

import os
from functools import partial
from typing import Any, Final

import msgspec
from aiohttp import web

from pagemesh.gateway.backend import Backend
from pagemesh.gateway.generation import ID_BYTES
from pagemesh.gateway.openai.answer import Job, encode_json, new_id, respond, too_large
from pagemesh.gateway.openai.chat import chat_job
from pagemesh.gateway.openai.errors import bad
from pagemesh.gateway.openai.params import split_key
from pagemesh.gateway.openai.responses import objects
from pagemesh.gateway.openai.responses.answer import ResponseAnswer
from pagemesh.gateway.openai.responses.background import BackgroundResponses, Run
from pagemesh.gateway.openai.responses.chat_form import (
    ENCRYPTED,
    chat_body,
    check_include,
    named_as_given,
)
from pagemesh.gateway.openai.responses.conversation import Message, chat_messages
from pagemesh.gateway.openai.responses.items import RESPONSE, Item, input_items
from pagemesh.gateway.openai.responses.objects import Object
from pagemesh.gateway.openai.responses.replay import replay
from pagemesh.gateway.openai.responses.schema import REFUSED, ResponseRequest
from pagemesh.gateway.openai.responses.store import Draft, ResponseStore
from pagemesh.gateway.openai.responses.truncation import truncated
from pagemesh.gateway.openai.schema import ChatRequest
from pagemesh.gateway.request_body import read_body
from pagemesh.shared.access import OWNER
from pagemesh.shared.errors import RequestError
from pagemesh.shared.messages import Tokenize, Tokenized
from pagemesh.shared.response_keys import StoredResponse

DEFAULT_PAGE: Final = 20
MAX_PAGE: Final = 100
TOO_LARGE: Final = 413


class ResponsesEndpoint:
    def __init__(
        self, backend: Backend, store: ResponseStore, background: BackgroundResponses
    ) -> None:
        self._backend = backend
        self._offload = backend.offload
        self._store = store
        self._background = background
        self._reader = backend.body_reader("responses", ResponseRequest, REFUSED)

    async def create(self, request: web.Request) -> web.StreamResponse:
        raw = await read_body(request)
        body = await self._reader.read(raw)
        with named_as_given():
            draft = await self._draft(request[OWNER], body, len(raw))
            job = await self._job(request, body, draft, len(raw) + draft.context.size_bytes)
            if body.background:
                return await self._run_in_background(request, body, job, draft)
            return await self._answer(request, body, job, draft)

    async def _draft(self, owner: str, body: ResponseRequest, size_bytes: int) -> Draft:
        """What is kept of the request."""
        response_id = RESPONSE + os.urandom(16).hex()
        items = await self._offload.run(size_bytes, input_items, body.input, response_id)
        items = await self._store.resolved(owner, items)
        context = await self._store.context(owner, body.previous_response_id)
        return Draft(response_id, owner, items, context)

    async def _job(
        self, request: web.Request, body: ResponseRequest, draft: Draft, size_bytes: int
    ) -> Job:
        chat = await self._offload.run(size_bytes, _chat, body, draft)
        served = self._backend.router.resolve(body.model, split_key(request, chat))
        job = await self._offload.run(size_bytes, chat_job, chat, served, draft.id)
        return await self._truncated(job) if body.truncation == "auto" else job

    async def _truncated(self, job: Job) -> Job:
        [prompt], card = job.prompts, job.served.card
        room_tokens = card.max_model_len - (job.params.max_tokens or 1)

        async def fits(kept: list[Message]) -> bool:
            shorter = msgspec.structs.replace(prompt, messages=kept)
            question = Tokenize(new_id("fits"), card.names[0], shorter)
            try:
                answer = await self._backend.upstream.ask(question)
            except RequestError as error:
                if error.code == "context_length_exceeded" or error.status == TOO_LARGE:
                    return False
                raise
            assert isinstance(answer, Tokenized)
            return len(answer.token_ids) // ID_BYTES <= room_tokens

        kept = await truncated(prompt.messages or [], fits)
        shorter = msgspec.structs.replace(prompt, messages=kept)
        return msgspec.structs.replace(job, prompts=[shorter])

    async def _answer(
        self, request: web.Request, body: ResponseRequest, job: Job, draft: Draft
    ) -> web.StreamResponse:
        begun, store = self._begun(body, job, draft)

        async def settle(ended: bytes) -> bytes:
            return await self._store.keep(draft, ended) if store else ended

        answer_of = partial(ResponseAnswer, job, begun, settle, seals=_seals(body))
        return await respond(self._backend, request, job, answer_of, settle)

    def _begun(self, body: ResponseRequest, job: Job, draft: Draft) -> tuple[Object, bool]:
        """The object as it begins, and whether the response is kept: of those that cannot be, only
        who asks for it is refused."""
        begun = objects.begun(body, job, store=body.store is not False)
        if body.store is False:
            return begun, False
        try:
            self._store.check_kept(draft, encode_json(begun))
        except RequestError:
            if body.store or body.background:
                raise
            return begun | {"store": False}, False
        return begun, True

    async def _run_in_background(
        self, request: web.Request, body: ResponseRequest, job: Job, draft: Draft
    ) -> web.StreamResponse:
        begun, _ = self._begun(body, job, draft)
        generation = job.generation(lambda full: full.fail(too_large()))
        answer = ResponseAnswer(job, begun, _unsettled, generation, seals=_seals(body))
        await self._background.start(Run(job, draft, answer, generation))
        if body.stream:
            return await replay(request, self._store, job.id, 0)
        return _json(encode_json(begun))

    async def retrieve(self, request: web.Request) -> web.StreamResponse:
        check_include(_all(request, "include"))
        found = await self._store.get(*_owned(request))
        if _flag(request, "stream"):
            after = _number(request, "starting_after", -1, low=-1)
            return await replay(request, self._store, request.match_info["id"], after + 1)
        return _json(_shown(found))

    async def cancel(self, request: web.Request) -> web.Response:
        found = await self._store.get(*_owned(request))
        if not msgspec.json.decode(found.object)["background"]:
            raise bad("id", "is of a response that does not run in the background: hang up instead")
        found = await self._store.cancel(*_owned(request))
        if found.status == objects.CANCELLED:
            self._background.stop(request.match_info["id"])
        return _json(_shown(found))

    async def delete(self, request: web.Request) -> web.Response:
        owner, response_id = _owned(request)
        await self._store.delete(owner, response_id)
        self._background.stop(response_id)
        return _json(encode_json({"id": response_id, "object": "response", "deleted": True}))

    async def input_items(self, request: web.Request) -> web.Response:
        check_include(_all(request, "include"))
        limit = _number(request, "limit", DEFAULT_PAGE, low=1, high=MAX_PAGE)
        items = await self._store.said(*_owned(request))
        if _choice(request, "order", ("desc", "asc")) == "desc":
            items.reverse()
        return _json(encode_json(_page(items, request.query.get("after"), limit)))


def _chat(body: ResponseRequest, draft: Draft) -> ChatRequest:
    items = [*draft.context.items, *draft.items]
    return chat_body(body, chat_messages(body.instructions, items))


async def _unsettled(ended: bytes) -> bytes:
    """Of a response in the background, whose runner stores it."""
    return ended


def _seals(body: ResponseRequest) -> bool:
    return ENCRYPTED in (body.include or ())


def _shown(found: StoredResponse) -> bytes:
    """The object says how it began until it has ended."""
    if found.status not in objects.ACTIVE:
        return found.object.encode()
    return encode_json(msgspec.json.decode(found.object) | {"status": found.status})


def _page(items: list[Item], after: str | None, limit: int) -> dict[str, Any]:
    ids = [item["id"] for item in items]
    if after is not None and after not in ids:
        raise bad("after", "is the id of none of the items")
    first = 0 if after is None else ids.index(after) + 1
    page = items[first : first + limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": first + limit < len(items),
    }


def _owned(request: web.Request) -> tuple[str, str]:
    """Who asks, and for which response."""
    return request[OWNER], request.match_info["id"]


def _all(request: web.Request, name: str) -> list[str]:
    """OpenAI's clients write a list as `name[]=…`."""
    return request.query.getall(f"{name}[]", []) + request.query.getall(name, [])


def _flag(request: web.Request, name: str) -> bool:
    return _choice(request, name, ("false", "true")) == "true"


def _choice(request: web.Request, name: str, known: tuple[str, ...]) -> str:
    """The first of `known` if none is given. Raises RequestError (400) for another."""
    given = request.query.get(name, known[0])
    if given not in known:
        raise bad(name, f"must be {' or '.join(known)}")
    return given


def _number(
    request: web.Request, name: str, default: int, *, low: int, high: int = 2**31 - 1
) -> int:
    given = request.query.get(name)
    if given is None:
        return default
    if not given.lstrip("-").isascii() or not given.lstrip("-").isdigit() or len(given) > 10:
        raise bad(name, "must be an integer")
    if not low <= int(given) <= high:
        raise bad(name, f"must be between {low} and {high}, got {given}")
    return int(given)


def _json(body: bytes) -> web.Response:
    return web.Response(body=body, content_type="application/json")
