"""The released anthropic client against a real mesh: what people change is the base URL."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
import requests
from mesh_process import MeshProcess

pytestmark = pytest.mark.mesh
ASK: Any = {
    "model": "smollm2-135m-instruct",
    "max_tokens": 24,
    "extra_body": {"temperature": 0},
    "system": [{"type": "text", "text": "You are a brief assistant."}],
    "messages": [{"role": "user", "content": "Where is Paris? One sentence."}],
}
TOOL: Any = {
    "name": "get_weather",
    "description": "Get the current weather in a city",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


@pytest.fixture
def client(mesh: MeshProcess) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=mesh.base_url, api_key="none", max_retries=0) as client:
        yield client


def test_the_stream_helper_gets_what_the_whole_answer_says(
    client: anthropic.Anthropic, mesh: MeshProcess
) -> None:
    whole = client.messages.create(**ASK)
    with client.messages.stream(**ASK) as stream:
        text = "".join(stream.text_stream)
        streamed = stream.get_final_message()
    [block] = whole.content
    assert block.type == "text"
    assert block.text == text == streamed.content[0].to_dict()["text"]
    assert (whole.stop_reason, whole.role) == (streamed.stop_reason, "assistant")
    chat = {
        **{name: ASK[name] for name in ("model", "max_tokens")},
        "temperature": 0,
        "messages": [{"role": "system", "content": ASK["system"]}, *ASK["messages"]],
    }
    url = f"{mesh.base_url}/v1/chat/completions"
    same = requests.post(url, json=chat, timeout=60).json()
    assert same["choices"][0]["message"]["content"] == text
    for usage in (whole.usage, streamed.usage):
        cached_tokens = usage.cache_read_input_tokens or 0
        assert usage.input_tokens + cached_tokens == same["usage"]["prompt_tokens"]
        assert usage.output_tokens == same["usage"]["completion_tokens"]
    counted = client.messages.count_tokens(
        **{name: ASK[name] for name in ("model", "system", "messages")}
    )
    assert counted.input_tokens == same["usage"]["prompt_tokens"]
    assert whole._request_id


def test_stop_sequences_and_prefills(client: anthropic.Anthropic) -> None:
    begun = [*ASK["messages"], {"role": "assistant", "content": "Paris is in"}]
    plain = client.messages.create(**{**ASK, "messages": begun})
    assert plain.content[0].type == "text"
    text = plain.content[0].text
    word = text.split()[1]
    stopped = client.messages.create(**{**ASK, "messages": begun}, stop_sequences=[word])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", word)
    assert stopped.content[0].type == "text"
    assert stopped.content[0].text == text.partition(word)[0]


def test_forced_tools_and_their_results(client: anthropic.Anthropic) -> None:
    forced: Any = {
        **ASK,
        "max_tokens": 200,
        "tools": [TOOL],
        "tool_choice": {"type": "tool", "name": "get_weather"},
    }
    with client.messages.stream(**forced) as stream:
        pieces = [event.partial_json for event in stream if event.type == "input_json"]
        streamed = stream.get_final_message()
    whole = client.messages.create(**forced)
    assert whole.stop_reason == streamed.stop_reason == "tool_use"
    [call], [same] = whole.content, streamed.content
    assert call.type == same.type == "tool_use"
    assert call.input == same.input == json.loads("".join(pieces))
    assert set(same.input) == {"city"}
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "Sunny, 21 degrees"}
    history = [
        *ASK["messages"],
        {"role": "assistant", "content": whole.content},
        {"role": "user", "content": [result]},
    ]
    answer = client.messages.create(**{**ASK, "messages": history, "tools": [TOOL]})
    assert answer.content
    assert answer.usage.output_tokens


def test_error_classes(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError) as missing:
        client.messages.create(**{**ASK, "model": "claude"})
    assert missing.value.type == "not_found_error"
    with pytest.raises(anthropic.BadRequestError, match="maximum context length"):
        client.messages.create(**{**ASK, "system": "word " * 4000})
    image = {"type": "image", "source": {"type": "url", "url": "http://x/y.png"}}
    messages: Any = [{"role": "user", "content": [image]}]
    with pytest.raises(anthropic.BadRequestError, match=r"messages\[0\].content\[0\].type 'image'"):
        client.messages.create(**{**ASK, "messages": messages})
    with pytest.raises(anthropic.APIStatusError) as late:
        client.messages.create(**{**ASK, "extra_body": {"timeout": 0.001}})
    assert late.value.type == "timeout_error"
