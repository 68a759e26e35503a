"""The Responses API through the real mesh, by the released openai client."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from pydantic import BaseModel

pytestmark = pytest.mark.mesh
MODEL: Any = {"model": "smollm2-135m-instruct", "temperature": 0}
TOOL: Any = {
    "type": "function",
    "name": "get_weather",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


class Person(BaseModel):
    name: str
    age: int


def test_a_conversation_is_kept(client: openai.OpenAI) -> None:
    first = client.responses.create(**MODEL, input="Name a city.", max_output_tokens=12)
    assert first.output_text
    assert client.responses.retrieve(first.id).output_text == first.output_text
    with client.responses.stream(
        **MODEL, input="Say hello.", previous_response_id=first.id, max_output_tokens=60
    ) as stream:
        text = "".join(e.delta for e in stream if e.type == "response.output_text.delta")
        second = stream.get_final_response()
    assert second.output_text == text
    items = client.responses.input_items.list(second.id, order="asc").data
    assert [item.id for item in items][1] == first.output[0].id
    chat = [
        {"role": "user", "content": "Name a city."},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "Say hello."},
    ]
    plain: Any = {**MODEL, "messages": chat, "max_tokens": 60}
    assert client.chat.completions.create(**plain).choices[0].message.content == text
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)


def test_rules_and_calls(client: openai.OpenAI) -> None:
    parsed = client.responses.parse(
        **MODEL, input="Give me a person", text_format=Person, max_output_tokens=200
    )
    assert isinstance(parsed.output_parsed, Person)
    called = client.responses.create(
        **MODEL, input="Is it warm in Rome?", tools=[TOOL], tool_choice="required", store=True
    )
    call = called.output[0]
    assert call.type == "function_call"
    assert set(json.loads(call.arguments)) == {"city"}
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "30 °C"}
    answer = client.responses.create(
        **MODEL, input=[result], previous_response_id=called.id, max_output_tokens=8
    )
    assert answer.output_text


def test_a_response_in_the_background(client: openai.OpenAI) -> None:
    begun = client.responses.create(
        **MODEL, input="Count.", background=True, stream=True, max_output_tokens=6
    )
    seen = list(begun)
    created, last = seen[0], seen[-1]
    assert created.type == "response.created"
    assert last.type == "response.incomplete"
    assert client.responses.retrieve(created.response.id) == last.response
    again = client.responses.retrieve(created.response.id, stream=True, starting_after=2)
    assert list(again) == seen[3:]
    endless: Any = {"max_output_tokens": 1000, "extra_body": {"ignore_eos": True}}
    running = client.responses.create(**MODEL, input="Count.", background=True, **endless)
    assert client.responses.cancel(running.id).status == "cancelled"
