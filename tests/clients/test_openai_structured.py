"""Answers of the real model that must have a form, asked for by the openai client."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel, Field

pytestmark = pytest.mark.mesh
MODEL = "smollm2-135m-instruct"
ASKED: list[Any] = [{"role": "user", "content": "Invent a person."}]
MAX_AT_ONCE = 8
UNKNOWN_TYPE = {"type": "json_schema", "json_schema": {"schema": {"type": "no"}}}


class Address(BaseModel):
    street: str = Field(max_length=24)
    number: int = Field(ge=1, le=999)


class Person(BaseModel):
    name: str = Field(max_length=24)
    mood: Literal["glad", "sad"]
    addresses: list[Address] = Field(max_length=2)


def test_a_nested_schema_is_followed_whatever_is_drawn(client: openai.OpenAI, n_runs: int) -> None:
    def run(seed: int) -> Person | None:
        answer = client.chat.completions.parse(
            model=MODEL, messages=ASKED, response_format=Person, temperature=1, seed=seed
        )
        assert answer.choices[0].finish_reason == "stop"
        return answer.choices[0].message.parsed

    with ThreadPoolExecutor(MAX_AT_ONCE) as threads:
        people = list(threads.map(run, range(n_runs)))
    assert all(isinstance(person, Person) for person in people)
    assert len({person.name for person in people if person}) > n_runs / 2


def test_a_stream_and_several_choices_and_logprobs(client: openai.OpenAI) -> None:
    texts = {0: "", 1: ""}
    with client.completions.create(
        model=MODEL,
        prompt="My number is",
        n=2,
        temperature=1,
        logprobs=1,
        max_tokens=30,
        stream=True,
        extra_body={"structured_outputs": {"regex": "[0-9]{3}-[0-9]{4}"}},
    ) as stream:
        for chunk in stream:
            for choice in chunk.choices:
                texts[choice.index] += choice.text
    assert all(re.fullmatch("[0-9]{3}-[0-9]{4}", text) for text in texts.values()), texts


def test_the_older_spelling(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=ASKED, extra_body={"guided_choice": ["cat", "dog"]}
    )
    assert answer.choices[0].message.content in ("cat", "dog")


def test_an_answer_that_is_cut_says_so(client: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
    answer = client.chat.completions.create(
        model=MODEL, messages=ASKED, extra_body={"guided_json": schema}, max_tokens=2
    )
    assert answer.choices[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        (
            "response_format",
            {"type": "json_schema", "json_schema": {"schema": {"type": "no"}}},
            "no",
        ),
        ("guided_regex", "(a", "unclosed group"),
        ("guided_grammar", "start: /a", "lexer"),
        ("structured_outputs", {"json": {"$ref": "#/nowhere"}}, "nowhere"),
    ],
)
def test_a_rule_that_cannot_be_followed_is_refused_before_anything_runs(
    client: openai.OpenAI, field: str, value: object, told: str
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(
            model=MODEL, messages=ASKED, extra_body={field: value}, max_tokens=1
        )
    assert refused.value.param == field
    assert told in refused.value.message
