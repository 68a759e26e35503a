"""A streamed answer, read event by event, without I/O or a clock."""

from __future__ import annotations

from array import array
from typing import Any, Final

import msgspec

from pagemesh.bench.records import CountedFrom, Failure

_DATA: Final = b"data:"
_DONE: Final = b"[DONE]"


class StreamFailed(Exception):
    """The answer cannot be used; `failure` says why."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.failure: Final = Failure(kind, message)


class EventReader:
    """Payloads of `data:` lines, out of bytes that are cut anywhere.

    OpenAI-style servers put each event's data on one line, so a line is an event.
    """

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [line[len(_DATA) :].strip() for line in lines if line.startswith(_DATA)]

    def close(self) -> list[bytes]:
        """The last line, if no line end followed it."""
        return self.feed(b"\n")


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[Any] | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None

    @property
    def brings_output(self) -> bool:
        """Chat servers open and close with empty deltas. Completions without text may be half a
        character."""
        if self.delta is None:
            return bool(self.text) or self.finish_reason is None
        delta = self.delta
        return bool(delta.content or delta.reasoning_content or delta.reasoning or delta.tool_calls)


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None


_decode: Final = msgspec.json.Decoder(_Chunk).decode


class StreamLog:
    """What one answer has brought so far, and when."""

    def __init__(self) -> None:
        self.event_s = array("d")
        self.last_s: float | None = None
        self._events = EventReader()
        self._finished = False
        self._usage = _Usage()

    def feed(self, data: bytes, at_s: float) -> None:
        """Take in bytes that came at `at_s`. Raises StreamFailed on an error event."""
        for payload in self._events.feed(data):
            self._take(payload, at_s)

    def close(self, at_s: float) -> None:
        """The stream has ended. Raises StreamFailed when the answer is not complete."""
        for payload in self._events.close():
            self._take(payload, at_s)
        if not self._finished:
            raise StreamFailed("cut stream", "the stream ended before the answer did")
        if not self.event_s:
            raise StreamFailed("no output", "the answer holds no tokens")

    @property
    def prompt_tokens(self) -> int | None:
        return self._usage.prompt_tokens

    @property
    def counted_from(self) -> CountedFrom:
        return "events" if self._usage.completion_tokens is None else "usage"

    @property
    def output_tokens(self) -> int:
        """As the server counts them; the number of events when it does not say."""
        counted = self._usage.completion_tokens
        return len(self.event_s) if counted is None else counted

    def _take(self, payload: bytes, at_s: float) -> None:
        if payload == _DONE:
            self._finished = True
            return
        chunk = _chunk(payload)
        if chunk.usage is not None:
            self._usage = chunk.usage
        for choice in chunk.choices or ():
            self._note(choice, at_s)

    def _note(self, choice: _Choice, at_s: float) -> None:
        """An answer of one token may come without text, in the event that ends it."""
        self.last_s = at_s
        ended = choice.finish_reason is not None
        self._finished = self._finished or ended
        if choice.brings_output or (ended and not self.event_s):
            self.event_s.append(at_s)


def _chunk(payload: bytes) -> _Chunk:
    try:
        chunk = _decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise StreamFailed("bad event", f"{error}: {payload[:200]!r}") from error
    if chunk.error is not None:
        raise StreamFailed("error event", error_message(chunk.error))
    return chunk


def error_message(error: Any) -> str:
    """What an OpenAI-style server says in the `error` of a body or an event."""
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)
