"""The released openai client against the gateway: what people change is the base URL."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from gateway_fakes import (
    PIECES,
    Conversation,
    FakeTokenizer,
    Gateway,
    say_hello,
    settings_for,
)

from pagemesh.shared.errors import RequestError
from pagemesh.shared.messages import WireError
from pagemesh.shared.settings import Settings

TEXT = "".join(PIECES)
MESSAGES: Any = [{"role": "user", "content": "Hi!"}]
KEY = "sk-test"


@pytest.fixture
def settings(redis_url: str, mesh_name: str) -> Settings:
    return settings_for(redis_url, mesh_name, api_key=[KEY])


@pytest.fixture
async def client(gateway: Gateway) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=gateway.url + "/v1", api_key=KEY, max_retries=0
    ) as client:
        yield client


async def test_chat(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(model="tiny", messages=MESSAGES, stop=["END"])
    assert answer.choices[0].message.content == TEXT
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.total_tokens == 7
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 2
    assert answer._request_id


async def test_chat_stream_with_two_choices_and_usage(client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model="tiny",
        messages=MESSAGES,
        n=2,
        stream=True,
        stream_options={"include_usage": True},
    )
    texts, finishes, usage = ["", ""], {}, None
    async for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            if choice.finish_reason is not None:
                finishes[choice.index] = choice.finish_reason
        usage = chunk.usage or usage
    assert texts == [TEXT, "".join(piece + "1" for piece in PIECES)]
    assert finishes == {0: "length", 1: "length"}
    assert usage is not None
    assert usage.completion_tokens == 8


async def test_the_stream_helper_accumulates(client: openai.AsyncOpenAI) -> None:
    async with client.chat.completions.stream(
        model="tiny", messages=MESSAGES, logprobs=True, top_logprobs=1, stop=["END"]
    ) as stream:
        kinds = [event.type async for event in stream]
        final = await stream.get_final_completion()
    assert "content.delta" in kinds
    assert final.choices[0].message.content == TEXT
    logprobs = final.choices[0].logprobs
    assert logprobs is not None
    assert [row.token for row in logprobs.content or []] == PIECES


async def test_chat_logprobs(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        model="tiny", messages=MESSAGES, logprobs=True, top_logprobs=2
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    rows = logprobs.content or []
    assert [bytes(row.bytes or []) for row in rows] == [piece.encode() for piece in PIECES]
    assert [top.token for top in rows[1].top_logprobs] == [PIECES[1], "nine"]


async def test_completions(client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(
        model="tiny", prompt=["a", "b"], n=2, logprobs=1, echo=True, max_tokens=2
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.choices[2].text == "b" + "".join(PIECES[:2])
    logprobs = answer.choices[2].logprobs
    assert logprobs is not None
    assert logprobs.tokens == ["b", *PIECES[:2]]
    assert (logprobs.token_logprobs or [])[1:] == [-0.5, -0.5]
    stream = await client.completions.create(model="tiny", prompt="a", stream=True)
    assert "".join([chunk.choices[0].text async for chunk in stream]) == TEXT


async def test_models(client: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in client.models.list()] == ["tiny", "tiny-alias"]
    assert (await client.models.retrieve("tiny")).id == "tiny"


async def test_raw_responses_carry_the_request_id(client: openai.AsyncOpenAI) -> None:
    raw = await client.chat.completions.with_raw_response.create(
        model="tiny", messages=MESSAGES, extra_headers={"X-Request-Id": "mine-1"}
    )
    assert raw.headers["x-request-id"] == "mine-1"
    assert raw.parse().choices[0].message.content == TEXT


async def test_extra_body_reaches_the_sampler(
    client: openai.AsyncOpenAI, tokenizer: FakeTokenizer
) -> None:
    extra = {"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "ignore_eos": True}
    await client.chat.completions.create(model="tiny", messages=MESSAGES, extra_body=extra)
    (talk,) = tokenizer.talks.values()
    params = talk.generate.params
    assert (params.top_k, params.min_p, params.repetition_penalty) == (5, 0.1, 1.1)
    assert params.ignore_eos
    assert params.max_tokens is None


async def test_error_classes(client: openai.AsyncOpenAI, tokenizer: FakeTokenizer) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        await client.chat.completions.create(model="tiny", messages=MESSAGES, temperature=9)
    assert (bad.value.param, bad.value.code) == ("temperature", "invalid_value")
    assert bad.value.request_id
    with pytest.raises(openai.NotFoundError) as missing:
        await client.chat.completions.create(model="gpt-9", messages=MESSAGES)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.AuthenticationError):
        await client.with_options(api_key="wrong").models.list()
    tokenizer.script = refusing(RequestError("busy", status=429))
    with pytest.raises(openai.RateLimitError):
        await client.chat.completions.create(model="tiny", messages=MESSAGES)


def refusing(error: RequestError) -> Any:
    async def refuse(talk: Conversation) -> None:
        talk.accept()
        talk.fail(error)

    return refuse


async def test_a_failure_in_mid_stream_raises(
    client: openai.AsyncOpenAI, tokenizer: FakeTokenizer
) -> None:
    seen = asyncio.Event()

    async def break_off(talk: Conversation) -> None:
        talk.accept()
        talk.delta("text", [1])
        await seen.wait()
        talk.delta("", [], error=WireError(500, None, None, "the engine broke"))

    tokenizer.script = break_off
    stream = await client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True)
    await anext(stream)
    seen.set()
    with pytest.raises(openai.APIError, match="the engine broke"):
        [chunk async for chunk in stream]


async def test_retries_obey_the_headers(gateway: Gateway, tokenizer: FakeTokenizer) -> None:
    """A 429 is tried again; a 500 that cannot succeed says so, and is not."""
    calls: list[int] = []

    def failing_first(status: int) -> Any:
        async def script(talk: Conversation) -> None:
            calls.append(status)
            if len(calls) == 1:
                talk.fail(RequestError("not now", status=status))
            else:
                await say_hello(talk)

        return script

    async with openai.AsyncOpenAI(
        base_url=gateway.url + "/v1", api_key=KEY, max_retries=2
    ) as client:
        tokenizer.script = failing_first(429)
        answer = await client.chat.completions.create(model="tiny", messages=MESSAGES)
        assert answer.choices[0].message.content == TEXT
        assert calls == [429, 429]
        calls.clear()
        tokenizer.script = failing_first(500)
        with pytest.raises(openai.InternalServerError):
            await client.chat.completions.create(model="tiny", messages=MESSAGES)
        assert calls == [500]
