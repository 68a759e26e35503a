"""Versions, the card and its clocks, with a scripted `nvidia-smi` and without one."""

from __future__ import annotations

import stat
import sys
import time
from pathlib import Path

import pytest

from pagemesh.bench.environment import CardSamples, environment, sampled_card
from pagemesh.bench.offline import LatencyFigure, Skipped
from pagemesh.bench.report_local import sampled_rows

SCRIPT = """#!{python}
import sys, time
query = next(flag for flag in sys.argv if flag.startswith("--query-gpu="))
if "driver_version" in query:
    print("NVIDIA H200, 580.159.04, 143771, 700.00")
else:
    print("[N/A], [N/A], [N/A], [N/A], [N/A]")
    for mhz in (1980, 1500, 1600):
        print(f"{{mhz}}, 3201, {{mhz / 4}}, 98, 55", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "nvidia-smi"
    path.write_text(SCRIPT.format(python=sys.executable))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tmp_path))


@pytest.fixture
def no_tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))


@pytest.mark.usefixtures("tool")
def test_the_card_is_named_and_sampled() -> None:
    assert environment()["card"] == {
        "name": "NVIDIA H200",
        "driver_version": "580.159.04",
        "memory.total": "143771",
        "power.limit": "700.00",
    }
    with sampled_card() as card:
        while (seen := card.between(0.0, time.monotonic())) is None or seen["samples"] < 3:
            pass
    assert seen == {
        "samples": 3,
        "sm_mhz_median": 1600,
        "sm_mhz_min": 1500,
        "memory_mhz_median": 3201,
        "power_w_mean": pytest.approx((1980 + 1500 + 1600) / 12),
        "utilization_percent_mean": 98,
        "celsius_max": 55,
    }


@pytest.mark.usefixtures("no_tool")
def test_without_the_tool_nothing_is_known() -> None:
    known = environment()
    assert known["card"] is None
    assert known["packages"]["torch"] is not None
    with sampled_card() as card:
        assert card.between(0.0, time.monotonic()) is None


@pytest.mark.usefixtures("tool")
def test_a_card_that_does_not_compute_is_not_sampled() -> None:
    with sampled_card(on=False) as card:
        pass
    assert card.between(0.0, time.monotonic()) is None


def test_each_row_has_the_samples_of_its_own_time() -> None:
    card = CardSamples()

    def measured():
        card.add(time.monotonic(), "1000, 3201, 100, 50, 40")
        yield LatencyFigure("W4", "first token", [1.0])
        yield Skipped("W3", "too long")
        card.add(time.monotonic(), "2000, 3201, 300, 90, 60")
        yield LatencyFigure("W5", "first token", [2.0])

    rows = [figures["gpu"] for _, figures in sampled_rows(measured(), card)]
    assert [row and row["sm_mhz_median"] for row in rows] == [1000, None, 2000]
