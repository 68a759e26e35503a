"""`pagemesh collect-env`, on a machine without what is for models."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from pagemesh.cli import main
from pagemesh.collect_env import as_text
from pagemesh.shared.prepared import MANIFEST

WITHOUT = """
import sys
for name in ("torch", "numpy", "numba", "psutil", "tqdm"):
    sys.modules[name] = None
from pagemesh.cli import main
sys.exit(main(["collect-env", "--json"]))
"""


def test_it_tells_of_the_machine_and_keeps_secrets(tmp_path: Path) -> None:
    folder = tmp_path / "prepared" / "broken"
    folder.mkdir(parents=True)
    (folder / MANIFEST).write_text("{}")
    environ = {
        "PATH": str(tmp_path),
        "PAGEMESH_CACHE_DIR": str(tmp_path),
        "PAGEMESH_API_KEY": "sk-secret",
        "PAGEMESH_REDIS_URL": "redis://user:hunter2@host:6379/0",
    }
    command = [sys.executable, "-c", WITHOUT]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    assert "secret" not in done.stdout
    assert "hunter2" not in done.stdout
    found = json.loads(done.stdout)
    assert found["pagemesh"] == version("pagemesh")
    assert found["cpu"]["cores"] >= found["cpu"]["cores_of_this_process"] >= 1
    assert found["memory"]["total"].endswith("kB")
    assert (found["gpus"], found["cuda_of_driver"]) == ([], None)
    assert found["packages"]["msgspec"] == version("msgspec")
    assert found["registries"]["valkey-server"] is None
    assert found["registries"]["embedded"].startswith("Valkey")
    assert set(found["settings"]) == {"api_key", "cache_dir", "redis_url"}
    (broken,) = found["prepared_models"]
    assert broken["folder"] == str(folder)
    assert "damaged" in broken["fault"]
    text = as_text(found)
    assert "\n  valkey-server: not found\n" in text
    assert "\ngpus: none\n" in text


def test_settings_that_cannot_be_read_are_part_of_the_report(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PAGEMESH_PROT", "8000")
    assert main(["collect-env"]) == 0
    assert "settings: cannot be read: unknown setting PAGEMESH_PROT" in capsys.readouterr().out
