"""Grammars over a model's vocabulary, by llguidance: checked where requests are checked, matched
where tokens are drawn. Imported by the services that hold no torch, or no text, alike."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from

from pagemesh.shared.errors import PagemeshError, StartupError
from pagemesh.shared.structured_outputs import Notation, StructuredOutputsParams

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

TOKENIZER_FILE: Final = "tokenizer.json"
_KEPT_RULES: Final = 32
# Some models would else write white space for ever, where it is allowed.
_JSON: Final[JsonCompileOptions] = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,64}"}
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
        fault = LLMatcher.validate_grammar(
            _grammar(*rule.notation_and_text), self.tokenizer, limits=_LIMITS
        )
        if fault:
            raise GrammarError(fault.strip().partition("\n\n")[0])
        self.compiled(*rule.notation_and_text)

    def compiled(self, notation: Notation, text: str) -> LLMatcher:
        """A matcher that knows already what may come first. Raises GrammarError, also for a rule
        that lets nothing begin."""
        core = LLMatcher(self.tokenizer, _grammar(notation, text), log_level=0, limits=_LIMITS)
        if not core.is_error():
            core.compute_bitmask()
        _require_health(core)
        return core


class CompiledRules:
    """Rules over a vocabulary; those used last are kept as they were compiled, since many requests
    come with the same ones. Used by one thread."""

    def __init__(self, vocabulary: GrammarVocabulary) -> None:
        self._compiled = lru_cache(_KEPT_RULES)(vocabulary.compiled)

    def matcher(self, rule: StructuredOutputsParams) -> Matcher:
        """Raises GrammarError."""
        return Matcher(self._compiled(*rule.notation_and_text).deep_copy(), rule)


class Matcher:
    """How far one answer has followed its rule."""

    def __init__(self, core: LLMatcher, rule: StructuredOutputsParams) -> None:
        """`core` is nobody else's."""
        self.opened_by = rule.opened_by
        """The token that may come instead of what the rule allows, while nothing has come."""
        self._closed_by = rule.begins_after if rule.opened_by is None else None
        self._rule = rule
        self.core = core

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
        """Why it can go no further, if so."""
        return _fault(self.core)

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

    def advance(self, token: int) -> None:
        """One that the rule does not allow leaves a fault."""
        if self.takes(token):
            self.core.consume_token(token)

    def consume(self, tokens: list[int]) -> None:
        """Raises GrammarError for a token that the rule does not allow."""
        for token in tokens:
            self.advance(token)
        _require_health(self.core)


def _fault(core: LLMatcher) -> str | None:
    """What follows the first line is its inner state."""
    return str(core.get_error()).partition("\n")[0] if core.is_error() else None


def _require_health(core: LLMatcher) -> None:
    fault = _fault(core)
    if fault is not None:
        raise GrammarError(fault)


def _grammar(notation: Notation, text: str) -> str:
    """Raises GrammarError for what is no text of its notation."""
    try:
        if notation == "json_schema":
            return str(LLMatcher.grammar_from_json_schema(text, defaults=_JSON))
        return str(grammar_from(notation, text))
    except Exception as error:  # llguidance raises what its parsers of each notation raise
        raise GrammarError(str(error)) from error
