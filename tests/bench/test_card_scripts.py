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


def run(script: str, folder: Path, *flags: str) -> tuple[str, dict[str, Any]]:
    out = folder / "out"
    command = [sys.executable, str(_SCRIPTS / script), *flags, "--out", str(out)]
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    ran = subprocess.run(command, capture_output=True, text=True, check=False, env=environ)
    assert ran.returncode == 0, ran.stderr
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
