"""The rules that answers in the batch must follow, by row slot."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from pagemesh.shared.errors import PagemeshError
from pagemesh.shared.grammar import CompiledRules, GrammarError, GrammarVocabulary, Matcher
from pagemesh.shared.structured_outputs import StructuredOutputsParams
from pagemesh.worker_svc.batch import Ints
from pagemesh.worker_svc.grammar_masks import fill_masks, mask_words


class RuleBroken(PagemeshError):
    """A row cannot be sampled by its rule. `slot` is the row's."""

    def __init__(self, slot: int, reason: str) -> None:
        super().__init__(f"structured_outputs: {reason}")
        self.slot = slot


def no_vocabulary() -> GrammarVocabulary:
    """Of an executor that was given none."""
    raise GrammarError("this worker has no vocabulary for rules")


class Grammars:
    """Owner of the matchers. A fault of one answer is told when that row is to be sampled, and so
    ends that request alone: a rule that cannot be followed lets nothing through."""

    def __init__(self, load_vocabulary: Callable[[], GrammarVocabulary], vocab_tokens: int) -> None:
        """`load_vocabulary` is called for the first rule."""
        self._load = load_vocabulary
        self._rules: CompiledRules | None = None
        self._mask_words = mask_words(vocab_tokens)
        self._matchers: dict[int, Matcher] = {}
        self._faults: dict[int, str] = {}

    @property
    def is_empty(self) -> bool:
        return not self._matchers and not self._faults

    def enter(self, slot: int, rule: StructuredOutputsParams, generated: list[int]) -> None:
        """A request enters the slot, with the tokens it generated elsewhere or before."""
        self.leave(slot)
        try:
            matcher = self._known_rules().matcher(rule)
            matcher.consume(generated)
        except PagemeshError as error:
            self._faults[slot] = str(error)
        else:
            self._matchers[slot] = matcher

    def leave(self, slot: int) -> None:
        self._matchers.pop(slot, None)
        self._faults.pop(slot, None)

    def clear(self) -> None:
        self._matchers.clear()
        self._faults.clear()

    def matchers(self, slots: Ints) -> list[Matcher]:
        """Raises RuleBroken for the first slot whose rule cannot be followed."""
        for slot in slots.tolist():
            if slot in self._faults:
                raise RuleBroken(slot, self._faults[slot])
            fault = self._matchers[slot].fault
            if fault is not None:
                raise RuleBroken(slot, fault)
        return [self._matchers[slot] for slot in slots.tolist()]

    def advance(self, matchers: list[Matcher], tokens: list[int]) -> None:
        """One token was sampled for each; they may have left their slots meanwhile. One that must
        not have its token is in error after that."""
        for matcher, token in zip(matchers, tokens, strict=True):
            matcher.advance(token)

    def is_done(self, slot: int) -> bool:
        return slot in self._matchers and self._matchers[slot].is_done

    def masks(self, slots: Ints) -> NDArray[np.int32]:
        """int32[N, ceil(V / 32)], see grammar_masks.fill_masks. Raises RuleBroken."""
        masks = np.empty(self.mask_shape(slots), np.int32)
        self.fill_masks(slots, masks)
        return masks

    def mask_shape(self, slots: Ints) -> tuple[int, int]:
        return len(slots), self._mask_words

    def fill_masks(self, slots: Ints, masks: NDArray[np.int32]) -> None:
        """`masks`, of `mask_shape`, need not hold anything. Raises RuleBroken."""
        fill_masks(self.matchers(slots), masks)
        self.matchers(slots)  # once more: making a mask may show that there is none

    def _known_rules(self) -> CompiledRules:
        if self._rules is None:
            self._rules = CompiledRules(self._load())
        return self._rules
