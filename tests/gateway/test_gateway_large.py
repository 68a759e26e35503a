"""Bodies and answers of many megabytes beside streams that go on."""

from __future__ import annotations

import asyncio
import io
import threading
from typing import Any

import msgspec
import pytest
from gateway_fakes import MAX_MODEL_LEN, FakeTokenizer, Gateway, read_events

from pagemesh.gateway.offload import LARGE_BYTES

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
# What a stream may notice of one large body, on a machine that is busy with other things too.
MAX_LAG_S = 1.0

MANY_IDS = b"[" + b",".join([b"0"] * 9_000_000) + b"]"
MESSAGE = b'{"role":"user","content":"x"}'

# (path, body, param, code, part of the message)
LARGE_BODIES = [
    (
        CHAT,
        b'{"messages":[{"role":"user","content":"x","foo":' + MANY_IDS + b"}]}",
        "messages[0]",
        "invalid_value",
        "more values",
    ),
    (
        CHAT,
        b'{"messages":[' + b",".join([MESSAGE] * 400_000) + b"]}",
        "messages",
        "invalid_value",
        "at most 4096 messages, got 400000",
    ),
    (
        COMPLETIONS,
        b'{"prompt":' + MANY_IDS + b"}",
        "prompt",
        "context_length_exceeded",
        f"maximum context length is {MAX_MODEL_LEN} tokens, but the prompt alone has 9000000",
    ),
    (
        "/detokenize",
        b'{"tokens":' + MANY_IDS + b"}",
        "tokens",
        "invalid_value",
        "at most 262144 token ids, got 9000000",
    ),
]


async def post_large(gateway: Gateway, path: str, body: bytes) -> tuple[int, Any]:
    """The client sends in pieces, so that it does not hold the loop itself."""
    async with gateway.session.post(gateway.url + path, data=io.BytesIO(body)) as response:
        return response.status, await response.json()


async def longest_lag_s(stop: asyncio.Event) -> float:
    loop = asyncio.get_running_loop()
    longest_s, last_s = 0.0, loop.time()
    while not stop.is_set():
        await asyncio.sleep(0)
        longest_s, last_s = max(longest_s, loop.time() - last_s), loop.time()
    return longest_s


@pytest.mark.parametrize(("path", "body", "param", "code", "text"), LARGE_BODIES)
async def test_large_lists_are_refused_and_do_not_hold_the_loop(
    gateway: Gateway, path: str, body: bytes, param: str, code: str, text: str
) -> None:
    stop = asyncio.Event()
    watching = asyncio.create_task(longest_lag_s(stop))
    status, answer = await post_large(gateway, path, body)
    stop.set()
    assert status == 400
    assert (answer["error"]["param"], answer["error"]["code"]) == (param, code)
    assert text in answer["error"]["message"]
    assert await watching < MAX_LAG_S


async def test_a_stream_overtakes_a_large_body_that_is_being_decoded(
    gateway: Gateway, tokenizer: FakeTokenizer
) -> None:
    held, release = threading.Event(), threading.Event()

    def hold() -> None:
        held.set()
        release.wait(30)

    holding = asyncio.create_task(gateway.core.backend.offload.run(LARGE_BYTES + 1, hold))
    await asyncio.to_thread(held.wait, 10)
    body = b'{"prompt":"' + b"x" * LARGE_BYTES + b'"}'
    large = asyncio.create_task(post_large(gateway, COMPLETIONS, body))
    small = {"prompt": "a", "stream": True}
    async with gateway.session.post(gateway.url + COMPLETIONS, json=small) as response:
        assert (await read_events(response))[-1] == "[DONE]"
    assert not large.done()
    assert len(tokenizer.talks) == 1
    release.set()
    await holding
    assert (await large)[0] == 200


@pytest.mark.parametrize(
    ("path", "field", "reply"),
    [("/tokenize", "prompt", "count"), ("/detokenize", "tokens", "prompt")],
)
async def test_a_large_question_is_answered(
    gateway: Gateway, path: str, field: str, reply: str
) -> None:
    value: Any = "x" * 300_000 if field == "prompt" else [120] * 200_000
    status, answer = await post_large(gateway, path, msgspec.json.encode({field: value}))
    assert status == 200
    assert answer[reply] == (300_000 if field == "prompt" else "x" * 200_000)
