"""POST /v1/completions: prompt forms, echo, scoring, logprobs, streams."""

from __future__ import annotations

import itertools
import json
import math
from typing import Any

import msgspec
import pytest
from gateway_fakes import (
    PIECES,
    Conversation,
    FakeTokenizer,
    Gateway,
    prompt_ids,
    read_events,
)

from pagemesh.shared.messages import TokenLogprob

TEXT = "".join(PIECES)


async def complete(gateway: Gateway, **fields: Any) -> dict[str, Any]:
    status, answer = await gateway.post("/v1/completions", {"model": "tiny", **fields})
    assert status == 200, answer
    return answer


async def stream(gateway: Gateway, **fields: Any) -> list[dict[str, Any]]:
    body = {"model": "tiny", "stream": True, **fields}
    async with gateway.session.post(gateway.url + "/v1/completions", json=body) as response:
        assert response.status == 200
        events = await read_events(response)
    assert events[-1] == "[DONE]"
    return [msgspec.json.decode(event) for event in events[:-1]]


async def test_whole_answer_has_the_golden_shape(gateway: Gateway) -> None:
    answer = await complete(gateway, prompt="Hi!")
    assert answer.pop("id").startswith("cmpl-")
    assert isinstance(answer.pop("created"), int)
    assert answer == {
        "object": "text_completion",
        "model": "tiny",
        "choices": [
            {
                "index": 0,
                "text": TEXT,
                "logprobs": None,
                "finish_reason": "length",
                "stop_reason": None,
                "prompt_logprobs": None,
            }
        ],
        "usage": {
            "prompt_tokens": 3,
            "completion_tokens": 4,
            "total_tokens": 7,
            "prompt_tokens_details": {"cached_tokens": 2},
            "completion_tokens_details": {"reasoning_tokens": 0},
        },
    }


async def test_stream_has_text_deltas_and_a_finish(gateway: Gateway) -> None:
    *chunks, last = await stream(gateway, prompt="Hi!", stream_options={"include_usage": True})
    assert all(c["object"] == "text_completion" and c["usage"] is None for c in chunks)
    choices = [chunk["choices"][0] for chunk in chunks]
    assert "".join(choice["text"] for choice in choices) == TEXT
    assert [c["finish_reason"] for c in choices] == [None] * (len(choices) - 1) + ["length"]
    assert last["choices"] == []
    assert last["usage"]["total_tokens"] == 7


@pytest.mark.parametrize(
    ("prompt", "ids"),
    [
        ("ab", [[97, 98]]),
        (["ab", "c"], [[97, 98], [99]]),
        ([97, 98], [[97, 98]]),
        ([[97, 98], [99]], [[97, 98], [99]]),
    ],
)
async def test_every_prompt_form(
    gateway: Gateway, tokenizer: FakeTokenizer, prompt: Any, ids: list[list[int]]
) -> None:
    answer = await complete(gateway, prompt=prompt, n=2)
    asked = [prompt_ids(talk.generate.prompt) for talk in tokenizer.talks.values()]
    assert asked == ids
    assert [c["index"] for c in answer["choices"]] == list(range(2 * len(ids)))
    # Choice index = prompt index * n + i; the fake marks choice 1 of each prompt.
    marked = "".join(piece + "1" for piece in PIECES)
    assert [c["text"] for c in answer["choices"]] == [TEXT, marked] * len(ids)
    assert answer["usage"]["prompt_tokens"] == sum(map(len, ids))
    assert answer["usage"]["completion_tokens"] == 8 * len(ids)


async def test_default_max_tokens_is_sixteen(gateway: Gateway, tokenizer: FakeTokenizer) -> None:
    await complete(gateway, prompt="a")
    (talk,) = tokenizer.talks.values()
    assert talk.generate.params.max_tokens == 16


async def test_a_salt_and_a_cache_key_travel(gateway: Gateway, tokenizer: FakeTokenizer) -> None:
    await complete(gateway, prompt="a", cache_salt="pepper", prompt_cache_key="user 1")
    (talk,) = tokenizer.talks.values()
    assert (talk.generate.cache_salt, talk.generate.cache_key) == ("pepper", "user 1")


async def test_echo_puts_the_prompt_in_front_of_every_choice(gateway: Gateway) -> None:
    answer = await complete(gateway, prompt="Hi!", echo=True, n=2)
    assert [c["text"][:8] for c in answer["choices"]] == ["Hi!Hello"] * 2
    chunks = await stream(gateway, prompt="Hi!", echo=True, n=2)
    for index in range(2):
        own = [c["choices"][0]["text"] for c in chunks if c["choices"][0]["index"] == index]
        assert "".join(own) == answer["choices"][index]["text"]


async def test_scoring_a_prompt_generates_nothing(gateway: Gateway) -> None:
    answer = await complete(gateway, prompt="Hi!", echo=True, max_tokens=0, logprobs=1)
    choice = answer["choices"][0]
    assert choice["text"] == "Hi!"
    assert choice["finish_reason"] == "length"
    assert choice["logprobs"] == {
        "tokens": ["H", "i", "!"],
        "token_logprobs": [None, -0.5, -0.5],
        "top_logprobs": [None, {"i": -0.5}, {"!": -0.5}],
        "text_offset": [0, 1, 2],
    }
    assert answer["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize("streamed", [False, True])
async def test_one_question_asks_for_the_first_tokens_of_all_echoes(
    gateway: Gateway, tokenizer: FakeTokenizer, streamed: bool
) -> None:
    prompts = ["ab", "cd", "ae", "cf", "b"]
    fields = {"prompt": prompts, "echo": True, "logprobs": 1}
    chunks = await stream(gateway, **fields) if streamed else [await complete(gateway, **fields)]
    echoed: dict[int, list[str]] = {}
    for choice in [choice for chunk in chunks for choice in chunk["choices"]]:
        echoed.setdefault(choice["index"], []).extend(choice["logprobs"]["tokens"])
    assert [echoed[i][: len(prompt)] for i, prompt in enumerate(prompts)] == list(
        map(list, prompts)
    )
    (question,) = tokenizer.questions
    assert sorted(prompt_ids(question.prompt)) == [97, 98, 99]


@pytest.mark.parametrize("echo", [False, True])
async def test_streamed_logprobs_equal_the_whole(gateway: Gateway, echo: bool) -> None:
    fields = {"prompt": "Hi!", "echo": echo, "logprobs": 2}
    whole = (await complete(gateway, **fields))["choices"][0]["logprobs"]
    streamed: dict[str, list[Any]] = {name: [] for name in whole}
    for chunk in await stream(gateway, **fields):
        for name, values in chunk["choices"][0]["logprobs"].items():
            streamed[name] += values
    assert streamed == whole
    text = ("Hi!" if echo else "") + TEXT
    offsets = [*whole["text_offset"], len(text)]
    spans = [text[a:b] for a, b in itertools.pairwise(offsets)]
    assert spans == whole["tokens"]


async def test_logprobs_zero_shows_the_chosen_token(gateway: Gateway) -> None:
    choice = (await complete(gateway, prompt="a", logprobs=0, max_tokens=1))["choices"][0]
    assert choice["logprobs"]["top_logprobs"] == [{"Hello": -0.5}]


@pytest.mark.parametrize("lowest", [-math.inf, math.nan, -1e30])
async def test_impossible_tokens_leave_the_json_finite(
    gateway: Gateway, tokenizer: FakeTokenizer, lowest: float
) -> None:
    """Sampling from the best token alone leaves no probability to any other."""

    async def score(talk: Conversation) -> None:
        alternatives = [(7, "x", b"x", lowest, 1)]
        row = TokenLogprob(8, "i", b"i", lowest, 900, alternatives)
        talk.accept()
        talk.delta("y", [9], prompt_logprobs=[None, row], logprobs=[row], finish_reason="length")

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    tokenizer.script = score
    body = {"prompt": "Hi", "echo": True, "logprobs": 1, "top_k": 1, "max_tokens": 1}
    async with gateway.session.post(gateway.url + "/v1/completions", json=body) as response:
        assert response.status == 200
        choice = json.loads(await response.text(), parse_constant=refuse)["choices"][0]
    assert choice["logprobs"]["token_logprobs"] == [None, -9999.0, -9999.0]
    assert choice["logprobs"]["top_logprobs"][1:] == [{"x": -9999.0, "i": -9999.0}] * 2
    assert choice["prompt_logprobs"][1]["8"]["rank"] == 900


async def test_prompt_logprobs_stand_in_each_choice(gateway: Gateway) -> None:
    answer = await complete(gateway, prompt=["ab", "cd"], prompt_logprobs=0)
    rows = [choice["prompt_logprobs"] for choice in answer["choices"]]
    assert [list(row[1]) for row in rows] == [[str(ord("b"))], [str(ord("d"))]]
