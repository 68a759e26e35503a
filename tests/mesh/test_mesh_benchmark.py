"""The benchmark of the whole mesh with a scripted worker: figures arrive, for every hop."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from mesh_process import clean_environ

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "mesh_scripted.py"

pytestmark = pytest.mark.mesh


def run(folder: Path, *flags: str) -> list[str]:
    """The lines it prints. From another folder: ours has a `pagemesh` of its own."""
    command = [sys.executable, str(SCRIPT), *flags]
    ran = subprocess.run(
        command, capture_output=True, text=True, check=True, cwd=folder, env=clean_environ()
    )
    return ran.stdout.splitlines()


def test_a_token_is_followed_from_the_worker_to_the_client(
    smollm2_folder: Path, tmp_path: Path
) -> None:
    assert smollm2_folder.is_dir()
    lines = run(tmp_path, "single", "--tokens", "120", "--step-ms", "1")
    figures = [re.findall(r"-?\d+\.\d+", line)[-2:] for line in lines[3:]]
    medians = [float(median) for median, _ in figures]
    hops, whole = medians[:8], medians[8]
    assert len(medians) == 11
    # A hop may round to nothing.
    assert all(0 <= hop <= whole for hop in hops)
    assert whole > 0


def test_streams_are_counted_and_their_tokens_paid_for(
    smollm2_folder: Path, tmp_path: Path
) -> None:
    assert smollm2_folder.is_dir()
    flags = ("--streams", "8", "--tokens", "100", "--rates", "2000")
    [_, line] = run(tmp_path, "streams", *flags, "--reader", "aiohttp")
    events = re.search(r"(\d\.\d+) events a token", line)
    assert events is not None
    assert 0 < float(events[1]) <= 1
    assert re.findall(r"(\w+) \d+\.\d\d", line) == [
        *("worker", "scheduler", "tokenizer", "gateway", "client", "together")
    ]


def test_every_process_of_every_shape_has_its_figures(smollm2_folder: Path, tmp_path: Path) -> None:
    assert smollm2_folder.is_dir()
    shapes = ("--gateways", "1", "2", "--tokenizers", "2", "1")
    load = ("--streams", "24", "--clients", "2", "--seconds", "1", "--tokens", "20", "4")
    lines = run(tmp_path, "scale", *shapes, *load, "--json", "scale.json")
    rows = json.loads((tmp_path / "scale.json").read_text())["rows"]
    assert [(*row["shape"], row["tokens"]) for row in rows] == [
        *((1, 2, 20), (1, 2, 4), (2, 1, 20), (2, 1, 4))
    ]
    for row, line in zip(rows, lines[3:], strict=True):
        gateways, tokenizers = row["shape"]
        processes = {service: len(shares) for service, shares in row["shares"].items()}
        expected = {"tokenizer": tokenizers, "gateway": gateways, "client": 2}
        assert processes == {"worker": 1, "scheduler": 1, **expected}
        assert all(sum(shares) > 0 for shares in row["shares"].values())
        assert row["tokens_per_s"] == pytest.approx(row["requests_per_s"] * row["tokens"])
        assert 0 < row["events_per_token"] <= 1
        assert line.split()[3] == f"{row['tokens_per_s']:.0f}"


def test_a_gateway_alone_has_figures_of_requests_and_streams(tmp_path: Path) -> None:
    script = SCRIPT.with_name("gateway_alone.py")
    load = ("--streams", "8", "--connections", "4", "--rates", "400", "--seconds", "1")
    command = [sys.executable, str(script), *load, "--tool", "ours", "--json", "alone.json"]
    subprocess.run(command, check=True, cwd=tmp_path, env=clean_environ())
    rows = json.loads((tmp_path / "alone.json").read_text())["rows"]
    assert [row["name"] for row in rows] == [
        *("one write an event", "aiohttp alone", "short answers", "streams")
    ]
    assert all(row["per_s"] > 0 for row in rows)
    assert rows[3]["events_per_token"] == pytest.approx(1, abs=0.2)
