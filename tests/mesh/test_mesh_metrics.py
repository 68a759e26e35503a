"""The gateway's /metrics over a real mesh: names, counts that add up, times that fit together."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final
from urllib.parse import urlsplit

import pytest
import requests
from mesh_process import MeshProcess, wait_until
from metric_names import GATEWAY_GOLDEN, Scrape, names_types_labels

pytestmark = pytest.mark.mesh
REPORTED_S: Final = 10.0
STORY: Final[dict[str, Any]] = {
    "model": "smollm2-135m-instruct",
    "prompt": "Once upon a time there was a page table",
    "temperature": 0,
    "max_tokens": 6,
    "ignore_eos": True,
}
ENDLESS: Final = {"max_tokens": 1900}
TIMED: Final = (
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "request_inference_time_seconds",
    "request_generation_tokens",
    "request_prefill_kv_computed_tokens",
)
STEPS: Final = ("plan", "round_trip", "worker", "compute", "link")


def scrape(mesh: MeshProcess) -> Scrape:
    return Scrape.of(requests.get(f"{mesh.base_url}/metrics", timeout=30).text)


def complete(mesh: MeshProcess, **fields: Any) -> requests.Response:
    return requests.post(f"{mesh.base_url}/v1/completions", json=STORY | fields, timeout=100)


def hang_up(mesh: MeshProcess, **fields: Any) -> None:
    """Ask for more than anybody waits for, and go once it is running."""
    host = urlsplit(mesh.base_url)
    body = json.dumps(STORY | ENDLESS | fields)
    before = scrape(mesh).total("vllm:request_prompt_tokens_count")
    with socket.create_connection((host.hostname or "", host.port or 0)) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host.netloc}\r\n"
        length = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(f"{head}{length}{body}".encode())
        counted = "vllm:request_prompt_tokens_count"
        wait_until(lambda: scrape(mesh).total(counted) > before, REPORTED_S)


def busy(seen: Scrape) -> float:
    gauges = ("pagemesh_requests_in_flight", "vllm:num_requests_running")
    return sum(seen.total(name) for name in (*gauges, "vllm:num_requests_waiting"))


def assert_reconciled(seen: Scrape) -> None:
    ended = seen.total("vllm:request_success_total")
    in_flight = seen.total("pagemesh_requests_in_flight")
    assert seen.total("pagemesh_requests_received_total") == ended + in_flight


def growth(before: Scrape, after: Scrape) -> Callable[..., float]:
    return lambda name, **labels: after.total(name, **labels) - before.total(name, **labels)


def test_requests_of_all_fates_add_up_and_their_times_fit_together(mesh: MeshProcess) -> None:
    wait_until(lambda: busy(scrape(mesh)) == 0, REPORTED_S)
    before = scrape(mesh)
    whole = [
        *[partial(complete, mesh, prompt=f"{STORY['prompt']} {i}") for i in range(4)],
        partial(complete, mesh, n=3, temperature=1.0),
        partial(complete, mesh, stop=[" "]),
        partial(complete, mesh, prompt="x " * 4000),
        partial(complete, mesh, n=0),
    ]
    with ThreadPoolExecutor(len(whole)) as pool:
        answers = [each.result() for each in [pool.submit(ask) for ask in whole]]
        assert_reconciled(scrape(mesh))
    for stream in (False, True):
        hang_up(mesh, stream=stream)
        assert_reconciled(scrape(mesh))
    wait_until(lambda: busy(scrape(mesh)) == 0, REPORTED_S)
    after = scrape(mesh)
    grown = growth(before, after)
    assert_reconciled(after)
    assert [answer.status_code for answer in answers] == [200] * 6 + [400] * 2
    usage = [answer.json()["usage"] for answer in answers[:6]]
    finished = {
        reason: grown("vllm:request_success_total", finished_reason=reason)
        for reason in ("length", "stop", "abort", "error", "refused")
    }
    assert finished == {"length": 7, "stop": 1, "abort": 2, "error": 0, "refused": 1}
    assert grown("pagemesh_requests_received_total") == 11
    assert grown("http_requests_total", handler="/v1/completions", code="499") == 2
    assert [grown(f"vllm:{name}_count") for name in TIMED] == [8] * len(TIMED)
    prompt_tokens = sum(each["prompt_tokens"] for each in usage)
    completion_tokens = sum(each["completion_tokens"] for each in usage)
    assert grown("vllm:request_generation_tokens_sum") == completion_tokens
    assert grown("vllm:generation_tokens_total") >= completion_tokens
    assert grown("vllm:prompt_tokens_total") > prompt_tokens  # those of the hang-ups too
    by_source = grown("vllm:prompt_tokens_by_source_total")
    assert by_source == grown("vllm:prompt_tokens_total")
    phases = grown("vllm:request_queue_time_seconds_sum") + grown(
        "vllm:request_inference_time_seconds_sum"
    )
    assert 0 < phases < grown("vllm:e2e_request_latency_seconds_sum")


def test_every_step_is_timed_hop_by_hop(mesh: MeshProcess) -> None:
    def settled() -> Scrape:
        wait_until(lambda: busy(scrape(mesh)) == 0, REPORTED_S)
        return scrape(mesh)

    before = settled()
    assert complete(mesh).status_code == 200
    wait_until(
        lambda: growth(before, scrape(mesh))("vllm:iteration_tokens_total_count") >= 6, REPORTED_S
    )
    grown = growth(before, settled())
    counts = {name: grown(f"pagemesh_step_{name}_seconds_count") for name in STEPS}
    assert min(counts.values()) >= 6
    sums = {name: grown(f"pagemesh_step_{name}_seconds_sum") for name in STEPS}
    assert sums["compute"] <= sums["worker"] <= sums["round_trip"]
    assert sums["link"] == pytest.approx(sums["round_trip"] - sums["worker"])
    assert grown("pagemesh_scheduler_token_seconds_count") >= 6


def test_names_types_and_labels_are_an_interface(mesh: MeshProcess) -> None:
    assert complete(mesh, made_up=1).status_code == 200
    text = requests.get(f"{mesh.base_url}/metrics", timeout=30).text
    assert _without_routes(names_types_labels(text)) == _without_routes(GATEWAY_GOLDEN.read_text())


def _without_routes(names: str) -> list[str]:
    """This mesh has none, and so no labels of theirs."""
    return [line for line in names.splitlines() if not line.startswith("pagemesh_route_")]
