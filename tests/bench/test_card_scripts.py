"""The scripts for a card, on a small shape without one: what can be measured is measured."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from parts.model_shapes import SHAPES, write_shape

_SCRIPTS = Path(__file__).parents[2] / "benchmarks" / "gpu"
_SMALL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_hidden_layers": 2,
    "vocab_size": 500,
}


@pytest.fixture
def shape(tmp_path: Path) -> list[str]:
    folder = tmp_path / "shape"
    write_shape(folder, SHAPES["qwen3-0.6b"] | _SMALL)
    flags = ["--load-format", "dummy", "--max-model-len", "512", "--kv-cache-memory", "32MiB"]
    return [str(folder), *flags, "--threads", "1", "--cache-dir", str(tmp_path / "cache")]


def run(script: str, folder: Path, *flags: str, exit_code: int = 0) -> tuple[str, dict[str, Any]]:
    out = folder / "out"
    command = [sys.executable, str(_SCRIPTS / script), *flags, "--out", str(out)]
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    ran = subprocess.run(command, capture_output=True, text=True, check=False, env=environ)
    assert ran.returncode == exit_code, ran.stdout + ran.stderr
    (path,) = out.glob("*-shape*.json")
    return ran.stdout, json.loads(path.read_text())


def test_offline_workloads(shape: list[str], tmp_path: Path) -> None:
    wanted = ["--workload", "W4", "W3", "--num-iters", "1"]
    out, figures = run("offline_h200.py", tmp_path, *shape, *wanted)
    assert [row["workload"] for row in figures["rows"]] == ["W4", "W4", "W3"]
    assert "skipped" in figures["rows"][2]
    assert figures["rows"][1]["median_ms"] > 0
    assert (figures["linear_layers_ms"], figures["compared"]) == ({}, [])
    assert figures["settings"]["model"]["load_format"] == "dummy"
    assert "W4           a token after it" in out


@pytest.mark.parametrize("where", ["offline", pytest.param("mesh", marks=pytest.mark.mesh)])
def test_steps(shape: list[str], tmp_path: Path, where: str) -> None:
    wanted = ["--batch", "2", "--context", "20", "--steps", "8", "--traced-steps", "4"]
    mesh = ["--mesh"] if where == "mesh" else []
    out, figures = run("step_profile.py", tmp_path, *shape, *wanted, *mesh)
    assert (figures["where"], figures["context"]) == (where, 20)
    plain, profile = figures["outcomes"]["plain-2"], figures["outcomes"]["profile-2"]
    assert (plain["rows"], plain["steps"], plain["graph_ms"]) == (2, 8, None)
    assert (plain["mean_rows"], plain["others"]) == (2, 0)
    assert 20 < plain["context_tokens"] < 512
    assert 0 <= plain["frames"]["late_share"] <= 1
    assert plain["launch_cpu_ms"] > 0
    services = {"worker", "scheduler", "tokenizer", "gateway"} if where == "mesh" else set()
    assert plain["services_cpu_ms"].keys() == services
    assert "TooShort" in profile["reason"]
    assert "profile-2: TooShort" in out


_LOAD = ["--concurrency", "2", "--rounds", "1", "--num-prompts", "6", "--clients", "1"]


@pytest.mark.mesh
def test_a_mesh_under_load(shape: list[str], tmp_path: Path) -> None:
    out, figures = run(
        "online_h200.py", tmp_path, *shape, *_LOAD, "--input-len", "20", "--output-len", "8"
    )
    assert list(figures["runs"]) == ["warm-up", "ONLINE2"]
    (load,) = figures["runs"]["ONLINE2"]
    assert (load["completed"], load["total_output_tokens"], load["seed"]) == (6, 48, 2)
    assert load["cpu"]["us_per_token"].keys() == {"worker", "scheduler", "tokenizer", "gateway"}
    assert load["cpu"]["busiest_share"] > 0
    assert figures["start_s"] > 0
    assert figures["of_offline"]["2"] > 0
    assert (figures["compared"], figures["failures"]) == ([], {})
    assert "online / offline at 2:" in out


@pytest.mark.mesh
def test_a_load_that_fails_is_named_and_the_rest_goes_on(shape: list[str], tmp_path: Path) -> None:
    out, figures = run(
        "online_h200.py", tmp_path, *shape, *_LOAD, "--output-len", "600", exit_code=1
    )
    assert list(figures["failures"]) == ["warm-up #0", "ONLINE2 #0"]
    assert "6 requests failed" in figures["failures"]["ONLINE2 #0"]
    assert "OFFLINE2     skipped:" in out
    assert figures["runs"] == {}
