"""Traces in Chrome's format whose times are known."""

from __future__ import annotations

from typing import Any

from parts.step_trace import annotation_of

STEP_US = 1000.0
LAUNCH_US = 200.0
BUSY_MS = 0.35


def event(cat: str, name: str, start: float, duration: float, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": start, "dur": duration, "args": args}


def traced_step(index: int, *, first_kernel_us: float = 250.0) -> list[dict[str, Any]]:
    """The host launches a graph of two kernels, which overlap by 50 us, and a copy 50 us later; 550
    us pass until the next step's first kernel."""
    at, correlation = index * STEP_US, 10 * index
    kernels = at + first_kernel_us
    return [
        event("user_annotation", annotation_of(100 + index), at, LAUNCH_US),
        event("cuda_runtime", "cudaGraphLaunch", at + 20, 60, correlation=correlation),
        event("cuda_runtime", "cudaMemcpyAsync", at + 100, 10, correlation=correlation + 1),
        event("cpu_op", "aten::copy_", at + 95, 40),
        event("kernel", "attend", kernels, 200, correlation=correlation),
        event("kernel", "multiply", kernels + 150, 150, correlation=correlation),
        event("gpu_memcpy", "Memcpy DtoH", kernels + 350, 50, correlation=correlation + 1),
    ]


def trace(n_steps: int) -> list[dict[str, Any]]:
    noise = [
        {"ph": "M", "name": "process_name"},
        event("gpu_user_annotation", annotation_of(100), 0, 5000),
    ]
    return noise + [one for index in range(n_steps) for one in traced_step(index)]
