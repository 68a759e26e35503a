"""The tokenizer service between a scripted gateway and scripted schedulers, over real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import msgspec
import pytest
from neighbours import Mesh, ScriptedGateway, ScriptedScheduler, running_service
from prometheus_client import generate_latest
from scripts import card_of, generate, logprob_row, prompt_logprobs, status_of, tokens
from structlog.testing import capture_logs

from pagemesh.shared import wire
from pagemesh.shared.settings import GatewaySettings, Settings
from pagemesh.shared.wire import (
    BadFrame,
    Cancel,
    Delta,
    Detokenize,
    Detokenized,
    Ended,
    Engines,
    Generate,
    Lost,
    ModelCard,
    Prompt,
    Submit,
    Tokenize,
    Tokenized,
    WireError,
    pack_ids,
    unpack_ids,
)
from pagemesh.tokenizer_svc import outbox
from pagemesh.tokenizer_svc.text_model import TextModel

STRANGE_CHAT = Prompt(messages=[{"role": "robot", "content": "x"}])
STORY = " once upon a time there was a 世界 of pages 😀 and it was good"


@pytest.fixture
async def mesh(
    byte_level_settings: Settings, redis_url: str, mesh_name: str
) -> AsyncIterator[Mesh]:
    async with running_service(byte_level_settings, redis_url, mesh_name) as running:
        yield running


@pytest.fixture
def card(byte_level: TextModel) -> ModelCard:
    return card_of(byte_level, max_model_len=4096)


@pytest.fixture
async def scheduler(mesh: Mesh, card: ModelCard) -> AsyncIterator[ScriptedScheduler]:
    async with mesh.scheduler(status_of(card)) as running:
        yield running


@pytest.fixture
async def gateway(mesh: Mesh, scheduler: ScriptedScheduler) -> ScriptedGateway:
    connected = await mesh.gateway()
    await connected.ready()
    return connected


def ids_of(model: TextModel, text: str) -> list[int]:
    return model.encode(Prompt(text=text))


def text_of(deltas: list[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


async def placed(
    gateway: ScriptedGateway, scheduler: ScriptedScheduler, request: Generate
) -> Submit:
    gateway.ask(request)
    await gateway.accepted(request.request_id)
    return await scheduler.submits.get()


async def say(
    gateway: ScriptedGateway, scheduler: ScriptedScheduler, submit: Submit, token_id: int
) -> Delta:
    """One token from the engine, followed to the gateway."""
    scheduler.send(tokens({submit.key: [token_id]}, engine_id=submit.engine_id))
    return await gateway.delta(submit.request_id)


# -- the plain way --------------------------------------------------------------------------------


async def test_a_prompt_goes_down_as_ids_and_comes_back_as_text(
    gateway: ScriptedGateway, scheduler: ScriptedScheduler, byte_level: TextModel
) -> None:
    gateway.ask(generate("Hello world"))
    accepted = await gateway.accepted("r1")
    submit = await scheduler.submits.get()
    assert unpack_ids(accepted.prompt_ids) == ids_of(byte_level, "Hello world")
    assert (submit.prompt_ids, submit.engine_id) == (accepted.prompt_ids, "engine-1")
    story = ids_of(byte_level, STORY)
    for token_id in story[:-1]:
        scheduler.send(tokens({submit.key: [token_id]}))
    scheduler.send(tokens({submit.key: story[-1:]}, ended=[Ended(submit.key, "length")]))
    deltas = await gateway.rest("r1")
    assert text_of(deltas) == STORY
    assert unpack_ids(b"".join(d.token_ids for d in deltas)) == story


async def test_choices_of_one_request_share_an_engine(
    gateway: ScriptedGateway, scheduler: ScriptedScheduler, mesh: Mesh, card: ModelCard
) -> None:
    async with mesh.scheduler(status_of(card, "engine-2"), name="scheduler-2") as second:
        await until_engines(gateway, 2)
        first = await placed(gateway, scheduler, generate(n=3))
        more = [await scheduler.submits.get() for _ in range(2)]
        assert {s.group for s in more} == {first.group}
        assert second.submits.empty()
        gateway.ask(generate(request_id="r2"))
        assert (await second.submits.get()).engine_id == "engine-2"


async def test_twenty_streams_keep_their_own_text(
    gateway: ScriptedGateway, scheduler: ScriptedScheduler, byte_level: TextModel
) -> None:
    names = [f"r{i}" for i in range(20)]
    submits = {name: await placed(gateway, scheduler, generate(request_id=name)) for name in names}
    texts = {name: f"this is stream {name}, {STORY}" for name in names}
    ids = {name: ids_of(byte_level, text) for name, text in texts.items()}
    for step in range(max(map(len, ids.values()))):
        rows = {submits[n].key: ids[n][step : step + 1] for n in names if step < len(ids[n])}
        ended = [Ended(submits[n].key, "length") for n in names if step == len(ids[n]) - 1]
        scheduler.send(tokens(rows, ended=ended))
    for name in names:
        assert text_of(await gateway.rest(name)) == texts[name]


async def test_a_request_of_many_prompts_is_admitted_by_an_idle_service(
    gateway: ScriptedGateway, scheduler: ScriptedScheduler
) -> None:
    """As many prompts and choices as the gateway lets one request have."""
    names = [f"many-{i}" for i in range(512)]
    for name in names:
        gateway.ask(generate(request_id=name, n=2))
    for name in names:
        await gateway.accepted(name)
    submits = [await scheduler.submits.get() for _ in range(1024)]
    assert {submit.request_id for submit in submits} == set(names)


async def test_tokenize_and_detokenize(
    gateway: ScriptedGateway, byte_level: TextModel, card: ModelCard
) -> None:
    gateway.ask(Tokenize("t1", "small", Prompt(text="Hello 😀"), want_token_strs=True))
    answer = await gateway.next("t1")
    assert isinstance(answer, Tokenized)
    ids = unpack_ids(answer.token_ids)
    assert ids == ids_of(byte_level, "Hello 😀")
    assert answer.token_strs == [byte_level.token_str(i) for i in ids]
    assert answer.max_model_len == card.max_model_len
    gateway.ask(Detokenize("t2", "small", answer.token_ids))
    assert await gateway.next("t2") == Detokenized("t2", "Hello 😀")


# -- ending early ---------------------------------------------------------------------------------


async def test_a_stop_string_across_tokens_ends_the_request_below(
    gateway: ScriptedGateway, scheduler: ScriptedScheduler, byte_level: TextModel
) -> None:
    submit = await placed(gateway, scheduler, generate(stop=["lazy dog"]))
    for token_id in ids_of(byte_level, "over the lazy dog and on"):
        scheduler.send(tokens({submit.key: [token_id]}))
    deltas = await gateway.rest("r1")
    assert text_of(deltas) == "over the "
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", "lazy dog")
    end = await scheduler.ends.get()
    assert (end.keys, end.reason) == ([submit.key], "stop")
    await idle(gateway)
    assert gateway.is_silent("r1")


async def test_cancel_frees_the_engine(
    gateway: ScriptedGateway, scheduler: ScriptedScheduler
) -> None:
    submit = await placed(gateway, scheduler, generate(n=2))
    other = await scheduler.submits.get()
    gateway.ask(Cancel("r1"))
    end = await scheduler.ends.get()
    assert (sorted(end.keys), end.reason) == (sorted([submit.key, other.key]), "abort")
    scheduler.send(tokens({submit.key: [5]}))
    await idle(gateway)
    assert gateway.is_silent("r1")


async def test_a_gateways_hang_up_frees_all_its_requests(
    mesh: Mesh, gateway: ScriptedGateway, scheduler: ScriptedScheduler
) -> None:
    leaving = await mesh.gateway("gateway-2")
    gone = [await placed(leaving, scheduler, generate(request_id=f"g{i}")) for i in range(3)]
    stays = await placed(gateway, scheduler, generate(request_id="stays"))
    await leaving.close()
    ends = [await scheduler.ends.get() for _ in gone]
    assert {end.reason for end in ends} == {"abort"}
    assert sorted(k for end in ends for k in end.keys) == sorted(s.key for s in gone)
    assert (await say(gateway, scheduler, stays, 5)).choice == 0


async def test_one_gateway_cannot_cancel_for_another(
    mesh: Mesh, gateway: ScriptedGateway, scheduler: ScriptedScheduler
) -> None:
    submit = await placed(gateway, scheduler, generate())
    other = await mesh.gateway("gateway-2")
    other.ask(Cancel("r1"))
    await idle(other)
    assert (await say(gateway, scheduler, submit, 5)).error is None


async def test_a_newer_attempt_replaces_the_older_one(
    mesh: Mesh, gateway: ScriptedGateway, scheduler: ScriptedScheduler
) -> None:
    older = await placed(gateway, scheduler, generate())
    other = await mesh.gateway("gateway-2")
    newer = await placed(other, scheduler, generate(attempt=2, prior_ids=[pack_ids([5])]))
    assert (await scheduler.ends.get()).keys == [older.key]
    assert unpack_ids(newer.prior_ids) == [5]
    other.ask(generate(attempt=2))
    assert (await other.failed("r1")).error.status == 409


# -- failover -------------------------------------------------------------------------------------


async def until_engines(gateway: ScriptedGateway, count: int) -> None:
    while len((await gateway.engines.get()).engines) != count:
        pass


async def idle(gateway: ScriptedGateway) -> None:
    """Return when the service has handled everything sent to it before this."""
    gateway.ask(Tokenize("idle", "small", Prompt(text="x")))
    await gateway.next("idle")


async def finish(
    gateway: ScriptedGateway, scheduler: ScriptedScheduler, submit: Submit, ids: list[int]
) -> list[Delta]:
    rest = ids[len(submit.prior_ids) // 4 :]
    ended = [Ended(submit.key, "length")]
    scheduler.send(tokens({submit.key: rest}, ended=ended, engine_id=submit.engine_id))
    return await gateway.rest(submit.request_id)


@pytest.mark.parametrize("cause", ["lost", "link"])
async def test_another_engine_goes_on_where_the_lost_one_stopped(
    cause: str,
    mesh: Mesh,
    gateway: ScriptedGateway,
    scheduler: ScriptedScheduler,
    byte_level: TextModel,
    card: ModelCard,
) -> None:
    submit = await placed(gateway, scheduler, generate())
    story = ids_of(byte_level, STORY)
    shown = [await say(gateway, scheduler, submit, token_id) for token_id in story[:20]]
    busy = status_of(card, "engine-2", running=1)
    async with mesh.scheduler(busy, name="scheduler-2") as second:
        await until_engines(gateway, 2)
        if cause == "link":
            await scheduler.die()
        else:
            scheduler.send(Engines([]))
            scheduler.send(Lost("engine-1", [submit.key]))
        again = await second.submits.get()
        assert (again.engine_id, again.attempt) == ("engine-2", 2)
        assert (again.seed, unpack_ids(again.prior_ids)) == (submit.seed, story[:20])
        shown += await finish(gateway, second, again, story)
    assert text_of(shown) == STORY
    assert unpack_ids(b"".join(d.token_ids for d in shown)) == story


async def test_the_same_scheduler_may_come_back(
    gateway: ScriptedGateway, scheduler: ScriptedScheduler, byte_level: TextModel
) -> None:
    submit = await placed(gateway, scheduler, generate())
    story = ids_of(byte_level, STORY)
    shown = [await say(gateway, scheduler, submit, story[0])]
    [link] = scheduler.links
    await link.close()
    again = await scheduler.submits.get()
    shown += await finish(gateway, scheduler, again, story)
    assert text_of(shown) == STORY


async def test_a_frame_without_sense_costs_the_link_and_no_request(
    gateway: ScriptedGateway, scheduler: ScriptedScheduler
) -> None:
    submit = await placed(gateway, scheduler, generate())
    scheduler.send(tokens()._replace(keys=b"odd"))
    again = await scheduler.submits.get()
    assert (again.request_id, again.attempt) == (submit.request_id, 2)


async def test_a_request_waits_for_an_engine(mesh: Mesh, card: ModelCard) -> None:
    gateway = await mesh.gateway()
    assert mesh.service.not_ready() is not None
    gateway.ask(generate())
    async with mesh.scheduler(status_of(card)) as scheduler:
        await gateway.accepted("r1")
        await scheduler.submits.get()
        assert mesh.service.not_ready() is None


async def test_without_an_engine_a_request_fails_in_time(
    byte_level_settings: Settings, redis_url: str, mesh_name: str, card: ModelCard
) -> None:
    patience = GatewaySettings(request_timeout_s=0.05)
    hasty = msgspec.structs.replace(byte_level_settings, gateway=patience)
    async with running_service(hasty, redis_url, mesh_name) as mesh:
        gateway = await mesh.gateway()
        gateway.ask(generate(request_id="early"))
        error = (await gateway.failed("early")).error
        assert (error.status, error.code) == (503, "engine_unavailable")
        async with mesh.scheduler(status_of(card)) as scheduler:
            await gateway.ready()
            submit = await placed(gateway, scheduler, generate())
            await say(gateway, scheduler, submit, 5)
        error = (await gateway.failed("r1")).error
        assert (error.status, error.code) == (503, "engine_unavailable")


async def test_a_draining_scheduler_gets_nothing_new(
    mesh: Mesh, gateway: ScriptedGateway, scheduler: ScriptedScheduler, card: ModelCard
) -> None:
    submit = await placed(gateway, scheduler, generate())
    busy = status_of(card, "engine-2", running=4)
    async with mesh.scheduler(busy, name="scheduler-2") as second:
        await until_engines(gateway, 2)
        scheduler.send(Engines([status_of(card)], draining=True))
        await gateway.engines.get()
        assert (await placed(gateway, second, generate(request_id="r2"))).engine_id == "engine-2"
        assert (await say(gateway, scheduler, submit, 5)).error is None


async def test_an_engine_of_another_model_is_refused_loudly(
    mesh: Mesh, gateway: ScriptedGateway, scheduler: ScriptedScheduler, card: ModelCard
) -> None:
    stranger = status_of(card._replace(fingerprint="beef"), "stranger")
    with capture_logs() as lines:
        async with mesh.scheduler(stranger, name="scheduler-2"):
            engines = await gateway.engines.get()
            assert [e.engine_id for e in engines.engines] == ["engine-1"]
            for i in range(3):
                await placed(gateway, scheduler, generate(request_id=f"r{i}"))
    [refusal] = [line for line in lines if line["event"] == "engine_refused"]
    assert (refusal["log_level"], refusal["engine"]) == ("error", "stranger")


# -- bad input and slow neighbours ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_", "status", "code", "param"),
    [
        (generate(request_id="bad", model="other"), 404, "model_not_found", "model"),
        (generate("", "bad"), 400, None, "prompt"),
        (generate([100_000], "bad"), 400, None, "prompt"),
        (generate([5] * 5000, "bad"), 400, "context_length_exceeded", "prompt"),
        (generate(request_id="bad", prompt=STRANGE_CHAT), 400, None, "messages"),
    ],
)
async def test_bad_requests_fail_alone(
    gateway: ScriptedGateway,
    scheduler: ScriptedScheduler,
    request_: Generate,
    status: int,
    code: str | None,
    param: str,
) -> None:
    healthy = await placed(gateway, scheduler, generate(request_id="healthy"))
    gateway.ask(request_)
    error = (await gateway.failed("bad")).error
    assert (error.status, error.code, error.param) == (status, code, param)
    assert (await say(gateway, scheduler, healthy, 5)).error is None
    assert scheduler.submits.empty()


@pytest.mark.parametrize(
    ("message", "status"),
    [
        (Tokenize("bad", "other", Prompt(text="x")), 404),
        (Detokenize("bad", "other", pack_ids([5])), 404),
        (Detokenize("bad", "small", pack_ids([-5])), 400),
        (Tokenize("bad", "small", Prompt(messages=[])), 400),
    ],
)
async def test_bad_tokenize_requests_are_answered(
    gateway: ScriptedGateway, message: Tokenize | Detokenize, status: int
) -> None:
    gateway.ask(message)
    assert (await gateway.failed("bad")).error.status == status


async def test_the_engines_first_refusal_ends_the_whole_request(
    gateway: ScriptedGateway, scheduler: ScriptedScheduler
) -> None:
    first = await placed(gateway, scheduler, generate(n=3))
    others = [await scheduler.submits.get() for _ in range(2)]
    error = WireError(429, "queue_full", None, "too many wait")
    with capture_logs() as lines:
        scheduler.send(tokens({others[0].key: [5]}))
        scheduler.send(tokens(failed=[(first.key, error), (others[0].key, error)]))
        scheduler.send(tokens(failed=[(others[1].key, error)]))
        assert (await gateway.delta("r1")).choice == others[0].choice
        assert (await gateway.failed("r1")).error == error
        end = await scheduler.ends.get()
        await idle(gateway)
    assert (end.keys, end.reason) == ([others[1].key], "abort")
    assert gateway.is_silent("r1")
    [line] = lines
    assert (line["event"], line["request_id"], line["status"]) == ("request_failed", "r1", 429)


async def test_a_placement_that_crashes_ends_its_request(
    gateway: ScriptedGateway, scheduler: ScriptedScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit = await placed(gateway, scheduler, generate([5] * 1000))
    with capture_logs() as lines:
        scheduler.send(Lost("engine-1", [submit.key]))
        monkeypatch.setattr(wire, "MAX_FRAME_BYTES", 2000)  # less than its prompt
        error = (await gateway.failed("r1")).error
    assert (error.status, error.message) == (500, "internal error")
    [crash] = [line for line in lines if line["event"] == "request_crashed"]
    assert isinstance(crash["exc_info"], BadFrame)


async def test_an_admitted_request_is_one_line_of_the_log(
    gateway: ScriptedGateway, scheduler: ScriptedScheduler
) -> None:
    with capture_logs() as lines:
        submit = await placed(gateway, scheduler, generate(n=2))
        await say(gateway, scheduler, submit, 5)
    [line] = lines
    assert line == {
        "event": "request_admitted",
        "log_level": "info",
        "request_id": "r1",
        "prompt_tokens": len(submit.prompt_ids) // 4,
        "choices": 2,
        "engine": "engine-1",
    }


async def test_large_prompt_logprobs_come_whole(
    gateway: ScriptedGateway, scheduler: ScriptedScheduler
) -> None:
    submit = await placed(gateway, scheduler, generate([5] * 500, prompt_logprobs=64))
    rows = [[(at % 300, -1.0)] * 65 for at in range(1, 500)]
    chunk = prompt_logprobs(submit.key, 1, rows, [1] * 499)
    scheduler.send(tokens({submit.key: [5]}, prompt_logprobs=[chunk]))
    scored = (await gateway.delta("r1")).prompt_logprobs
    assert scored is not None
    assert [entry and (entry.token_id, len(entry.top)) for entry in scored] == [
        None,
        *((at % 300, 64) for at in range(1, 500)),
    ]


async def test_a_huge_prompt_does_not_stall_a_running_stream(
    gateway: ScriptedGateway, scheduler: ScriptedScheduler, card: ModelCard
) -> None:
    roomy = Engines([status_of(card._replace(max_model_len=2**20))])
    scheduler.send(roomy)
    while (await gateway.engines.get()).engines != roomy.engines:
        pass
    submit = await placed(gateway, scheduler, generate(max_tokens=4000))
    gateway.ask(generate("hello there, " * 80_000, "huge"))
    n_tokens = 0
    while gateway.is_silent("huge"):
        await say(gateway, scheduler, submit, 5)
        n_tokens += 1
    assert len((await gateway.accepted("huge")).prompt_ids) > 4 * 80_000
    # Encoding a megabyte takes some hundred times as long as a token takes to pass.
    assert n_tokens > 20


async def test_a_gateway_that_does_not_read_loses_only_its_own_link(
    mesh: Mesh,
    gateway: ScriptedGateway,
    scheduler: ScriptedScheduler,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(outbox, "MAX_PENDING_BYTES", 100_000)
    healthy = await placed(gateway, scheduler, generate(request_id="healthy"))
    deaf = await mesh.dial("gateway-2")
    deaf.send(generate(request_id="deaf", max_tokens=4000, logprobs=20))
    submit = await scheduler.submits.get()
    row = logprob_row(submit.key, [5] * 21, [-1.0] * 21, 1)
    many = tokens({submit.key: [5] * 200}, logprobs=[row] * 200)
    while scheduler.ends.empty():
        scheduler.send(many)
        await say(gateway, scheduler, healthy, 5)
    assert (await scheduler.ends.get()).keys == [submit.key]
    assert (await say(gateway, scheduler, healthy, 5)).error is None
    await deaf.close()


async def test_drain_refuses_new_requests_and_waits_for_the_running(
    mesh: Mesh, gateway: ScriptedGateway, scheduler: ScriptedScheduler
) -> None:
    submit = await placed(gateway, scheduler, generate())
    drained = asyncio.create_task(mesh.service.drain())
    while not (await gateway.engines.get()).draining:
        pass
    gateway.ask(generate(request_id="late"))
    assert (await gateway.failed("late")).error.status == 503
    assert not drained.done()
    scheduler.send(tokens({submit.key: [5]}, ended=[Ended(submit.key, "length")]))
    await drained
    assert (await gateway.delta("r1")).finish_reason == "length"


async def test_metrics_count_tokens_and_name_engines(
    mesh: Mesh, gateway: ScriptedGateway, scheduler: ScriptedScheduler, byte_level: TextModel
) -> None:
    submit = await placed(gateway, scheduler, generate())
    await say(gateway, scheduler, submit, 5)
    text = generate_latest(mesh.runtime.metrics).decode()
    n_prompt = len(submit.prompt_ids) // 4
    assert f"pagemesh_tokenizer_prompt_tokens_total {n_prompt}.0" in text
    assert "pagemesh_tokenizer_output_tokens_total 1.0" in text
    assert "pagemesh_tokenizer_requests_in_flight 1.0" in text
    assert 'vllm:num_requests_running{engine="engine-1",model_name="small"}' in text


async def test_a_new_gateway_learns_the_engines_at_once(
    mesh: Mesh, gateway: ScriptedGateway, scheduler: ScriptedScheduler
) -> None:
    link = await mesh.dial("gateway-2")
    assert [status.engine_id for status in link.peer.engines] == ["engine-1"]
    await link.close()
