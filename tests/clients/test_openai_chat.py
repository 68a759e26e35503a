"""The released openai client against the real mesh: helpers, errors, batches."""

from __future__ import annotations

import io
import json
from typing import Any

import openai
import pytest
import requests
from mesh_process import MeshProcess, wait_until
from metric_names import Scrape

pytestmark = pytest.mark.mesh
MODEL = "smollm2-135m-instruct"
ASK: Any = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "temperature": 0,
    "max_tokens": 12,
}


def test_the_stream_helper_gets_what_the_whole_answer_says(client: openai.OpenAI) -> None:
    ask: Any = {**ASK, "logprobs": True, "top_logprobs": 2}
    whole = client.chat.completions.create(**ask)
    with client.chat.completions.stream(**ask, stream_options={"include_usage": True}) as stream:
        text = "".join(event.delta for event in stream if event.type == "content.delta")
        streamed = stream.get_final_completion()
    [choice], [same] = whole.choices, streamed.choices
    assert choice.message.content == same.message.content == text
    assert choice.finish_reason == same.finish_reason
    assert streamed.usage is not None
    assert whole.usage is not None
    assert streamed.usage.completion_tokens == whole.usage.completion_tokens
    rows, others = choice.logprobs, same.logprobs
    assert rows is not None
    assert others is not None
    assert [row.token for row in rows.content or []] == [row.token for row in others.content or []]
    raw = b"".join(bytes(row.bytes or []) for row in rows.content or [])
    assert raw.decode().startswith(text)
    assert all(len(row.top_logprobs) == 2 for row in rows.content or [])


def test_errors_are_told_apart_and_what_cannot_succeed_is_not_tried_again(
    client: openai.OpenAI,
) -> None:
    persistent = client.with_options(max_retries=2)
    cases: list[tuple[Any, type[openai.APIStatusError], str]] = [
        ({"model": "gpt-9"}, openai.NotFoundError, "model_not_found"),
        (
            {"messages": [{"role": "user", "content": "word " * 4000}]},
            openai.BadRequestError,
            "context_length_exceeded",
        ),
        ({"extra_body": {"timeout": 0.001}}, openai.InternalServerError, "deadline_exceeded"),
    ]
    for fields, kind, code in cases:
        with pytest.raises(kind) as refused:
            persistent.chat.completions.create(**{**ASK, **fields})
        assert refused.value.code == code
        assert refused.value.response.headers["x-should-retry"] == "false"
        assert refused.value.response.request.headers["x-stainless-retry-count"] == "0"


async def test_a_stream_that_is_left_ends_its_request(mesh: MeshProcess) -> None:
    endless: Any = {**ASK, "max_tokens": 1500, "extra_body": {"ignore_eos": True}}
    async with (
        openai.AsyncOpenAI(base_url=f"{mesh.base_url}/v1", api_key="none") as client,
        await client.chat.completions.create(**endless, stream=True) as stream,
    ):
        await anext(stream)
        await anext(stream)

    def unfinished() -> float:
        scrape = Scrape.of(requests.get(f"{mesh.base_url}/metrics", timeout=10).text)
        return scrape.total("vllm:num_requests_running") + scrape.total("vllm:num_requests_waiting")

    wait_until(lambda: unfinished() == 0, timeout_s=20)


def test_a_batch_from_its_file_to_its_answers(client: openai.OpenAI) -> None:
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": ASK}
    lines = io.BytesIO(json.dumps(line).encode())
    given = client.files.create(file=("rows.jsonl", lines), purpose="batch")
    batch = client.batches.create(
        input_file_id=given.id, endpoint="/v1/chat/completions", completion_window="24h"
    )

    def is_complete() -> bool:
        return client.batches.retrieve(batch.id).status == "completed"

    wait_until(is_complete, timeout_s=60)
    done = client.batches.retrieve(batch.id)
    assert done.output_file_id is not None
    row = json.loads(client.files.content(done.output_file_id).text)
    assert row["custom_id"] == "a"
    same = client.chat.completions.create(**ASK).choices[0].message.content
    assert row["response"]["body"]["choices"][0]["message"]["content"] == same
    client.files.delete(given.id)
