"""POST /tokenize and /detokenize, in vLLM's shapes."""

from __future__ import annotations

from typing import Final

from aiohttp import web

from pagemesh.gateway.backend import Backend
from pagemesh.gateway.headers import REQUEST_ID
from pagemesh.gateway.openai.answer import encode_json, new_id
from pagemesh.gateway.openai.body import IdLimit
from pagemesh.gateway.openai.chat import chat_prompt
from pagemesh.gateway.openai.errors import bad
from pagemesh.gateway.openai.fields import TOKENIZE_REFUSED
from pagemesh.gateway.openai.prompts import check_vocabulary
from pagemesh.gateway.openai.schema import DetokenizeRequest, TokenizeRequest
from pagemesh.gateway.openai.tools import checked_tools
from pagemesh.gateway.request_body import read_body
from pagemesh.shared.messages import Detokenize, Detokenized, Prompt, Tokenize, Tokenized
from pagemesh.shared.wire import pack_ids, unpack_ids

MIN_DETOKENIZE_LIMIT_TOKENS: Final = 2**18


class TokenizeEndpoint:
    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._offload = backend.offload
        self._tokenize = backend.body_reader("tokenize", TokenizeRequest, TOKENIZE_REFUSED)
        self._detokenize = backend.body_reader("detokenize", DetokenizeRequest, {})

    async def tokenize(self, request: web.Request) -> web.Response:
        raw = await read_body(request)
        body = await self._tokenize.read(raw)
        served = self._backend.router.resolve(body.model, request[REQUEST_ID])
        question = Tokenize(
            request_id=new_id("tok"),
            model=served.card.names[0],
            prompt=await self._offload.run(len(raw), _prompt, body),
            want_token_strs=bool(body.return_token_strs),
        )
        answer = await self._backend.upstream.ask(question)
        assert isinstance(answer, Tokenized)
        return _json(await self._offload.run(len(answer.token_ids), _tokenized, answer))

    async def detokenize(self, request: web.Request) -> web.Response:
        raw = await read_body(request)
        body = await self._detokenize.read(raw, self._id_limit())
        served = self._backend.router.resolve(body.model, request[REQUEST_ID])
        check_vocabulary(body.tokens, served.card, "tokens")
        question = Detokenize(
            request_id=new_id("detok"),
            model=served.card.names[0],
            token_ids=pack_ids(body.tokens),
        )
        answer = await self._backend.upstream.ask(question)
        assert isinstance(answer, Detokenized)
        return _json(encode_json({"prompt": answer.text}))

    def _id_limit(self) -> IdLimit:
        """Texts of many answers may be joined, so more than a context is fine."""
        longest_tokens = self._backend.directory.longest_context_tokens or 0
        return IdLimit("tokens", max(longest_tokens, MIN_DETOKENIZE_LIMIT_TOKENS), _check_count)


def _check_count(limit: int, _: int, count: int) -> None:
    if count > limit:
        raise bad("tokens", f"must hold at most {limit} token ids, got {count}")


def _prompt(body: TokenizeRequest) -> Prompt:
    if (body.prompt is None) == (body.messages is None):
        raise bad("prompt", "or messages must be given, and not both")
    if body.messages is not None:
        return chat_prompt(body, body.messages, checked_tools(body.tools))
    return Prompt(text=body.prompt, add_special_tokens=body.add_special_tokens is not False)


def _tokenized(answer: Tokenized) -> bytes:
    tokens = unpack_ids(answer.token_ids)
    return encode_json(
        {
            "count": len(tokens),
            "max_model_len": answer.max_model_len,
            "tokens": tokens,
            "token_strs": answer.token_strs,
        }
    )


def _json(body: bytes) -> web.Response:
    return web.Response(body=body, content_type="application/json")
