"""The tokenizer service between a scripted gateway and scripted schedulers, over real sockets."""

from __future__ import annotations

import asyncio

import pytest
from conversation import STORY, idle, ids_of, placed, say, until_engines
from neighbours import Mesh, ScriptedGateway, ScriptedScheduler
from prometheus_client import generate_latest
from scripts import generate, status_of, text_of, tokens
from structlog.testing import capture_logs

from pagemesh.shared.engine_messages import Ended, Started
from pagemesh.shared.messages import (
    Begun,
    Cancel,
    Detokenize,
    Detokenized,
    ModelCard,
    Prompt,
    Tokenize,
    Tokenized,
)
from pagemesh.shared.wire import pack_ids, unpack_ids
from pagemesh.tokenizer_svc.text_model import TextModel

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


async def test_choices_that_end_in_one_frame_all_say_so(
    gateway: ScriptedGateway, scheduler: ScriptedScheduler
) -> None:
    submits = [await placed(gateway, scheduler, generate(n=3))]
    submits += [await scheduler.submits.get() for _ in range(2)]
    rows = {submit.key: [5] for submit in submits}
    ended = [Ended(submit.key, "length") for submit in submits]
    scheduler.send(tokens(rows, ended=ended))
    deltas = [await gateway.delta("r1") for _ in submits]
    assert {delta.choice: delta.finish_reason for delta in deltas} == dict.fromkeys(
        range(3), "length"
    )
    await idle(gateway)
    assert gateway.is_silent("r1")


async def test_what_an_engine_says_of_a_start_goes_up_before_the_first_token(
    gateway: ScriptedGateway, scheduler: ScriptedScheduler
) -> None:
    submit = await placed(gateway, scheduler, generate())
    scheduler.send(tokens({submit.key: [5]}, started=[Started(submit.key, 3, 0.5, 0.25)]))
    assert (await gateway.delta("r1")).cached_tokens == 3
    assert gateway.begun == [Begun("r1", 0, "engine-1", 3, 0.5, 0.25)]


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


# -- what operators see ----------------------------------------------------------------------------


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


async def test_a_drain_that_takes_too_long_gives_its_requests_up(
    mesh: Mesh, gateway: ScriptedGateway, scheduler: ScriptedScheduler
) -> None:
    submit = await placed(gateway, scheduler, generate())
    scheduler.send(tokens({submit.key: [5]}))
    await gateway.delta("r1")
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(mesh.service.drain(), 0.05)
    await gateway.ended()
    assert (await scheduler.ends.get()).keys == [submit.key]


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


async def test_only_what_goes_to_a_gateway_is_counted_and_timed(
    mesh: Mesh, gateway: ScriptedGateway, scheduler: ScriptedScheduler
) -> None:
    """A request ends with its first failed choice; others of the same frame go on."""
    before = await placed(gateway, scheduler, generate(request_id="before"))
    failing = await placed(gateway, scheduler, generate(request_id="failing", n=2))
    sibling = await scheduler.submits.get()
    after = await placed(gateway, scheduler, generate(request_id="after"))
    submits = (before, failing, sibling, after)
    scheduler.send(tokens({each.key: [-5 if each is failing else 5] for each in submits}))
    await gateway.failed("failing")
    for request_id in ("before", "after"):
        await gateway.delta(request_id)
    text = generate_latest(mesh.runtime.metrics).decode()
    assert "pagemesh_tokenizer_output_tokens_total 2.0" in text
    assert "pagemesh_tokenizer_token_seconds_count 2.0" in text


async def test_a_new_gateway_learns_the_engines_at_once(
    mesh: Mesh, gateway: ScriptedGateway, scheduler: ScriptedScheduler
) -> None:
    link = await mesh.dial("gateway-2")
    assert [status.engine_id for status in link.peer.engines] == ["engine-1"]
    await link.close()
