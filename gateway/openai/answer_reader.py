"""What the gains of an answer turn out to be, choice by choice."""

from __future__ import annotations

from pagemesh.gateway.generation import Generation
from pagemesh.gateway.openai.answer import Job
from pagemesh.gateway.openai.forced_calls import PARSER
from pagemesh.gateway.openai.schema import ChatRequest
from pagemesh.gateway.tools.events import CallStart, Event, Reasoning
from pagemesh.gateway.tools.parser import AnswerParser, ToolParser
from pagemesh.gateway.tools.reasoning import ReasoningSplit, ReasoningTokens
from pagemesh.shared.messages import Delta
from pagemesh.shared.text_parsers import REASONING_TAGS


class AnswerReader:
    """Each gain goes through the parser of its choice, and may mean several events or none."""

    def __init__(self, job: Job, generation: Generation) -> None:
        self._job = job
        self._generation = generation
        self._readers: dict[int, ChoiceReader] = {}
        body = job.body
        self._hides_reasoning = isinstance(body, ChatRequest) and body.include_reasoning is False

    def read(self, gain: Delta) -> tuple[list[Event], Delta]:
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
