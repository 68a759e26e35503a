"""What an answer must look like: one schema for the gateway, the wire and the offline class."""

from __future__ import annotations

from typing import Any, Final, Literal

import msgspec

Notation = Literal["choice", "regex", "grammar", "json_schema"]

_ANY_OBJECT: Final = '{"type": "object"}'
KINDS: Final = ("json", "regex", "choice", "grammar", "json_object")


class StructuredOutputsParams(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Exactly one of: a JSON schema, as text or as a dict; a regular expression of the whole
    answer; a list of answers to choose from; a grammar in Lark's or GBNF's notation; any JSON
    object. Names and meaning are vLLM's.

    The rule holds from the first token on; or behind the token `begins_after`, which ends a model's
    reasoning: with `opened_by` only if that token came first. `given_as` is the field that a client
    wrote it in. Raises ValueError from the constructor; the text starts with the name of the field
    at fault.
    """

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool = False
    begins_after: int | None = None
    opened_by: int | None = None
    given_as: str = "structured_outputs"

    def __post_init__(self) -> None:
        if isinstance(self.json, dict):
            # A frozen struct may still normalise its own fields while it is being built.
            text = msgspec.json.encode(self.json).decode()
            msgspec.structs.force_setattr(self, "json", text)
        given = [kind for kind in KINDS if getattr(self, kind) not in (None, False)]
        if len(given) != 1:
            raise ValueError(
                f"structured_outputs takes exactly one of {', '.join(KINDS)}, "
                f"got {' and '.join(given) or 'none'}"
            )
        if self.choice is not None and not (self.choice and all(self.choice)):
            raise ValueError("choice must hold at least one string, and none that is empty")

    @property
    def notation_and_text(self) -> tuple[Notation, str]:
        """The notation of the rule, and the rule in it."""
        if self.choice is not None:
            return "choice", msgspec.json.encode(self.choice).decode()
        if self.regex is not None:
            return "regex", self.regex
        if self.grammar is not None:
            return "grammar", self.grammar
        return "json_schema", _ANY_OBJECT if self.json_object else str(self.json)
