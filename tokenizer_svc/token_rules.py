"""Rules of an answer that are written in words, as rules of token ids."""

from __future__ import annotations

from typing import Final

from pagemesh.shared.errors import RequestError
from pagemesh.shared.messages import Prompt
from pagemesh.shared.sampling import ThinkingBudget
from pagemesh.shared.text_parsers import REASONING_TAGS
from pagemesh.tokenizer_svc.text_model import TextModel

MAX_BAD_WORD_CHARS: Final = 1024
MAX_BAD_WORD_TOKENS: Final = 2**14
"""Of all words of a request, each counted bare and behind a space."""


def bad_word_ids(words: list[str], text_model: TextModel) -> list[list[int]]:
    """The sequences of tokens that write each word, at the beginning of a text and behind a space.
    Raises RequestError (400) for a word that is too long or has no tokens, and for too many."""
    found: list[list[int]] = []
    n_left = MAX_BAD_WORD_TOKENS
    for word in words:
        if len(word) > MAX_BAD_WORD_CHARS:
            raise RequestError(
                f"bad_words takes words of at most {MAX_BAD_WORD_CHARS} characters",
                code="invalid_value",
                param="bad_words",
            )
        bare = _encoded(word.lstrip(), text_model)
        spaced = _encoded(" " + word.lstrip(), text_model)
        if not bare:
            raise RequestError(
                f"bad_words: {word[:40]!r} has no tokens", code="invalid_value", param="bad_words"
            )
        n_left -= len(bare) + len(spaced)
        if n_left < 0:
            raise RequestError(
                f"bad_words takes words of at most {MAX_BAD_WORD_TOKENS} tokens together, each "
                "bare and behind a space",
                code="invalid_value",
                param="bad_words",
            )
        found += [bare] if spaced == bare else [bare, spaced]
    return found


def _encoded(text: str, text_model: TextModel) -> list[int]:
    return text_model.encode(Prompt(text=text, add_special_tokens=False))


def thinking_budget(
    most_tokens: int, text_model: TextModel, prompt: Prompt, text: str | None
) -> ThinkingBudget:
    """For an answer to `prompt`, whose text is `text`. Raises RequestError (400) for a model that
    marks no reasoning."""
    tags = REASONING_TAGS.get(text_model.parsers.reasoning)
    if tags is None or prompt.messages is None:
        raise RequestError(
            "thinking_token_budget needs a chat with a model that marks its reasoning "
            "(--reasoning-parser)",
            code="unsupported_parameter",
            param="thinking_token_budget",
        )
    opening, closing = (_encoded(tag, text_model) for tag in tags)
    begun = text_model.in_reasoning(prompt, text)
    return ThinkingBudget(most_tokens, [] if begun else opening, closing)
