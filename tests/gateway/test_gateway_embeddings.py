"""Embeddings, field by field, over a tokenizer service that makes vectors by itself."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from itertools import count
from typing import Any, Final

import openai
import pytest
from gateway_fakes import (
    CARD,
    MAX_MODEL_LEN,
    Conversation,
    FakeTokenizer,
    Gateway,
    fake_tokenizer,
    prompt_ids,
)

from pagemesh.gateway.openai import embeddings
from pagemesh.gateway.openai.embeddings import INPUT
from pagemesh.shared.errors import RequestError
from pagemesh.shared.messages import PromptExtras
from pagemesh.shared.pooling import PoolingParams, pack_floats
from pagemesh.shared.settings import Settings

PATH = "/v1/embeddings"
HIDDEN = CARD.hidden_size


async def pool(talk: Conversation) -> None:
    """A vector that begins with the length of the prompt and its first id."""
    pooling, ids = talk.generate.pooling, prompt_ids(talk.generate.prompt)
    assert pooling is not None
    assert talk.generate.params.max_tokens == 0
    talk.accept()
    talk.begin()
    vector = [len(ids), ids[0], *(0.1 * i for i in range(2, HIDDEN))][: pooling.dimensions]
    talk.delta("", [], finish_reason="length", cached_tokens=1, vector=pack_floats(vector))


@pytest.fixture
async def tokenizer(settings: Settings) -> AsyncIterator[FakeTokenizer]:
    async with fake_tokenizer(settings, script=pool) as fake:
        yield fake


async def heads(gateway: Gateway, input: Any, **fields: Any) -> list[list[float]]:
    status, answer = await gateway.post(PATH, {"input": input, **fields})
    assert status == 200, answer
    assert [one["index"] for one in answer["data"]] == list(range(len(answer["data"])))
    return [one["embedding"][:2] for one in answer["data"]]


async def test_the_shape_of_an_answer(gateway: Gateway) -> None:
    status, answer = await gateway.post(
        PATH, {"model": "tiny-alias", "input": ["abc", "z"], "user": "somebody"}
    )
    assert status == 200
    data = answer.pop("data")
    assert [(one["object"], one["index"], len(one["embedding"])) for one in data] == [
        ("embedding", 0, HIDDEN),
        ("embedding", 1, HIDDEN),
    ]
    assert answer.pop("id").startswith("embd-")
    assert answer.pop("created") > 0
    assert answer == {
        "object": "list",
        "model": "tiny-alias",
        "usage": {
            "prompt_tokens": 4,
            "total_tokens": 4,
            "prompt_tokens_details": {"cached_tokens": 2},
        },
    }


async def test_every_form_of_the_input(gateway: Gateway) -> None:
    assert await heads(gateway, "abc") == [[3, ord("a")]]
    assert await heads(gateway, ["abc", "z"]) == [[3, ord("a")], [1, ord("z")]]
    assert await heads(gateway, [5, 6]) == [[2, 5]]
    assert await heads(gateway, [[5, 6], [7]]) == [[2, 5], [1, 7]]


async def test_base64_is_of_the_same_floats(gateway: Gateway) -> None:
    _, plain = await gateway.post(PATH, {"input": "abc", "encoding_format": "float"})
    _, packed = await gateway.post(PATH, {"input": "abc", "encoding_format": "base64"})
    raw = base64.b64decode(packed["data"][0]["embedding"])
    assert raw == pack_floats(plain["data"][0]["embedding"])


async def test_the_released_client(gateway: Gateway) -> None:
    async with openai.AsyncOpenAI(base_url=gateway.url + "/v1", api_key="none") as client:
        answer = await client.embeddings.create(model="tiny", input="abc", dimensions=3)
        assert answer.data[0].embedding == pytest.approx([3, ord("a"), 0.2])


async def test_fields_reach_the_mesh(gateway: Gateway, tokenizer: FakeTokenizer) -> None:
    fields = {
        "dimensions": 5,
        "pooling": "last",
        "normalize": False,
        "truncate_prompt_tokens": 7,
        "add_special_tokens": False,
        "priority": 3,
        "cache_salt": "pepper",
        "prompt_cache_key": "key",
        "metadata": {},
    }
    await heads(gateway, "abc", **fields)
    [talk] = tokenizer.talks.values()
    generate, prompt = talk.generate, talk.generate.prompt
    assert generate.pooling == PoolingParams(pooling="last", dimensions=5, normalize=False)
    assert prompt.extras == PromptExtras(truncate_tokens=7)
    assert not prompt.add_special_tokens
    assert prompt.field == "input"
    placed = generate.priority, generate.cache_salt, generate.cache_key
    assert placed == (3, "pepper", "key")


async def test_null_is_absent(gateway: Gateway, tokenizer: FakeTokenizer) -> None:
    names = set(embeddings.EmbeddingRequest.__struct_fields__) - {"input"}
    await heads(gateway, "abc", **dict.fromkeys(names))
    [talk] = tokenizer.talks.values()
    assert talk.generate.pooling == PoolingParams()


async def test_ids_that_are_truncated_may_be_longer_than_the_context(gateway: Gateway) -> None:
    n = MAX_MODEL_LEN + 1
    assert await heads(gateway, [9] * n, truncate_prompt_tokens=-1) == [[n, 9]]
    status, answer = await gateway.post(PATH, {"input": [9] * n})
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")


BAD: Final[list[tuple[dict[str, Any], str]]] = [
    ({}, "input"),
    ({"input": None}, "input"),
    ({"input": []}, "input"),
    ({"input": [[]]}, "input"),
    ({"input": ["a", 1]}, "input"),
    ({"input": [1, "a"]}, "input"),
    ({"input": [1.5]}, "input[0]"),
    ({"input": [-1]}, "input"),
    ({"input": [CARD.vocab_tokens]}, "input"),
    ({"input": ["a"] * (INPUT.most + 1)}, "input"),
    ({"input": [[1]] * (INPUT.most + 1)}, "input"),
    ({"input": [[1] * (9 * MAX_MODEL_LEN)]}, "input"),
    ({"input": {"text": "a"}}, "input"),
    ({"input": "a", "dimensions": 0}, "dimensions"),
    ({"input": "a", "dimensions": HIDDEN + 1}, "dimensions"),
    ({"input": "a", "dimensions": 2**40}, "dimensions"),
    ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
    ({"input": "a", "pooling": "max"}, "pooling"),
    ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"input": "a", "truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
    ({"input": "a", "timeout": 0}, "timeout"),
    ({"input": "a", "cache_salt": ""}, "cache_salt"),
    ({"input": "a", "messages": [{"role": "user", "content": "a"}]}, "messages"),
    ({"input": "a", "endianness": "big"}, "endianness"),
]


async def test_bad_input_names_the_field(gateway: Gateway) -> None:
    for body, param in BAD:
        status, answer = await gateway.post(PATH, body)
        assert (status, answer["error"]["param"]) == (400, param), (str(body)[:99], answer)


async def test_numbers_of_one_answer_are_bounded(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embeddings, "MAX_NUMBERS", 3 * HIDDEN)
    assert len(await heads(gateway, ["a"] * 3)) == 3
    status, answer = await gateway.post(PATH, {"input": ["a"] * 4})
    assert (status, answer["error"]["param"]) == (400, "input")
    assert len(await heads(gateway, ["a"] * 4, dimensions=1)) == 4


async def test_many_inputs_are_below_a_part_at_a_time(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch, tokenizer: FakeTokenizer
) -> None:
    monkeypatch.setattr(embeddings, "_AT_ONCE", 3)
    open_now, numbers = set[str](), count()

    async def pool_and_count(talk: Conversation) -> None:
        open_now.add(talk.generate.request_id)
        assert len(open_now) <= 3
        next(numbers)
        open_now.remove(talk.generate.request_id)
        await pool(talk)

    tokenizer.script = pool_and_count
    texts = ["x" * n for n in range(1, 9)]
    assert await heads(gateway, texts) == [[n, ord("x")] for n in range(1, 9)]
    assert next(numbers) == 8


async def test_one_input_that_fails_ends_the_others(
    gateway: Gateway, tokenizer: FakeTokenizer
) -> None:
    async def fail_one(talk: Conversation) -> None:
        if talk.generate.prompt.text == "bad":
            talk.accept()
            talk.fail(RequestError("it went wrong", status=500, code="step_failed"))

    tokenizer.script = fail_one
    status, answer = await gateway.post(PATH, {"input": ["good", "bad"]})
    assert (status, answer["error"]["message"]) == (500, "it went wrong")
    [good] = [talk for talk in tokenizer.talks.values() if talk.generate.prompt.text == "good"]
    await good.cancelled.wait()


async def test_a_deadline_cancels_what_still_runs(
    gateway: Gateway, tokenizer: FakeTokenizer
) -> None:
    async def hang(talk: Conversation) -> None:
        talk.accept()

    tokenizer.script = hang
    status, answer = await gateway.post(PATH, {"input": "abc", "timeout": 0.05})
    assert (status, answer["error"]["code"]) == (504, "deadline_exceeded")
    [talk] = tokenizer.talks.values()
    await talk.cancelled.wait()


async def test_a_lost_service_costs_nothing_but_time(
    gateway: Gateway, tokenizer: FakeTokenizer
) -> None:
    attempts = []

    async def lose_once(talk: Conversation) -> None:
        attempts.append(talk.generate.attempt)
        await (tokenizer.hang_up() if talk.generate.attempt == 0 else pool(talk))

    tokenizer.script = lose_once
    assert await heads(gateway, "abc") == [[3, ord("a")]]
    assert attempts == [0, 1]


async def test_unknown_fields_are_counted(gateway: Gateway) -> None:
    await heads(gateway, "abc", dimension=3)
    assert 'pagemesh_unknown_fields_total{endpoint="embeddings",field="dimension"} 1.0' in (
        await gateway.metrics()
    )
