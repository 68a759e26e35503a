"""Latencies, tokens, and the count of choices that must add up whatever ends them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from gateway_fakes import Conversation, FakeTokenizer, Gateway, fake_tokenizer
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from pagemesh.gateway.generation import Generation
from pagemesh.gateway.metrics import GatewayMetrics
from pagemesh.gateway.pending import PendingGeneration
from pagemesh.gateway.request_metrics import ChoiceTiming, RequestMetrics
from pagemesh.shared.errors import RequestError
from pagemesh.shared.messages import Delta, Generate, Prompt, WireError
from pagemesh.shared.sampling import SamplingParams
from pagemesh.shared.settings import Settings
from pagemesh.shared.wire import pack_ids

COMPLETIONS = "/v1/completions"
TINY = {"model_name": "tiny"}
REASONS = ("stop", "length", "abort", "error", "refused")


def value(registry: CollectorRegistry, name: str, **labels: str) -> float:
    return registry.get_sample_value(name, TINY | labels) or 0.0


def finished(registry: CollectorRegistry) -> dict[str, float]:
    counts = {
        reason: value(registry, "vllm:request_success_total", finished_reason=reason)
        for reason in REASONS
    }
    return {reason: count for reason, count in counts.items() if count}


# -- the pure parts: time is an argument ----------------------------------------------------------


def test_a_merged_delta_counts_its_gap_once_divided_by_its_tokens() -> None:
    registry = CollectorRegistry()
    timing = ChoiceTiming(RequestMetrics(registry).of("tiny"), 100.0)
    for n_tokens, now_s in ((2, 100.5), (1, 100.75), (0, 101.0), (5, 103.25)):
        timing.gained(n_tokens, now_s)
    timing.completed(104.0)
    assert value(registry, "vllm:time_to_first_token_seconds_count") == 1
    assert value(registry, "vllm:time_to_first_token_seconds_sum") == 0.5
    for name in ("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"):
        assert value(registry, f"{name}_count") == 2
        assert value(registry, f"{name}_sum") == 0.25 + 2.5 / 5
        assert value(registry, f"{name}_bucket", le="0.3") == 1
        assert value(registry, f"{name}_bucket", le="+Inf") == 2
    assert value(registry, "vllm:e2e_request_latency_seconds_sum") == 4.0
    assert value(registry, "vllm:generation_tokens_total") == 8
    assert value(registry, "vllm:request_generation_tokens_sum") == 8


def test_a_prompt_counts_once_whatever_n_and_however_often_it_is_sent() -> None:
    registry = CollectorRegistry()
    pending = pending_choices(registry, 3)
    for _ in range(2):
        pending.accept(pack_ids([1, 2, 3, 4]), None)
        pending.link_lost()
    assert value(registry, "vllm:prompt_tokens_total") == 4
    assert value(registry, "vllm:request_prompt_tokens_count") == 1
    assert value(registry, "vllm:request_prompt_tokens_bucket", le="2.0") == 0
    assert value(registry, "vllm:request_prompt_tokens_bucket", le="5.0") == 1


def pending_choices(registry: CollectorRegistry, n: int) -> PendingGeneration:
    generate = Generate("r", 0, "tiny", Prompt(text="a"), SamplingParams(n=n, seed=1))
    metrics = GatewayMetrics(registry).requests.of("tiny")
    return PendingGeneration(generate, 0, Generation(1, n), metrics, now_s=0.0)


EVENTS = st.lists(
    st.tuples(st.sampled_from(["token", "stop", "abort", "error"]), st.integers(0, 3))
)


@given(
    events=EVENTS, accepted=st.booleans(), ending=st.sampled_from(["fail", "abandon", "link_lost"])
)
def test_received_is_finished_plus_in_flight_after_every_event(
    events: list[tuple[str, int]], accepted: bool, ending: str
) -> None:
    registry = CollectorRegistry()
    pending = pending_choices(registry, 4)
    if accepted:
        pending.accept(pack_ids([1]), None)
    for kind, choice in events:
        pending.add(delta_of(kind, choice), now_s=1.0)
        assert_reconciled(registry, 4)
    if ending == "fail":
        pending.fail(RequestError("no"))
    elif ending == "abandon":
        pending.abandon()
    else:
        pending.link_lost()
    assert_reconciled(registry, 4)
    assert ending == "link_lost" or value(registry, "pagemesh_requests_in_flight") == 0


def delta_of(kind: str, choice: int) -> Delta:
    reason = kind if kind in ("stop", "abort") else None
    error = WireError(500, "broken", None, "broken") if kind == "error" else None
    return Delta("r", choice, "", pack_ids([1]), finish_reason=reason, error=error)


def assert_reconciled(registry: CollectorRegistry, received: int) -> None:
    in_flight = value(registry, "pagemesh_requests_in_flight")
    assert value(registry, "pagemesh_requests_received_total") == received
    assert sum(finished(registry).values()) + in_flight == received


# -- over HTTP ------------------------------------------------------------------------------------


@pytest.fixture
async def tokenizer(settings: Settings) -> AsyncIterator[FakeTokenizer]:
    """Says nothing by itself."""
    async with fake_tokenizer(settings) as fake:
        yield fake


async def counts(gateway: Gateway) -> tuple[float, float, dict[str, float]]:
    """Received, in flight, and finished by reason, of one scrape."""
    samples = [
        sample
        for family in text_string_to_metric_families(await gateway.metrics())
        for sample in family.samples
    ]
    plain = {sample.name: sample.value for sample in samples if sample.labels == TINY}
    by_reason = {
        sample.labels["finished_reason"]: sample.value
        for sample in samples
        if sample.name == "vllm:request_success_total"
    }
    received = plain["pagemesh_requests_received_total"]
    return received, plain["pagemesh_requests_in_flight"], by_reason


async def asked(
    gateway: Gateway, tokenizer: FakeTokenizer, **fields: Any
) -> tuple[asyncio.Task[tuple[int, Any]], Conversation]:
    body = {"prompt": "ab", "n": 2} | fields
    asking = asyncio.create_task(gateway.post(COMPLETIONS, body))
    return asking, await tokenizer.asked.get()


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
    async with aiohttp.ClientSession() as leaver:
        leaving = asyncio.create_task(leaver.post(gateway.url + COMPLETIONS, json={"prompt": "a"}))
        leaver_talk = await tokenizer.asked.get()
        leaving.cancel()
    await asyncio.wait_for(leaver_talk.cancelled.wait(), 5)
    asking, talk = await asked(gateway, tokenizer)
    ended = {"stop": 1, "length": 1, "error": 3, "refused": 2, "abort": 1}
    assert await counts(gateway) == (10, 2, ended)
    talk.accept()
    for choice in range(2):
        talk.delta("z", [1], choice=choice, finish_reason="stop")
    assert (await asking)[0] == 200
    assert await counts(gateway) == (10, 0, ended | {"stop": 3})
