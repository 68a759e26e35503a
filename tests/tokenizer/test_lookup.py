"""Placement by the prefix index, through the tokenizer service and a real Valkey."""

from __future__ import annotations

import asyncio
from itertools import count

import pytest
from conversation import idle, ids_of, until_engines
from neighbours import Mesh, ScriptedGateway, ScriptedScheduler
from prometheus_client import CollectorRegistry
from scripts import generate, status_of
from structlog.testing import capture_logs

from pagemesh.shared.engine_messages import Submit
from pagemesh.shared.hashing import chain_hashes
from pagemesh.shared.messages import Cancel, EngineStatus, ModelCard
from pagemesh.shared.messages import Engines as Offer
from pagemesh.shared.prefix_index import Claim, index_keys
from pagemesh.shared.wire import pack_ids
from pagemesh.tokenizer_svc import lookup
from pagemesh.tokenizer_svc.lookup import Lookup, LookupMetrics
from pagemesh.tokenizer_svc.text_model import TextModel

PROMPTS = [f"{n} times the page table of this machine was read and found whole" for n in range(8)]


class Engines:
    """Two engines of one scheduler, each with its number in the index."""

    def __init__(self, mesh: Mesh, card: ModelCard, scheduler: ScriptedScheduler) -> None:
        self.index = mesh.runtime.registry.prefix_index
        self.claims: dict[str, Claim] = {}
        self._card = card
        self._scheduler = scheduler

    async def offer(self, **running: int) -> None:
        statuses = []
        for name in ("engine-1", "engine-2"):
            self.claims[name] = await self.index.claim(name)
            statuses.append(self._status(name, running.get(name.replace("-", "_"), 0)))
        self._scheduler.engines = statuses

    async def hold(self, name: str, ids: list[int], salt: str = "") -> None:
        hashes = b"".join(chain_hashes(pack_ids(ids), self._card.block_tokens, salt=salt))
        await self.index.publish(self.claims[name], index_keys(hashes, self._card), b"")

    def _status(self, name: str, running: int) -> EngineStatus:
        number = self.claims[name].number
        return status_of(self._card, name, index_number=number, running=running)


@pytest.fixture
async def engines(mesh: Mesh, card: ModelCard, scheduler: ScriptedScheduler) -> Engines:
    engines = Engines(mesh, card, scheduler)
    await engines.offer()
    return engines


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that is busy must not make the index silent."""
    monkeypatch.setattr(lookup, "PATIENCE_S", 10.0)


numbers = count()


async def placed_on(
    gateway: ScriptedGateway, scheduler: ScriptedScheduler, prompt: str, **fields: str
) -> Submit:
    """Where the prompt went. It is cancelled at once, so that engines are idle again."""
    request_id = f"request-{next(numbers)}"
    gateway.ask(generate(prompt, request_id, **fields))
    submit = await scheduler.submits.get()
    gateway.ask(Cancel(request_id))
    await idle(gateway)
    return submit


async def both_known(mesh: Mesh, scheduler: ScriptedScheduler) -> ScriptedGateway:
    gateway = await mesh.gateway("gateway-2")
    await gateway.ready()
    scheduler.send(Offer(scheduler.engines))
    await until_engines(gateway, 2)
    return gateway


async def test_the_engine_that_holds_the_prompt_gets_it(
    engines: Engines,
    mesh: Mesh,
    scheduler: ScriptedScheduler,
    byte_level: TextModel,
    patient: None,
) -> None:
    gateway = await both_known(mesh, scheduler)
    wanted = ["engine-1", "engine-2"] * 3
    for name, prompt in zip(wanted, PROMPTS, strict=False):
        await engines.hold(name, ids_of(byte_level, prompt))
    for name, prompt in zip(wanted, PROMPTS, strict=False):
        submit = await placed_on(gateway, scheduler, prompt)
        assert submit.engine_id == name
    metrics = mesh.service._lookup._metrics
    assert metrics.hits._value.get() == len(wanted)
    assert metrics.hit_tokens._value.get() > 0


async def test_a_salt_shares_no_entry(
    engines: Engines,
    mesh: Mesh,
    scheduler: ScriptedScheduler,
    byte_level: TextModel,
    patient: None,
) -> None:
    gateway = await both_known(mesh, scheduler)
    for prompt in PROMPTS[:3]:
        await engines.hold("engine-1", ids_of(byte_level, prompt))
        await engines.hold("engine-2", ids_of(byte_level, prompt), salt="pepper")
    for prompt in PROMPTS[:3]:
        assert (await placed_on(gateway, scheduler, prompt)).engine_id == "engine-1"
        salted = await placed_on(gateway, scheduler, prompt, cache_salt="pepper")
        assert salted.engine_id == "engine-2"


async def test_requests_of_one_cache_key_go_together(
    engines: Engines, mesh: Mesh, scheduler: ScriptedScheduler, patient: None
) -> None:
    gateway = await both_known(mesh, scheduler)
    for key in ("a", "b", "c", "d"):
        submits = [
            await placed_on(gateway, scheduler, f"{key}{n} {PROMPTS[n]}", cache_key=key)
            for n in range(2)
        ]
        assert len({submit.engine_id for submit in submits}) == 1


async def test_a_silent_index_is_waited_for_a_moment_and_told_of_once(
    engines: Engines, mesh: Mesh, scheduler: ScriptedScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(keys: bytes) -> dict[int, int]:
        await asyncio.get_running_loop().create_future()
        return {}

    gateway = await both_known(mesh, scheduler)
    monkeypatch.setattr(mesh.runtime.registry.prefix_index, "depths", never)
    with capture_logs() as lines:
        for prompt in PROMPTS:
            await placed_on(gateway, scheduler, prompt)
    assert [line["event"] for line in lines].count("prefix_index_silent") == 1
    assert mesh.service._lookup._metrics.unanswered._value.get() == len(PROMPTS)


class NeverAnswers:
    def __init__(self) -> None:
        self.asked = 0

    async def depths(self, keys: bytes) -> dict[int, int]:
        self.asked += 1
        await asyncio.get_running_loop().create_future()
        return {}


async def test_lookups_out_are_bounded() -> None:
    index = NeverAnswers()
    looking = Lookup(index, LookupMetrics(CollectorRegistry()))  # type: ignore[arg-type]
    async with asyncio.timeout(30):
        asked = [looking.depths(b"") for _ in range(lookup.MAX_LOOKUPS + 5)]
        assert await asyncio.gather(*asked) == [None] * len(asked)
    assert index.asked == lookup.MAX_LOOKUPS
    await looking.close()
    await asyncio.sleep(0)
    assert not looking._out
