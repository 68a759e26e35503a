"""Tools and reasoning in chat completions: shapes, order, finish reasons, refusals."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import openai
import pytest
from gateway_fakes import (
    CARD,
    Conversation,
    FakeTokenizer,
    Gateway,
    Script,
    engine,
    fake_tokenizer,
    read_events,
)

from pagemesh.gateway.openai.forced_calls import calls_schema
from pagemesh.gateway.openai.tools import ToolUse
from pagemesh.shared.messages import Accepted
from pagemesh.shared.settings import Settings
from pagemesh.shared.text_parsers import TextParsers
from pagemesh.shared.wire import pack_ids

END_ID = 7
MESSAGES: Any = [{"role": "user", "content": "Hi!"}]
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
PIECES = [
    *("Let me", " see.\n\n", "<tool_", 'call>\n{"name": "weather", "argu', 'ments": {"city": "'),
    *('Paris"}', "}\n</tool_call>\n<tool_call>", '{"name": "weather", "arguments": {}}'),
    "</tool_call>",
]
CALLS = PIECES[2:]
THOUGHT = ["<think>", "\nHm", ".", "</think>", "\n\n", "Hello", "!"]
THOUGHT_IDS = [1, 2, 3, END_ID, 4, 5, 6]


@pytest.fixture
async def tokenizer(settings: Settings) -> AsyncIterator[FakeTokenizer]:
    """Of a model that calls and thinks."""
    async with fake_tokenizer(settings, script=saying(PIECES)) as fake:
        parsers = TextParsers("hermes", "think", END_ID)
        fake.engines = [engine(card=CARD._replace(parsers=parsers))]
        yield fake


def saying(
    pieces: list[str],
    finish_reason: str = "stop",
    ids: list[int] | None = None,
    *,
    in_reasoning: bool = False,
) -> Script:
    async def script(talk: Conversation) -> None:
        request_id = talk.generate.request_id
        talk.link.send(Accepted(request_id, pack_ids([1, 2, 3]), None, in_reasoning))
        for i, piece in enumerate(pieces):
            last = i == len(pieces) - 1
            finish = {"finish_reason": finish_reason} if last else {}
            talk.delta(piece, [ids[i] if ids else 10 + i], **finish)

    return script


async def chat(gateway: Gateway, **fields: Any) -> tuple[int, dict[str, Any]]:
    body = {"model": "tiny", "messages": MESSAGES, **fields}
    return await gateway.post("/v1/chat/completions", body)


async def message(gateway: Gateway, **fields: Any) -> tuple[dict[str, Any], str]:
    """The whole message and its finish reason."""
    status, answer = await chat(gateway, **fields)
    assert status == 200, answer
    choice = answer["choices"][0]
    return choice["message"], choice["finish_reason"]


async def deltas(gateway: Gateway, **fields: Any) -> tuple[list[dict[str, Any]], str]:
    """Those between the role and the finish, and the finish reason."""
    body = {"model": "tiny", "messages": MESSAGES, "stream": True, **fields}
    url = gateway.url + "/v1/chat/completions"
    async with gateway.session.post(url, json=body) as response:
        assert response.status == 200
        *events, done = await read_events(response)
    assert done == "[DONE]"
    first, *middle, last = [msgspec.json.decode(event)["choices"][0] for event in events]
    assert first["delta"] == {"role": "assistant", "content": ""}
    assert last["delta"] == {}
    assert all(choice["finish_reason"] is None for choice in (first, *middle))
    return [choice["delta"] for choice in middle], last["finish_reason"]


def together(pieces: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that the deltas make, as a client puts it together."""
    whole: dict[str, Any] = {}
    for piece in pieces:
        for name, value in piece.items():
            if name != "tool_calls":
                whole[name] = whole.get(name, "") + value
        for call in piece.get("tool_calls", []):
            calls = whole.setdefault("tool_calls", [])
            if call["index"] == len(calls):
                calls.append({**call, "function": dict(call["function"])})
            else:
                calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    return whole


def without_ids(calls: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(call["function"]["name"], call["function"]["arguments"]) for call in calls]


TWO = [("weather", '{"city": "Paris"}'), ("weather", "{}")]


async def test_a_whole_message_with_calls(gateway: Gateway) -> None:
    answer, finish_reason = await message(gateway, tools=[TOOL])
    assert finish_reason == "tool_calls"
    calls = answer.pop("tool_calls")
    assert answer == {"role": "assistant", "content": "Let me see.", "refusal": None}
    assert without_ids(calls) == TWO
    assert all(call.keys() == {"id", "type", "function"} for call in calls)
    assert all(call["type"] == "function" for call in calls)
    assert len({call["id"] for call in calls}) == 2


async def test_content_is_null_beside_nothing_but_calls(
    gateway: Gateway, tokenizer: FakeTokenizer
) -> None:
    tokenizer.script = saying(CALLS)
    answer, _ = await message(gateway, tools=[TOOL])
    assert answer["content"] is None
    assert without_ids(answer["tool_calls"]) == TWO


async def test_streamed_calls_come_in_the_order_of_openai(gateway: Gateway) -> None:
    pieces, finish_reason = await deltas(gateway, tools=[TOOL])
    assert finish_reason == "tool_calls"
    assert together(pieces)["content"] == "Let me see."
    assert without_ids(together(pieces)["tool_calls"]) == TWO
    calls = [call for piece in pieces for call in piece.get("tool_calls", [])]
    starts = [call for call in calls if "id" in call]
    assert [call["index"] for call in starts] == [0, 1]
    for call in starts:
        assert call["type"] == "function"
        assert call["function"] == {"name": "weather", "arguments": ""}
    others = [call for call in calls if "id" not in call]
    assert all(call.keys() == {"index", "function"} for call in others)
    assert all(call["function"].keys() == {"arguments"} for call in others)
    assert [call["index"] for call in calls] == sorted(call["index"] for call in calls)
    assert not any(piece.get("content") == "" for piece in pieces)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_cut_by_the_limit_ends_with_length(
    gateway: Gateway, tokenizer: FakeTokenizer, stream: bool
) -> None:
    tokenizer.script = saying(CALLS[:3], finish_reason="length")
    if stream:
        pieces, finish_reason = await deltas(gateway, tools=[TOOL])
        calls = together(pieces)["tool_calls"]
    else:
        answer, finish_reason = await message(gateway, tools=[TOOL])
        calls = answer["tool_calls"]
    assert finish_reason == "length"
    assert without_ids(calls) == [("weather", '{"city": "')]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_malformed_call_is_content(
    gateway: Gateway, tokenizer: FakeTokenizer, stream: bool
) -> None:
    """What a stop string has cut off as well: nothing that was held back is lost."""
    text = 'Well, <tool_call>\n{"name": weather}'
    tokenizer.script = saying([*text])
    if stream:
        pieces, finish_reason = await deltas(gateway, tools=[TOOL])
        assert together(pieces) == {"content": text}
    else:
        answer, finish_reason = await message(gateway, tools=[TOOL])
        assert answer == {"role": "assistant", "content": text, "refusal": None}
    assert finish_reason == "stop"


async def test_only_the_first_call_if_they_may_not_be_parallel(gateway: Gateway) -> None:
    fields = {"tools": [TOOL], "parallel_tool_calls": False}
    answer, _ = await message(gateway, **fields)
    assert without_ids(answer["tool_calls"]) == TWO[:1]
    pieces, finish_reason = await deltas(gateway, **fields)
    assert without_ids(together(pieces)["tool_calls"]) == TWO[:1]
    assert finish_reason == "tool_calls"


@pytest.mark.parametrize(
    "fields", [{}, {"tools": []}, {"tools": [TOOL], "tool_choice": "none"}, {"tools": None}]
)
async def test_without_tools_a_tag_is_text(
    gateway: Gateway, tokenizer: FakeTokenizer, fields: dict[str, Any]
) -> None:
    answer, finish_reason = await message(gateway, **fields)
    assert answer["content"] == "".join(PIECES)
    assert finish_reason == "stop"
    (talk,) = tokenizer.talks.values()
    assert talk.generate.prompt.tools == []


async def test_the_template_gets_the_tools_and_the_decoder_keeps_the_marks(
    gateway: Gateway, tokenizer: FakeTokenizer
) -> None:
    tool = {**TOOL, "function": {**TOOL["function"], "strict": None}}
    await message(gateway, tools=[tool], tool_choice="auto")
    (talk,) = tokenizer.talks.values()
    expected = {key: value for key, value in TOOL["function"].items() if key != "strict"}
    assert talk.generate.prompt.tools == [{"type": "function", "function": expected}]
    assert talk.generate.keeps_marks


async def test_history_with_calls_and_results_is_taken(gateway: Gateway) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    history = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "Hm."},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "sunny"}]},
    ]
    answer, _ = await message(gateway, messages=history, tools=[TOOL])
    assert len(answer["tool_calls"]) == 2


def changed(**function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {**TOOL["function"], **function}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": ["x"]}, "tools[0]"),
        ({"tools": [{"type": "retrieval"}]}, "tools[0].type"),
        ({"tools": [TOOL, {"type": "function"}]}, "tools[1].function"),
        ({"tools": [changed(name="a b")]}, "tools[0].function.name"),
        ({"tools": [changed(name=None)]}, "tools[0].function.name"),
        ({"tools": [changed(name="n" * 65)]}, "tools[0].function.name"),
        ({"tools": [TOOL, TOOL]}, "tools[1].function.name"),
        ({"tools": [changed(description=5)]}, "tools[0].function.description"),
        ({"tools": [changed(strict="yes")]}, "tools[0].function.strict"),
        ({"tools": [changed(parameters=[])]}, "tools[0].function.parameters"),
        ({"tools": [changed(parameters={"type": "string"})]}, "tools[0].function.parameters"),
        (
            {"tools": [changed(parameters={"properties": {"foo": "bar"}})]},
            "tools[0].function.parameters.properties.foo",
        ),
        (
            {"tools": [changed(parameters={"properties": {"a": {"items": {"type": "text"}}}})]},
            "tools[0].function.parameters.properties.a.items.type",
        ),
        (
            {"tools": [changed(parameters={"required": [1]})]},
            "tools[0].function.parameters.required",
        ),
        (
            {"tools": [changed(parameters={"anyOf": {}})]},
            "tools[0].function.parameters.anyOf",
        ),
        ({"tools": [TOOL] * 1025}, "tools"),
        (
            {
                "tools": [TOOL],
                "tool_choice": "required",
                "guided_regex": "a+",
            },
            "guided_regex",
        ),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "other"}}},
            "tool_choice",
        ),
        ({"tools": [TOOL], "tool_choice": "always"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ({"tools": [TOOL], "parallel_tool_calls": "no"}, "parallel_tool_calls"),
        ({"tool_choice": "required"}, "tool_choice"),
    ],
)
async def test_bad_tools_are_refused_by_name(
    gateway: Gateway, fields: dict[str, Any], param: str
) -> None:
    status, answer = await chat(gateway, **fields)
    assert (status, answer["error"]["param"]) == (400, param), answer


async def test_a_model_without_a_tool_parser_takes_no_tools(
    gateway: Gateway, tokenizer: FakeTokenizer
) -> None:
    tokenizer.push([engine()])
    while gateway.core.backend.directory.models[0].card.parsers.tools != "none":
        await gateway.get("/ready")
    status, answer = await chat(gateway, tools=[TOOL])
    assert (status, answer["error"]["param"]) == (400, "tools")
    assert "--tool-call-parser" in answer["error"]["message"]
    assert (await chat(gateway, tools=[TOOL], tool_choice="none"))[0] == 200


async def test_tools_count_in_tokenize(gateway: Gateway, tokenizer: FakeTokenizer) -> None:
    status, _ = await gateway.post("/tokenize", {"messages": MESSAGES, "tools": [TOOL]})
    assert status == 200
    assert tokenizer.questions[0].prompt.tools == [TOOL]


@pytest.mark.parametrize("inside", [False, True])
async def test_reasoning_is_told_apart(
    gateway: Gateway, tokenizer: FakeTokenizer, inside: bool
) -> None:
    skipped = 1 if inside else 0
    tokenizer.script = saying(THOUGHT[skipped:], ids=THOUGHT_IDS[skipped:], in_reasoning=inside)
    status, answer = await chat(gateway)
    assert status == 200
    assert answer["choices"][0]["message"] == {
        "role": "assistant",
        "content": "Hello!",
        "refusal": None,
        "reasoning_content": "Hm.",
        "reasoning": "Hm.",
    }
    details = answer["usage"]["completion_tokens_details"]
    assert details == {"reasoning_tokens": 4 - skipped}
    pieces, finish_reason = await deltas(gateway)
    assert together(pieces) == {"reasoning_content": "Hm.", "reasoning": "Hm.", "content": "Hello!"}
    assert finish_reason == "stop"


async def test_reasoning_may_be_left_out(gateway: Gateway, tokenizer: FakeTokenizer) -> None:
    tokenizer.script = saying(THOUGHT, ids=THOUGHT_IDS)
    pieces, _ = await deltas(gateway, include_reasoning=False)
    assert together(pieces) == {"content": "Hello!"}


async def test_a_structured_output_comes_behind_the_reasoning(
    gateway: Gateway, tokenizer: FakeTokenizer
) -> None:
    tokenizer.script = saying(["Hm.", "</think>", '{"a"', ": 1}"], in_reasoning=True)
    answer, _ = await message(gateway, response_format={"type": "json_object"})
    assert (answer["reasoning"], answer["content"]) == ("Hm.", '{"a": 1}')
    tokenizer.script = saying(['{"a"', ": 1}"])
    answer, _ = await message(gateway, response_format={"type": "json_object"})
    assert answer == {"role": "assistant", "content": '{"a": 1}', "refusal": None}


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "weather"}}]
)
async def test_forced_calls_come_as_json(
    gateway: Gateway, tokenizer: FakeTokenizer, choice: object
) -> None:
    tokenizer.script = saying(['[{"name": "wea', 'ther", "arguments": {"city": "Pa', 'ris"}}]'])
    fields = {"tool_choice": choice, "response_format": {"type": "json_object"}}
    answer, finish_reason = await message(gateway, tools=[TOOL], **fields)
    [call] = answer["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": '{"city": "Paris"}'}
    assert (answer["content"], finish_reason) == (None, "tool_calls")
    [talk] = tokenizer.talks.values()
    rule = talk.generate.params.structured_outputs
    assert rule is not None
    assert rule.given_as == "tool_choice"


def test_the_schema_of_forced_calls() -> None:
    """References into the root of a tool's parameters are turned to where these stand now."""
    references = {"left": "#", "n": "#/$defs/n", "of_litellm": "/$defs/n"}
    properties = {name: {"$ref": reference} for name, reference in references.items()}
    tree = {"type": "object", "properties": properties}
    tools = [
        {"type": "function", "function": {"name": "a"}},
        {"type": "function", "function": {"name": "b", "parameters": tree}},
    ]
    schema = calls_schema(ToolUse(tools, "b", parallel=True))
    assert (schema["minItems"], schema["maxItems"]) == (1, 1)
    [call] = schema["items"]["anyOf"]
    assert call["properties"] == {"name": {"const": "b"}, "arguments": {"$ref": "#/$defs/1"}}
    assert schema["$defs"]["1"]["properties"] == {
        "left": {"$ref": "#/$defs/1"},
        "n": {"$ref": "#/$defs/1/$defs/n"},
        "of_litellm": {"$ref": "#/$defs/1/$defs/n"},
    }
    several = calls_schema(ToolUse(tools, "required", parallel=True))
    assert "maxItems" not in several
    assert [each["properties"]["name"]["const"] for each in several["items"]["anyOf"]] == ["a", "b"]
    assert calls_schema(ToolUse(tools, "required", parallel=False))["maxItems"] == 1


async def test_streamed_usage_counts_reasoning(gateway: Gateway, tokenizer: FakeTokenizer) -> None:
    tokenizer.script = saying(THOUGHT, ids=THOUGHT_IDS)
    url, options = gateway.url + "/v1/chat/completions", {"include_usage": True}
    body = {"messages": MESSAGES, "stream": True, "stream_options": options}
    async with gateway.session.post(url, json=body) as response:
        events = await read_events(response)
    details = json.loads(events[-2])["usage"]["completion_tokens_details"]
    assert details == {"reasoning_tokens": 4}


async def test_calls_behind_reasoning(gateway: Gateway, tokenizer: FakeTokenizer) -> None:
    tokenizer.script = saying([*THOUGHT[:4], *CALLS])
    answer, finish_reason = await message(gateway, tools=[TOOL])
    assert (answer["reasoning_content"], answer["content"]) == ("Hm.", None)
    assert without_ids(answer["tool_calls"]) == TWO
    assert finish_reason == "tool_calls"


async def test_the_stream_helper_of_openai_puts_calls_together(gateway: Gateway) -> None:
    async with (
        openai.AsyncOpenAI(base_url=gateway.url + "/v1", api_key="none") as client,
        client.chat.completions.stream(model="tiny", messages=MESSAGES, tools=[TOOL]) as stream,
    ):
        kinds = [event.type async for event in stream]
        final = (await stream.get_final_completion()).choices[0]
    assert kinds.count("tool_calls.function.arguments.done") == 2
    assert final.finish_reason == "tool_calls"
    calls = final.message.tool_calls or []
    assert [call.function.arguments for call in calls] == [arguments for _, arguments in TWO]
    assert calls[0].function.parsed_arguments == {"city": "Paris"}
