"""Fields of requests whose effect the real model shows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from mesh_process import MeshProcess

pytestmark = pytest.mark.mesh
PROMPT: dict[str, Any] = {
    "model": "smollm2-135m-instruct",
    "prompt": "The capital of France is",
    "temperature": 0,
    "max_tokens": 6,
}


@pytest.fixture
def client(mesh: MeshProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{mesh.base_url}/v1", api_key="none") as client:
        yield client


def complete(client: openai.OpenAI, fields: dict[str, Any], **more: Any) -> Any:
    extra = {"return_token_ids": True, **fields}
    return client.completions.create(**(PROMPT | more), extra_body=extra).choices[0]


def test_words_and_ids_that_must_not_come_do_not(client: openai.OpenAI) -> None:
    free = complete(client, {})
    assert "Paris" in free.text
    assert "Paris" not in complete(client, {"bad_words": ["Paris"]}).text
    allowed = complete(client, {"allowed_token_ids": free.token_ids})
    assert allowed.token_ids == free.token_ids
    assert set(complete(client, {"allowed_token_ids": free.token_ids[1:]}).token_ids) <= set(
        free.token_ids[1:]
    )


def test_the_ids_of_a_cut_prompt_and_of_its_stream(client: openai.OpenAI) -> None:
    whole = complete(client, {"truncate_prompt_tokens": 3}, max_tokens=4)
    assert whole.prompt_token_ids == complete(client, {}).prompt_token_ids[-3:]
    extra = {"return_token_ids": True, "truncate_prompt_tokens": 3}
    with client.completions.create(
        **PROMPT | {"max_tokens": 4}, stream=True, extra_body=extra
    ) as stream:
        choices = [chunk.choices[0] for chunk in stream]
    assert choices[0].prompt_token_ids == whole.prompt_token_ids
    assert [token for choice in choices for token in choice.token_ids] == whole.token_ids
    assert "".join(choice.text for choice in choices) == whole.text


def test_logprobs_of_chosen_tokens(client: openai.OpenAI) -> None:
    best = complete(client, {}, logprobs=5, max_tokens=1)
    ids = {"logprob_token_ids": [0, *best.token_ids], "return_tokens_as_token_ids": True}
    shown = complete(client, ids, logprobs=0, max_tokens=1).logprobs
    [top] = shown.top_logprobs
    assert top.keys() == {"token_id:0", f"token_id:{best.token_ids[0]}"}
    assert top[f"token_id:{best.token_ids[0]}"] == pytest.approx(best.logprobs.token_logprobs[0])
