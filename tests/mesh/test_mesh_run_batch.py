"""`pagemesh run-batch` with a mesh of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from mesh_process import clean_environ

pytestmark = [pytest.mark.mesh, pytest.mark.timeout(300)]


def test_a_file_is_answered_and_the_mesh_is_gone(
    tiny_settings: dict[str, str], tmp_path: Path
) -> None:
    lines = [
        {"custom_id": name, "method": "POST", "url": url, "body": body}
        for name, url, body in (
            ("text", "/v1/completions", {"prompt": "Once", "max_tokens": 4}),
            ("numbers", "/v1/embeddings", {"input": "Once"}),
            ("bad", "/v1/completions", {"prompt": "Once", "temperature": 9}),
        )
    ]
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps(each) + "\n" for each in lines))
    flags = [f"--{key.replace('_', '-')}={value}" for key, value in tiny_settings.items()]
    home = tmp_path / "home"
    flags.append(f"--data-dir={home}")
    command = [sys.executable, "-m", "pagemesh.cli", "run-batch", "-i", str(source), "-o", str(out)]
    done = subprocess.run([*command, *flags], env=clean_environ(), capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    assert done.stdout == ""
    assert not home.exists()
    assert "pagemesh: 2 requests answered, 1 failed" in done.stderr
    answers = {each["custom_id"]: each for each in map(json.loads, out.read_text().splitlines())}
    assert answers["text"]["response"]["body"]["usage"]["completion_tokens"] == 4
    assert answers["numbers"]["response"]["body"]["data"][0]["embedding"]
    assert answers["bad"]["response"]["status_code"] == 400
