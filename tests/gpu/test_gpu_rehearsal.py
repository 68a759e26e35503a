"""The rehearsal: what it runs, and what it concludes from the memory it sees."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pagemesh.shared.engine_messages import Step
from pagemesh.shared.errors import StartupError
from pagemesh.shared.messages import Capacity, ModelCard
from pagemesh.worker_svc.gpu.card import Reading
from pagemesh.worker_svc.gpu.memory import StepTooLarge
from pagemesh.worker_svc.gpu.rehearsal import dry_run, rehearse

GIB = 2**30
LOADED = Reading(free_bytes=60 * GIB, allocated_bytes=0, peak_bytes=0, reserved_bytes=0, n_failed=0)
FREE = {
    "assembled": 60,
    "short": 60,
    "half": 58,
    "full": 56,
    "largest": 55,
    "captured": 54,
    "decoded": 54,
}


class FakeRunner:
    """Notes its steps; `fail` says what is wrong with one."""

    def __init__(self, max_num_seqs: int, step_tokens: int, max_model_len: int) -> None:
        self.card = ModelCard(["m"], 97, max_model_len, 16, "bfloat16", [5], 1, "f", 0)
        self.capacity = Capacity(2, max_num_seqs, step_tokens, 512, "cuda")
        self.steps: list[Step] = []
        self.fail: Callable[[Step], list[tuple[int, str]]] = lambda step: []
        self.resets = 0

    def execute(self, step: Step) -> Any:
        self.steps.append(step)
        return SimpleNamespace(failed=self.fail(step))

    def launch(self, step: Step) -> Any:
        return SimpleNamespace(wait=lambda: self.steps.append(step))

    def reset(self) -> None:
        self.resets += 1


class FakeExecutor:
    def __init__(self) -> None:
        self.calls: list[str] = []
        self.capture_fails = False

    def capture(self) -> None:
        self.calls.append("capture")
        if self.capture_fails:
            raise torch.OutOfMemoryError("CUDA out of memory")

    def launch_largest(self) -> None:
        self.calls.append("launch_largest")

    def launch_hot(self) -> None:
        self.calls.append("launch_hot")


@pytest.fixture
def runner() -> FakeRunner:
    return FakeRunner(max_num_seqs=64, step_tokens=1000, max_model_len=300)


@pytest.fixture
def executor() -> FakeExecutor:
    return FakeExecutor()


def readings(**n_failed: int) -> Callable[[], Reading]:
    """Of a device on which ever more is taken; `n_failed` by the name of a reading."""

    def read() -> Iterator[Reading]:
        yield LOADED
        failed = 0
        for name, free in FREE.items():
            failed += n_failed.get(name, 0)
            allocated = GIB // 2  # the state of the requests
            peak = {"half": GIB, "full": 2 * GIB}.get(name, 0)
            yield Reading(free * GIB, allocated, peak, GIB, failed)
        while True:
            yield Reading(FREE["decoded"] * GIB, GIB // 2, 0, GIB, failed)

    return read().__next__


def test_needs_follow_from_the_readings(runner: FakeRunner, executor: FakeExecutor) -> None:
    needs = rehearse(lambda: (runner, executor), readings(), 9 * GIB)
    assert needs.weights_bytes == 9 * GIB
    assert needs.slots_bytes == GIB // 2
    assert needs.graphs_bytes == GIB
    assert needs.total_bytes == 9 * GIB + 6 * GIB
    assert needs.step_bytes_per_token == GIB / 500
    assert executor.calls == ["launch_largest", "capture"]
    assert runner.resets == 1


def test_memory_that_others_gave_back_does_not_hide_what_is_reserved(
    runner: FakeRunner, executor: FakeExecutor
) -> None:
    fixed = Reading(LOADED.free_bytes, GIB, GIB, 3 * GIB, 0)
    read = iter([LOADED]).__next__
    needs = rehearse(lambda: (runner, executor), lambda: next_or(read, fixed), 0)
    assert needs.total_bytes == 3 * GIB


def next_or(read: Callable[[], Reading], fixed: Reading) -> Reading:
    try:
        return read()
    except StopIteration:
        return fixed


def test_steps_are_as_large_as_may_be_asked_for(runner: FakeRunner, executor: FakeExecutor) -> None:
    rehearse(lambda: (runner, executor), readings(), 0)
    prompts, decodes = runner.steps[:3], runner.steps[3:]
    assert [step.n_tokens for step in prompts] == [2, 500, 1000]
    assert [row.n_prompt for row in prompts[2].new] == [300, 300, 300, 100]
    assert {step.n_rows for step in decodes} == {64, 8}
    assert all(step.n_tokens == step.n_rows for step in decodes)
    assert all(row.computed == 1 for step in decodes for row in step.new)


def test_a_dry_run_launches_what_the_rehearsal_does(
    runner: FakeRunner, executor: FakeExecutor
) -> None:
    dry_run(runner, executor)  # type: ignore[arg-type]
    dry = runner.steps[:]
    runner.steps.clear()
    rehearse(lambda: (runner, executor), readings(), 0)
    assert dry == runner.steps
    assert executor.calls == ["launch_largest", "launch_hot", "launch_largest", "capture"]


@pytest.mark.parametrize("max_model_len", [1, 2])
def test_the_shortest_lengths(executor: FakeExecutor, max_model_len: int) -> None:
    runner = FakeRunner(max_num_seqs=1, step_tokens=1, max_model_len=max_model_len)
    rehearse(lambda: (runner, executor), readings(), 0)
    for step in runner.steps:
        [row] = step.new
        assert row.n_prompt - row.computed == step.n_tokens == 1
        assert row.n_prompt <= max_model_len


@pytest.mark.parametrize(
    ("reading", "limit"),
    [
        ("assembled", "max_num_seqs"),
        ("half", "step_tokens"),
        ("full", "step_tokens"),
        ("captured", "max_num_seqs"),
        ("decoded", "max_num_seqs"),
    ],
)
def test_a_failed_allocation_names_the_limit_though_the_step_passed_in_parts(
    runner: FakeRunner, executor: FakeExecutor, reading: str, limit: str
) -> None:
    with pytest.raises(StepTooLarge) as error:
        rehearse(lambda: (runner, executor), readings(**{reading: 1}), 0)
    assert error.value.limit == limit


def test_memory_that_is_lacking_outside_of_steps(
    runner: FakeRunner, executor: FakeExecutor
) -> None:
    executor.capture_fails = True
    with pytest.raises(StepTooLarge) as error:
        rehearse(lambda: (runner, executor), readings(), 0)
    assert error.value.limit == "max_num_seqs"


def test_a_step_that_fails_otherwise_ends_the_start(
    runner: FakeRunner, executor: FakeExecutor
) -> None:
    runner.fail = lambda step: [(0, "no such instruction")] if step.n_tokens > 64 else []
    with pytest.raises(StartupError, match=r"500 tokens cannot be computed \(no such instruction"):
        rehearse(lambda: (runner, executor), readings(), 0)
