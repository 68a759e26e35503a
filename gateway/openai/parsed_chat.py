"""Chat answers in which calls, or reasoning, are told apart from the text."""

from __future__ import annotations

from typing import Any

from pagemesh.gateway.generation import Generation
from pagemesh.gateway.openai.answer import Job, encode_json
from pagemesh.gateway.openai.chat_answer import ChatAnswer
from pagemesh.gateway.openai.forced_calls import PARSER
from pagemesh.gateway.openai.logprobs import chat_logprobs
from pagemesh.gateway.openai.schema import ChatRequest
from pagemesh.gateway.tools.events import Arguments, CallStart, Content, Event, Reasoning
from pagemesh.gateway.tools.parser import AnswerParser, ToolParser
from pagemesh.gateway.tools.reasoning import ReasoningSplit, ReasoningTokens
from pagemesh.shared.messages import Delta
from pagemesh.shared.text_parsers import REASONING_TAGS


class ParsedChatAnswer(ChatAnswer):
    """Each gain goes through the parser of its choice, and may make several chunks or none."""

    def __init__(self, job: Job, generation: Generation) -> None:
        super().__init__(job, generation)
        self._readers: dict[int, ChoiceReader] = {}
        body = job.body
        self._hides_reasoning = isinstance(body, ChatRequest) and body.include_reasoning is False

    def _read(self, gain: Delta) -> tuple[list[Event], Delta]:
        """What the gain brought, and the gain with the finish reason that the client sees."""
        reader = self._readers.get(gain.choice)
        if reader is None:
            reader = self._readers[gain.choice] = self._new_reader()
        n_before = reader.reasoning_tokens
        events = reader.read(gain)
        self._generation.reasoning_tokens += reader.reasoning_tokens - n_before
        if gain.finish_reason == "stop" and reader.has_called:
            gain = gain._replace(finish_reason="tool_calls")
        if self._hides_reasoning:
            events = [event for event in events if not isinstance(event, Reasoning)]
        return events, gain

    def _new_reader(self) -> ChoiceReader:
        """The prompt has been accepted by now."""
        parsers, use = self._job.served.card.parsers, self._job.tool_use
        tags = REASONING_TAGS.get(parsers.reasoning)
        # A rule waits for the end of the reasoning if one token is that end.
        waits = self._job.params.structured_outputs is None or parsers.reasoning_end_id is not None
        inside = self._generation.prompts[0].in_reasoning and waits
        reasoning = ReasoningSplit(*tags, inside=inside) if tags else None
        tools = None
        if use is not None:
            max_calls = None if use.parallel else 1
            format_name = PARSER if use.is_forced else parsers.tools
            tools = ToolParser(format_name, use.names, max_calls=max_calls)
        return ChoiceReader(AnswerParser(reasoning, tools), parsers.reasoning_end_id)

    def _choice(self, gain: Delta) -> dict[str, Any]:
        events, gain = self._read(gain)
        choice = super()._choice(gain)
        choice["message"] |= _message(events)
        return choice

    def event(self, gain: Delta) -> bytes:
        events, gain = self._read(gain)
        deltas = [_delta(event) for event in events]
        if gain.logprobs and not deltas:
            deltas = [{"content": ""}]
        logprobs = encode_json(chat_logprobs(gain.logprobs)) if gain.logprobs else b"null"
        chunks = []
        for delta in deltas:
            chunks.append(
                self._frame.event(
                    b'{"index":%d,"delta":%b,"logprobs":%b,"finish_reason":null}'
                    % (gain.choice, encode_json(delta), logprobs)
                )
            )
            logprobs = b"null"
        if gain.finish_reason is not None:
            chunks.append(self._frame.event(self._finish(gain)))
        return b"".join(chunks)


class ChoiceReader:
    """The parser of one choice, and what it has found so far."""

    def __init__(self, parser: AnswerParser, reasoning_end_id: int | None) -> None:
        self.has_called = False
        self._parser = parser
        self._tokens = ReasoningTokens(reasoning_end_id)

    @property
    def reasoning_tokens(self) -> int:
        return self._tokens.count

    def read(self, gain: Delta) -> list[Event]:
        events = self._parser.feed(gain.text)
        if self._parser.reasoning is not None:
            self._tokens.add(gain, self._parser.reasoning)
        if gain.finish_reason is not None:
            events += self._parser.finish()
        self.has_called |= any(isinstance(event, CallStart) for event in events)
        return events


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
