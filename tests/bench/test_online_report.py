"""What is said and kept of a mesh under load, and what it is compared with."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from parts.online_report import OnlineReport
from parts.peer_figures import ONLINE_SIZES

from pagemesh.bench.offline import Skipped, ThroughputRun
from pagemesh.bench.report_local import row_json
from pagemesh.shared.settings import ModelSettings, Settings

SETTINGS = Settings(model=ModelSettings(model="/somewhere/qwen3-0.6b"))


def run(rate: float, *limits: str) -> dict[str, Any]:
    latencies = {f"{s}_{m}_ms": 8.0 for s in ("median", "p99") for m in ("ttft", "tpot", "itl")}
    cpu = {"us_per_token": {"worker": 40.0}, "busiest": "worker", "busiest_share": 0.5}
    return {"output_throughput": rate, "client": {"limits": limits}, "cpu": cpu, **latencies}


def offline(rate: float) -> tuple[ThroughputRun, dict[str, Any]]:
    row = ThroughputRun("OFFLINE256", 0, 1.0, 400, 204_800, int(rate))
    return row, row_json(row)


@pytest.fixture
def report(tmp_path: Path) -> OnlineReport:
    return OnlineReport(tmp_path, SETTINGS, ONLINE_SIZES)


def kept(folder: Path) -> Any:
    return json.loads((folder / "online-qwen3-0.6b.json").read_text())


def test_medians_are_compared_with_the_goals(report: OnlineReport, tmp_path: Path) -> None:
    for repeat, rate in enumerate((13_000, 15_000)):
        report.add_run("ONLINE64", repeat, run(rate))
    report.add_linear_layers({64: 0.82})
    compared = {each["workload"]: each for each in kept(tmp_path)["compared"]}
    assert compared["ONLINE64"]["value"] == 14_000
    assert compared["ONLINE64"]["goal_ratio"] == 1.0
    assert compared["ONLINE64"]["machine"] == pytest.approx(1.0)
    assert compared["ONLINE64-tpot-median"]["ratio"] == pytest.approx(4.36 / 8)
    assert len(compared) == 7


def test_the_mesh_stands_beside_its_engine(
    report: OnlineReport, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report.add_offline(256, *offline(20_000))
    assert kept(tmp_path)["of_offline"] == {}
    report.add_run("ONLINE256", 0, run(19_000))
    assert kept(tmp_path)["of_offline"] == {"256": 0.95}
    report.say_compared()
    assert "online / offline at 256: 0.950 (asked: 0.97)" in capsys.readouterr().out


def test_what_does_not_fit_offline_is_said_only(
    report: OnlineReport, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    skipped = Skipped("OFFLINE256", "too long")
    report.add_offline(256, skipped, row_json(skipped))
    report.add_run("ONLINE256", 0, run(19_000))
    assert "OFFLINE256   skipped: too long" in capsys.readouterr().out
    assert kept(tmp_path)["offline"] == {}


def test_other_sizes_are_not_compared(tmp_path: Path) -> None:
    report = OnlineReport(tmp_path, SETTINGS, (400, 512, 1))
    figures = run(10_000)
    del figures["median_tpot_ms"]
    report.add_run("ONLINE64", 0, figures)
    assert kept(tmp_path)["compared"] == []


def test_what_failed_and_a_client_at_its_limit_are_said(
    report: OnlineReport, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report.add_run("ONLINE64", 0, run(10_000, "The client was the limit."))
    report.fail("ONLINE64 #1", "5 requests failed")
    out = capsys.readouterr().out
    assert "worker 40.0; busiest: the worker, 50% of a core" in out
    assert "The client was the limit." in out
    assert "ONLINE64 #1 FAILED: 5 requests failed" in out
    assert kept(tmp_path)["failures"] == {"ONLINE64 #1": "5 requests failed"}
    assert len(kept(tmp_path)["runs"]["ONLINE64"]) == 1
