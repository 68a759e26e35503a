"""Requests whose engine is lost, missing, draining or strange."""

from __future__ import annotations

import msgspec
import pytest
from conversation import STORY, ids_of, placed, say, until_engines
from neighbours import Mesh, ScriptedGateway, ScriptedScheduler, running_service
from scripts import generate, status_of, text_of, tokens
from structlog.testing import capture_logs

from pagemesh.shared.engine_messages import Ended, Lost, Submit
from pagemesh.shared.messages import Delta, Engines, ModelCard
from pagemesh.shared.settings import GatewaySettings, Settings
from pagemesh.shared.wire import unpack_ids
from pagemesh.tokenizer_svc.text_model import TextModel


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
            while not any(line["event"] == "engine_refused" for line in lines):
                engines = await gateway.engines.get()
                assert [e.engine_id for e in engines.engines] == ["engine-1"]
            for i in range(3):
                await placed(gateway, scheduler, generate(request_id=f"r{i}"))
    [refusal] = [line for line in lines if line["event"] == "engine_refused"]
    assert (refusal["log_level"], refusal["engine"]) == ("error", "stranger")
