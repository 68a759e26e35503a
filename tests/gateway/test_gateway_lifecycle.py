"""Hang-ups, lost tokenizer services, failures in mid-stream, draining."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import msgspec
import pytest
from gateway_fakes import (
    CARD,
    Conversation,
    FakeTokenizer,
    Gateway,
    engine,
    fake_tokenizer,
    read_events,
    running_gateway,
    say_hello,
    settings_for,
)
from msgspec.structs import replace

from pagemesh.gateway.upstream import MAX_FRUITLESS_LOSSES
from pagemesh.shared.engine_messages import NeedSnapshot
from pagemesh.shared.errors import SHUTTING_DOWN, RequestError
from pagemesh.shared.messages import Delta, Deltas, WireError
from pagemesh.shared.settings import Settings
from pagemesh.shared.wire import unpack_ids

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
CHAT_BODY = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}
# What "within a second" leaves for a busy machine.
CANCEL_TIMEOUT_S = 1.0


@pytest.fixture
async def tokenizer(settings: Settings) -> AsyncIterator[FakeTokenizer]:
    """Says nothing by itself."""
    async with fake_tokenizer(settings) as fake:
        yield fake


async def until(gateway: Gateway, line: str) -> None:
    """Until the metrics hold `line`."""
    async with asyncio.timeout(5):
        while line not in await gateway.metrics():
            pass


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("running", [False, True])
async def test_a_hang_up_cancels_within_a_second(
    gateway: Gateway, tokenizer: FakeTokenizer, stream: bool, running: bool
) -> None:
    body = {"model": "tiny", "prompt": ["a", "b"], "n": 2, "stream": stream}
    async with aiohttp.ClientSession() as leaver:
        asking = asyncio.create_task(leaver.post(gateway.url + COMPLETIONS, json=body))
        talks = [await tokenizer.asked.get() for _ in range(2)]
        if running:
            for talk in talks:
                talk.accept()
                talk.delta("text", [1])
            if stream:
                response = await asking
                await response.content.readuntil(b"\n\n")
                response.close()
        asking.cancel()
    async with asyncio.timeout(CANCEL_TIMEOUT_S):
        for talk in talks:
            await talk.cancelled.wait()
    await until(gateway, '{engine="",finished_reason="abort",model_name="tiny"} 4.0')
    await until(gateway, f'{{code="499",handler="{COMPLETIONS}",method="POST",status="4xx"}} 1.0')


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("as_header", [False, True])
async def test_an_answer_that_takes_longer_than_the_client_gives_it_is_cancelled(
    gateway: Gateway, tokenizer: FakeTokenizer, path: str, stream: bool, as_header: bool
) -> None:
    body = {"prompt": "a"} if path == COMPLETIONS else CHAT_BODY
    body = body | {"stream": stream} | ({} if as_header else {"timeout": 0.2})
    headers = {"X-Request-Timeout": "0.2"} if as_header else {}
    async with aiohttp.ClientSession() as client:
        asking = asyncio.create_task(client.post(gateway.url + path, json=body, headers=headers))
        talk = await tokenizer.asked.get()
        talk.accept()
        talk.delta("text", [1])
        await asyncio.wait_for(talk.cancelled.wait(), 0.2 + CANCEL_TIMEOUT_S)
        response = await asking
        assert response.status == (200 if stream else 504)
        text = await response.text()
    assert '"deadline_exceeded"' in text
    assert "0.2 s" in text


@pytest.mark.parametrize("seconds", [0, -1, 1e400, "soon"])
async def test_a_timeout_that_is_none_is_refused(
    gateway: Gateway, tokenizer: FakeTokenizer, seconds: Any
) -> None:
    body = msgspec.json.encode({"prompt": "a", "timeout": seconds}).replace(b"null", b"1e400")
    status, answer = await gateway.post_raw(COMPLETIONS, body)
    assert (status, answer["error"]["param"]) == (400, "timeout")
    headers = {"X-Request-Timeout": str(seconds)}
    status, answer = await gateway.post(COMPLETIONS, {"prompt": "a"}, headers=headers)
    assert (status, answer["error"]["param"]) == (400, "X-Request-Timeout")
    assert tokenizer.asked.empty()


async def test_a_timeout_that_is_kept_changes_nothing(
    gateway: Gateway, tokenizer: FakeTokenizer
) -> None:
    asking = asyncio.create_task(gateway.post(COMPLETIONS, {"prompt": "a", "timeout": 30}))
    talk = await tokenizer.asked.get()
    talk.accept()
    talk.delta("done", [1], finish_reason="stop")
    assert (await asking)[0] == 200


@pytest.mark.parametrize(
    ("path", "body", "prefix"),
    [("/tokenize", {"prompt": "ab"}, "tok-"), ("/detokenize", {"tokens": [65]}, "detok-")],
)
async def test_a_hang_up_cancels_a_question_and_an_answer_does_not(
    gateway: Gateway, tokenizer: FakeTokenizer, path: str, body: dict[str, Any], prefix: str
) -> None:
    assert (await gateway.post(path, body))[0] == 200
    tokenizer.mute_questions = True
    async with aiohttp.ClientSession() as leaver:
        asking = asyncio.create_task(leaver.post(gateway.url + path, json=body))
        async with asyncio.timeout(5):
            await tokenizer.muted.wait()
        asking.cancel()
    withdrawn = await asyncio.wait_for(tokenizer.withdrawn.get(), CANCEL_TIMEOUT_S)
    assert withdrawn.startswith(prefix)
    assert tokenizer.withdrawn.empty()
    tokenizer.mute_questions = False
    assert (await gateway.post(path, body))[0] == 200


async def test_a_finished_choice_is_not_cancelled_again(
    gateway: Gateway, tokenizer: FakeTokenizer
) -> None:
    asking = asyncio.create_task(gateway.post(COMPLETIONS, {"prompt": "a"}))
    talk = await tokenizer.asked.get()
    talk.accept()
    talk.delta("done", [1], finish_reason="stop")
    assert (await asking)[0] == 200
    assert (await gateway.post("/tokenize", {"prompt": "a"}))[0] == 200
    assert not talk.cancelled.is_set()


async def test_an_error_of_one_prompt_ends_the_request_and_cancels_the_others(
    gateway: Gateway, tokenizer: FakeTokenizer
) -> None:
    asking = asyncio.create_task(gateway.post(COMPLETIONS, {"prompt": ["a", "b"]}))
    first, second = [await tokenizer.asked.get() for _ in range(2)]
    second.fail(RequestError("no", status=400, param="prompt"))
    status, answer = await asking
    assert (status, answer["error"]["message"]) == (400, "no")
    await asyncio.wait_for(first.cancelled.wait(), CANCEL_TIMEOUT_S)


@pytest.mark.parametrize(
    "ending",
    [
        {"error": WireError(500, "nonfinite", None, "the logits were not finite")},
        {"finish_reason": "abort"},
    ],
)
async def test_a_failure_in_mid_stream_is_an_error_event_then_done(
    gateway: Gateway, tokenizer: FakeTokenizer, ending: dict[str, Any]
) -> None:
    body = CHAT_BODY | {"stream": True, "n": 2}
    asking = asyncio.create_task(gateway.session.post(gateway.url + CHAT, json=body))
    talk = await tokenizer.asked.get()
    talk.accept()
    talk.delta("text", [1])
    response = await asking
    talk.delta("", [], choice=1, **ending)
    *_, error, done = await read_events(response)
    assert done == "[DONE]"
    shown = msgspec.json.decode(error)["error"]
    assert shown["type"] == "server_error"
    assert isinstance(shown["code"], str)
    await asyncio.wait_for(talk.cancelled.wait(), CANCEL_TIMEOUT_S)


async def test_an_aborted_whole_answer_is_an_error_and_no_new_finish_reason(
    gateway: Gateway, tokenizer: FakeTokenizer
) -> None:
    asking = asyncio.create_task(gateway.post(CHAT, CHAT_BODY))
    talk = await tokenizer.asked.get()
    talk.accept()
    talk.delta("text", [1], finish_reason="abort")
    status, answer = await asking
    assert (status, answer["error"]["code"]) == (503, "aborted")


async def resumed_by(fake: FakeTokenizer) -> Conversation:
    async with asyncio.timeout(10):
        return await fake.asked.get()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_lost_tokenizer_service_costs_only_a_pause(
    gateway: Gateway, tokenizer: FakeTokenizer, settings: Settings, stream: bool
) -> None:
    """The second attempt carries what each choice had; a finished choice runs again in vain."""
    body = {"prompt": "ab", "n": 2, "stream": stream, "seed": 7, "logprobs": None}
    asking = asyncio.create_task(gateway.session.post(gateway.url + COMPLETIONS, json=body))
    talk = await tokenizer.asked.get()
    talk.accept()
    talk.delta("one ", [1], choice=0, cached_tokens=1)
    talk.delta("uno", [4, 5], choice=1, finish_reason="stop", stop_reason="x")
    if stream:
        await asking
    async with fake_tokenizer(settings, "tokenizer-2") as other:
        async with asyncio.timeout(5):
            while len(gateway.core.backend.directory.links_serving("tiny")) < 2:
                await gateway.get("/ready")
        await tokenizer.hang_up()
        again = await resumed_by(other)
        assert again.generate == msgspec.structs.replace(
            talk.generate, attempt=1, prior_ids=again.generate.prior_ids
        )
        assert list(map(unpack_ids, again.generate.prior_ids)) == [[1], [4, 5]]
        again.accept()
        again.delta("", [], choice=1, finish_reason="stop", stop_reason="x")
        again.delta("two", [2], choice=0, finish_reason="length", cached_tokens=2)
        texts, usage = await _texts(await asking, stream)
    assert texts == {0: "one two", 1: "uno"}
    if usage is not None:
        assert usage["completion_tokens"] == 4
        assert usage["prompt_tokens_details"]["cached_tokens"] == 1
    await until(gateway, "pagemesh_requests_resubmitted_total 1.0")


async def _texts(
    response: aiohttp.ClientResponse, stream: bool
) -> tuple[dict[int, str], dict[str, Any] | None]:
    if not stream:
        answer = await response.json()
        return {c["index"]: c["text"] for c in answer["choices"]}, answer["usage"]
    texts: dict[int, str] = {}
    for event in (await read_events(response))[:-1]:
        choice = msgspec.json.decode(event)["choices"][0]
        texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    return texts, None


async def test_a_request_waits_for_the_service_to_come_back(
    gateway: Gateway, tokenizer: FakeTokenizer
) -> None:
    asking = asyncio.create_task(gateway.post(COMPLETIONS, {"prompt": "a"}))
    await tokenizer.asked.get()
    await tokenizer.hang_up()
    again = await resumed_by(tokenizer)
    assert (again.generate.attempt, again.generate.prior_ids) == (1, [])
    again.accept()
    again.delta("late", [1], finish_reason="stop")
    status, answer = await asking
    assert (status, answer["choices"][0]["text"]) == (200, "late")


async def test_a_request_that_ends_every_service_is_given_up(
    gateway: Gateway, tokenizer: FakeTokenizer
) -> None:
    asking = asyncio.create_task(gateway.post(COMPLETIONS, {"prompt": "poison"}))
    for attempt in range(MAX_FRUITLESS_LOSSES + 1):
        talk = await resumed_by(tokenizer)
        assert talk.generate.attempt == attempt
        await tokenizer.hang_up()
    status, answer = await asking
    assert (status, answer["error"]["code"]) == (503, "service_unavailable")
    await gateway.until_ready()
    assert (await gateway.post("/tokenize", {"prompt": "a"}))[0] == 200


async def test_messages_that_make_no_sense_are_passed_over(
    gateway: Gateway, tokenizer: FakeTokenizer
) -> None:
    asking = asyncio.create_task(gateway.post(COMPLETIONS, {"prompt": "a"}))
    talk = await tokenizer.asked.get()
    talk.accept()
    talk.delta("x", [1], choice=0, cached_tokens=3)
    talk.delta("no such choice", [1], choice=7)
    talk.link.send(Deltas([Delta("no such request", 0, "y", b"")]))
    talk.link.send(NeedSnapshot(1, 1))
    talk.delta("z", [2], finish_reason="stop")
    status, answer = await asking
    assert (status, answer["choices"][0]["text"]) == (200, "xz")


async def test_the_status_of_a_later_prompt_is_kept(
    gateway: Gateway, tokenizer: FakeTokenizer
) -> None:
    """A stream of several prompts starts when all are accepted, not when the first one speaks."""
    body = {"prompt": ["a", "b"], "stream": True}
    asking = asyncio.create_task(gateway.post(COMPLETIONS, body))
    first, second = [await tokenizer.asked.get() for _ in range(2)]
    first.accept()
    first.delta("text", [1])
    second.fail(RequestError("too long", status=400, code="context_length_exceeded"))
    status, answer = await asking
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")


async def test_a_question_survives_a_lost_service(
    gateway: Gateway, tokenizer: FakeTokenizer
) -> None:
    """/tokenize is asked again of whoever comes back."""
    tokenizer.mute_questions = True
    asking = asyncio.create_task(gateway.post("/tokenize", {"prompt": "ab"}))
    async with asyncio.timeout(5):
        await tokenizer.muted.wait()
    tokenizer.mute_questions = False
    await tokenizer.hang_up()
    assert (await asking)[1]["tokens"] == [97, 98]


async def test_a_service_that_stays_away_ends_the_request(redis_url: str, mesh_name: str) -> None:
    settings = settings_for(redis_url, mesh_name, request_timeout_s=0.2)
    async with running_gateway(settings) as gateway:
        async with fake_tokenizer(settings) as fake:
            await gateway.until_ready()
            whole = asyncio.create_task(gateway.post(CHAT, CHAT_BODY))
            await fake.asked.get()
            body = CHAT_BODY | {"stream": True}
            streamed = asyncio.create_task(gateway.session.post(gateway.url + CHAT, json=body))
            talk = await fake.asked.get()
            talk.accept()
            talk.delta("text", [1])
            response = await streamed
        status, answer = await whole
        assert (status, answer["error"]["code"]) == (503, "service_unavailable")
        *_, error, done = await read_events(response)
        assert done == "[DONE]"
        assert msgspec.json.decode(error)["error"]["code"] == "service_unavailable"


async def test_a_draining_service_gets_nothing_new(
    gateway: Gateway, tokenizer: FakeTokenizer, settings: Settings
) -> None:
    """What crossed its last word on the way is refused by it, and asked of another."""
    asking = asyncio.create_task(gateway.post(COMPLETIONS, {"prompt": "a"}))
    talk = await tokenizer.asked.get()
    async with fake_tokenizer(settings, "tokenizer-2") as other:
        async with asyncio.timeout(5):
            while len(gateway.core.backend.directory.links_serving("tiny")) < 2:
                await gateway.get("/ready")
        talk.fail(RequestError("going", status=503, code=SHUTTING_DOWN))
        for fresh in (False, True):
            if fresh:
                asking = asyncio.create_task(gateway.post(COMPLETIONS, {"prompt": "a"}))
            again = await resumed_by(other)
            again.accept()
            again.delta("x", [1], finish_reason="stop")
            assert (await asking)[0] == 200


@asynccontextmanager
async def two_services(
    settings: Settings,
) -> AsyncIterator[tuple[Gateway, FakeTokenizer, FakeTokenizer]]:
    async with (
        running_gateway(settings) as gateway,
        fake_tokenizer(settings, "tokenizer-1") as one,
        fake_tokenizer(settings, "tokenizer-2") as two,
    ):
        async with asyncio.timeout(5):
            while len(gateway.core.backend.directory.links_serving("tiny")) < 2:
                await gateway.get("/ready")
        yield gateway, one, two


async def test_a_request_goes_where_fewest_are_open(settings: Settings) -> None:
    body = {"model": "tiny", "prompt": "a"}
    async with two_services(settings) as (gateway, *services):
        async with asyncio.TaskGroup() as asking:
            held = [asking.create_task(gateway.post(COMPLETIONS, body)) for _ in range(4)]
            talks = [[await fake.asked.get() for _ in range(2)] for fake in services]
            services[1].script = say_hello
            for talk in talks[1]:
                await say_hello(talk)
            await asyncio.wait(held, return_when=asyncio.FIRST_COMPLETED)
            for _ in range(3):  # while the first service has two
                assert (await gateway.post(COMPLETIONS, body))[0] == 200
            for talk in talks[0]:
                await say_hello(talk)
        assert [len(fake.talks) for fake in services] == [2, 5]


async def test_idle_services_take_turns(settings: Settings) -> None:
    async with two_services(settings) as (gateway, *services):
        for fake in services:
            fake.script = say_hello
        for _ in range(4):
            await gateway.post(COMPLETIONS, {"model": "tiny", "prompt": "a"})
        assert [len(fake.talks) for fake in services] == [2, 2]


async def test_two_models_are_kept_apart(
    gateway: Gateway, tokenizer: FakeTokenizer, settings: Settings
) -> None:
    card = CARD._replace(names=["other"])
    async with fake_tokenizer(settings, "tokenizer-2") as fake:
        fake.engines = [engine("engine-2", card)]
        async with asyncio.timeout(5):
            while not gateway.core.backend.directory.links_serving("other"):
                await gateway.get("/ready")
        status, answer = await gateway.post(COMPLETIONS, {"prompt": "a"})
        assert (status, answer["error"]["param"]) == (400, "model")
        asking = asyncio.create_task(gateway.post(COMPLETIONS, {"prompt": "a", "model": "other"}))
        talk = await resumed_by(fake)
        talk.accept()
        talk.delta("x", [1], finish_reason="stop")
        assert (await asking)[1]["model"] == "other"


async def begun_stream(
    gateway: Gateway, tokenizer: FakeTokenizer
) -> tuple[Conversation, aiohttp.ClientResponse]:
    """A completion of which a first piece has gone out."""
    body = {"prompt": "a", "stream": True}
    asking = asyncio.create_task(gateway.session.post(gateway.url + COMPLETIONS, json=body))
    talk = await tokenizer.asked.get()
    talk.accept()
    talk.delta("one ", [1])
    return talk, await asking


async def test_draining_finishes_what_runs_and_takes_nothing_new(
    settings: Settings, tokenizer: FakeTokenizer
) -> None:
    async with running_gateway(settings) as gateway:
        await gateway.until_ready()
        talk, response = await begun_stream(gateway, tokenizer)
        os.kill(os.getpid(), signal.SIGTERM)
        await gateway.until_ready(ready=False)
        async with aiohttp.ClientSession() as newcomer:
            refused = await newcomer.post(gateway.url + COMPLETIONS, json={"prompt": "b"})
            assert refused.status == 503
            assert (await refused.json())["error"]["type"] == "server_error"
        talk.delta("two", [2], finish_reason="stop")
        assert (await read_events(response))[-1] == "[DONE]"


async def test_a_balancer_has_time_to_notice(settings: Settings) -> None:
    """A gateway that leaves says so at /ready, takes requests a little longer, then none."""
    noticed = msgspec.structs.replace(
        settings, gateway=msgspec.structs.replace(settings.gateway, drain_notice_s=1.0)
    )
    async with running_gateway(noticed) as gateway, fake_tokenizer(settings) as tokenizer:
        while (await gateway.get("/ready"))[0] != 200:
            pass
        leaving = asyncio.create_task(gateway.core.drain())
        while (await gateway.get("/ready"))[0] != 503:
            pass
        asking = asyncio.create_task(gateway.post(COMPLETIONS, {"prompt": "late"}))
        talk = await tokenizer.asked.get()
        await asyncio.sleep(1.0)
        async with aiohttp.ClientSession() as newcomer:
            late = await newcomer.post(gateway.url + COMPLETIONS, json={"prompt": "too late"})
            assert late.status == 503
        assert not leaving.done()
        talk.accept()
        talk.delta("x", [1], finish_reason="stop")
        assert (await asking)[0] == 200
        await leaving


@pytest.mark.parametrize("stream", [True, False])
async def test_a_connection_that_was_open_when_draining_began_is_served_once_more(
    settings: Settings, tokenizer: FakeTokenizer, stream: bool
) -> None:
    async with running_gateway(settings) as gateway, one_connection() as session:
        await gateway.until_ready()
        url, body = gateway.url + COMPLETIONS, {"prompt": "a", "stream": stream}
        for expected in (None, "close"):
            asking = asyncio.create_task(session.post(url, json=body))
            talk = await tokenizer.asked.get()
            if expected is None:
                os.kill(os.getpid(), signal.SIGTERM)
                await gateway.until_ready(ready=False)
            talk.accept()
            talk.delta("one", [1], finish_reason="stop")
            response = await asking
            await response.read()
            assert response.status == 200
            if expected is not None:
                assert response.headers.get("connection") == expected


async def test_a_probe_that_keeps_its_connection_delays_no_drain(
    settings: Settings, tokenizer: FakeTokenizer
) -> None:
    async with running_gateway(settings) as gateway, one_connection() as balancer:
        await gateway.until_ready()

        async def probe() -> None:
            await (await balancer.get(f"{gateway.url}/ready")).read()

        async def probe_on() -> None:
            while True:
                await probe()
                await asyncio.sleep(0.1)

        await probe()
        asking = asyncio.create_task(gateway.post(COMPLETIONS, {"prompt": "a"}))
        talk = await tokenizer.asked.get()
        probing = asyncio.create_task(probe_on())
        leaving = asyncio.create_task(gateway.core.drain())
        await asyncio.sleep(0.5)
        talk.accept()
        talk.delta("x", [1], finish_reason="stop")
        assert (await asking)[0] == 200
        await asyncio.wait_for(leaving, 5)
        probing.cancel()


@asynccontextmanager
async def one_connection() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=1)) as session:
        yield session


async def test_a_drain_that_takes_too_long_ends_its_streams_with_an_error(
    settings: Settings, tokenizer: FakeTokenizer
) -> None:
    hasty = replace(settings, mesh=replace(settings.mesh, drain_timeout_s=0.2))
    async with running_gateway(hasty) as gateway:
        await gateway.until_ready()
        _, response = await begun_stream(gateway, tokenizer)
        os.kill(os.getpid(), signal.SIGTERM)
        *_, error, done = await read_events(response)
        assert (json.loads(error)["error"]["code"], done) == ("service_unavailable", "[DONE]")
