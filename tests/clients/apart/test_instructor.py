"""instructor: pydantic models by calls and by schemas, whole, in parts and several."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import instructor
import openai
import pytest
from asked import INVENT, KEY, MODEL, ROOM_TOKENS, Person, user
from instructor.core import InstructorRetryException

ASK: Any = {"model": MODEL, "messages": user(INVENT), "max_tokens": ROOM_TOKENS, "temperature": 1}
MODES = [
    instructor.Mode.TOOLS,
    instructor.Mode.TOOLS_STRICT,
    instructor.Mode.JSON_SCHEMA,
]


@pytest.fixture
def client(base_url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=base_url, api_key=KEY, max_retries=0) as client:
        yield client


@pytest.mark.parametrize("mode", MODES)
def test_a_nested_model_at_the_first_try(client: openai.OpenAI, mode: instructor.Mode) -> None:
    taught = instructor.from_openai(client, mode=mode)
    person, answer = taught.create_with_completion(response_model=Person, max_retries=1, **ASK)
    assert isinstance(person, Person)
    assert answer.usage.completion_tokens > 10


@pytest.mark.parametrize("mode", MODES)
def test_a_model_grows_while_it_is_streamed(client: openai.OpenAI, mode: instructor.Mode) -> None:
    taught = instructor.from_openai(client, mode=mode)
    parts = list(taught.create_partial(response_model=Person, **ASK))
    assert len(parts) > 5
    Person.model_validate(parts[-1].model_dump())


def test_errors_are_the_clients_own(client: openai.OpenAI) -> None:
    taught = instructor.from_openai(client)
    with pytest.raises(InstructorRetryException, match="model_not_found"):
        taught.create(response_model=Person, max_retries=1, **{**ASK, "model": "no-such-model"})


def test_a_nested_model_by_the_responses_api(client: openai.OpenAI) -> None:
    taught = instructor.from_openai(client, mode=instructor.Mode.RESPONSES_TOOLS)
    ask = {"model": MODEL, "input": INVENT, "max_output_tokens": ROOM_TOKENS, "temperature": 1}
    person = taught.responses.create(response_model=Person, max_retries=1, **ask)
    assert isinstance(person, Person)
