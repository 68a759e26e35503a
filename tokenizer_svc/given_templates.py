"""Chat templates that requests bring, and what requests ask of a template."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Final

from pagemesh.shared.errors import RequestError
from pagemesh.shared.messages import PromptExtras
from pagemesh.tokenizer_svc.chat_form import ChatForm
from pagemesh.tokenizer_svc.templates import ChatTemplate

MAX_TEMPLATE_CHARS: Final = 2**16
MAX_KEPT: Final = 16
"""Compiled templates; the one not used for longest is forgotten, and compiled again."""
EFFORT: Final = "reasoning_effort"
# What templates call a switch of the reasoning.
_SWITCHES: Final = ("enable_thinking", "thinking")


class GivenTemplates:
    """Compiled by their text. Threads may share it."""

    def __init__(self, special_tokens: Mapping[str, str]) -> None:
        self._special_tokens = special_tokens
        self._kept = lru_cache(MAX_KEPT)(self._compiled)

    def __call__(self, source: str) -> tuple[ChatTemplate, ChatForm]:
        """Raises RequestError (400) for what is no template, or too long."""
        if len(source) > MAX_TEMPLATE_CHARS:
            raise _refused("chat_template", f"has over {MAX_TEMPLATE_CHARS} characters")
        return self._kept(source)

    def _compiled(self, source: str) -> tuple[ChatTemplate, ChatForm]:
        try:
            template = ChatTemplate(source, self._special_tokens)
        # Compiling calculates what is constant, which may fail in any way.
        except Exception as error:
            reason = str(error.__cause__ or error)[:200]
            raise _refused("chat_template", f"cannot be used: {reason}") from error
        return template, ChatForm(template)


def template_variables(
    extras: PromptExtras, template: ChatTemplate, *, thinks: bool
) -> dict[str, Any]:
    """What the options and documents of a prompt are to `template`; `thinks`: its model does.
    Raises RequestError (400) naming an option that the template does not know."""
    knows = template.variables
    found: dict[str, Any] = {}
    for name, value in extras.options.items():
        own: dict[str, Any] = {name: value} if name in knows else {}
        if name == EFFORT:
            own |= dict.fromkeys(knows.intersection(_SWITCHES), value != "none")
        is_met = name == EFFORT and value == "none" and not thinks
        if not own and not is_met:
            raise _refused(name, "is not known to this model's chat template")
        found |= own
    if extras.documents:
        if "documents" not in knows:
            raise _refused("documents", "are not known to this model's chat template")
        found["documents"] = extras.documents
    return found


def _refused(param: str, rule: str) -> RequestError:
    return RequestError(f"{param} {rule}", code="unsupported_parameter", param=param)
