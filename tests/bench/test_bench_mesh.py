"""The benchmarks on the real thing, as small as can be."""

from __future__ import annotations

import json
from pathlib import Path

import psutil
import pytest
from mesh_process import SERVICES, MeshProcess

from pagemesh import cli
from pagemesh.bench.startup import measure_startup
from pagemesh.shared.errors import StartupError
from pagemesh.shared.settings import ModelSettings, Settings

pytestmark = pytest.mark.mesh


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_the_mesh_serves_what_is_asked(
    mesh: MeshProcess, endpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "figures.json"
    flags = {
        "--base-url": mesh.base_url,
        "--endpoint": endpoint,
        "--num-prompts": "4",
        "--max-concurrency": "2",
        "--random-input-len": "12",
        "--random-output-len": "4",
        "--json": str(path),
    }
    argv = [part for pair in flags.items() for part in pair]
    assert cli.main(["bench", "serve", *argv, "--ignore-eos"]) == 0
    figures = json.loads(path.read_text())
    assert (figures["completed"], figures["total_output_tokens"]) == (4, 16)
    assert figures["output_tokens_from"] == "usage"
    if endpoint == "completions":
        assert figures["total_input_tokens"] == 48  # ids, so exactly as many
    assert "shorter than asked" not in capsys.readouterr().out


def test_startup_passes_its_moments_in_order_and_leaves_nothing(
    smollm2_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert smollm2_folder.is_dir()
    before = psutil.Process().children(recursive=True)
    path = tmp_path / "figures.json"
    small = ["--max-model-len", "512", "--kv-cache-memory", "64MiB"]
    command = ["bench", "startup", "--num-iters", "1", "--json", str(path), *small]
    assert cli.main(command) == 0
    figures = json.loads(path.read_text())
    (run,) = figures["runs"]
    assert 0 < run["listening_s"] < run["ready_s"] < run["first_answer_s"]
    stages = run["worker_stages_s"]
    assert list(stages) == ["imports", "weights", "kv_pool", "first_token", "rules", "total"]
    assert 0 < stages["total"] < run["ready_s"]
    assert run["memory_division"]["kv_pool_bytes"] <= 64 * 2**20
    memory = figures["peak_memory_bytes"]
    assert {*SERVICES, "serve", "valkey"} <= set(memory)
    assert memory["all together"]["pss"] > memory["worker"]["pss"] > 100 * 2**20
    assert set(psutil.Process().children(recursive=True)) <= set(before)


async def test_a_mesh_that_cannot_start_says_why() -> None:
    with pytest.raises(StartupError, match="nowhere"):
        await measure_startup(Settings(model=ModelSettings(model="./nowhere")))
