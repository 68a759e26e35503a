"""What few chats ask of their prompt: how to think, another template, documents, its end alone."""

from __future__ import annotations

from operator import attrgetter
from typing import Any, Final

import msgspec

from pagemesh.gateway.openai.body import check_plain
from pagemesh.gateway.openai.errors import bad
from pagemesh.gateway.openai.limits import EFFORTS, MAX_DOCUMENTS, VERBOSITIES
from pagemesh.gateway.openai.prompts import truncation
from pagemesh.gateway.openai.schema import ChatRequest
from pagemesh.shared.messages import Prompt, PromptExtras

_OPTIONS: Final = {"reasoning_effort": EFFORTS, "verbosity": VERBOSITIES}
_FIELDS: Final = (*_OPTIONS, "chat_template", "documents", "truncate_prompt_tokens")
_asked: Final = attrgetter(*_FIELDS)
_NOT_ASKED: Final = (None,) * len(_FIELDS)


def with_options(prompt: Prompt, body: ChatRequest, *, trusts_templates: bool) -> Prompt:
    """Raises RequestError (400) naming the field at fault. Whether a template knows an option, the
    tokenizer service can tell."""
    if _asked(body) == _NOT_ASKED:
        return prompt
    extras = PromptExtras(
        options={name: value for name in _OPTIONS if (value := _option(body, name))},
        documents=_documents(body.documents or []),
        chat_template=_template(body.chat_template, trusts=trusts_templates),
        truncate_tokens=truncation(body),
    )
    return msgspec.structs.replace(prompt, extras=extras)


def _option(body: ChatRequest, name: str) -> str | None:
    value: str | None = getattr(body, name)
    if value is not None and value not in _OPTIONS[name]:
        raise bad(name, f"must be one of {', '.join(_OPTIONS[name])}")
    # What models do that are not asked.
    return None if (name, value) == ("verbosity", "medium") else value


def _template(given: str | None, *, trusts: bool) -> str:
    if given is not None and not trusts:
        raise bad(
            "chat_template",
            "of a request is rendered only by a server started with --trust-request-chat-template",
            code="unsupported_parameter",
        )
    return given or ""


def _documents(given: list[dict[str, Any]]) -> list[dict[str, Any]]:
    if len(given) > MAX_DOCUMENTS:
        raise bad("documents", f"must hold at most {MAX_DOCUMENTS} documents, got {len(given)}")
    check_plain(given, "documents")
    return given
