"""litellm, through its providers `openai`, `hosted_vllm` and `anthropic`."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import litellm
import pytest
from asked import (
    CAPITAL,
    INVENT,
    KEY,
    MODEL,
    ROOM_TOKENS,
    STORY,
    TOO_LONG,
    WEATHER,
    WEATHER_TOOL,
    Person,
    user,
)
from mesh_process import MeshProcess

PROVIDERS = ("openai", "hosted_vllm", "anthropic")


@pytest.fixture(params=PROVIDERS)
def complete(request: pytest.FixtureRequest, mesh: MeshProcess) -> Callable[..., Any]:
    """litellm.completion by one of the providers; that of Anthropic adds /v1/messages itself."""
    base = mesh.base_url if request.param == "anthropic" else f"{mesh.base_url}/v1"
    return partial(
        litellm.completion,
        model=f"{request.param}/{MODEL}",
        api_base=base,
        api_key=KEY,
        temperature=0,
        max_tokens=24,
        num_retries=0,
    )


def test_the_stream_gives_what_the_whole_answer_says(complete: Callable[..., Any]) -> None:
    whole = complete(messages=user(CAPITAL))
    stream = complete(messages=user(CAPITAL), stream=True, stream_options={"include_usage": True})
    rebuilt = litellm.stream_chunk_builder(list(stream))
    assert "Paris" in whole.choices[0].message.content
    assert rebuilt.choices[0].message.content == whole.choices[0].message.content
    assert rebuilt.choices[0].finish_reason == whole.choices[0].finish_reason
    assert rebuilt.usage.completion_tokens == whole.usage.completion_tokens
    assert rebuilt.usage.prompt_tokens == whole.usage.prompt_tokens


def test_a_forced_call_and_its_result(complete: Callable[..., Any]) -> None:
    ask = {"messages": user(WEATHER), "tools": [WEATHER_TOOL]}
    forced = complete(
        **ask, tool_choice="required", parallel_tool_calls=False, max_tokens=ROOM_TOKENS
    ).choices[0]
    assert forced.finish_reason == "tool_calls"
    [call] = forced.message.tool_calls
    assert call.function.name == "get_weather"
    assert set(json.loads(call.function.arguments)) == {"city"}
    result = {"role": "tool", "tool_call_id": call.id, "content": "Sunny, 21 degrees"}
    messages = [*ask["messages"], forced.message, result]
    after = complete(messages=messages, tools=[WEATHER_TOOL], tool_choice="auto").choices[0]
    assert after.message.content or after.message.tool_calls


def test_a_nested_model(complete: Callable[..., Any]) -> None:
    answer = complete(
        messages=user(INVENT), response_format=Person, max_tokens=ROOM_TOKENS, temperature=1
    )
    Person.model_validate_json(answer.choices[0].message.content)


def test_errors_are_told_apart(complete: Callable[..., Any]) -> None:
    with pytest.raises(litellm.ContextWindowExceededError):
        complete(messages=user(TOO_LONG))
    with pytest.raises(litellm.AuthenticationError):
        complete(messages=user(CAPITAL), api_key="wrong")
    provider, _, _ = complete.keywords["model"].partition("/")
    with pytest.raises(litellm.NotFoundError):
        complete(messages=user(CAPITAL), model=f"{provider}/no-such-model")
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        complete(messages=user(CAPITAL), temperature=9)


def test_a_stream_that_is_closed_ends_its_request(
    complete: Callable[..., Any], becomes_idle: Callable[[], None]
) -> None:
    stream = complete(messages=user(STORY), stream=True, max_tokens=1500)
    next(iter(stream))
    stream.completion_stream.close()
    becomes_idle()


def test_text_completion(base_url: str) -> None:
    answer = litellm.text_completion(
        model=f"text-completion-openai/{MODEL}",
        prompt="The capital of France is",
        api_base=base_url,
        api_key=KEY,
        max_tokens=4,
        temperature=0,
    )
    assert "Paris" in answer.choices[0].text


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
def test_embeddings(base_url: str, provider: str) -> None:
    ask = {"model": f"{provider}/{MODEL}", "api_base": base_url, "api_key": KEY}
    answer = litellm.embedding(**ask, input=["A cat.", "Interest rates."])
    assert [len(row["embedding"]) for row in answer.data] == [576, 576]
    assert answer.usage.prompt_tokens > 0


def test_responses(base_url: str) -> None:
    ask = {"model": f"openai/{MODEL}", "api_base": base_url, "api_key": KEY}
    answer = litellm.responses(**ask, input=CAPITAL, temperature=0, max_output_tokens=24)
    assert "Paris" in answer.output_text
