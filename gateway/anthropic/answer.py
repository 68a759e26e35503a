"""How the answers of /v1/messages are worded."""

from __future__ import annotations

from typing import Any, Final

from pagemesh.gateway.anthropic.blocks import BlockStream, whole_blocks
from pagemesh.gateway.anthropic.errors import error_body
from pagemesh.gateway.generation import Generation
from pagemesh.gateway.openai.answer import Job, QuickAnswer, encode_json
from pagemesh.gateway.openai.answer_reader import AnswerReader
from pagemesh.gateway.openai.sse import Framing
from pagemesh.shared.messages import Delta


def event(payload: dict[str, Any]) -> bytes:
    """Named after the payload's type."""
    return b"event: %b\ndata: %b\n\n" % (payload["type"].encode(), encode_json(payload))


_PING: Final = event({"type": "ping"})
ANTHROPIC: Final = Framing(
    ping=_PING,
    done=event({"type": "message_stop"}),
    failure=lambda error: event(error_body(error)),
)


class MessagesAnswer(QuickAnswer):
    """A message of one choice, as content blocks."""

    framing: Final = ANTHROPIC

    def __init__(self, job: Job, generation: Generation) -> None:
        self._job = job
        self._generation = generation
        self._reader = AnswerReader(job, generation)
        self._blocks = BlockStream()

    def whole(self, gains: list[Delta]) -> dict[str, Any]:
        events, gain = self._reader.read(gains[0])
        blocks = whole_blocks(events)
        called = any(block["type"] == "tool_use" for block in blocks)
        return self._message(blocks) | _stop(gain, called=called)

    def _message(self, blocks: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._job.id,
            "type": "message",
            "role": "assistant",
            "model": self._job.served.name,
            "content": blocks,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage(self._generation) | {"service_tier": "standard"},
        }

    async def opening(self) -> bytes:
        return event({"type": "message_start", "message": self._message([])}) + _PING

    def event(self, gain: Delta) -> bytes:
        events, gain = self._reader.read(gain)
        payloads = list(self._blocks.word(events))
        if gain.finish_reason is not None:
            payloads += self._blocks.end()
            stop = _stop(gain, called=self._blocks.has_called)
            counts = usage(self._generation)
            payloads.append({"type": "message_delta", "delta": stop, "usage": counts})
        return b"".join(map(event, payloads))

    async def closing(self) -> bytes:
        return b""


def usage(generation: Generation) -> dict[str, Any]:
    """Anthropic does not count what was cached among the input tokens."""
    cached_tokens = generation.cached_tokens
    return {
        "input_tokens": generation.prompt_tokens - cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached_tokens,
        "output_tokens": generation.completion_tokens,
    }


def _stop(gain: Delta, *, called: bool) -> dict[str, Any]:
    sequence = gain.stop_reason if isinstance(gain.stop_reason, str) else None
    if gain.finish_reason == "length":
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if called:
        return {"stop_reason": "tool_use", "stop_sequence": None}
    reason = "end_turn" if sequence is None else "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": sequence}
