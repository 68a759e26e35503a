"""/v1/responses: objects, events and refusals, as the released openai client reads them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from gateway_fakes import (
    CARD,
    PIECES,
    Conversation,
    FakeTokenizer,
    Gateway,
    engine,
    fake_tokenizer,
    say_hello,
)
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from test_gateway_tools import CALLS, END_ID, THOUGHT, THOUGHT_IDS, saying

from pagemesh.gateway.openai.responses.conversation import chat_messages
from pagemesh.gateway.openai.responses.items import input_items
from pagemesh.shared.errors import RequestError
from pagemesh.shared.messages import WireError
from pagemesh.shared.settings import Settings
from pagemesh.shared.text_parsers import TextParsers

TEXT = "".join(PIECES)
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
TOOL: Any = {
    "type": "function",
    "name": "weather",
    "strict": True,
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}


@pytest.fixture
async def tokenizer(settings: Settings) -> AsyncIterator[FakeTokenizer]:
    """Of a model that calls and thinks."""
    async with fake_tokenizer(settings, script=say_hello) as fake:
        parsers = TextParsers("hermes", "think", END_ID)
        fake.engines = [engine(card=CARD._replace(parsers=parsers))]
        yield fake


@pytest.fixture
async def client(gateway: Gateway) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=gateway.url + "/v1", api_key="none", max_retries=0
    ) as client:
        yield client


async def create(gateway: Gateway, **fields: Any) -> dict[str, Any]:
    body = {"model": "tiny", "input": "Hi!", **fields}
    status, answer = await gateway.post("/v1/responses", body)
    assert status == 200, answer
    Response.model_validate(answer, strict=True)
    return dict(answer)


async def events(gateway: Gateway, **fields: Any) -> list[dict[str, Any]]:
    """Each is what openai's types say, under its own name, with its place as its number."""
    body = {"model": "tiny", "input": "Hi!", "stream": True, **fields}
    async with gateway.session.post(f"{gateway.url}/v1/responses", json=body) as response:
        return numbered(await response.text())


def numbered(text: str, first: int = 0) -> list[dict[str, Any]]:
    found = []
    for block in text.split("\n\n")[:-1]:
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        EVENT.validate_python(event)
        assert name == f"event: {event['type']}"
        found.append(event)
    assert [event["sequence_number"] for event in found] == list(range(first, first + len(found)))
    return found


def kinds(found: list[dict[str, Any]]) -> list[str]:
    return [event["type"].removeprefix("response.") for event in found]


async def test_the_object(gateway: Gateway, tokenizer: FakeTokenizer) -> None:
    asked = {
        "instructions": "Be kind.",
        "max_output_tokens": 9,
        "metadata": {"a": "b"},
        "stop": ["END"],
        "temperature": 0.5,
        "tools": [TOOL],
        "tool_choice": "none",
        "truncation": "auto",
        "text": {"format": {"type": "text"}},
        "reasoning": {"effort": "low", "summary": "auto"},
        "user": "me",
        "prompt_cache_key": "k",
        "service_tier": "flex",
    }
    answer = await create(gateway, **asked)
    [item] = answer["output"]
    assert (answer["status"], answer["model"], answer["error"]) == ("completed", "tiny", None)
    assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "completed")
    [part] = item["content"]
    assert (part["type"], part["text"], part["annotations"]) == ("output_text", TEXT, [])
    assert answer["usage"] == {
        "input_tokens": 11,
        "input_tokens_details": {"cached_tokens": 2, "cache_write_tokens": 0},
        "output_tokens": 4,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 15,
    }
    assert (answer["service_tier"], answer["reasoning"]["effort"]) == ("flex", "low")
    echoed = {"instructions", "max_output_tokens", "metadata", "temperature", "tools", "truncation"}
    assert {name: answer[name] for name in echoed} == {name: asked[name] for name in echoed}
    assert (answer["top_p"], answer["parallel_tool_calls"], answer["store"]) == (1.0, True, True)
    talk = list(tokenizer.talks.values())[-1]
    assert talk.generate.prompt.messages == [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Hi!"},
    ]
    assert (talk.generate.params.temperature, talk.generate.params.max_tokens) == (0.5, 9)
    assert (talk.generate.cache_key, talk.generate.priority) == ("k", 1)
    extras = talk.generate.prompt.extras
    assert extras is not None
    assert extras.options == {"reasoning_effort": "low"}


async def test_a_limit_makes_it_incomplete(gateway: Gateway) -> None:
    answer = await create(gateway, max_output_tokens=2)
    assert (answer["status"], answer["completed_at"]) == ("incomplete", None)
    assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
    assert answer["output"][0]["status"] == "incomplete"
    found = await events(gateway, max_output_tokens=2)
    assert kinds(found)[-2:] == ["output_item.done", "incomplete"]
    assert found[-2]["item"]["status"] == "incomplete"


async def test_the_events_of_a_text(gateway: Gateway) -> None:
    found = await events(gateway, stop=["END"], include=["message.output_text.logprobs"])
    n_deltas = kinds(found).count("output_text.delta")
    assert kinds(found) == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *["output_text.delta"] * n_deltas,
        *("output_text.done", "content_part.done", "output_item.done", "completed"),
    ]
    deltas = found[4 : 4 + n_deltas]
    assert "".join(delta["delta"] for delta in deltas) == TEXT
    rows = [row for delta in deltas for row in delta["logprobs"]]
    assert [row["token"] for row in rows] == PIECES
    done, part, item, last = found[-4:]
    assert (done["text"], part["part"]["text"]) == (TEXT, TEXT)
    assert done["logprobs"] == part["part"]["logprobs"] == rows
    assert item["item"] == last["response"]["output"][0]
    assert last["response"]["usage"]["output_tokens"] == 4
    assert found[0]["response"]["output"] == []


async def test_the_events_of_reasoning_and_calls(
    gateway: Gateway, tokenizer: FakeTokenizer
) -> None:
    tokenizer.script = saying([*THOUGHT[:5], "Sure", *CALLS], ids=list(range(30)))
    found = await events(gateway, tools=[TOOL], include=["reasoning.encrypted_content"])
    call = ["output_item.added", *["function_call_arguments.delta"], "function_call_arguments.done"]
    seen = [kind for i, kind in enumerate(kinds(found)) if kind != kinds(found)[i - 1]]
    assert seen == [
        *("created", "in_progress"),
        *("output_item.added", "content_part.added", "reasoning_text.delta"),
        *("reasoning_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta"),
        *("output_text.done", "content_part.done", "output_item.done"),
        *(*call, "output_item.done", *call, "output_item.done", "completed"),
    ]
    answer = found[-1]["response"]
    thoughts, text, first, second = answer["output"]
    assert thoughts["content"] == [{"type": "reasoning_text", "text": "Hm."}]
    assert text["content"][0]["text"] == "Sure"
    assert (first["name"], first["arguments"]) == ("weather", '{"city": "Paris"}')
    assert second["arguments"] == "{}"
    assert first["call_id"].startswith("call_")
    added = [event["item"] for event in found if event["type"] == "response.output_item.added"]
    assert [item["status"] for item in added] == ["in_progress"] * 4
    done = [event["item"] for event in found if event["type"] == "response.output_item.done"]
    assert done == answer["output"]
    again = {"model": "tiny", "input": [{"role": "user", "content": "Hi!"}, *answer["output"]]}
    del again["input"][1]["content"]
    await create(gateway, **again)
    messages = list(tokenizer.talks.values())[-1].generate.prompt.messages or []
    assert messages[1]["reasoning_content"] == "Hm."
    assert messages[1]["content"] == "Sure"
    assert [call["id"] for call in messages[1]["tool_calls"]] == [
        first["call_id"],
        second["call_id"],
    ]


async def test_usage_counts_reasoning(gateway: Gateway, tokenizer: FakeTokenizer) -> None:
    tokenizer.script = saying(THOUGHT, ids=THOUGHT_IDS)
    answer = await create(gateway)
    assert answer["usage"]["output_tokens_details"] == {"reasoning_tokens": 4}
    assert [item["type"] for item in answer["output"]] == ["reasoning", "message"]


async def test_an_answer_of_nothing_is_a_message(
    gateway: Gateway, tokenizer: FakeTokenizer
) -> None:
    tokenizer.script = saying([""])
    answer = await create(gateway)
    assert answer["output"][0]["content"][0]["text"] == ""
    assert kinds(await events(gateway))[2:] == [
        *("output_item.added", "content_part.added", "output_text.done"),
        *("content_part.done", "output_item.done", "completed"),
    ]


async def test_rules_for_the_answer(gateway: Gateway, tokenizer: FakeTokenizer) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    tokenizer.script = saying(['{"a": 1}'])
    form = {"type": "json_schema", "name": "x", "schema": schema, "strict": True}
    await create(gateway, text={"format": form})
    tokenizer.script = saying(['[{"name": "weather", "arguments": {"city": "Rome"}}]'])
    named = await create(gateway, tools=[TOOL], tool_choice={"type": "function", "name": "weather"})
    assert named["output"][0]["arguments"] == '{"city": "Rome"}'
    first, second = (talk.generate.params for talk in tokenizer.talks.values())
    assert first.structured_outputs is not None
    assert json.loads(str(first.structured_outputs.json)) == schema
    assert second.structured_outputs is not None
    assert second.structured_outputs.given_as == "tool_choice"


IMAGE = {"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}
REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("input", {"input": []}),
    ("input[0].content[0].type", {"input": [IMAGE]}),
    ("input[0].role", {"input": [{"role": "tool", "content": "x"}]}),
    ("input[0].type", {"input": [{"type": "computer_call"}]}),
    ("input[0].output", {"input": [{"type": "function_call_output", "call_id": "c"}]}),
    ("input[0].arguments", {"input": [{"type": "function_call", "call_id": "c", "name": "n"}]}),
    ("input[0].encrypted_content", {"input": [{"type": "reasoning", "encrypted_content": "gA"}]}),
    ("input[0].id", {"input": [{"type": "item_reference", "id": "msg_1"}]}),
    ("input", {"input": 5}),
    ("tools[0].type", {"tools": [{"type": "web_search"}]}),
    ("tools[0].name", {"tools": [{"type": "function", "name": "no good"}]}),
    ("tools[0].parameters.allOf", {"tools": [TOOL | {"parameters": {"allOf": 1}}]}),
    ("tool_choice", {"tool_choice": {"type": "mcp"}}),
    ("tool_choice", {"tools": [TOOL], "tool_choice": {"type": "function", "name": "other"}}),
    ("text.format", {"text": {"format": {"type": "json_schema", "name": "x"}}}),
    ("text.format", {"text": {"format": {"type": "grammar"}}}),
    ("text.verbosity", {"text": {"verbosity": "some"}}),
    ("reasoning.effort", {"reasoning": {"effort": "some"}}),
    ("reasoning.summary", {"reasoning": {"summary": "detailed"}}),
    ("include", {"include": ["file_search_call.results"]}),
    ("max_output_tokens", {"max_output_tokens": 0}),
    ("top_logprobs", {"top_logprobs": 21}),
    ("temperature", {"temperature": 3}),
    ("truncation", {"truncation": "some"}),
    ("service_tier", {"service_tier": "gold"}),
    ("metadata", {"metadata": {"k" * 65: ""}}),
    ("metadata", {"metadata": {str(i): "" for i in range(17)}}),
    ("background", {"background": True, "store": False}),
    ("timeout", {"background": True, "timeout": 1}),
    ("stream_options", {"stream_options": {"include_obfuscation": False}}),
    ("conversation", {"conversation": "conv_1"}),
    ("prompt", {"prompt": {"id": "pmpt_1"}}),
    ("previous_response_id", {"previous_response_id": "resp_none"}),
]


async def test_refusals_name_the_field(gateway: Gateway) -> None:
    for param, fields in REFUSED:
        status, answer = await gateway.post("/v1/responses", {"input": "Hi!", **fields})
        error = answer["error"]
        assert (status, error["param"]) == (400, param), (fields, error)
        assert error["message"].startswith(("Previous", param)), error


async def test_refusals_of_the_mesh_speak_of_the_input(
    gateway: Gateway, tokenizer: FakeTokenizer
) -> None:
    async def refuse(talk: Conversation) -> None:
        talk.fail(RequestError("your messages are too long", param="messages"))

    tokenizer.script = refuse
    for stream in (False, True):
        body = {"input": "Hi!", "stream": stream}
        status, answer = await gateway.post("/v1/responses", body)
        assert (status, answer["error"]["param"]) == (400, "input")
        assert answer["error"]["message"] == "your input are too long"


async def test_a_failure_in_mid_stream(
    client: openai.AsyncOpenAI, gateway: Gateway, tokenizer: FakeTokenizer
) -> None:
    seen_first = asyncio.Event()

    async def break_off(talk: Conversation) -> None:
        talk.accept()
        talk.delta("text", [1])
        await seen_first.wait()
        talk.delta("", [], error=WireError(500, None, None, "the engine broke"))

    tokenizer.script = break_off
    body = {"input": "Hi!", "stream": True}
    async with gateway.session.post(f"{gateway.url}/v1/responses", json=body) as response:
        begun = await response.content.readline()
        seen_first.set()
        found = numbered((begun + await response.read()).decode())
    assert kinds(found)[-2:] == ["error", "failed"]
    assert found[-2]["message"] == "the engine broke"
    failed = found[-1]["response"]
    assert (failed["status"], failed["error"]["code"]) == ("failed", "server_error")
    seen_first.clear()
    stream = await client.responses.create(model="tiny", input="Hi!", stream=True)
    seen = [(await anext(stream)).type]
    seen_first.set()
    seen += [event.type async for event in stream]
    assert seen[-2:] == ["error", "response.failed"]


async def test_a_hang_up_cancels(gateway: Gateway, tokenizer: FakeTokenizer) -> None:
    async def say_one(talk: Conversation) -> None:
        talk.accept()
        talk.delta("one", [1])

    tokenizer.script = say_one
    body = {"input": "Hi!", "stream": True}
    async with gateway.session.post(f"{gateway.url}/v1/responses", json=body) as response:
        await response.content.readline()
    [talk] = tokenizer.talks.values()
    await talk.cancelled.wait()


async def test_what_is_oldest_is_left_out(gateway: Gateway, tokenizer: FakeTokenizer) -> None:
    """The fake's tokens are characters; the context has 4096."""
    turns = [{"role": role, "content": role[0] * 300} for role in ("user", "assistant")] * 10
    question = [*turns, {"role": "user", "content": "?"}]
    fields = {"input": question, "instructions": "Be kind.", "truncation": "auto"}
    await create(gateway, **fields, max_output_tokens=200)
    messages = list(tokenizer.talks.values())[-1].generate.prompt.messages or []
    assert messages[0] == {"role": "system", "content": "Be kind."}
    assert messages[1:] == [{**each} for each in question[-13:]]
    await create(gateway, input=question[-3:], truncation="auto")
    assert list(tokenizer.talks.values())[-1].generate.prompt.messages == question[-3:]


async def test_the_helpers_of_openai(client: openai.AsyncOpenAI, tokenizer: FakeTokenizer) -> None:
    tokenizer.script = saying([*THOUGHT[:5], "Sure", *CALLS])
    async with client.responses.stream(model="tiny", input="Hi!", tools=[TOOL]) as stream:
        seen = [event.type async for event in stream]
        final = await stream.get_final_response()
    assert "response.output_text.delta" in seen
    assert final.status == "completed"
    page = await client.responses.input_items.list(final.id)
    assert [item.type for item in page.data] == ["message"]
    raw = await client.responses.with_raw_response.retrieve(final.id)
    assert raw.parse().id == final.id


def test_items_become_messages() -> None:
    call = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "c1"}
    thought = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm"}]}
    parts = [{"type": "input_text", "text": "1"}, {"type": "input_text", "text": "2"}]
    said: Any = [{"type": "output_text", "text": "Well"}, {"type": "refusal", "refusal": "no"}]
    given = [
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": parts},
        *(thought, {"role": "assistant", "content": said}, call, {**call, "call_id": "c2"}),
        *({**result, "output": "one"}, {**result, "call_id": "c2", "output": parts}),
        *(thought, {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "so"}]}),
        *(call, {"role": "assistant", "content": "Done.", "id": None}),
    ]
    messages = chat_messages("Obey.", input_items(given, "resp_" + "0" * 32))
    for message in messages:
        for each in message.get("tool_calls", []):
            assert each.pop("function") == {"name": "f", "arguments": "{}"}
            assert each.pop("type") == "function"
    assert messages == [
        {"role": "system", "content": "Obey."},
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": "12"},
        {
            "role": "assistant",
            "content": "Wellno",
            "reasoning_content": "Hm",
            "tool_calls": [{"id": "c1"}, {"id": "c2"}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "one"},
        {"role": "tool", "tool_call_id": "c2", "content": "12"},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "Hm\nso",
            "tool_calls": [{"id": "c1"}],
        },
        {"role": "assistant", "content": "Done."},
    ]
