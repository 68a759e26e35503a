"""From the body of a response to that of a chat, and the errors of that chat back. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from pagemesh.gateway.openai.errors import bad
from pagemesh.gateway.openai.responses.conversation import Message
from pagemesh.gateway.openai.responses.schema import ResponseRequest
from pagemesh.gateway.openai.schema import ChatRequest
from pagemesh.shared.errors import RequestError

LOGPROBS: Final = "message.output_text.logprobs"
ENCRYPTED: Final = "reasoning.encrypted_content"
_INCLUDABLE: Final = (LOGPROBS, ENCRYPTED)
_MAX_METADATA: Final = 16
_MAX_KEY_CHARS: Final = 64
_MAX_VALUE_CHARS: Final = 512
_SAME_NAME: Final = (
    *("model", "stream", "temperature", "top_p", "parallel_tool_calls", "user"),
    *("prompt_cache_key", "top_k", "min_p", "min_tokens", "presence_penalty"),
    *("frequency_penalty", "repetition_penalty", "logit_bias", "seed", "stop", "stop_token_ids"),
    *("include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "structured_outputs"),
    *("chat_template_kwargs", "priority", "timeout", "cache_salt"),
    *("service_tier", "thinking_token_budget", "allowed_token_ids", "bad_words"),
)
# What the chat's fields are called here.
_NAMES: Final = (
    (re.compile(r"\bmessages\[\d+\][\w.\[\]]*|\bmessages\b"), "input"),
    (re.compile(r"\b(tools\[\d+\])\.function\b"), r"\1"),
    (re.compile(r"\bmax_completion_tokens\b"), "max_output_tokens"),
    (re.compile(r"\breasoning_effort\b"), "reasoning.effort"),
    (re.compile(r"\bverbosity\b"), "text.verbosity"),
    (re.compile(r"\bresponse_format(\.json_schema|\b)"), "text.format"),
)


def chat_body(body: ResponseRequest, messages: list[Message]) -> ChatRequest:
    """Raises RequestError (400) naming the field at fault."""
    check_fields(body)
    wants_logprobs = body.top_logprobs is not None or LOGPROBS in (body.include or ())
    return ChatRequest(
        messages=messages,
        max_completion_tokens=body.max_output_tokens,
        response_format=_response_format(body),
        tools=_tools(body.tools),
        tool_choice=_tool_choice(body.tool_choice),
        reasoning_effort=None if body.reasoning is None else body.reasoning.effort,
        verbosity=None if body.text is None else body.text.verbosity,
        logprobs=wants_logprobs or None,
        top_logprobs=body.top_logprobs,
        **{name: getattr(body, name) for name in _SAME_NAME},
    )


def check_fields(body: ResponseRequest) -> None:
    """Of what the chat knows nothing of. Raises RequestError (400)."""
    check_include(body.include or [])
    if body.truncation not in (None, "auto", "disabled"):
        raise bad("truncation", "must be auto or disabled")
    if body.background and body.store is False:
        raise bad("background", "needs store to be true: the answer is fetched later")
    if body.background and body.timeout is not None:
        raise bad("timeout", "is for a client that waits, which background excludes")
    if body.stream_options is not None and not body.stream:
        raise bad("stream_options", "needs stream to be true")
    _check_reasoning(body)
    _check_metadata(body.metadata or {})


def check_include(names: list[str]) -> None:
    for name in names:
        if name not in _INCLUDABLE:
            known = ", ".join(_INCLUDABLE)
            raise bad("include", f"does not take {name[:64]!r} here. Known: {known}")


def _check_reasoning(body: ResponseRequest) -> None:
    options = body.reasoning
    if options is None:
        return
    for name in ("summary", "generate_summary"):
        if getattr(options, name) not in (None, "auto"):
            raise bad(
                f"reasoning.{name}",
                "must be auto or left out: reasoning comes in full, nothing makes summaries of it",
                code="unsupported_parameter",
            )


def _check_metadata(metadata: dict[str, str]) -> None:
    if len(metadata) > _MAX_METADATA:
        raise bad("metadata", f"must hold at most {_MAX_METADATA} pairs, got {len(metadata)}")
    for key, value in metadata.items():
        if len(key) > _MAX_KEY_CHARS or len(value) > _MAX_VALUE_CHARS:
            raise bad(
                "metadata",
                f"takes keys of {_MAX_KEY_CHARS} characters and values of {_MAX_VALUE_CHARS}",
            )


def _response_format(body: ResponseRequest) -> dict[str, Any] | None:
    """A flat json_schema becomes the nested one of chat."""
    given = None if body.text is None else body.text.format
    if given is None or given.get("type") != "json_schema":
        return given
    flat = {name: value for name, value in given.items() if name != "type"}
    return {"type": "json_schema", "json_schema": flat}


def _tools(tools: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Flat functions become the nested ones of chat."""
    if tools is None:
        return None
    return [_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools)]


def _tool(tool: dict[str, Any], where: str) -> dict[str, Any]:
    kind = tool.get("type")
    if kind != "function":
        raise bad(
            f"{where}.type",
            f"{str(kind)[:40]!r} is not supported: function is",
            code="unsupported_parameter",
        )
    function = {name: value for name, value in tool.items() if name != "type"}
    return {"type": "function", "function": function}


def _tool_choice(choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    match choice:
        case {"type": "function", "name": str(name)}:
            return {"type": "function", "function": {"name": name}}
        case dict():
            kind = str(choice.get("type"))[:40]
            raise bad(
                "tool_choice",
                f"of type {kind!r} is not supported: it may be none, auto, required or "
                '{"type": "function", "name": …}',
            )
    return choice


@contextmanager
def named_as_given() -> Iterator[None]:
    """Errors about the chat's fields, from within the block, speak of the response's."""
    try:
        yield
    except RequestError as error:
        raise renamed(error) from error


def renamed(error: RequestError) -> RequestError:
    if error.param is None:
        return error
    param = error.param
    for pattern, name in _NAMES:
        param = pattern.sub(name, param)
    return RequestError(
        error.message.replace(error.param, param, 1),
        status=error.status,
        code=error.code,
        param=param,
        retry_after_s=error.retry_after_s,
    )
