"""How the answers of /v1/responses are worded: an object, or events that end with it."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Final

import msgspec

from pagemesh.gateway.generation import Generation
from pagemesh.gateway.openai.answer import Job, QuickAnswer, encode_json
from pagemesh.gateway.openai.answer_reader import AnswerReader
from pagemesh.gateway.openai.errors import error_body
from pagemesh.gateway.openai.responses import objects
from pagemesh.gateway.openai.responses.chat_form import renamed
from pagemesh.gateway.openai.responses.objects import Object
from pagemesh.gateway.openai.responses.output import Output, StreamEvent
from pagemesh.gateway.openai.sse import OPENAI, Framing
from pagemesh.shared.errors import RequestError
from pagemesh.shared.messages import Delta

Settle = Callable[[bytes], Awaitable[bytes]]
"""Gets the object of a response that has ended, before the client does; returns what he gets."""


class Events:
    """Words stream events, and numbers them from `next_number` on."""

    def __init__(self, next_number: int = 0) -> None:
        self.next_number = next_number

    def word(self, event: StreamEvent) -> bytes:
        name = event["type"].encode()
        numbered = encode_json({**event, "sequence_number": self.next_number})
        self.next_number += 1
        return b"event: %b\ndata: %b\n\n" % (name, numbered)

    def error(self, error: RequestError) -> bytes:
        told = error_body(error)["error"]
        fields = {name: told[name] for name in ("code", "message", "param")}
        return self.word({"type": "error", **fields})


class ResponseAnswer(QuickAnswer):
    """`begun` is the object as it begins. `seals`: reasoning is also sent sealed."""

    def __init__(
        self, job: Job, begun: Object, settle: Settle, generation: Generation, *, seals: bool
    ) -> None:
        self.begun: Final = begun
        self._generation = generation
        self._settle = settle
        self._reader = AnswerReader(job, generation)
        self._output = Output(job.id, seals=seals)
        self._events = Events()
        self._cut_off = False

    @property
    def framing(self) -> Framing:
        return Framing(OPENAI.ping, b"", self._failure)

    @property
    def n_worded(self) -> int:
        """Events so far."""
        return self._events.next_number

    def whole(self, gains: list[Delta]) -> Object:
        for gain in gains:
            self._take(gain)
        return self.ended()

    def ended(self) -> Object:
        """The object, now that all gains were taken."""
        return objects.ended(
            self.begun,
            self._output.items,
            self._generation,
            cut_off=self._cut_off,
            at_s=time.time(),
        )

    async def opening(self) -> bytes:
        return self.told("created") + self.told("in_progress")

    def told(self, kind: str) -> bytes:
        """An event with the object as it began."""
        status = objects.IN_PROGRESS if kind == objects.IN_PROGRESS else self.begun["status"]
        response = self.begun | {"status": status}
        return self._events.word({"type": f"response.{kind}", "response": response})

    def event(self, gain: Delta) -> bytes:
        return b"".join(self.events([gain]))

    def events(self, gains: Iterable[Delta]) -> list[bytes]:
        return [self._events.word(event) for gain in gains for event in self._take(gain)]

    def _take(self, gain: Delta) -> list[StreamEvent]:
        events, gain = self._reader.read(gain)
        told = self._output.add(events, gain.logprobs or [])
        if gain.finish_reason is not None:
            self._cut_off = gain.finish_reason == "length"
            told += self._output.finish("incomplete" if self._cut_off else "completed")
        return told

    async def closing(self) -> bytes:
        """The client may build upon the response as soon as he hears of its end."""
        return self.last(await self._settle(encode_json(self.ended())))

    def last(self, ended: bytes) -> bytes:
        kind = objects.INCOMPLETE if self._cut_off else objects.COMPLETED
        return self._events.word({"type": f"response.{kind}", "response": msgspec.Raw(ended)})

    def failing(self, error: RequestError) -> list[bytes]:
        """`error` ends a stream that has begun."""
        failed = {"type": "response.failed", "response": objects.failed(self.begun, error)}
        return [self._events.error(error), self._events.word(failed)]

    def _failure(self, error: RequestError) -> bytes:
        return b"".join(self.failing(renamed(error)))
