"""Grammars over a model's vocabulary, by llguidance: checked where requests are checked, matched
where tokens are drawn. Imported by the services that hold no torch, or no text, alike."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from

from pagemesh.shared.errors import PagemeshError, StartupError
from pagemesh.shared.structured_outputs import StructuredOutputsParams

TOKENIZER_FILE: Final = "tokenizer.json"
# A rule that needs more is refused: a request must not hold a service for seconds.
_LIMITS: Final = LLParserLimits(max_grammar_size=500_000, step_lexer_fuel=500_000)


class GrammarError(PagemeshError):
    """A rule cannot be followed. `reason` is for the one who wrote it."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"the rule cannot be followed: {reason}")
        self.reason = reason


class GrammarVocabulary:
    """The tokens of a model as grammars see them. Immutable, so that threads may share it.

    `vocab_tokens` is the width of the model's logits. Raises StartupError.
    """

    def __init__(self, folder: Path, vocab_tokens: int, eos_token_ids: list[int]) -> None:
        path = folder / TOKENIZER_FILE
        try:
            # An empty list of ends would be the tokenizer's own guess.
            ends = eos_token_ids or None
            self.tokenizer = LLTokenizer(path.read_text("utf-8"), vocab_tokens, ends)
        except (OSError, ValueError) as error:
            raise StartupError(
                f"{path} cannot be used for structured outputs ({error}): prepare the model again"
            ) from error
        self.vocab_tokens = vocab_tokens

    def check(self, rule: StructuredOutputsParams) -> None:
        """Raises GrammarError for a rule that no matcher could follow, or that lets nothing begin.

        Some rules take minutes or end the process: see the tokenizer service's rule_process.
        """
        fault = LLMatcher.validate_grammar(_grammar(rule), self.tokenizer, limits=_LIMITS)
        if fault:
            raise GrammarError(fault.strip().partition("\n\n")[0])
        self.matcher(rule).require_a_beginning()

    def matcher(self, rule: StructuredOutputsParams) -> Matcher:
        """Raises GrammarError."""
        return Matcher(self, rule)


class Matcher:
    """How far one answer has followed its rule."""

    def __init__(self, vocabulary: GrammarVocabulary, rule: StructuredOutputsParams) -> None:
        self.opened_by = rule.opened_by
        """The token that may come instead of what the rule allows, while nothing has come."""
        self._closed_by = rule.begins_after if rule.opened_by is None else None
        self._rule = rule
        self.core = LLMatcher(vocabulary.tokenizer, _grammar(rule), log_level=0, limits=_LIMITS)
        self._require_health()

    @property
    def is_free(self) -> bool:
        """Whether any token may come."""
        return self._closed_by is not None

    @property
    def is_done(self) -> bool:
        """Whether nothing but an end may follow."""
        return bool(self.core.is_stopped())

    @property
    def fault(self) -> str | None:
        """Why it can go no further, if so. What follows the first line is its inner state."""
        return str(self.core.get_error()).partition("\n")[0] if self.core.is_error() else None

    def takes(self, token: int) -> bool:
        """Whether `token`, which comes next, is one for the rule. What follows an end is not: steps
        run ahead of it."""
        opened_by, self.opened_by = self.opened_by, None
        if opened_by is not None and token == opened_by:
            self._closed_by = self._rule.begins_after
            return False
        if self.is_free:
            if token == self._closed_by:
                self._closed_by = None
            return False
        return not self.is_done

    def consume(self, tokens: list[int]) -> None:
        """Raises GrammarError for a token that the rule does not allow."""
        for token in tokens:
            if self.takes(token):
                self.core.consume_token(token)
        self._require_health()

    def require_a_beginning(self) -> None:
        """Raises GrammarError if no token may come next."""
        self.core.compute_bitmask()
        self._require_health()

    def _require_health(self) -> None:
        if self.fault is not None:
            raise GrammarError(self.fault)


def _grammar(rule: StructuredOutputsParams) -> str:
    """Raises GrammarError for what is no text of its notation."""
    try:
        return str(grammar_from(*rule.notation_and_text))
    except Exception as error:  # llguidance raises what its parsers of each notation raise
        raise GrammarError(str(error)) from error
