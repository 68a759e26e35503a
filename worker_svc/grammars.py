"""The rules that answers in the batch must follow, by row slot."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pagemesh.shared.errors import PagemeshError
from pagemesh.shared.grammar import CompiledRules, GrammarError, GrammarVocabulary, Matcher
from pagemesh.shared.sampling import SamplingParams
from pagemesh.worker_svc.batch import Ints
from pagemesh.worker_svc.grammar_masks import (
    Mask,
    fill_masks,
    mask_of,
    mask_of_all,
    mask_words,
)
from pagemesh.worker_svc.token_rules import TokenRules, token_rules


class RuleBroken(PagemeshError):
    """A row cannot be sampled by its rule. `slot` is the row's."""

    def __init__(self, slot: int, reason: str) -> None:
        super().__init__(f"structured_outputs: {reason}")
        self.slot = slot


def no_vocabulary() -> GrammarVocabulary:
    """Of an executor that was given none."""
    raise GrammarError("this worker has no vocabulary for rules")


class AnswerRules(NamedTuple):
    """How far one answer has followed its grammar, and what holds by token ids alone."""

    matcher: Matcher | None
    tokens: TokenRules | None

    def advance(self, token: int) -> None:
        """`token` was sampled. One that the grammar does not allow leaves a fault."""
        if self.matcher is not None:
            self.matcher.advance(token)
        if self.tokens is not None:
            self.tokens.advance(token)


class Grammars:
    """Owner of the rules. A fault of one answer is told when that row is to be sampled, and so
    ends that request alone: a rule that cannot be followed lets nothing through."""

    def __init__(self, load_vocabulary: Callable[[], GrammarVocabulary], vocab_tokens: int) -> None:
        """`load_vocabulary` is called for the first grammar."""
        self._load = load_vocabulary
        self._rules: CompiledRules | None = None
        self._vocab_tokens = vocab_tokens
        self._vocabulary = mask_of_all(vocab_tokens)
        self._by_slot: dict[int, AnswerRules] = {}
        self._faults: dict[int, str] = {}
        self._masks: dict[int, Mask] = {}
        """Of the last rows with rules, by slot."""

    @property
    def is_empty(self) -> bool:
        return not self._by_slot and not self._faults

    def enter(self, slot: int, params: SamplingParams, generated: list[int]) -> None:
        """A request enters the slot, with the tokens it generated elsewhere or before."""
        self.leave(slot)
        matcher, rule = None, params.structured_outputs
        try:
            if rule is not None:
                matcher = self._known_rules().matcher(rule)
                matcher.consume(generated)
        except PagemeshError as error:
            self._faults[slot] = str(error)
        else:
            tokens = token_rules(params, generated, self._vocab_tokens)
            self._by_slot[slot] = AnswerRules(matcher, tokens)

    def leave(self, slot: int) -> None:
        self._by_slot.pop(slot, None)
        self._faults.pop(slot, None)

    def clear(self) -> None:
        self._by_slot.clear()
        self._faults.clear()

    def rules(self, slots: Ints) -> list[AnswerRules]:
        """Raises RuleBroken for the first slot whose rule cannot be followed."""
        for slot in slots.tolist():
            if slot in self._faults:
                raise RuleBroken(slot, self._faults[slot])
            matcher = self._by_slot[slot].matcher
            if matcher is not None and matcher.fault is not None:
                raise RuleBroken(slot, matcher.fault)
        return [self._by_slot[slot] for slot in slots.tolist()]

    def advance(self, rules: list[AnswerRules], tokens: list[int]) -> None:
        """One token was sampled for each; they may have left their slots meanwhile. One that must
        not have its token is in error after that."""
        for each, token in zip(rules, tokens, strict=True):
            each.advance(token)

    def masks(self, slots: Ints) -> NDArray[np.int32]:
        """int32[N, ceil(V / 32)], see grammar_masks.fill_masks. Raises RuleBroken."""
        masks = np.empty(self.mask_shape(slots), np.int32)
        self.fill_masks(slots, masks)
        return masks

    def mask_shape(self, slots: Ints) -> tuple[int, int]:
        return len(slots), mask_words(self._vocab_tokens)

    def fill_masks(self, slots: Ints, masks: NDArray[np.int32]) -> None:
        """`masks`, of `mask_shape`, need not hold anything. Raises RuleBroken."""
        rules = self.rules(slots)
        fill_masks([each.matcher for each in rules], masks)
        self.rules(slots)  # once more: making a mask may show that there is none
        for each, mask in zip(rules, masks, strict=True):
            if each.tokens is not None:
                each.tokens.restrict(mask)
        self._masks = dict(zip(slots.tolist(), masks, strict=True))

    def mask(self, slot: int) -> Mask:
        """The row of the masks made last that is of `slot`, which must be among them."""
        return self._masks[slot]

    def allows_only(self, slot: int, token_ids: Ints) -> bool:
        """Whether the rules of `slot`, by the masks made last, allow nothing but some of
        `token_ids`; not if it has no rules."""
        if slot not in self._by_slot:
            return False
        others = self._vocabulary & ~mask_of(token_ids, self._vocab_tokens)
        return not (self._masks[slot] & others).any()

    def _known_rules(self) -> CompiledRules:
        if self._rules is None:
            self._rules = CompiledRules(self._load())
        return self._rules
