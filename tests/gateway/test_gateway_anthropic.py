"""/v1/messages over a scripted tokenizer service: shapes, translation, events, refusals."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator
from typing import Any

import anthropic
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
    settings_for,
)

from pagemesh.gateway.anthropic.blocks import BlockStream, whole_blocks
from pagemesh.gateway.tools.events import Arguments, CallStart, Content, Event, Reasoning
from pagemesh.shared.errors import RequestError
from pagemesh.shared.messages import Accepted, WireError
from pagemesh.shared.settings import Settings
from pagemesh.shared.text_parsers import TextParsers
from pagemesh.shared.wire import pack_ids

TEXT = "".join(PIECES)
KEY = {"x-api-key": "sk-test", "anthropic-version": "2023-06-01"}
MESSAGES: Any = [{"role": "user", "content": "Hi!"}]
ASK: dict[str, Any] = {"model": "tiny", "max_tokens": 9, "messages": MESSAGES}
TOOL: Any = {
    "name": "weather",
    "description": "The weather of a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
    "cache_control": {"type": "ephemeral"},
}
THOUGHT_AND_CALLS = [
    *("<think>Hm", ".</think>\n", "Let me see.\n"),
    *('<tool_call>\n{"name": "weather", "arguments": {"city": "', 'Paris"}}\n</tool_call>'),
    '<tool_call>{"name": "weather", "arguments": {}}</tool_call>',
]


@pytest.fixture
def settings(redis_url: str, mesh_name: str) -> Settings:
    return settings_for(redis_url, mesh_name, api_key=["sk-test"], max_body_bytes=2**16)


@pytest.fixture
async def tokenizer(settings: Settings) -> AsyncIterator[FakeTokenizer]:
    """Of a model that calls and thinks."""
    async with fake_tokenizer(settings, script=say_hello) as fake:
        fake.engines = [engine(card=CARD._replace(parsers=TextParsers("hermes", "think")))]
        yield fake


async def ask(gateway: Gateway, path: str = "/v1/messages", **fields: Any) -> tuple[int, Any]:
    return await gateway.post(path, {**ASK, **fields}, headers=KEY)


async def events(gateway: Gateway, **fields: Any) -> list[tuple[str, dict[str, Any]]]:
    body = {**ASK, **fields, "stream": True}
    async with gateway.session.post(f"{gateway.url}/v1/messages", json=body, headers=KEY) as answer:
        assert answer.headers["request-id"] == answer.headers["x-request-id"]
        blocks = (await answer.text()).split("\n\n")
    assert blocks.pop() == ""
    split = [block.removeprefix("event: ").split("\ndata: ") for block in blocks]
    return [(name, json.loads(data)) for name, data in split]


def saying(pieces: list[str], **last: Any) -> Any:
    async def script(talk: Conversation) -> None:
        talk.link.send(Accepted(talk.generate.request_id, pack_ids([1, 2, 3])))
        for i, piece in enumerate(pieces):
            talk.delta(piece, [i + 10], **(last if i == len(pieces) - 1 else {}))

    return script


@pytest.mark.parametrize(
    ("last", "reason", "sequence"),
    [
        ({"finish_reason": "stop", "stop_reason": "END"}, "stop_sequence", "END"),
        ({"finish_reason": "stop", "stop_reason": 7}, "end_turn", None),
        ({"finish_reason": "length"}, "max_tokens", None),
    ],
)
async def test_a_message(
    gateway: Gateway, tokenizer: FakeTokenizer, last: Any, reason: str, sequence: str | None
) -> None:
    tokenizer.script = saying(PIECES, **last)
    status, answer = await ask(gateway)
    assert answer.pop("id").startswith("msg")
    assert (status, answer) == (
        200,
        {
            "type": "message",
            "role": "assistant",
            "model": "tiny",
            "content": [{"type": "text", "text": TEXT}],
            "stop_reason": reason,
            "stop_sequence": sequence,
            "usage": {
                "input_tokens": 3,
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": 0,
                "output_tokens": 4,
                "service_tier": "standard",
            },
        },
    )


async def test_every_field_reaches_the_engine(gateway: Gateway, tokenizer: FakeTokenizer) -> None:
    history = [
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "x"},
                {"type": "redacted_thinking", "data": "abc"},
                {"type": "text", "text": "Let me see.", "cache_control": {"type": "ephemeral"}},
                {
                    "type": "tool_use",
                    "id": "toolu_1",
                    "name": "weather",
                    "input": {"city": "Paris"},
                },
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": "Sun"},
                {"type": "tool_result", "tool_use_id": "t2", "content": [part("Rain")]},
                {"type": "tool_result", "tool_use_id": "t3"},
                part("And "),
                part("now?"),
            ],
        },
    ]
    status, _ = await ask(
        gateway,
        system=[{**part("Be brief."), "cache_control": {"type": "ephemeral"}}],
        messages=history,
        stop_sequences=["END"],
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        metadata={"user_id": "me"},
        service_tier="auto",
        tools=[TOOL],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
        thinking={"type": "enabled", "budget_tokens": 1024},
        cache_control={"type": "ephemeral"},
    )
    assert status == 200
    [talk] = tokenizer.talks.values()
    prompt, params = talk.generate.prompt, talk.generate.params
    assert prompt.messages == [
        {"role": "system", "content": [part("Be brief.")]},
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": [part("Let me see.")],
            "reasoning_content": "Hm.",
            "reasoning": "Hm.",
            "tool_calls": [
                {
                    "id": "toolu_1",
                    "type": "function",
                    "function": {"name": "weather", "arguments": '{"city":"Paris"}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "toolu_1", "content": "Sun"},
        {"role": "tool", "tool_call_id": "t2", "content": [part("Rain")]},
        {"role": "tool", "tool_call_id": "t3", "content": ""},
        {"role": "user", "content": [part("And "), part("now?")]},
    ]
    [tool] = prompt.tools
    assert tool["function"]["parameters"] == TOOL["input_schema"]
    assert prompt.template_kwargs == {"enable_thinking": True}
    assert prompt.add_generation_prompt
    assert params.structured_outputs is not None
    assert params.structured_outputs.given_as == "tool_choice"
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k) == (9, 0.5, 0.9, 7)
    assert (params.stop, params.thinking_token_budget) == (["END"], 1024)


def part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


async def test_an_answer_goes_on_where_the_assistant_stopped(
    gateway: Gateway, tokenizer: FakeTokenizer
) -> None:
    begun = [*MESSAGES, {"role": "assistant", "content": "My answer is"}]
    assert (await ask(gateway, messages=begun))[0] == 200
    [talk] = tokenizer.talks.values()
    assert talk.generate.prompt.continue_final_message
    assert not talk.generate.prompt.add_generation_prompt


async def test_thoughts_and_calls_are_blocks(gateway: Gateway, tokenizer: FakeTokenizer) -> None:
    tokenizer.script = saying(THOUGHT_AND_CALLS, finish_reason="stop")
    _, answer = await ask(gateway, tools=[TOOL])
    assert answer["stop_reason"] == "tool_use"
    ids = [block.pop("id") for block in answer["content"] if block["type"] == "tool_use"]
    assert len({*ids}) == 2
    assert all(each.startswith("toolu_") for each in ids)
    assert answer["content"] == [
        {"type": "thinking", "thinking": "Hm.", "signature": "pagemesh"},
        part("Let me see."),
        {"type": "tool_use", "name": "weather", "input": {"city": "Paris"}},
        {"type": "tool_use", "name": "weather", "input": {}},
    ]
    _, answer = await ask(gateway, tools=[TOOL], thinking={"type": "disabled"})
    assert [block["type"] for block in answer["content"]] == ["text", "tool_use", "tool_use"]


async def test_a_stream_tells_the_same(gateway: Gateway, tokenizer: FakeTokenizer) -> None:
    tokenizer.script = saying(THOUGHT_AND_CALLS, finish_reason="stop")
    told = await events(gateway, tools=[TOOL])
    assert all(name == payload["type"] for name, payload in told)
    names = [name for name, _ in told]
    assert names[:2] == ["message_start", "ping"]
    assert names[-2:] == ["message_delta", "message_stop"]
    first = told[0][1]["message"]
    assert (first["content"], first["usage"]["input_tokens"]) == ([], 3)
    inner = [payload for _, payload in told[2:-2]]
    assert [each["index"] for each in inner] == sorted(each["index"] for each in inner)
    deltas: dict[int, str] = {}
    kinds = {}
    for each in inner:
        if each["type"] == "content_block_start":
            kinds[each["index"]] = each["content_block"]["type"]
        elif each["type"] == "content_block_delta":
            _, text = each["delta"].values()
            deltas[each["index"]] = deltas.get(each["index"], "") + text
    assert list(kinds.values()) == ["thinking", "text", "tool_use", "tool_use"]
    assert deltas == {0: "Hm.pagemesh", 1: "Let me see.", 2: '{"city": "Paris"}', 3: "{}"}
    last = told[-2][1]
    assert last["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert last["usage"]["output_tokens"] == len(THOUGHT_AND_CALLS)


def test_a_call_that_was_cut_short_is_text() -> None:
    begun: list[Event] = [CallStart(0, "call_1", "f"), Arguments(0, '{"a": ')]
    assert whole_blocks(begun) == [{"type": "text", "text": '{"a": '}]


def test_neighbours_of_one_kind_are_one_block() -> None:
    pieces: list[Event] = [Reasoning("a"), Reasoning("b"), Content(""), Content("c"), Content("d")]
    assert [block["type"] for block in whole_blocks(pieces)] == ["thinking", "text"]
    blocks = BlockStream()
    started = [each for each in blocks.word(pieces) if each["type"] == "content_block_start"]
    assert [each["index"] for each in started] == [0, 1]


async def test_tokens_are_counted(gateway: Gateway, tokenizer: FakeTokenizer) -> None:
    body = {"model": "tiny", "messages": MESSAGES, "tools": [TOOL], "system": "abc"}
    answer = await gateway.post("/v1/messages/count_tokens", body, headers=KEY)
    assert answer == (200, {"input_tokens": 6})
    assert tokenizer.questions[0].prompt.tools
    wrong = {**body, "messages": []}
    status, answer = await gateway.post("/v1/messages/count_tokens", wrong, headers=KEY)
    assert (status, answer["error"]["type"]) == (400, "invalid_request_error")


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}


BAD: Any = [
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [5]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "robot", "content": ""}]}, "messages[0].role"),
    (
        {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "a"}]}]},
        "messages[0].content[0].name",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]},
        "messages[0].content[0].tool_use_id",
    ),
    ({"system": [IMAGE]}, "system[0].type"),
    ({"system": 5}, "system"),
    ({"temperature": 9}, "temperature"),
    ({"stop_sequences": [""]}, "stop_sequences"),
    ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name"),
    ({"tools": [{"name": "a"}]}, "tools[0].input_schema"),
    ({"tools": [{"name": "a", "input_schema": {"type": "array"}}]}, "tools[0].input_schema"),
    ({"tools": [{"name": "web", "type": "web_search_20250305"}]}, "tools[0].type"),
    ({"tools": [TOOL], "tool_choice": {"type": "some"}}, "tool_choice.type"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice"),
    (
        {"tools": [TOOL], "tool_choice": {"type": "auto", "disable_parallel_tool_use": 1}},
        "tool_choice.disable_parallel_tool_use",
    ),
    ({"thinking": {"type": "deep"}}, "thinking.type"),
    ({"thinking": {"type": "enabled", "budget_tokens": -1}}, "thinking.budget_tokens"),
    ({"metadata": {"user_id": 5}}, "metadata.user_id"),
    ({"output_config": {"format": {"type": "xml"}}}, "output_config.format"),
    ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
]


async def test_bad_fields_are_named(gateway: Gateway) -> None:
    for fields, name in BAD:
        body = {key: value for key, value in {**ASK, **fields}.items() if value is not None}
        status, answer = await gateway.post("/v1/messages", body, headers=KEY)
        assert (status, answer["type"]) == (400, "error"), name
        assert answer["error"]["type"] == "invalid_request_error"
        message = answer["error"]["message"]
        assert message.startswith((f"{name} ", f"{name}: ")), message


@pytest.mark.parametrize(
    ("status", "kind"),
    [(429, "rate_limit_error"), (503, "overloaded_error"), (500, "api_error")],
)
async def test_failures_of_the_mesh_are_in_anthropics_words(
    gateway: Gateway, tokenizer: FakeTokenizer, status: int, kind: str
) -> None:
    async def refuse(talk: Conversation) -> None:
        talk.fail(RequestError("not now", status=status))

    tokenizer.script = refuse
    for fields in ({}, {"stream": True}):
        body = {"type": "error", "error": {"type": kind, "message": "not now"}}
        assert await ask(gateway, **fields) == (status, body)


async def test_failures_of_http_are_in_anthropics_words(gateway: Gateway) -> None:
    wrong = {**KEY, "x-api-key": "wrong"}
    answers = [
        await gateway.post("/v1/messages", ASK, headers=wrong),
        await gateway.post("/v1/messages", ASK),
        await ask(gateway, model="claude"),
        await ask(gateway, "/v1/messages/batches"),
        await gateway.get("/v1/messages", headers=KEY),
        await ask(gateway, system="x" * 2**17),
    ]
    found = [(status, answer["error"]["type"]) for status, answer in answers]
    assert found == [
        (401, "authentication_error"),
        (401, "authentication_error"),
        (404, "not_found_error"),
        (404, "not_found_error"),
        (405, "invalid_request_error"),
        (413, "request_too_large"),
    ]
    bearer = {"authorization": "Bearer sk-test"}
    assert (await gateway.post("/v1/messages", ASK, headers=bearer))[0] == 200


async def test_a_failure_in_mid_stream_is_the_last_event(
    gateway: Gateway, tokenizer: FakeTokenizer
) -> None:
    seen = asyncio.Event()

    async def break_off(talk: Conversation) -> None:
        talk.accept()
        talk.delta("text", [1])
        await seen.wait()
        talk.delta("", [], error=WireError(500, None, None, "the engine broke"))

    tokenizer.script = break_off
    body = {**ASK, "stream": True}
    async with gateway.session.post(f"{gateway.url}/v1/messages", json=body, headers=KEY) as answer:
        assert await answer.content.readline() == b"event: message_start\n"
        seen.set()
        told = (await answer.text()).split("\n\n")
    failure = {"type": "error", "error": {"type": "api_error", "message": "the engine broke"}}
    assert (told[-1], json.loads(told[-2].removeprefix("event: error\ndata: "))) == ("", failure)


async def test_a_quiet_stream_is_kept_alive_by_pings(
    gateway: Gateway, tokenizer: FakeTokenizer
) -> None:
    """The clock is wound by hand."""
    tokenizer.script = None
    url, body = f"{gateway.url}/v1/messages", {**ASK, "stream": True}
    async with asyncio.TaskGroup() as group:
        asked = group.create_task(gateway.session.post(url, json=body, headers=KEY))
        talk = await tokenizer.asked.get()
        talk.accept()
        talk.delta("text", [1])
    async with asked.result() as answer:
        while b"text_delta" not in await answer.content.readuntil(b"\n\n"):
            pass
        gateway.core.backend.keep_alive.sweep(math.inf)
        ping = await answer.content.readuntil(b"\n\n")
    assert ping == b'event: ping\ndata: {"type":"ping"}\n\n'


async def test_the_client_tries_again_what_may_succeed(
    gateway: Gateway, tokenizer: FakeTokenizer
) -> None:
    calls: list[int] = []

    async def busy_at_first(talk: Conversation) -> None:
        calls.append(len(calls))
        if len(calls) == 1:
            talk.fail(RequestError("busy", status=429, retry_after_s=0.01))
        else:
            await say_hello(talk)

    tokenizer.script = busy_at_first
    schema = {"type": "object"}
    async with anthropic.AsyncAnthropic(base_url=gateway.url, api_key="sk-test") as client:
        answer = await client.messages.create(
            **ASK, output_config={"format": {"type": "json_schema", "schema": schema}}
        )
    assert answer.content[0].to_dict()["text"] == TEXT
    assert answer._request_id
    assert calls == [0, 1]
    rule = next(iter(tokenizer.talks.values())).generate.params.structured_outputs
    assert rule is not None
    assert rule.json == '{"type":"object"}'
