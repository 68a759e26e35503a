"""Prompts without answers, and token ids without texts."""

from __future__ import annotations

import json
from typing import Any

from gateway_fakes import FakeTokenizer, Gateway, read_events

CHAT: Any = {"messages": [{"role": "user", "content": "Hi!"}], "temperature": 0.5, "max_tokens": 3}


async def test_a_conversation_is_rendered(gateway: Gateway, tokenizer: FakeTokenizer) -> None:
    rule = {"choice": ["a", "b"]}
    body = CHAT | {"structured_outputs": rule, "priority": 3, "cache_salt": "s"}
    status, answer = await gateway.post("/v1/chat/completions/render", body)
    assert answer.pop("request_id").startswith("chatcmpl-")
    params = {"max_tokens": 3, "temperature": 0.5, "structured_outputs": rule}
    assert (status, answer) == (
        200,
        {
            "model": "tiny",
            "token_ids": [72, 105, 33],
            "text": "Hi!",
            "sampling_params": params,
            "stream": False,
            "priority": 3,
            "cache_salt": "s",
        },
    )
    assert not tokenizer.talks
    status, answer = await gateway.post("/inference/v1/generate", answer)
    assert (status, len(answer["choices"][0]["token_ids"])) == (200, 3)
    [talk] = tokenizer.talks.values()
    assert talk.generate.params.temperature == 0.5
    assert (talk.generate.priority, talk.generate.cache_salt) == (3, "s")


async def test_every_prompt_of_a_completion_is_rendered(gateway: Gateway) -> None:
    status, answer = await gateway.post("/completions/render", {"prompt": ["a", "bc"], "seed": 5})
    assert (status, [prompt["token_ids"] for prompt in answer]) == (200, [[97], [98, 99]])
    assert answer[0]["sampling_params"] == {"max_tokens": 16, "seed": 5}


REFUSED: Any = [
    ("/v1/chat/completions/render", CHAT | {"temperature": 9}, "temperature"),
    ("/v1/chat/completions/render", {"messages": []}, "messages"),
    ("/v1/completions/render", {"prompt": []}, "prompt"),
    ("/inference/v1/generate", {"token_ids": []}, "token_ids"),
    ("/inference/v1/generate", {"token_ids": [5000]}, "token_ids"),
    ("/inference/v1/generate", {"token_ids": [1] * 5000}, "token_ids"),
    ("/inference/v1/generate", {"token_ids": [1], "request_id": "\n"}, "request_id"),
    ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {"n": 0}}, "n"),
    (
        "/inference/v1/generate",
        {"token_ids": [1], "sampling_params": {"use_beam_search": True}},
        "use_beam_search",
    ),
]


async def test_what_is_refused(gateway: Gateway) -> None:
    for path, body, param in REFUSED:
        status, answer = await gateway.post(path, body)
        assert (status, answer["error"]["param"]) == (400, param), body


async def test_tokens_in_tokens_out(gateway: Gateway, tokenizer: FakeTokenizer) -> None:
    ask = {"token_ids": [1, 2], "sampling_params": {"n": 2, "logprobs": 1}, "request_id": "mine"}
    status, answer = await gateway.post("/inference/v1/generate", ask)
    assert (status, answer["request_id"], answer["usage"]["completion_tokens"]) == (200, "mine", 8)
    assert [choice["token_ids"] for choice in answer["choices"]] == [[10, 11, 12, 13]] * 2
    assert answer["choices"][0]["finish_reason"] == "length"
    assert len(answer["choices"][0]["logprobs"]["content"]) == 4
    [talk] = tokenizer.talks.values()
    assert not talk.generate.params.detokenize
    ask |= {"stream": True, "stream_options": {"include_usage": True}}
    async with gateway.session.post(f"{gateway.url}/inference/v1/generate", json=ask) as response:
        assert response.headers["x-request-id"] == "mine"
        *chunks, usage, done = await read_events(response)
    assert done == "[DONE]"
    assert json.loads(usage)["usage"] == answer["usage"]
    ids: list[list[int]] = [[], []]
    for chunk in map(json.loads, chunks):
        [choice] = chunk["choices"]
        ids[choice["index"]] += choice["token_ids"]
    assert ids == [choice["token_ids"] for choice in answer["choices"]]
