"""What an answer may hold, by token ids alone: the ids that are allowed, words that must not come,
the end of the reasoning when its budget is used up.

Rules are functions of the tokens generated so far, as those of grammars are.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from pagemesh.shared.sampling import SamplingParams, ThinkingBudget
from pagemesh.worker_svc.grammar_masks import Mask, mask_of, mask_of_all


def token_rules(
    params: SamplingParams, generated: Sequence[int], vocab_tokens: int
) -> TokenRules | None:
    """Those of an answer that has come so far; None if there are none."""
    if params.allowed_token_ids is None and not params.bad_word_ids and params.thinking is None:
        return None
    rules = TokenRules(params, vocab_tokens)
    for token in generated:
        rules.advance(token)
    return rules


class TokenRules:
    """Of one answer."""

    def __init__(self, params: SamplingParams, vocab_tokens: int) -> None:
        words = params.bad_word_ids or []
        allowed = params.allowed_token_ids
        self._vocab_tokens = vocab_tokens
        self._vocabulary = mask_of_all(vocab_tokens)
        self._allowed = None if allowed is None else mask_of(allowed, vocab_tokens)
        self._banned = [word[0] for word in words if len(word) == 1]
        self._words = defaultdict[int, list[list[int]]](list)
        """Those of several tokens, by the last but one."""
        for word in words:
            if len(word) > 1:
                self._words[word[-2]].append(word)
        self._tail = _Tail(max(map(len, words), default=1) - 1)
        self._thinking = None if params.thinking is None else _Thinking(params.thinking)

    def advance(self, token: int) -> None:
        """`token` was generated."""
        self._tail.add(token)
        if self._thinking is not None:
            self._thinking.advance(token)

    def restrict(self, mask: Mask) -> None:
        """Take the bits of tokens that must not come next from `mask`. Words that would leave
        nothing are let through."""
        forced = None if self._thinking is None else self._thinking.forced
        if forced is not None:
            mask[:] = mask_of([forced], self._vocab_tokens)
            return
        if self._allowed is not None:
            mask &= self._allowed
        banned = [*self._banned, *self._completing()]
        if banned:
            left = mask & ~mask_of(banned, self._vocab_tokens)
            if (left & self._vocabulary).any():
                mask[:] = left

    def _completing(self) -> Iterator[int]:
        """The tokens that would complete a word of several."""
        for word in self._words.get(self._tail.last, ()):
            if self._tail.ends_with(word[:-1]):
                yield word[-1]


class _Tail:
    """The last `most` tokens."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.tokens: list[int] = []

    def add(self, token: int) -> None:
        self.tokens = [*self.tokens, token][-self._most :] if self._most else []

    @property
    def last(self) -> int:
        """-1 before the first one."""
        return self.tokens[-1] if self.tokens else -1

    def ends_with(self, tokens: Sequence[int]) -> bool:
        return self.tokens[len(self.tokens) - len(tokens) :] == tokens


class _Thinking:
    """How much of its budget an answer has thought. Nobody thinks twice."""

    def __init__(self, budget: ThinkingBudget) -> None:
        self._budget = budget
        self._tail = _Tail(max(len(budget.opening), len(budget.closing)))
        self._n_tokens = -1 if budget.opening else 0
        """Of the reasoning so far; -1 before it."""
        self._is_over = False

    def advance(self, token: int) -> None:
        if self._is_over:
            return
        self._tail.add(token)
        if self._n_tokens >= 0:
            self._n_tokens += 1
            self._is_over = self._tail.ends_with(self._budget.closing)
        elif self._tail.ends_with(self._budget.opening):
            self._n_tokens = 0
            self._tail.tokens = []

    @property
    def forced(self) -> int | None:
        """The token of the end that must come next."""
        if self._is_over or not 0 <= self._budget.most_tokens <= self._n_tokens:
            return None
        closing = self._budget.closing
        written = range(len(closing) - 1, 0, -1)
        return closing[next((n for n in written if self._tail.ends_with(closing[:n])), 0)]
