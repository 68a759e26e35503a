"""Tiny models in every form that `prepare` reads."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from prepare_helpers import Options, RunPython
from tiny_llama import save_tiny_llama

from pagemesh.shared.settings import ModelSettings


@pytest.fixture(scope="session")
def tiny_source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder: a random two-layer Llama in one safetensors file. Copy to change."""
    return save_tiny_llama(tmp_path_factory.mktemp("tiny") / "tiny-llama")


@pytest.fixture
def source(tiny_source: Path, tmp_path: Path) -> Path:
    """A copy of the tiny model that a test may damage."""
    return Path(shutil.copytree(tiny_source, tmp_path / "tiny-llama"))


@pytest.fixture
def options(tmp_path: Path) -> Options:
    """Model settings with a cache of this test alone."""

    def make(model: str | Path, **changed: object) -> ModelSettings:
        return ModelSettings(model=str(model), cache_dir=str(tmp_path / "cache"), **changed)  # type: ignore[arg-type]

    return make


@pytest.fixture
def run_python() -> RunPython:
    """Run a program in a fresh interpreter, with further environment variables."""

    def run(program: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )

    return run
