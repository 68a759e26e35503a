"""The rules that answers in the batch must follow, by row slot."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from pagemesh.shared.errors import PagemeshError
from pagemesh.shared.grammar import GrammarError, GrammarVocabulary, Matcher
from pagemesh.shared.structured_outputs import StructuredOutputsParams
from pagemesh.worker_svc.batch import Ints
from pagemesh.worker_svc.grammar_masks import MaskMaker, banned_tokens


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
        self._vocabulary: GrammarVocabulary | None = None
        self._maker: MaskMaker | None = None
        self._vocab_tokens = vocab_tokens
        self._matchers: dict[int, Matcher] = {}
        self._faults: dict[int, str] = {}

    @property
    def is_empty(self) -> bool:
        return not self._matchers and not self._faults

    def enter(self, slot: int, rule: StructuredOutputsParams, generated: list[int]) -> None:
        """A request enters the slot, with the tokens it generated elsewhere or before."""
        self.leave(slot)
        try:
            matcher = self._matchers[slot] = self._known_vocabulary().matcher(rule)
            matcher.consume(generated)
        except PagemeshError as error:
            self._faults[slot] = str(error)

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
        return [self._matchers[slot] for slot in slots.tolist()]

    def advance(self, slots: Ints, tokens: Ints) -> None:
        """One token was sampled for each slot."""
        for slot, token in zip(slots.tolist(), tokens.tolist(), strict=True):
            if slot not in self._faults:
                self.advance_one(slot, self._matchers[slot], token)

    def advance_one(self, slot: int, matcher: Matcher, token: int) -> None:
        """`matcher` may have left `slot` meanwhile; then nobody asks for its faults."""
        try:
            matcher.consume([token])
        except GrammarError as error:
            if self._matchers.get(slot) is matcher:
                self._faults[slot] = str(error)

    def is_done(self, slot: int) -> bool:
        return slot in self._matchers and self._matchers[slot].is_done

    def masks(self, slots: Ints) -> NDArray[np.int32]:
        """int32[N, ceil(V / 32)], see MaskMaker. Raises RuleBroken."""
        matchers = self.matchers(slots)
        if self._maker is None:
            self._maker = MaskMaker(self._vocab_tokens)
        try:
            return self._maker.masks(matchers)
        except GrammarError:
            self._note_faults(slots)
            raise RuleBroken(*next(iter(self._faults.items()))) from None

    def banned(self, slot: int) -> Ints:
        """The ids that may not come next. Raises RuleBroken."""
        [mask] = self.masks(np.array([slot]))
        return banned_tokens(mask, self._vocab_tokens)

    def _note_faults(self, slots: Ints) -> None:
        for slot in slots.tolist():
            if self._matchers[slot].core.is_error():
                self._faults[slot] = self._matchers[slot].core.get_error()

    def _known_vocabulary(self) -> GrammarVocabulary:
        if self._vocabulary is None:
            self._vocabulary = self._load()
        return self._vocabulary
