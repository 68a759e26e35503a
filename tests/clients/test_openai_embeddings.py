"""The released openai client asks a mesh of the real model for embeddings."""

from __future__ import annotations

import math
from collections.abc import Sequence

import openai
import pytest
from mesh_process import MeshProcess

pytestmark = pytest.mark.mesh
MODEL = "smollm2-135m-instruct"
TEXTS = ["The cat sits on the mat.", "A kitten is lying on a rug.", "Interest rates rose again."]


def vectors(client: openai.OpenAI, input: str | list[str], **fields: object) -> list[list[float]]:
    answer = client.embeddings.create(model=MODEL, input=input, **fields)  # type: ignore[arg-type]
    assert [each.index for each in answer.data] == list(range(len(answer.data)))
    assert answer.usage.prompt_tokens == answer.usage.total_tokens > 0
    return [each.embedding for each in answer.data]


def dot(one: Sequence[float], other: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(one, other, strict=True))


def test_base64_which_the_client_asks_for_and_floats_say_the_same(client: openai.OpenAI) -> None:
    plain = vectors(client, TEXTS, encoding_format="float")
    assert [len(vector) for vector in plain] == [576] * 3
    assert vectors(client, TEXTS) == [pytest.approx(vector) for vector in plain]
    assert [math.sqrt(dot(vector, vector)) for vector in plain] == [pytest.approx(1, abs=1e-5)] * 3
    cat, kitten, rates = plain
    assert dot(cat, kitten) > dot(cat, rates)


def test_a_text_alone_among_others_and_as_ids(client: openai.OpenAI, mesh: MeshProcess) -> None:
    (alone,) = vectors(client, TEXTS[0])
    assert vectors(client, [TEXTS[1], TEXTS[0] * 20, TEXTS[0]])[2] == pytest.approx(alone, abs=1e-4)
    ids = client.post("/tokenize", body={"prompt": TEXTS[0]}, cast_to=dict)["tokens"]
    answer = client.embeddings.create(model=MODEL, input=[ids, ids[:2]])
    assert answer.data[0].embedding == pytest.approx(alone, abs=1e-4)
    assert answer.usage.prompt_tokens == len(ids) + 2


def test_dimensions_are_the_first_ones_at_length_one(client: openai.OpenAI) -> None:
    (whole,), (cut,) = vectors(client, TEXTS[0]), vectors(client, TEXTS[0], dimensions=64)
    length = math.sqrt(dot(whole[:64], whole[:64]))
    assert cut == pytest.approx([number / length for number in whole[:64]], abs=1e-5)
    with pytest.raises(openai.BadRequestError, match="between 1 and 576") as refused:
        vectors(client, TEXTS[0], dimensions=577)
    assert refused.value.param == "dimensions"


def test_more_inputs_than_are_below_at_once(client: openai.OpenAI) -> None:
    many = vectors(client, [str(i % 7) for i in range(260)])
    assert len(many) == 260
    assert many[259] == pytest.approx(many[259 - 7], abs=1e-4)


def test_the_last_token_and_the_last_tokens(client: openai.OpenAI) -> None:
    last = {"extra_body": {"pooling": "last"}}
    assert vectors(client, TEXTS[0], **last) != vectors(client, TEXTS[0])
    (long,) = vectors(client, "word " * 3000, extra_body={"truncate_prompt_tokens": 5})
    assert long == pytest.approx(vectors(client, " word word word word ")[0], abs=1e-3)
    with pytest.raises(openai.BadRequestError, match="maximum context length") as refused:
        vectors(client, "word " * 30000)
    assert refused.value.param == "input"
