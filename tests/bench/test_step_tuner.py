"""The search for the choices of a decode step, with times made up."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")
sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from parts import linear_choice, step_candidates, step_choices
from parts.model_shapes import SHAPES
from parts.step_candidates import Space
from parts.step_choices import Choices, Shape
from parts.step_tuner import Tuner
from parts.turns import Gain

from pagemesh.worker_svc.models.config import DecoderConfig

SHAPE = Shape(DecoderConfig.from_dict(SHAPES["llama31-8b"]))


@pytest.fixture(autouse=True)
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    """The size of the one that the tables are for."""
    for module in (linear_choice, step_candidates, step_choices):
        monkeypatch.setattr(module, "multiprocessors", lambda: 132)


class MadeUpBench:
    """Milliseconds follow from the choices."""

    def __init__(self, choices: Choices, ms: Any, refuses: Any = lambda _: None) -> None:
        self.present = self.candidate = choices
        self.ms, self.refuses = ms, refuses
        self.expected: list[str] = []

    def expect(self, choices: Choices, changed: str) -> None:
        self.expected.append(changed)

    def prepare(self, choices: Choices, changed: str) -> str | None:
        self.candidate = choices
        return "out of resources" if choices["norm"].num_warps == 2 else None

    def gain(self, turns: int) -> Gain:
        before, after = self.ms(self.present), self.ms(self.candidate)
        return Gain.of([before] * turns, [after] * turns)

    def refusal(self) -> str | None:
        found: str | None = self.refuses(self.candidate)
        return found

    def accept(self) -> None:
        self.present = self.candidate


def tuner(bench: MadeUpBench, rows: int = 128, deadline_s: float = 1.0) -> Tuner:
    lines: list[str] = []
    return Tuner(
        bench, Space(SHAPE, rows), bench.present, deadline_s, lines.append, clock=lambda: 0.5
    )


def warps_ms(choices: Choices) -> float:
    """Two warps are best, and nothing in front of the norm to overlap with."""
    return 10 + abs(choices["norm"].num_warps - 2) / 8 + 0.5 * choices["pdl:norm"]


def test_finds_the_best_that_can_be_launched() -> None:
    bench = MadeUpBench(SHAPE.present(128), warps_ms)
    found = tuner(bench).run()
    assert found["norm"].num_warps == 4
    assert not found["pdl:norm"]
    assert bench.present == found
    assert found["qkv"] == SHAPE.present(128)["qkv"]


def test_keeps_what_is_not_faster_for_certain_or_is_wrong() -> None:
    present = SHAPE.present(128)
    slightly = MadeUpBench(present, lambda c: 10 + 0.005 * c["pdl:norm"])
    assert tuner(slightly).run() == present
    wrong = MadeUpBench(present, warps_ms, lambda _: "logits differ")
    assert tuner(wrong).run() == present


def test_stops_when_time_is_over() -> None:
    bench = MadeUpBench(SHAPE.present(128), warps_ms)
    search = tuner(bench, deadline_s=0.0)
    assert search.run() == SHAPE.present(128)
    assert search.tried == 0


def test_few_rows_keep_the_order_of_sums() -> None:
    present = SHAPE.present(64)
    for name in ("qkv", "o", "down"):
        configs = Space(SHAPE, 64).alternatives(name, present)
        assert configs
        assert {config.order for config in configs} == {present[name].order}
        free = Space(SHAPE, 64, any_order=True).alternatives(name, present)
        assert None in free
        assert len({config.order for config in free if config is not None}) > 1


def test_noise_is_no_gain() -> None:
    noisy = Gain.of([10.0, 10.4, 9.7, 10.2], [9.9, 10.5, 9.6, 10.3])
    assert not noisy.certain
    assert Gain.of([10.0, 10.4, 9.7, 10.2], [9.5, 9.9, 9.2, 9.7]).certain
