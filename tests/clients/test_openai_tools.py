"""Tools, by the released openai client: whatever the model says comes back whole."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

pytestmark = pytest.mark.mesh
MAX_AT_ONCE = 8
ASK: Any = {
    "model": "smollm2-135m-instruct",
    "messages": [{"role": "user", "content": "What is the weather in Paris?"}],
    "temperature": 0,
    "max_tokens": 48,
}


def weather(**city: Any) -> Any:
    parameters = {
        "type": "object",
        "properties": {"city": {"type": "string", **city}},
        "required": ["city"],
        "additionalProperties": False,
    }
    function = {
        "name": "get_weather",
        "description": "Get the current weather in a city",
        "strict": True,
        "parameters": parameters,
    }
    return {"type": "function", "function": function}


TOOL = weather()


def test_the_stream_helper_gets_what_the_whole_answer_says(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(**ASK, tools=[TOOL]).choices[0]
    with client.chat.completions.stream(**ASK, tools=[TOOL]) as stream:
        streamed = stream.get_final_completion().choices[0]
    plain = client.chat.completions.create(**ASK).usage
    told = client.chat.completions.create(**ASK, tools=[TOOL]).usage
    assert whole.message.content or whole.message.tool_calls
    assert (streamed.message.content or None) == whole.message.content
    assert streamed.finish_reason == whole.finish_reason
    assert [call.function.arguments for call in streamed.message.tool_calls or []] == [
        call.function.arguments for call in whole.message.tool_calls or []
    ]
    assert plain is not None
    assert told is not None
    assert told.prompt_tokens > plain.prompt_tokens + 50


def test_forced_calls_are_valid_whatever_is_drawn(client: openai.OpenAI, n_runs: int) -> None:
    tools = [weather(maxLength=20)]
    drawn: Any = {**ASK, "tools": tools, "temperature": 1, "max_tokens": 1500}
    named = {"type": "function", "function": {"name": "get_weather"}}

    def run(seed: int) -> None:
        choice = "required" if seed % 2 else named
        ask = {**drawn, "tool_choice": choice, "seed": seed, "parallel_tool_calls": False}
        answer = client.chat.completions.create(**ask).choices[0]
        assert answer.message.content is None
        [call] = answer.message.tool_calls or []
        assert call.function.name == "get_weather"
        assert answer.finish_reason == "tool_calls"
        assert set(json.loads(call.function.arguments)) == {"city"}

    with ThreadPoolExecutor(MAX_AT_ONCE) as threads:
        list(threads.map(run, range(n_runs)))


def test_a_result_goes_back_to_the_model(client: openai.OpenAI) -> None:
    forced = client.chat.completions.create(
        **{**ASK, "max_tokens": 200},
        tools=[TOOL],
        tool_choice="required",
        parallel_tool_calls=False,
    )
    asked = forced.choices[0].message
    [call] = asked.tool_calls or []
    result = {"role": "tool", "tool_call_id": call.id, "content": "Sunny, 21 degrees"}
    history: Any = {**ASK, "messages": [*ASK["messages"], asked, result], "max_tokens": 4}
    told = client.chat.completions.create(**history, tools=[TOOL])
    assert told.choices[0].message.content
    assert told.usage is not None
    assert forced.usage is not None
    assert told.usage.prompt_tokens > forced.usage.prompt_tokens
