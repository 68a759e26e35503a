"""POST /tokenize and /detokenize, in vLLM's shapes."""

from __future__ import annotations

from functools import partial

from aiohttp import web

from pagemesh.gateway.backend import Backend
from pagemesh.gateway.openai.answer import encode_json, new_id
from pagemesh.gateway.openai.body import BodyDecoder
from pagemesh.gateway.openai.chat import chat_prompt
from pagemesh.gateway.openai.fields import TOKENIZE_REFUSED
from pagemesh.gateway.openai.params import bad
from pagemesh.gateway.openai.prompts import check_vocabulary
from pagemesh.gateway.openai.schema import DetokenizeRequest, TokenizeRequest
from pagemesh.shared.wire import (
    Detokenize,
    Detokenized,
    Prompt,
    Tokenize,
    Tokenized,
    pack_ids,
    unpack_ids,
)


class TokenizeEndpoint:
    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        unknown = backend.metrics.unknown_field
        self._tokenize = BodyDecoder(
            TokenizeRequest, TOKENIZE_REFUSED, partial(unknown, "tokenize")
        )
        self._detokenize = BodyDecoder(DetokenizeRequest, {}, partial(unknown, "detokenize"))

    async def tokenize(self, request: web.Request) -> web.Response:
        body = self._tokenize.decode(await request.read())
        served = self._backend.directory.resolve(body.model)
        question = Tokenize(
            request_id=new_id("tok"),
            model=served.card.names[0],
            prompt=_prompt(body),
            want_token_strs=bool(body.return_token_strs),
        )
        answer = await self._backend.upstream.ask(question)
        assert isinstance(answer, Tokenized)
        tokens = unpack_ids(answer.token_ids)
        return _json(
            {
                "count": len(tokens),
                "max_model_len": answer.max_model_len,
                "tokens": tokens,
                "token_strs": answer.token_strs,
            }
        )

    async def detokenize(self, request: web.Request) -> web.Response:
        body = self._detokenize.decode(await request.read())
        served = self._backend.directory.resolve(body.model)
        check_vocabulary(body.tokens, served.card, "tokens")
        question = Detokenize(
            request_id=new_id("detok"),
            model=served.card.names[0],
            token_ids=pack_ids(body.tokens),
        )
        answer = await self._backend.upstream.ask(question)
        assert isinstance(answer, Detokenized)
        return _json({"prompt": answer.text})


def _prompt(body: TokenizeRequest) -> Prompt:
    if (body.prompt is None) == (body.messages is None):
        raise bad("prompt", "or messages must be given, and not both")
    if body.messages is not None:
        return chat_prompt(body, body.messages)
    return Prompt(text=body.prompt, add_special_tokens=body.add_special_tokens is not False)


def _json(body: dict[str, object]) -> web.Response:
    return web.Response(body=encode_json(body), content_type="application/json")
