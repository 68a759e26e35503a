"""How the answers of /v1/chat/completions are worded."""

from __future__ import annotations

from functools import cached_property
from typing import Any, Final

from pagemesh.gateway.generation import Generation
from pagemesh.gateway.openai.answer import ChunkFrame, Job, QuickAnswer, encode_json, named_ids
from pagemesh.gateway.openai.logprobs import chat_logprobs, prompt_logprobs, with_ids_as_text
from pagemesh.gateway.openai.sse import OPENAI
from pagemesh.gateway.openai.usage import usage
from pagemesh.shared.messages import Delta
from pagemesh.shared.wire import unpack_ids


class ChatAnswer(QuickAnswer):
    """Chunks: a role per choice, text, a finish per choice, usage when asked for."""

    framing: Final = OPENAI

    def __init__(self, job: Job, generation: Generation) -> None:
        self._job = job
        self._generation = generation
        self._shows_ids = bool(job.body.return_token_ids)

    def whole(self, gains: list[Delta]) -> dict[str, Any]:
        prompt = self._generation.prompts[0]
        ids = {"prompt_token_ids": unpack_ids(prompt.ids)} if self._shows_ids else {}
        return {
            "id": self._job.id,
            "object": "chat.completion",
            "created": self._job.created_s,
            "model": self._job.served.name,
            "choices": [self._choice(gain) for gain in gains],
            "usage": usage(self._generation),
            "prompt_logprobs": prompt_logprobs(prompt.logprobs),
            **ids,
            **self._job.echoes,
        }

    def _choice(self, gain: Delta) -> dict[str, Any]:
        wanted = self._job.params.logprobs is not None
        ids = {"token_ids": unpack_ids(gain.token_ids)} if self._shows_ids else {}
        return {
            "index": gain.choice,
            "message": {"role": "assistant", "content": gain.text, "refusal": None},
            "logprobs": self._logprobs(gain) if wanted else None,
            "finish_reason": gain.finish_reason,
            "stop_reason": gain.stop_reason,
            **ids,
        }

    def _logprobs(self, gain: Delta) -> dict[str, Any]:
        rows = gain.logprobs or []
        as_ids = self._job.body.return_tokens_as_token_ids
        return chat_logprobs(with_ids_as_text(rows) if as_ids else rows)

    def _ids(self, gain: Delta) -> bytes:
        """The field of the choice's new tokens, if asked for and there are some."""
        wanted = self._shows_ids and gain.token_ids
        return named_ids(b"token_ids", gain.token_ids) if wanted else b""

    @cached_property
    def _frame(self) -> ChunkFrame:
        return ChunkFrame(self._job, "chat.completion.chunk", self._generation)

    @cached_property
    def _plain(self) -> tuple[bytes, bytes] | None:
        """Around index and text, if nothing else of a chunk may change while the choice goes on."""
        if self._job.params.logprobs is not None or self._frame.counts_each or self._shows_ids:
            return None
        return self._frame.around(b'{"index":', b'},"logprobs":null,"finish_reason":null}')

    async def opening(self) -> bytes:
        delta = b'"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}'
        ids = self._generation.prompts[0].ids
        more = named_ids(b"prompt_token_ids", ids) if self._shows_ids else b""
        return b"".join(
            self._frame.event(b'{"index":%d,%b' % (index, delta), more)
            for index in range(self._job.params.n)
        )

    def event(self, gain: Delta) -> bytes:
        """No chunk for a gain without text, logprobs or finish (half a character, say)."""
        if self._plain is not None and gain.text and gain.finish_reason is None:
            before, after = self._plain
            text = encode_json(gain.text)
            return b'%b%d,"delta":{"content":%b%b' % (before, gain.choice, text, after)
        events, ids = b"", self._ids(gain)
        if gain.text or gain.logprobs or ids:
            logprobs = encode_json(self._logprobs(gain)) if gain.logprobs else b"null"
            events = self._frame.event(
                b'{"index":%d,"delta":{"content":%b},"logprobs":%b,"finish_reason":null%b}'
                % (gain.choice, encode_json(gain.text), logprobs, ids)
            )
        if gain.finish_reason is not None:
            events += self._frame.event(self._finish(gain))
        return events

    def _finish(self, gain: Delta) -> bytes:
        return b'{"index":%d,"delta":{},"logprobs":null,"finish_reason":%b,"stop_reason":%b}' % (
            gain.choice,
            encode_json(gain.finish_reason),
            encode_json(gain.stop_reason),
        )

    async def closing(self) -> bytes:
        return self._frame.usage_event()
