"""Coordinate descent over the choices of a decode step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Final, Protocol

from parts.config_text import show
from parts.step_candidates import Space
from parts.step_choices import Choices
from parts.turns import Gain

_HOPELESS_SHARE: Final = 0.01
_FEW_TURNS: Final = 5
_TURNS: Final = 30
_NOTHING: Final = object()

Say = Callable[[str], None]


class Bench(Protocol):
    """Steps of one number of rows, as they are chosen."""

    def expect(self, choices: Choices, changed: str) -> None:
        """With what is `changed` they may become the candidate: compile it."""

    def prepare(self, choices: Choices, changed: str) -> str | None:
        """Make it the candidate; why it cannot be."""

    def gain(self, turns: int) -> Gain:
        """Of the candidate over the present step."""

    def refusal(self) -> str | None:
        """Why the candidate's results are wrong."""

    def accept(self) -> None:
        """The candidate becomes the present step."""


@dataclass
class Tuner:
    bench: Bench
    space: Space
    choices: Choices
    deadline_s: float
    """By `clock`."""
    say: Say = print
    clock: Callable[[], float] = perf_counter
    hopeless: set[tuple[str, str]] = field(default_factory=set)
    tried: int = 0

    def run(self) -> Choices:
        """`choices` of the present step are what the bench begins with."""
        while self._pass():
            self.say("another pass")
        return self.choices

    def _pass(self) -> bool:
        """Whether anything changed, with time left for more."""
        changed = False
        for name in self.space.names(self.choices):
            for value in self._left(name):
                if self.clock() > self.deadline_s:
                    self.say("time is over")
                    return False
                changed |= self._try(name, value)
        return changed

    def _left(self, name: str) -> Iterator[Any]:
        """Alternatives, also to what is accepted on the way."""
        seen = {show(self.choices[name])}
        while True:
            self._expect(name)
            values = self.space.alternatives(name, self.choices)
            known = seen | {text for at, text in self.hopeless if at == name}
            new = next((value for value in values if show(value) not in known), _NOTHING)
            if new is _NOTHING:
                return
            seen.add(show(new))
            yield new

    def _expect(self, name: str) -> None:
        for value in self.space.alternatives(name, self.choices):
            if (name, show(value)) not in self.hopeless:
                self.bench.expect(self.choices | {name: value}, name)

    def _try(self, name: str, value: Any) -> bool:
        self.tried += 1
        text = f"{name}: {show(self.choices[name])} -> {show(value)}"
        failure = self.bench.prepare(self.choices | {name: value}, name)
        if failure is not None:
            self.hopeless.add((name, show(value)))
            self.say(f"  skipped {name} {show(value)}: {failure}")
            return False
        gain = self.bench.gain(_FEW_TURNS)
        if gain.ms < -_HOPELESS_SHARE * gain.before_ms:
            self.hopeless.add((name, show(value)))
            return False
        if gain.ms < 0 or not (gain := self.bench.gain(_TURNS)).certain:
            return False
        refusal = self.bench.refusal()
        if refusal is not None:
            self.say(f"  refused {text}: {refusal}")
            return False
        self.bench.accept()
        self.choices = self.choices | {name: value}
        self.say(f"  {gain.ms * 1e3:+7.1f} us (± {gain.error_ms * 1e3:.1f})  {text}")
        return True
