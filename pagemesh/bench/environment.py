"""What a figure depends on beside the code: versions, the card, and its clocks meanwhile."""

from __future__ import annotations

import platform
import shutil
import subprocess
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from statistics import fmean, median
from typing import Any, Final

_PACKAGES: Final = ("pagemesh", "torch", "triton", "numpy", "numba")
_TOOL: Final = "nvidia-smi"
_CARD: Final = ("name", "driver_version", "memory.total", "power.limit")
_SAMPLED: Final = (
    "clocks.sm",
    "clocks.mem",
    "power.draw",
    "utilization.gpu",
    "temperature.gpu",
)
_PERIOD_MS: Final = 200
_TOOL_TIMEOUT_S: Final = 20.0

Sample = Sequence[float]


def environment() -> dict[str, Any]:
    """Versions (None for a package that is missing) and the first card (None where the tool that
    knows it is missing)."""
    return {
        "python": platform.python_version(),
        "packages": package_versions(_PACKAGES),
        "card": next(iter(cards()), None),
    }


def package_versions(names: Iterable[str]) -> dict[str, str | None]:
    """None for a package that is missing."""
    return {name: _version(name) for name in names}


def cards() -> list[dict[str, str]]:
    """All that `nvidia-smi` knows; none without it."""
    try:
        ran = subprocess.run(
            _query(_CARD), capture_output=True, text=True, check=True, timeout=_TOOL_TIMEOUT_S
        )
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [line.split(", ") for line in ran.stdout.splitlines() if line]
    return [dict(zip(_CARD, cells, strict=True)) for cells in rows]


class CardSamples:
    """Clocks, power and load of the first card over time, as `nvidia-smi` sees them."""

    def __init__(self) -> None:
        self._samples: list[tuple[float, Sample]] = []

    def add(self, at_s: float, line: str) -> None:
        """`at_s` of `time.monotonic`. What the card does not tell ("[N/A]") spoils its line."""
        try:
            self._samples.append((at_s, [float(cell) for cell in line.split(",")]))
        except ValueError:
            return

    def between(self, start_s: float, end_s: float) -> dict[str, float] | None:
        """None without a sample from that time."""
        rows = [sample for at_s, sample in self._samples if start_s <= at_s <= end_s]
        if not rows:
            return None
        sm_mhz, memory_mhz, power_w, load, celsius = zip(*rows, strict=True)
        return {
            "samples": len(rows),
            "sm_mhz_median": median(sm_mhz),
            "sm_mhz_min": min(sm_mhz),
            "memory_mhz_median": median(memory_mhz),
            "power_w_mean": fmean(power_w),
            "utilization_percent_mean": fmean(load),
            "celsius_max": max(celsius),
        }


@contextmanager
def sampled_card(*, on: bool = True) -> Iterator[CardSamples]:
    """Samples come while the block runs, if `on`; none where there is no tool to ask."""
    samples = CardSamples()
    if not on or shutil.which(_TOOL) is None:
        yield samples
        return
    process = subprocess.Popen(
        _query(_SAMPLED, "--id=0", f"--loop-ms={_PERIOD_MS}"),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    reading = threading.Thread(target=_read, args=(process, samples), daemon=True)
    reading.start()
    try:
        yield samples
    finally:
        process.terminate()
        process.wait()
        reading.join()


def _read(process: subprocess.Popen[str], samples: CardSamples) -> None:
    assert process.stdout is not None
    with process.stdout as lines:
        for line in lines:
            samples.add(time.monotonic(), line)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _query(fields: Sequence[str], *flags: str) -> list[str]:
    return [
        _TOOL,
        f"--query-gpu={','.join(fields)}",
        "--format=csv,noheader,nounits",
        *flags,
    ]
