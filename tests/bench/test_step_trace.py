"""A profiler's trace, split by decode step, on traces whose times are known."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from known_trace import BUSY_MS, LAUNCH_US, trace, traced_step
from parts.step_trace import TooShort, split_steps


def test_busy_is_the_union_and_the_rest_is_gaps() -> None:
    split = split_steps(trace(10))
    assert split.steps == 6  # the first three start the window, its first end ends the fourth
    assert split.wall_ms == pytest.approx(1.0)
    assert split.kernel_ms == pytest.approx(0.3)
    assert split.busy_ms == pytest.approx(BUSY_MS)
    assert split.gaps_within_steps_ms == pytest.approx(0.05)
    assert split.gaps_between_steps_ms == pytest.approx(0.6)
    assert split.launches == pytest.approx(3.0)


def test_each_name_has_its_time_and_count() -> None:
    split = split_steps(trace(10))
    kernels = {one.name: (one.per_step, one.us_per_step) for one in split.kernels}
    assert kernels == {"attend": (1, 200), "multiply": (1, 150), "Memcpy DtoH": (1, 50)}
    assert split.kernels[0].name == "attend"
    calls = {one.name: (one.per_step, one.us_per_step) for one in split.host_calls}
    assert calls == {"cudaGraphLaunch": (1, 60), "cudaMemcpyAsync": (1, 10)}
    gaps = {one.name: one.us_per_step for one in split.gaps}
    assert gaps == {
        "within a step: multiply → Memcpy DtoH": 50,
        "between steps: Memcpy DtoH → attend": 600,
    }


def test_a_large_gap_knows_what_the_host_did() -> None:
    gap = split_steps(trace(10)).largest_gaps[0]
    assert (gap.us, gap.before, gap.after) == (600, "Memcpy DtoH", "attend")
    assert gap.between_steps
    assert gap.in_launch_us == LAUNCH_US
    assert gap.calls == {"cudaGraphLaunch": 60, "aten::copy_": 40, "cudaMemcpyAsync": 10}


def test_the_host_may_run_ahead() -> None:
    """Kernels belong to the step that launched them, however late they run."""
    events = [one for i in range(10) for one in traced_step(i, first_kernel_us=2500.0)]
    split = split_steps(events)
    assert (split.steps, split.wall_ms) == (6, pytest.approx(1.0))
    assert split.busy_ms == pytest.approx(BUSY_MS)
    assert split.gaps_between_steps_ms == pytest.approx(0.6)


def test_a_trace_without_kernels_is_too_short() -> None:
    host_only = [one for one in trace(10) if one.get("cat") not in ("kernel", "gpu_memcpy")]
    for events in (host_only, trace(4), trace(0)):
        with pytest.raises(TooShort):
            split_steps(events)
