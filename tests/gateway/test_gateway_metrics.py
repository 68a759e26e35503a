"""Latencies, tokens, and the count of choices that must add up whatever ends them."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Sequence
from itertools import product
from typing import Any, Final

import aiohttp
import pytest
from gateway_fakes import Conversation, FakeTokenizer, Gateway, engine, fake_tokenizer
from hypothesis import given
from hypothesis import strategies as st
from metric_names import GATEWAY_GOLDEN, Scrape, names_types_labels
from prometheus_client import CollectorRegistry, generate_latest

from pagemesh.gateway.generation import Generation
from pagemesh.gateway.metrics import GatewayMetrics
from pagemesh.gateway.pending import PendingGeneration
from pagemesh.gateway.request_metrics import (
    FORMER,
    MAX_FORMER_ENGINES,
    ChoiceTiming,
    ModelTally,
    RequestMetrics,
)
from pagemesh.gateway.request_series import RequestCollector
from pagemesh.shared.errors import RequestError
from pagemesh.shared.messages import (
    Accepted,
    Begun,
    Delta,
    EngineStatus,
    Generate,
    Prompt,
    WireError,
)
from pagemesh.shared.metrics import DesiredWorkersCollector, EngineCollector
from pagemesh.shared.sampling import SamplingParams
from pagemesh.shared.settings import Settings
from pagemesh.shared.wire import pack_ids

COMPLETIONS: Final = "/v1/completions"
RECEIVED: Final = "pagemesh_requests_received_total"
IN_FLIGHT: Final = "pagemesh_requests_in_flight"
FINISHED: Final = "vllm:request_success_total"


def scrape(requests: RequestMetrics, engines: Sequence[EngineStatus] = ()) -> Scrape:
    registry = CollectorRegistry()
    registry.register(RequestCollector(requests, lambda: engines))
    return Scrape.of(generate_latest(registry).decode())


def finished(seen: Scrape) -> dict[str, float]:
    return seen.by(FINISHED, "finished_reason")


def assert_reconciled(seen: Scrape) -> None:
    ended = sum(finished(seen).values())
    assert seen.total(RECEIVED) == ended + seen.total(IN_FLIGHT)


# -- the pure parts: time is an argument ----------------------------------------------------------


def begun(choice: int = 0, engine_id: str = "engine-1", **fields: Any) -> Begun:
    start = {"cached_tokens": 3, "queue_s": 2.0, "prefill_s": 0.25} | fields
    return Begun("r", choice, engine_id, **start)


def test_each_token_of_a_merged_delta_counts_its_share_of_the_gap() -> None:
    requests = RequestMetrics()
    timing = ChoiceTiming(requests.of("tiny"), 100.0)
    timing.begin(begun())
    for n_tokens, now_s in ((2, 100.5), (1, 100.75), (0, 101.0), (5, 103.25)):
        timing.gained(n_tokens, now_s)
    timing.completed(104.0, n_prompt_tokens=10)
    seen = scrape(requests)
    labels = {"model_name": "tiny", "engine": "engine-1"}
    assert seen.total("vllm:time_to_first_token_seconds_count", **labels) == 1
    assert seen.total("vllm:time_to_first_token_seconds_sum") == 0.5
    for name in ("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"):
        assert seen.total(f"{name}_count", **labels) == 6
        assert seen.total(f"{name}_sum") == 0.25 + 2.5
        assert seen.total(f"{name}_bucket", le="0.3") == 1
        assert seen.total(f"{name}_bucket", le="+Inf") == 6
    assert seen.total("vllm:generation_tokens_total", **labels) == 8
    expected = {
        "e2e_request_latency_seconds": 4.0,
        "request_queue_time_seconds": 2.0,
        "request_prefill_time_seconds": 0.25,
        "request_decode_time_seconds": 2.75,
        "request_inference_time_seconds": 3.0,
        "request_time_per_output_token_seconds": 2.75 / 7,
        "request_generation_tokens": 8,
        "request_prefill_kv_computed_tokens": 7,
    }
    assert {name: seen.total(f"vllm:{name}_sum", **labels) for name in expected} == expected


def test_after_a_resume_the_phases_of_the_first_engine_count() -> None:
    requests = RequestMetrics()
    timing = ChoiceTiming(requests.of("tiny"), 0.0)
    timing.begin(begun())
    timing.gained(1, 1.0)
    timing.begin(begun(engine_id="engine-2", queue_s=7.0))
    timing.gained(1, 3.0)
    timing.completed(3.0, n_prompt_tokens=10)
    seen = scrape(requests)
    assert seen.by("vllm:generation_tokens_total", "engine") == {"engine-1": 1, "engine-2": 1}
    assert seen.by("vllm:request_queue_time_seconds_sum", "engine") == {"engine-2": 2.0}
    assert seen.by("vllm:request_decode_time_seconds_sum", "engine") == {"engine-2": 2.0}


def pending_choices(requests: RequestMetrics, **params: Any) -> PendingGeneration:
    sampling = SamplingParams(seed=1, **params)
    generate = Generate("r", 0, "tiny", Prompt(text="a"), sampling)
    return PendingGeneration(generate, 0, Generation(1, sampling.n), requests.of("tiny"), now_s=0.0)


def test_a_prompt_counts_once_whatever_n_and_however_often_it_is_sent() -> None:
    requests = RequestMetrics()
    pending = pending_choices(requests, n=3, max_tokens=7)
    for attempt in range(2):
        pending.accept(Accepted("r", pack_ids([1, 2, 3, 4])))
        for choice in range(3):
            pending.begin(begun(choice))
            pending.add(delta_of("token", choice), now_s=float(attempt))
        pending.link_lost()
    pending.add(delta_of("token", 1), now_s=3.0)
    for choice in range(3):
        pending.add(delta_of("stop", choice), now_s=3.0)
    seen = scrape(requests)
    assert seen.total("vllm:prompt_tokens_total", engine="engine-1") == 4
    assert seen.total("vllm:prompt_tokens_cached_total") == 1
    sources = seen.by("vllm:prompt_tokens_by_source_total", "source")
    assert sources == {"local_compute": 3, "local_cache_hit": 1}
    assert seen.total("vllm:request_prompt_tokens_bucket", le="2.0") == 0
    assert seen.total("vllm:request_prompt_tokens_bucket", le="5.0") == 1
    for name, value in (
        ("prompt_tokens", 4),
        ("params_n", 3),
        ("params_max_tokens", 7),
        ("max_num_generation_tokens", 3),
    ):
        assert seen.total(f"vllm:request_{name}_count") == 1
        assert seen.total(f"vllm:request_{name}_sum") == value


EVENTS = st.lists(
    st.tuples(st.sampled_from(["begin", "token", "stop", "abort", "error"]), st.integers(0, 3))
)


@given(
    events=EVENTS, accepted=st.booleans(), ending=st.sampled_from(["fail", "abandon", "link_lost"])
)
def test_received_is_finished_plus_in_flight_after_every_event(
    events: list[tuple[str, int]], accepted: bool, ending: str
) -> None:
    requests = RequestMetrics()
    pending, tally = pending_choices(requests, n=4), requests.of("tiny")
    if accepted:
        pending.accept(Accepted("r", pack_ids([1])))
    for kind, choice in events:
        if kind == "begin":
            pending.begin(begun(choice))
        else:
            pending.add(delta_of(kind, choice), now_s=1.0)
        assert tally.n_in_flight + n_finished(tally) == 4
    if ending == "fail":
        pending.fail(RequestError("no"))
    elif ending == "abandon":
        pending.abandon()
    else:
        pending.link_lost()
    seen = scrape(requests)
    assert_reconciled(seen)
    assert seen.total(RECEIVED) == 4
    assert ending == "link_lost" or seen.total(IN_FLIGHT) == 0


def n_finished(tally: ModelTally) -> int:
    return sum(engine.finished.total() for engine in tally.engines.values())


def delta_of(kind: str, choice: int) -> Delta:
    reason = kind if kind in ("stop", "abort") else None
    error = WireError(500, "broken", None, "broken") if kind == "error" else None
    ids = pack_ids([1]) if kind == "token" else b""
    return Delta("r", choice, "", ids, finish_reason=reason, error=error, cached_tokens=1)


# -- engines that come and go ---------------------------------------------------------------------


def run_one(requests: RequestMetrics, engine_id: str) -> None:
    pending = pending_choices(requests)
    pending.accept(Accepted("r", pack_ids([1, 2])))
    pending.begin(begun(engine_id=engine_id))
    pending.add(delta_of("token", 0), now_s=1.0)
    pending.add(delta_of("stop", 0), now_s=1.0)


def test_restarted_workers_leave_a_bounded_number_of_series_and_every_count() -> None:
    requests = RequestMetrics()
    n_restarts = 20
    for number in range(n_restarts):
        run_one(requests, f"engine-{number}")
        seen = scrape(requests)
    assert_reconciled(seen)
    former = {FORMER: n_restarts - MAX_FORMER_ENGINES}
    newest = {f"engine-{n_restarts - 1 - age}": 1 for age in range(MAX_FORMER_ENGINES)}
    assert seen.by(FINISHED, "engine") == former | newest
    for name in ("generation_tokens_total", "e2e_request_latency_seconds_count"):
        assert seen.total(f"vllm:{name}") == n_restarts
    assert seen.total("vllm:e2e_request_latency_seconds_sum", engine=FORMER) == former[FORMER]


def test_an_engine_keeps_its_series_while_it_lives_or_has_an_open_choice() -> None:
    requests = RequestMetrics()
    running = pending_choices(requests)
    running.begin(begun(engine_id="lost"))
    run_one(requests, "alive")
    alive = [engine("alive")]
    for number in range(10):
        run_one(requests, f"engine-{number}")
        scrape(requests, alive)
    tallies = requests.of("tiny").engines
    assert {"lost", "alive", FORMER} < set(tallies)
    running.begin(begun(engine_id="alive"))
    seen = scrape(requests, alive)
    assert "lost" not in tallies
    running.fail(RequestError("no"))
    assert tallies["alive"].n_open == 0
    assert_reconciled(seen)


def test_a_scrape_shows_idle_engines_with_zeros_and_leaves_nothing_behind() -> None:
    requests = RequestMetrics()
    seen = scrape(requests, [engine("idle")])
    labels = {"model_name": "tiny", "engine": "idle"}
    assert ("vllm:generation_tokens_total", labels, 0.0) in seen.samples
    assert (RECEIVED, {"model_name": "tiny"}, 0.0) in seen.samples
    assert requests.models == {}


OF_THE_PROCESS = tuple(f"pagemesh_{name}_" for name in ("event_loop", "ledger", "link", "redis"))


def test_names_types_and_labels_are_an_interface() -> None:
    """All but the series of the process and its ledger, which the test over HTTP has as well."""
    registry = CollectorRegistry()
    metrics = GatewayMetrics(registry)
    registry.register(RequestCollector(metrics.requests, lambda: [engine()]))
    registry.register(EngineCollector(lambda: [engine()]))
    registry.register(DesiredWorkersCollector(lambda: {"tiny": 1}))
    metrics.answered("GET", "/", 200, 0.1)
    metrics.unknown_field("chat", "made_up")
    metrics.routed("fast", "tiny")
    metrics.passed_over("fast", "tiny")
    golden = [
        line
        for line in GATEWAY_GOLDEN.read_text().splitlines()
        if not line.startswith(OF_THE_PROCESS)
    ]
    assert names_types_labels(generate_latest(registry).decode()).splitlines() == golden


# -- over HTTP ------------------------------------------------------------------------------------


@pytest.fixture
async def tokenizer(settings: Settings) -> AsyncIterator[FakeTokenizer]:
    """Says nothing by itself."""
    async with fake_tokenizer(settings) as fake:
        yield fake


async def asked(
    gateway: Gateway, tokenizer: FakeTokenizer, **fields: Any
) -> tuple[asyncio.Task[tuple[int, Any]], Conversation]:
    body = {"prompt": "ab", "n": 2} | fields
    asking = asyncio.create_task(gateway.post(COMPLETIONS, body))
    return asking, await tokenizer.asked.get()


async def counts(gateway: Gateway) -> tuple[float, float, dict[str, float]]:
    """Received, in flight, and finished by reason, of one scrape."""
    seen = Scrape.of(await gateway.metrics())
    return seen.total(RECEIVED), seen.total(IN_FLIGHT), finished(seen)


async def test_choices_add_up_over_finished_failed_refused_and_aborted(
    gateway: Gateway, tokenizer: FakeTokenizer
) -> None:
    assert (await gateway.post(COMPLETIONS, {"prompt": "ab", "n": 0}))[0] == 400
    asking, talk = await asked(gateway, tokenizer)
    talk.accept()
    talk.delta("x", [1, 2], choice=0, finish_reason="stop")
    talk.delta("y", [3], choice=1, finish_reason="length")
    assert (await asking)[0] == 200
    asking, talk = await asked(gateway, tokenizer, n=3)
    talk.accept()
    talk.delta("", [], error=WireError(500, "broken", None, "broken"))
    assert (await asking)[0] == 500
    asking, talk = await asked(gateway, tokenizer)
    talk.fail(RequestError("too long"))
    assert (await asking)[0] == 400
    await hang_up(gateway, tokenizer)
    asking, talk = await asked(gateway, tokenizer)
    ended = {"stop": 1, "length": 1, "error": 3, "refused": 2, "abort": 1}
    assert await counts(gateway) == (10, 2, ended)
    talk.accept()
    for choice in range(2):
        talk.delta("z", [1], choice=choice, finish_reason="stop")
    assert (await asking)[0] == 200
    assert await counts(gateway) == (10, 0, ended | {"stop": 3})


async def hang_up(gateway: Gateway, tokenizer: FakeTokenizer) -> None:
    async with aiohttp.ClientSession() as leaver:
        leaving = asyncio.create_task(leaver.post(gateway.url + COMPLETIONS, json={"prompt": "a"}))
        talk = await tokenizer.asked.get()
        leaving.cancel()
    await asyncio.wait_for(talk.cancelled.wait(), 5)


async def test_tokens_of_streams_are_timed_through_the_gateway(
    gateway: Gateway, tokenizer: FakeTokenizer
) -> None:
    body = {"prompt": "ab", "stream": True}
    asking = asyncio.create_task(gateway.session.post(gateway.url + COMPLETIONS, json=body))
    talk = await tokenizer.asked.get()
    talk.accept()
    talk.delta("x", [1])
    async with await asking as response:
        await response.content.readuntil(b"\n\n")
        for token in (2, 3):
            talk.delta("x", [token])
            await response.content.readuntil(b"\n\n")
        seen = Scrape.of(await gateway.metrics())
    # The first token's event is written with the headers.
    assert seen.total("pagemesh_gateway_token_seconds_count") == 2


async def read_stream(gateway: Gateway, body: dict[str, Any]) -> None:
    async with gateway.session.post(gateway.url + COMPLETIONS, json=body) as response:
        await response.read()


# -- many at once ---------------------------------------------------------------------------------


class Fates:
    """A tokenizer service where the prompt says what becomes of the request. Those that wait have
    a number, and an event for when they do."""

    def __init__(self) -> None:
        self.waiting: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)

    async def answer(self, talk: Conversation) -> None:
        fate = talk.generate.prompt.text or ""
        await answer_by_fate(talk, fate)
        self.waiting[fate].set()


async def answer_by_fate(talk: Conversation, fate: str) -> None:
    if fate == "refused":
        talk.fail(RequestError("too long", code="context_length_exceeded"))
        return
    talk.accept()
    if fate == "failed after acceptance":
        talk.fail(RequestError("no engine", status=503))
        return
    talk.begin()
    talk.delta("a", [1])
    await asyncio.sleep(0)  # so that the ends of many requests mix
    if fate in ("stop", "length", "abort"):
        talk.delta("b", [2], finish_reason=fate)
    elif fate == "error":
        talk.delta("", [], error=WireError(500, "nonfinite_logits", None, "broken"))
    elif talk.generate.attempt > 0:
        talk.delta("c", [3], finish_reason="stop")
    # "hang-up" waits for its client to go, "lost service" for the loss


async def leave_early(gateway: Gateway, fates: Fates, number: int, *, stream: bool) -> None:
    """A client that goes away while its answer is generated."""
    fate = f"hang-up {number}{stream}"
    async with aiohttp.ClientSession() as session:
        body = {"prompt": fate, "stream": stream}
        asking = asyncio.create_task(session.post(gateway.url + COMPLETIONS, json=body))
        await fates.waiting[fate].wait()
        if stream:
            (await asking).close()
        asking.cancel()
        with contextlib.suppress(asyncio.CancelledError, aiohttp.ClientError):
            await asking


ENDS: Final = {
    "stop": "stop",
    "length": "length",
    "abort": "error",
    "error": "error",
    "refused": "refused",
    "failed after acceptance": "error",
}
ROUNDS: Final = 8


async def ask(gateway: Gateway, fate: str, *, stream: bool) -> None:
    await read_stream(gateway, {"prompt": fate, "stream": stream})


async def reconciled_until(gateway: Gateway, done: asyncio.Event) -> int:
    """Scrape again and again; every scrape must add up. Returns how many saw work in flight."""
    busy = 0
    while not done.is_set():
        seen = Scrape.of(await gateway.metrics())
        assert_reconciled(seen)
        busy += seen.total(IN_FLIGHT) > 0
    return busy


async def until_idle(gateway: Gateway) -> Scrape:
    async with asyncio.timeout(10):
        while (seen := Scrape.of(await gateway.metrics())).total(IN_FLIGHT):
            pass
    return seen


async def test_hundreds_of_requests_of_all_fates_add_up_during_load_and_after(
    gateway: Gateway, tokenizer: FakeTokenizer
) -> None:
    fates, done = Fates(), asyncio.Event()
    tokenizer.script = fates.answer
    scraping = asyncio.create_task(reconciled_until(gateway, done))
    lost = [f"lost service {number}" for number in range(2 * ROUNDS)]
    losing = asyncio.gather(*(ask(gateway, fate, stream=fate[-1] in "02468") for fate in lost))
    clients = [ask_badly(gateway) for _ in range(ROUNDS)]
    for number, stream in product(range(ROUNDS), (False, True)):
        clients += [ask(gateway, fate, stream=stream) for fate in ENDS]
        clients.append(leave_early(gateway, fates, number, stream=stream))
    await asyncio.gather(*clients)
    for fate in lost:
        await fates.waiting[fate].wait()
    await tokenizer.hang_up()
    await losing
    done.set()
    assert await scraping > 0
    seen = await until_idle(gateway)
    expected = Counter(dict.fromkeys(ENDS.values(), 0))
    for reason in ENDS.values():
        expected[reason] += 2 * ROUNDS
    expected["stop"] += 2 * ROUNDS  # resumed after the loss
    expected["abort"] = 2 * ROUNDS
    assert_reconciled(seen)
    assert finished(seen) == expected
    assert seen.total("http_requests_total", handler=COMPLETIONS, code="400") == 3 * ROUNDS


async def ask_badly(gateway: Gateway) -> None:
    """Not well formed: refused by the gateway, and not counted as received."""
    assert (await gateway.post(COMPLETIONS, {"prompt": "x", "n": 0}))[0] == 400
