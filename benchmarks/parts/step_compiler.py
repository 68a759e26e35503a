"""Variants of a decode step compiled ahead, in processes that fill Triton's cache."""

from __future__ import annotations

from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from multiprocessing import get_context
from pathlib import Path

import torch

from pagemesh.worker_svc.models.config import DecoderConfig
from parts.decode_step import DecodeStep, one_layer
from parts.step_choices import Choices, Shape


@dataclass(frozen=True)
class Steps:
    """Which steps: sequences of `context` tokens, at most `max_rows`."""

    folder: Path
    max_rows: int
    context: int

    @property
    def shape(self) -> Shape:
        return Shape(DecoderConfig.from_folder(self.folder))

    def on(self, device: torch.device) -> DecodeStep:
        return DecodeStep.random(self.shape, self.max_rows, self.context, device)


@dataclass
class StepCompiler:
    """Of what may be wanted, and of what is wanted soon: the one does not wait for the other."""

    steps: Steps
    later: ProcessPoolExecutor
    soon: ProcessPoolExecutor
    started: dict[tuple[int, str, str], Future[str | None]] = field(default_factory=dict)

    @classmethod
    def of(cls, steps: Steps, processes: int) -> StepCompiler:
        context, few = get_context("spawn"), max(1, processes // 3)
        later = ProcessPoolExecutor(max(1, processes - few), context)
        return cls(steps, later, ProcessPoolExecutor(few, context))

    def start(self, rows: int, choices: Choices, changed: str, *, soon: bool = False) -> None:
        """The kernels of a step in which `changed` is not what it was before."""
        key = rows, changed, repr(choices[changed])
        if key not in self.started:
            pool = self.soon if soon else self.later
            self.started[key] = pool.submit(compile_step, self.steps, rows, choices)

    def failure(self, rows: int, choices: Choices, changed: str) -> str | None:
        """Why it does not compile, once that is known."""
        self.start(rows, choices, changed, soon=True)
        return self.started[rows, changed, repr(choices[changed])].result()

    def wait(self, rows: int) -> None:
        """For all that were started of such steps."""
        for key, future in self.started.items():
            if key[0] == rows:
                future.result()

    def close(self) -> None:
        for pool in (self.later, self.soon):
            pool.shutdown(cancel_futures=True)


def compile_step(steps: Steps, rows: int, choices: Choices) -> str | None:
    """Every kernel of the step; why one does not compile."""
    try:
        _layer_on_meta(steps).launch(rows, choices, mode="compile")
    except Exception as error:  # of any part of the compiler
        return reason(error)
    return None


@cache
def _layer_on_meta(steps: Steps) -> DecodeStep:
    shape = one_layer(steps.shape)
    return DecodeStep.random(shape, steps.max_rows, steps.context, torch.device("meta"))


def reason(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:120]}"
