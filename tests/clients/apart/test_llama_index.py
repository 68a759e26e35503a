"""llama-index-llms-openai-like: OpenAILike, which asks for completions unless told otherwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import openai
import pytest
from asked import CAPITAL, INVENT, KEY, MODEL, ROOM_TOKENS, STORY, TOO_LONG, WEATHER, City, Person
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike
from mesh_process import MeshProcess


def get_weather(city: str) -> str:
    return f"Sunny, 21 degrees in {city}"


@pytest.fixture
def told(base_url: str) -> dict[str, Any]:
    return {
        "api_base": base_url,
        "api_key": KEY,
        "model": MODEL,
        "context_window": 2048,
        "max_retries": 0,
        "temperature": 0,
        "max_tokens": 24,
    }


@pytest.fixture
def llm(told: dict[str, Any]) -> OpenAILike:
    return OpenAILike(**told, is_chat_model=True, is_function_calling_model=True)


def test_the_stream_gives_what_the_whole_answer_says(llm: OpenAILike) -> None:
    messages = [ChatMessage(role="user", content=CAPITAL)]
    whole = llm.chat(messages)
    *_, last = llm.stream_chat(messages)
    assert "Paris" in whole.message.content
    assert last.message.content == whole.message.content
    assert whole.raw.usage.completion_tokens > 0


def test_completions_unless_told_that_it_is_chat(told: dict[str, Any], mesh: MeshProcess) -> None:
    llm = OpenAILike(**told)
    whole = llm.complete("The capital of France is")
    *_, last = llm.stream_complete("The capital of France is")
    assert "Paris" in whole.text
    assert last.text == whole.text
    assert whole.raw.object == "text_completion"


def test_a_forced_call_and_its_result(llm: OpenAILike) -> None:
    tool = FunctionTool.from_defaults(
        get_weather, description="Get the current weather in a city", fn_schema=City
    )
    history = [ChatMessage(role="user", content=WEATHER)]
    asked = llm.chat_with_tools(
        [tool], chat_history=history, tool_required=True, max_tokens=ROOM_TOKENS
    )
    [call] = llm.get_tool_calls_from_response(asked)
    assert (call.tool_name, set(call.tool_kwargs)) == ("get_weather", {"city"})
    result = tool(**call.tool_kwargs)
    told = ChatMessage(
        role="tool",
        content=str(result.content),
        additional_kwargs={"tool_call_id": call.tool_id},
    )
    after = llm.chat_with_tools([tool], chat_history=[*history, asked.message, told])
    assert after.message.content or llm.get_tool_calls_from_response(
        after, error_on_no_tool_call=False
    )


@pytest.mark.parametrize("by_schema", [True, False])
def test_a_nested_model(told: dict[str, Any], by_schema: bool) -> None:
    llm = OpenAILike(
        **told | {"max_tokens": ROOM_TOKENS, "temperature": 1},
        is_chat_model=True,
        is_function_calling_model=True,
        should_use_structured_outputs=by_schema,
    )
    person = llm.as_structured_llm(Person).complete(INVENT).raw
    assert isinstance(person, Person)


def test_embeddings(base_url: str) -> None:
    embedding = OpenAILikeEmbedding(model_name=MODEL, api_base=base_url, api_key=KEY)
    [one, other] = embedding.get_text_embedding_batch(["A cat.", "Interest rates."])
    assert embedding.get_text_embedding("A cat.") == pytest.approx(one, abs=1e-4)
    assert len(one) == len(other) == 576


def test_a_stream_that_is_left_ends_its_request(
    llm: OpenAILike, becomes_idle: Callable[[], None]
) -> None:
    stream = llm.stream_chat([ChatMessage(role="user", content=STORY)], max_tokens=1500)
    next(stream)
    stream.close()
    becomes_idle()


def test_errors_are_the_clients_own(told: dict[str, Any], llm: OpenAILike) -> None:
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        llm.complete(TOO_LONG)
    for wrong, error in (
        ({"api_key": "wrong"}, openai.AuthenticationError),
        ({"model": "no-such-model"}, openai.NotFoundError),
    ):
        with pytest.raises(error):
            OpenAILike(**told | wrong).complete(CAPITAL)
