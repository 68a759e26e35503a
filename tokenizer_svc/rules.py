"""Checks of what answers must look like, before anything is scheduled."""

from __future__ import annotations

from pathlib import Path
from threading import Lock

from pagemesh.shared.errors import RequestError
from pagemesh.shared.grammar import GrammarError, GrammarVocabulary
from pagemesh.shared.prepared import PreparedModel
from pagemesh.shared.structured_outputs import StructuredOutputsParams


class Rules:
    """Over one model's tokens, which are read for the first rule. Threads may share it."""

    def __init__(self, folder: Path, prepared: PreparedModel) -> None:
        self._folder = folder
        self._prepared = prepared
        self._lock = Lock()
        self._vocabulary: GrammarVocabulary | None = None

    def check(self, rule: StructuredOutputsParams) -> None:
        """Raises RequestError (400) for a rule that no answer could be made to follow."""
        try:
            self._known_vocabulary().check(rule)
        except GrammarError as error:
            raise RequestError(
                f"{rule.given_as} cannot be followed: {error.reason}",
                code="invalid_value",
                param=rule.given_as,
            ) from error

    def _known_vocabulary(self) -> GrammarVocabulary:
        with self._lock:
            if self._vocabulary is None:
                prepared = self._prepared
                self._vocabulary = GrammarVocabulary(
                    self._folder, prepared.vocab_tokens, prepared.eos_token_ids
                )
            return self._vocabulary
