"""POST /v1/chat/completions: golden shapes, streamed and not."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from gateway_fakes import PIECES, Gateway, read_events

MESSAGES = [{"role": "user", "content": "Hi!"}]
TEXT = "".join(PIECES)
USAGE = {
    "prompt_tokens": 3,
    "completion_tokens": 4,
    "total_tokens": 7,
    "prompt_tokens_details": {"cached_tokens": 2},
    "completion_tokens_details": {"reasoning_tokens": 0},
}


async def chat(gateway: Gateway, **fields: Any) -> dict[str, Any]:
    body = {"model": "tiny", "messages": MESSAGES, **fields}
    status, answer = await gateway.post("/v1/chat/completions", body)
    assert status == 200, answer
    return answer


async def stream(gateway: Gateway, **fields: Any) -> list[dict[str, Any]]:
    """The chunks before [DONE]."""
    body = {"model": "tiny", "messages": MESSAGES, "stream": True, **fields}
    url = gateway.url + "/v1/chat/completions"
    async with gateway.session.post(url, json=body) as response:
        assert response.status == 200
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert response.headers["cache-control"] == "no-cache"
        assert response.headers["x-accel-buffering"] == "no"
        assert response.headers["x-request-id"]
        events = await read_events(response)
    assert events[-1] == "[DONE]"
    return [msgspec.json.decode(event) for event in events[:-1]]


async def test_whole_answer_has_the_golden_shape(gateway: Gateway) -> None:
    answer = await chat(gateway)
    assert answer.pop("id").startswith("chatcmpl-")
    assert isinstance(answer.pop("created"), int)
    assert answer == {
        "object": "chat.completion",
        "model": "tiny",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": TEXT, "refusal": None},
                "logprobs": None,
                "finish_reason": "length",
                "stop_reason": None,
            }
        ],
        "usage": USAGE,
        "prompt_logprobs": None,
    }


async def test_stream_has_the_golden_shape(gateway: Gateway) -> None:
    chunks = await stream(gateway)
    assert len({(c["id"], c["created"], c["model"], c["object"]) for c in chunks}) == 1
    assert chunks[0]["object"] == "chat.completion.chunk"
    assert all("usage" not in chunk for chunk in chunks)
    first, *middle, last = [chunk["choices"][0] for chunk in chunks]
    assert first == {
        "index": 0,
        "delta": {"role": "assistant", "content": ""},
        "logprobs": None,
        "finish_reason": None,
    }
    assert "".join(choice["delta"]["content"] for choice in middle) == TEXT
    assert all(choice["delta"].keys() == {"content"} for choice in middle)
    assert all(choice["finish_reason"] is None for choice in middle)
    assert last == {
        "index": 0,
        "delta": {},
        "logprobs": None,
        "finish_reason": "length",
        "stop_reason": None,
    }


async def test_usage_comes_last_and_only_when_asked_for(gateway: Gateway) -> None:
    *chunks, last = await stream(gateway, stream_options={"include_usage": True})
    assert all(chunk["usage"] is None and chunk["choices"] for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"] == USAGE
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


async def test_continuous_usage_is_cumulative(gateway: Gateway) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = await stream(gateway, stream_options=options)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 4


async def test_each_choice_has_its_own_role_text_and_finish(gateway: Gateway) -> None:
    chunks = await stream(gateway, n=3, stream_options={"include_usage": True})
    for index in range(3):
        own = [
            c["choices"][0] for c in chunks if c["choices"] and c["choices"][0]["index"] == index
        ]
        assert own[0]["delta"]["role"] == "assistant"
        assert [c["finish_reason"] for c in own[:-1]] == [None] * (len(own) - 1)
        assert own[-1]["finish_reason"] == "length"
        mark = str(index) if index else ""
        text = "".join(c["delta"].get("content", "") for c in own)
        assert text == "".join(piece + mark for piece in PIECES)
    assert chunks[-1]["usage"]["completion_tokens"] == 12
    assert chunks[-1]["usage"]["prompt_tokens"] == 3


async def test_whole_n_counts_the_prompt_once(gateway: Gateway) -> None:
    answer = await chat(gateway, n=2)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert answer["usage"]["prompt_tokens"] == 3
    assert answer["usage"]["completion_tokens"] == 8


async def test_logprobs_of_the_stream_equal_those_of_the_whole(gateway: Gateway) -> None:
    whole = (await chat(gateway, logprobs=True, top_logprobs=2))["choices"][0]["logprobs"]
    chunks = await stream(gateway, logprobs=True, top_logprobs=2)
    streamed = [
        row for c in chunks for row in (c["choices"][0]["logprobs"] or {"content": []})["content"]
    ]
    assert streamed == whole["content"]
    assert whole["refusal"] is None
    assert whole["content"][0] == {
        "token": "Hello",
        "logprob": -0.5,
        "bytes": list(b"Hello"),
        "top_logprobs": [
            {"token": "Hello", "logprob": -0.5, "bytes": list(b"Hello")},
            {"token": "nine", "logprob": -1.5, "bytes": list(b"nine")},
        ],
    }


async def test_logprobs_without_top_has_empty_lists(gateway: Gateway) -> None:
    rows = (await chat(gateway, logprobs=True))["choices"][0]["logprobs"]["content"]
    assert len(rows) == 4
    assert all(row["top_logprobs"] == [] for row in rows)


async def test_prompt_logprobs_are_an_extra_field(gateway: Gateway) -> None:
    rows = (await chat(gateway, prompt_logprobs=1))["prompt_logprobs"]
    assert rows[0] is None
    assert rows[1] == {str(ord("i")): {"logprob": -0.5, "rank": 1, "decoded_token": "i"}}


async def test_stop_reason_names_the_stop_string(gateway: Gateway) -> None:
    choice = (await chat(gateway, stop="END"))["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "END")


async def test_the_alias_is_echoed_and_the_model_may_be_left_out(gateway: Gateway) -> None:
    assert (await chat(gateway, model="tiny-alias"))["model"] == "tiny-alias"
    assert (await chat(gateway, model=None))["model"] == "tiny"


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions/", "/chat/completions", "/chat/completions/"]
)
async def test_every_spelling_of_the_path_answers(gateway: Gateway, path: str) -> None:
    status, _ = await gateway.post(path, {"model": "tiny", "messages": MESSAGES})
    assert status == 200
