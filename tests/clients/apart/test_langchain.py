"""langchain-openai: ChatOpenAI, OpenAI and OpenAIEmbeddings."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import reduce
from operator import add
from typing import Any

import openai
import pytest
from asked import CAPITAL, INVENT, KEY, MODEL, ROOM_TOKENS, STORY, TOO_LONG, WEATHER, City, Person
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings


@tool(args_schema=City)
def get_weather(city: str) -> str:
    """Get the current weather in a city"""
    return f"Sunny, 21 degrees in {city}"


@pytest.fixture
def told(base_url: str) -> dict[str, Any]:
    """How LangChain is told of a server."""
    return {"base_url": base_url, "api_key": KEY, "model": MODEL, "max_retries": 0}


@pytest.fixture
def llm(told: dict[str, Any]) -> ChatOpenAI:
    return ChatOpenAI(**told, temperature=0, max_tokens=24)


def added_up(chunks: Iterable[Any]) -> Any:
    return reduce(add, chunks)


def test_the_sum_of_the_chunks_is_the_whole_answer(llm: ChatOpenAI) -> None:
    """With a base URL of one's own usage is not asked for unless one says so."""
    whole = llm.invoke(CAPITAL)
    assert "Paris" in whole.content
    chunks = list(llm.stream(CAPITAL, stream_usage=True))
    assert [chunk.usage_metadata is not None for chunk in chunks].count(True) == 1
    streamed = added_up(chunks)
    assert streamed.content == whole.content
    for name in ("input_tokens", "output_tokens", "total_tokens"):
        assert streamed.usage_metadata[name] == whole.usage_metadata[name]
    assert streamed.response_metadata["finish_reason"] == whole.response_metadata["finish_reason"]
    assert not any(chunk.usage_metadata for chunk in llm.stream(CAPITAL))


def test_a_stream_that_is_left_ends_its_request(
    told: dict[str, Any], becomes_idle: Callable[[], None]
) -> None:
    llm = ChatOpenAI(**told, temperature=0, max_tokens=1500)
    for chunk in llm.stream(STORY):
        if chunk.content:
            break
    becomes_idle()


def test_a_forced_call_and_its_result(llm: ChatOpenAI) -> None:
    forced = llm.bind_tools([get_weather], tool_choice="any", parallel_tool_calls=False)
    asked = forced.invoke(WEATHER, max_tokens=ROOM_TOKENS)
    [call] = asked.tool_calls
    assert (call["name"], set(call["args"])) == ("get_weather", {"city"})
    streamed = added_up(forced.stream(WEATHER, max_tokens=ROOM_TOKENS))
    assert [each["args"] for each in streamed.tool_calls] == [call["args"]]
    result = get_weather.invoke(call)
    assert isinstance(result, ToolMessage)
    after = llm.bind_tools([get_weather]).invoke([HumanMessage(WEATHER), asked, result])
    assert after.content or after.tool_calls


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_a_nested_model(told: dict[str, Any], method: str) -> None:
    llm = ChatOpenAI(**told, temperature=1, max_tokens=ROOM_TOKENS)
    person = llm.with_structured_output(Person, method=method).invoke(INVENT)
    assert isinstance(person, Person)


def test_logprobs(llm: ChatOpenAI) -> None:
    answer = llm.bind(logprobs=True, top_logprobs=2).invoke(CAPITAL)
    rows = answer.response_metadata["logprobs"]["content"]
    assert "".join(row["token"] for row in rows).startswith(answer.content)
    assert all(len(row["top_logprobs"]) == 2 for row in rows)


def test_text_completion(told: dict[str, Any]) -> None:
    llm = OpenAI(**told, temperature=0, max_tokens=4)
    whole = llm.invoke("The capital of France is")
    assert "Paris" in whole
    assert "".join(llm.stream("The capital of France is")) == whole


def test_the_responses_api(told: dict[str, Any], llm: ChatOpenAI) -> None:
    by_responses = ChatOpenAI(**told, temperature=0, max_tokens=24, use_responses_api=True)
    answer = by_responses.invoke(CAPITAL)
    assert answer.text == llm.invoke(CAPITAL).content
    streamed = added_up(by_responses.stream(CAPITAL))
    assert streamed.text == answer.text
    assert streamed.usage_metadata["output_tokens"] == answer.usage_metadata["output_tokens"]


def test_embeddings(told: dict[str, Any]) -> None:
    """Texts go as they are: their ids, which LangChain sends otherwise, are of OpenAI's models."""
    embeddings = OpenAIEmbeddings(**told, check_embedding_ctx_length=False)
    one, other = embeddings.embed_documents(["A cat.", "Interest rates."])
    assert embeddings.embed_query("A cat.") == pytest.approx(one, abs=1e-4)
    assert len(one) == len(other) == 576


def test_errors_are_told_apart(told: dict[str, Any], llm: ChatOpenAI) -> None:
    with pytest.raises(ContextOverflowError):
        llm.invoke(TOO_LONG)
    with pytest.raises(openai.AuthenticationError):
        ChatOpenAI(**{**told, "api_key": "wrong"}).invoke(CAPITAL)
    with pytest.raises(openai.NotFoundError):
        ChatOpenAI(**{**told, "model": "no-such-model"}).invoke(CAPITAL)
    with pytest.raises(openai.BadRequestError, match="temperature"):
        llm.invoke(CAPITAL, temperature=9)
