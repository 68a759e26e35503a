"""Figures from records made by hand."""

from __future__ import annotations

from array import array

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagemesh.bench.client_limit import client_limits
from pagemesh.bench.client_load import ClientLoad
from pagemesh.bench.records import Failure, Record
from pagemesh.bench.report import Report
from pagemesh.bench.statistics import FailureCount, Spread, is_good, merged_load, spread, summarize


def record(index: int, sent_s: float, *event_s: float, tokens: int | None = None) -> Record:
    return Record(
        index=index,
        sent_s=sent_s,
        end_s=event_s[-1],
        event_s=array("d", event_s),
        prompt_tokens=10,
        output_tokens=len(event_s) if tokens is None else tokens,
        counted_from="usage",
        asked_tokens=len(event_s),
    )


def failed(sent_s: float, end_s: float, kind: str, message: str) -> Record:
    return Record(9, sent_s, end_s, array("d", [sent_s]), 10, 1, failure=Failure(kind, message))


TWO = [record(0, 1.0, 1.5, 2.0, 3.0), record(1, 1.0, 1.25, 5.0)]


def report(records: list[Record], load: ClientLoad | None = None, **limits: float) -> Report:
    return Report(
        setup={"model": "m"},
        summary=summarize(records, limits),
        load=load or ClientLoad(),
        n_clients=1,
        refused_ids=None,
        fixed_lengths=True,
    )


def test_throughput_is_over_the_whole_run() -> None:
    figures = report(TWO).as_json()
    assert figures["duration"] == 4.0
    assert figures["completed"] == 2
    assert figures["request_throughput"] == 0.5
    assert figures["output_throughput"] == 5 / 4
    assert figures["total_token_throughput"] == 25 / 4
    assert "request_goodput" not in figures


def test_latencies_are_in_ms_and_named_as_vllm_names_them() -> None:
    figures = report(TWO).as_json()
    assert figures["mean_ttft_ms"] == 375.0
    assert figures["median_ttft_ms"] == 375.0
    assert figures["p90_ttft_ms"] == 475.0
    assert figures["mean_tpot_ms"] == (750 + 3750) / 2
    assert figures["mean_itl_ms"] == pytest.approx((500 + 1000 + 3750) / 3)
    assert figures["mean_e2el_ms"] == 3000.0
    assert figures["p99_e2el_ms"] == pytest.approx(3980.0)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50))
def test_a_spread_is_numpys(values: list[float]) -> None:
    expected = (np.mean(values), *np.percentile(values, [50, 90, 99]))
    assert spread(values) == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_nothing_has_no_spread_and_one_value_is_all_of_it() -> None:
    assert spread([]) is None
    assert spread([3.0]) == Spread(3.0, 3.0, 3.0, 3.0)


def test_only_requests_within_every_limit_are_good() -> None:
    assert report(TWO, ttft=600.0, e2el=2500.0).as_json()["request_goodput"] == 1 / 4
    assert report(TWO, ttft=400.0, e2el=2500.0).as_json()["request_goodput"] == 0.0
    assert report(TWO, tpot=750.0).as_json()["request_goodput"] == 1 / 4


def test_a_limit_holds_up_to_its_value_and_one_token_has_no_time_per_token() -> None:
    assert is_good(TWO[0], {"ttft": 500.0, "tpot": 750.0, "e2el": 2000.0})
    assert not is_good(TWO[0], {"ttft": 499.0})
    assert is_good(record(0, 0.0, 1.0), {"tpot": 0.001})


def test_failures_are_counted_by_kind_and_bring_no_tokens() -> None:
    records = [
        *TWO,
        failed(1.0, 2.0, "HTTP 500", "first"),
        failed(1.0, 2.0, "HTTP 500", "second"),
        failed(1.0, 11.0, "cut stream", "gone"),
    ]
    summary = summarize(records)
    assert summary.failures == {
        "HTTP 500": FailureCount(2, "first"),
        "cut stream": FailureCount(1, "gone"),
    }
    assert (summary.completed, summary.failed, summary.output_tokens) == (2, 3, 5)
    assert summary.duration_s == 10.0
    assert "2 requests failed: HTTP 500 (first)." in report(records).as_text()


def test_nothing_completed_is_still_a_report() -> None:
    figures = report([failed(1.0, 1.0, "connection", "refused")]).as_json()
    assert (figures["completed"], figures["failed"]) == (0, 1)
    assert figures["output_throughput"] == 0.0
    assert "mean_ttft_ms" not in figures
    assert "Failed requests:" in report([failed(1.0, 1.0, "connection", "refused")]).as_text()


def test_the_report_says_where_its_counts_come_from() -> None:
    by_events = record(0, 0.0, 1.0, 2.0)
    by_events.counted_from = "events"
    by_events.prompt_tokens = None
    assert report(TWO).as_json()["output_tokens_from"] == "usage"
    assert report([by_events]).as_json()["output_tokens_from"] == "events"
    mixed = report([*TWO, by_events])
    assert mixed.as_json()["output_tokens_from"] == "usage and events"
    assert "Input tokens lack 1 prompts nobody counted." in mixed.as_text()


def test_the_report_tells_of_short_answers_and_merged_tokens() -> None:
    text = report([record(0, 0.0, 1.0, 2.0, tokens=1)]).as_text()
    assert "1 answers are shorter than asked for." in text
    merged = report([record(0, 0.0, 1.0, 2.0, tokens=5)]).as_text()
    assert "shorter" not in merged
    (line,) = [line for line in merged.splitlines() if line.startswith("Tokens per event:")]
    assert line.split()[-1] == "2.50"


def test_the_report_tells_of_requests_sent_twice() -> None:
    twice = record(0, 0.0, 1.0, 2.0)
    twice.n_resends = 1
    assert "1 requests were sent twice" in report([*TWO, twice]).as_text()
    assert "sent twice" not in report(TWO).as_text()


def test_a_busy_client_is_the_limit() -> None:
    (sentence,) = client_limits(ClientLoad(cpu_share=0.95), n_clients=2)
    assert "used 95% of a core" in sentence


def test_a_late_client_without_cpu_blames_other_work() -> None:
    (sentence,) = client_limits(ClientLoad(0.1, lag_s=[0.0] * 90 + [0.08] * 10), n_clients=1)
    assert "80 ms" in sentence
    assert "other work" in sentence


def test_a_client_that_waits_for_a_core_is_the_limit_too() -> None:
    (sentence,) = client_limits(ClientLoad(0.5, 0.45, [0.1] * 10), n_clients=1)
    assert "client was the limit" in sentence
    assert "got 50% of a core" in sentence
    assert "--clients" not in sentence  # more of them would take cores from the server


def test_the_load_of_several_clients_is_that_of_the_busiest() -> None:
    merged = merged_load([ClientLoad(0.2, 0.3, [0.1]), ClientLoad(0.9, 0.0, [0.2, 0.3])])
    assert merged == ClientLoad(0.9, 0.0, [0.1, 0.2, 0.3])


def test_an_idle_client_is_no_limit() -> None:
    assert client_limits(ClientLoad(0.3, 0.1, [0.001] * 100), n_clients=1) == []
    assert report(TWO, ClientLoad(0.3, 0.1, [0.001])).as_json()["client"]["limits"] == []
