"""Bodies and answers of many megabytes beside streams that go on."""

from __future__ import annotations

import asyncio
import io
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from gateway_fakes import (
    MAX_MODEL_LEN,
    Conversation,
    FakeTokenizer,
    Gateway,
    read_events,
    say_hello,
)
from hypothesis import given
from hypothesis import strategies as st

from pagemesh.gateway.offload import LARGE_BYTES
from pagemesh.gateway.openai import answer
from pagemesh.gateway.openai import body as bodies
from pagemesh.shared.errors import RequestError

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
# What a stream may notice of one large body, on a machine that is busy with other things too.
MAX_LAG_S = 1.0

MANY_IDS = b"[" + b",".join([b"0"] * 9_000_000) + b"]"
MANY_FIELDS = b",".join(b'"%d":1' % i for i in range(130_000))
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
        b'{"messages":[' + b",".join([MESSAGE] * 20_000) + b"]}",
        "messages",
        "invalid_value",
        "at most 4096 messages, got 20000",
    ),
    (
        CHAT,
        b'{"messages":[{"role":"user",' + MANY_FIELDS + b',"content":"x"}]}',
        "messages",
        "invalid_value",
        "may have 64 fields each, got 130002",
    ),
    (
        COMPLETIONS,
        b'{"prompt":' + MANY_IDS + b"}",
        "prompt",
        "context_length_exceeded",
        f"maximum context length is {MAX_MODEL_LEN} tokens, but the prompt alone has 9000000",
    ),
    (
        COMPLETIONS,
        b'{"prompt":[[1],' + MANY_IDS + b",[2]]}",
        "prompt",
        "context_length_exceeded",
        f"maximum context length is {MAX_MODEL_LEN} tokens, but the prompt alone has 9000000",
    ),
    (
        COMPLETIONS,
        b'{"prompt":[' + b",".join([b"[" + b"7," * 200 + b"7]"] * 10_000) + b"]}",
        "prompt",
        "invalid_value",
        "at most 512 prompts, got 10000",
    ),
    (
        "/detokenize",
        b'{"tokens":' + MANY_IDS + b"}",
        "tokens",
        "invalid_value",
        "at most 262144 token ids, got 9000000",
    ),
    (
        CHAT,
        b'{"messages":[' + b",".join([MESSAGE] * 400_000) + b"]}",
        None,
        "invalid_value",
        "1600001 strings",
    ),
    (
        COMPLETIONS,
        b'{"prompt":["",' + b",".join([b"[1]"] * 4_000_000) + b"]}",
        None,
        "invalid_value",
        "4000002 lists and objects",
    ),
    (
        COMPLETIONS,
        b'{"prompt":"a",' + b",".join(b'"%d":1' % i for i in range(2_000_000)) + b"}",
        None,
        "invalid_value",
        "2000002 strings",
    ),
]


async def post_large(gateway: Gateway, path: str, body: bytes) -> tuple[int, Any]:
    """The client sends in pieces, so that it does not hold the loop itself."""
    async with gateway.session.post(gateway.url + path, data=io.BytesIO(body)) as response:
        return response.status, await response.json()


@asynccontextmanager
async def held_thread(gateway: Gateway) -> AsyncIterator[None]:
    """While the block lasts, nothing large gets done."""
    held, release = threading.Event(), threading.Event()

    def hold() -> None:
        held.set()
        release.wait(30)

    holding = asyncio.create_task(gateway.core.backend.offload.run(LARGE_BYTES + 1, hold))
    await asyncio.to_thread(held.wait, 10)
    try:
        yield
    finally:
        release.set()
        await holding


async def run_small_stream(gateway: Gateway) -> None:
    body = {"prompt": "a", "stream": True}
    async with gateway.session.post(gateway.url + COMPLETIONS, json=body) as response:
        assert (await read_events(response))[-1] == "[DONE]"


async def longest_lag_s(stop: asyncio.Event) -> float:
    loop = asyncio.get_running_loop()
    longest_s, last_s = 0.0, loop.time()
    while not stop.is_set():
        await asyncio.sleep(0)
        longest_s, last_s = max(longest_s, loop.time() - last_s), loop.time()
    return longest_s


@pytest.mark.parametrize(("path", "body", "param", "code", "text"), LARGE_BODIES)
async def test_large_lists_are_refused_and_do_not_hold_the_loop(
    gateway: Gateway, path: str, body: bytes, param: str | None, code: str, text: str
) -> None:
    stop = asyncio.Event()
    watching = asyncio.create_task(longest_lag_s(stop))
    status, reply = await post_large(gateway, path, body)
    stop.set()
    assert status == 400
    assert (reply["error"]["param"], reply["error"]["code"]) == (param, code)
    assert text in reply["error"]["message"]
    assert await watching < MAX_LAG_S


@given(
    value=st.recursive(
        st.text('a"\\\\[{,') | st.integers(),
        lambda children: st.lists(children) | st.dictionaries(st.text('b"\\\\]}'), children),
    )
)
def test_only_structure_counts_and_not_what_strings_hold(value: Any) -> None:
    """Padded to the size from which on bodies are counted."""
    body = msgspec.json.encode([value, "[" * LARGE_BYTES])
    n_strings, n_containers = count(value)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bodies, "MAX_STRINGS", n_strings + 1)
        patch.setattr(bodies, "MAX_VALUES", n_containers + 1)
        bodies.check_structure(body)
        patch.setattr(bodies, "MAX_VALUES", n_containers)
        with pytest.raises(RequestError, match="lists and objects"):
            bodies.check_structure(body)
        patch.setattr(bodies, "MAX_STRINGS", n_strings)
        with pytest.raises(RequestError, match="strings"):
            bodies.check_structure(body)


def count(value: Any) -> tuple[int, int]:
    """Strings with keys, and lists with objects."""
    if isinstance(value, str):
        return 1, 0
    if isinstance(value, int):
        return 0, 0
    keys = len(value) if isinstance(value, dict) else 0
    children = [count(child) for child in (value.values() if keys else value)]
    return keys + sum(s for s, _ in children), 1 + sum(c for _, c in children)


async def test_a_stream_overtakes_a_large_body_that_is_being_decoded(
    gateway: Gateway, tokenizer: FakeTokenizer
) -> None:
    body = b'{"prompt":"' + b"x" * LARGE_BYTES + b'"}'
    async with held_thread(gateway):
        large = asyncio.create_task(post_large(gateway, COMPLETIONS, body))
        await run_small_stream(gateway)
        assert not large.done()
        assert len(tokenizer.talks) == 1
    assert (await large)[0] == 200


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt_logprobs": 1},
        {"echo": True, "logprobs": 1},
        {"echo": True, "logprobs": 1, "stream": True},
    ],
)
async def test_a_stream_overtakes_thousands_of_prompt_logprobs_that_are_being_worded(
    gateway: Gateway, fields: dict[str, Any]
) -> None:
    prompt = "ab" * (MAX_MODEL_LEN // 4)

    async def ask() -> str:
        body = {"prompt": prompt, "n": 2} | fields
        async with gateway.session.post(gateway.url + COMPLETIONS, json=body) as response:
            assert response.status == 200
            return await response.text()

    async with held_thread(gateway):
        large = asyncio.create_task(ask())
        async with asyncio.timeout(10):
            while 'finished_reason="length",model_name="tiny"} 2.0' not in await gateway.metrics():
                pass
        await run_small_stream(gateway)
        assert not large.done()
    text = await large
    # Once per choice: each alternative of each scored token, as a key or as a token of the text.
    assert text.count("-0.5") >= 2 * (len(prompt) - 1)


async def test_draining_waits_for_an_answer_that_is_being_worded(gateway: Gateway) -> None:
    body = {"prompt": "ab" * (MAX_MODEL_LEN // 4), "prompt_logprobs": 1}
    async with held_thread(gateway):
        large = asyncio.create_task(gateway.post(COMPLETIONS, body))
        async with asyncio.timeout(10):
            while 'finished_reason="length",model_name="tiny"} 1.0' not in await gateway.metrics():
                pass
        draining = asyncio.create_task(gateway.core.drain())
        assert (await gateway.post("/tokenize", {"prompt": "a"}))[0] == 200
        assert not draining.done()
        gateway.core.backend.offload.close()
    assert (await large)[0] == 200
    await asyncio.wait_for(draining, 10)


async def test_a_whole_answer_is_bounded(
    gateway: Gateway, tokenizer: FakeTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answer, "MAX_WHOLE_BYTES", 2**20)
    talks: list[Conversation] = []

    async def flood(talk: Conversation) -> None:
        talks.append(talk)
        talk.accept()
        while not talk.cancelled.is_set():
            talk.delta("x" * 1024, [1])
            await asyncio.sleep(0)

    tokenizer.script = flood
    status, body = await gateway.post(COMPLETIONS, {"prompt": ["a", "b"]})
    assert (status, body["error"]["code"]) == (400, "answer_too_large")
    assert "over 1 MiB" in body["error"]["message"]
    async with asyncio.timeout(10):
        for talk in talks:
            await talk.cancelled.wait()
    assert len(talks) == 2


@pytest.mark.parametrize("in_turn", [True, False])
async def test_prompt_logprobs_of_a_stream_are_bounded_until_they_are_echoed(
    gateway: Gateway, tokenizer: FakeTokenizer, monkeypatch: pytest.MonkeyPatch, in_turn: bool
) -> None:
    """Two of the four prompts have more of them than is held."""
    monkeypatch.setattr(answer, "MAX_WHOLE_BYTES", 2**20)
    echoed = [asyncio.Event() for _ in range(4)]

    async def wait_for_the_one_before(talk: Conversation) -> None:
        index = int(talk.generate.request_id.rpartition("-")[2])
        talk.accept()
        if in_turn and index:
            await echoed[index - 1].wait()
        await say_hello(talk)

    tokenizer.script = wait_for_the_one_before
    body = {"prompt": ["ab" * 700] * 4, "n": 2, "echo": True, "logprobs": 1, "stream": True}
    async with gateway.session.post(gateway.url + COMPLETIONS, json=body) as response:
        text = ""
        async for piece in response.content.iter_any():
            text += piece.decode()
            for index, event in enumerate(echoed):
                if all(f'"index":{2 * index + i},' in text for i in range(2)):
                    event.set()
    assert ("answer_too_large" in text) is not in_turn
    assert (text.count('"finish_reason":"length"') == 8) is in_turn


@pytest.mark.parametrize(
    ("path", "field", "key"),
    [("/tokenize", "prompt", "count"), ("/detokenize", "tokens", "prompt")],
)
async def test_a_large_question_is_answered(
    gateway: Gateway, path: str, field: str, key: str
) -> None:
    value: Any = "x" * 300_000 if field == "prompt" else [120] * 200_000
    status, reply = await post_large(gateway, path, msgspec.json.encode({field: value}))
    assert status == 200
    assert reply[key] == (300_000 if field == "prompt" else "x" * 200_000)
