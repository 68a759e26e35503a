"""Chat answers in which calls, or reasoning, are told apart from the text."""

from __future__ import annotations

from typing import Any

from pagemesh.gateway.generation import Generation
from pagemesh.gateway.openai.answer import Job, encode_json
from pagemesh.gateway.openai.answer_reader import AnswerReader
from pagemesh.gateway.openai.chat_answer import ChatAnswer
from pagemesh.gateway.tools.events import Arguments, CallStart, Content, Event, Reasoning
from pagemesh.shared.messages import Delta


class ParsedChatAnswer(ChatAnswer):
    """Each gain may make several chunks or none."""

    def __init__(self, job: Job, generation: Generation) -> None:
        super().__init__(job, generation)
        self._reader = AnswerReader(job, generation)

    def _choice(self, gain: Delta) -> dict[str, Any]:
        events, gain = self._reader.read(gain)
        choice = super()._choice(gain)
        choice["message"] |= _message(events)
        return choice

    def event(self, gain: Delta) -> bytes:
        events, gain = self._reader.read(gain)
        deltas = [_delta(event) for event in events]
        ids = self._ids(gain)
        if (gain.logprobs or ids) and not deltas:
            deltas = [{"content": ""}]
        logprobs = encode_json(self._logprobs(gain)) if gain.logprobs else b"null"
        chunks = []
        for delta in deltas:
            chunks.append(
                self._frame.event(
                    b'{"index":%d,"delta":%b,"logprobs":%b,"finish_reason":null%b}'
                    % (gain.choice, encode_json(delta), logprobs, ids)
                )
            )
            logprobs, ids = b"null", b""
        if gain.finish_reason is not None:
            chunks.append(self._frame.event(self._finish(gain)))
        return b"".join(chunks)


def _message(events: list[Event]) -> dict[str, Any]:
    """The fields of a whole message that differ from those of plain text."""
    content = _joined(events, Content)
    message: dict[str, Any] = {"content": content}
    thoughts = _joined(events, Reasoning)
    if thoughts:
        message |= _reasoning(thoughts)
    calls = [_call(event, events) for event in events if isinstance(event, CallStart)]
    if calls:
        message |= {"content": content or None, "tool_calls": calls}
    return message


def _joined(events: list[Event], kind: type[Content] | type[Reasoning]) -> str:
    return "".join([event.text for event in events if isinstance(event, kind)])


def _call(start: CallStart, events: list[Event]) -> dict[str, Any]:
    pieces = [e.text for e in events if isinstance(e, Arguments) and e.number == start.number]
    function = {"name": start.name, "arguments": "".join(pieces)}
    return {"id": start.id, "type": "function", "function": function}


def _delta(event: Event) -> dict[str, Any]:
    match event:
        case Content(text):
            return {"content": text}
        case Reasoning(text):
            return _reasoning(text)
        case CallStart(number, call_id, name):
            function = {"name": name, "arguments": ""}
            call = {"index": number, "id": call_id, "type": "function", "function": function}
            return {"tool_calls": [call]}
        case Arguments(number, text):
            return {"tool_calls": [{"index": number, "function": {"arguments": text}}]}


def _reasoning(text: str) -> dict[str, str]:
    """Older clients read one name, newer ones the other."""
    return {"reasoning_content": text, "reasoning": text}
