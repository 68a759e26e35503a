"""From a body of /v1/messages to one of chat completions. Pure."""

from __future__ import annotations

from typing import Any, Final

from pagemesh.gateway.anthropic.messages import chat_messages, continues_last
from pagemesh.gateway.anthropic.schema import CountTokensRequest, MessagesRequest
from pagemesh.gateway.openai.errors import bad
from pagemesh.gateway.openai.limits import MAX_INT32
from pagemesh.gateway.openai.schema import ChatRequest
from pagemesh.shared.errors import RequestError

_CHOICES: Final = {"auto": "auto", "any": "required", "none": "none"}
_THINKING: Final = {"enabled": True, "adaptive": True, "disabled": False}
# What chat completions call a field, and how it is called here.
_NAMES: Final = {
    "continue_final_message": "messages",
    "response_format": "output_config.format",
    "stop": "stop_sequences",
    "thinking_token_budget": "thinking.budget_tokens",
}


def chat_request(body: MessagesRequest, *, thinks: bool) -> ChatRequest:
    """`thinks`: whether the model marks its reasoning; a budget means nothing to others.

    Raises RequestError (400) naming the field at fault.
    """
    if body.max_tokens < 1:
        raise bad("max_tokens", "must be at least 1")
    return ChatRequest(
        **_prompt_fields(body),
        **_answer_fields(body, thinks=thinks),
        max_tokens=body.max_tokens,
        stop=body.stop_sequences,
        stream=body.stream,
        temperature=body.temperature,
        top_k=body.top_k,
        top_p=body.top_p,
        user=_user(body.metadata),
        cache_salt=body.cache_salt,
        priority=body.priority,
        seed=body.seed,
        timeout=body.timeout,
    )


def prompt_request(body: CountTokensRequest) -> ChatRequest:
    """As `chat_request`, of what makes the prompt alone."""
    return ChatRequest(**_prompt_fields(body))


def renamed(error: RequestError) -> RequestError:
    """`error` with the name that its field has here."""
    theirs = error.param or ""
    ours = theirs.replace(".function.parameters", ".input_schema").replace(".function.", ".")
    ours = _NAMES.get(ours, ours)
    if ours == theirs:
        return error
    message = error.message.replace(theirs, ours)
    return RequestError(message, status=error.status, code=error.code, param=ours)


def _prompt_fields(body: CountTokensRequest) -> dict[str, Any]:
    messages = chat_messages(body.system, body.messages)
    continues = continues_last(body.messages)
    choice = body.tool_choice or {}
    return {
        "model": body.model,
        "messages": messages,
        "continue_final_message": continues,
        "add_generation_prompt": not continues,
        "tools": [_tool(tool, f"tools[{i}]") for i, tool in enumerate(body.tools or [])] or None,
        "tool_choice": _tool_choice(choice) if choice else None,
        "parallel_tool_calls": not choice.get("disable_parallel_tool_use", False),
        "chat_template_kwargs": _thinking(body.thinking) | (body.chat_template_kwargs or {}),
    }


def _tool(tool: dict[str, Any], where: str) -> dict[str, Any]:
    """Tools that run at the server are named by a type."""
    kind = tool.get("type")
    if kind not in (None, "custom"):
        raise bad(f"{where}.type", f"{str(kind)[:40]!r} is not served here: only custom tools are")
    if not isinstance(tool.get("input_schema"), dict):
        raise bad(f"{where}.input_schema", "must be a JSON schema of an object")
    names = {"name": "name", "description": "description", "strict": "strict"}
    function = {ours: tool.get(theirs) for theirs, ours in names.items()}
    return {"type": "function", "function": {**function, "parameters": tool["input_schema"]}}


def _tool_choice(choice: dict[str, Any]) -> str | dict[str, Any]:
    kind = choice.get("type")
    if not isinstance(choice.get("disable_parallel_tool_use", False), bool):
        raise bad("tool_choice.disable_parallel_tool_use", "must be true or false")
    if kind == "tool":
        if not isinstance(choice.get("name"), str):
            raise bad("tool_choice.name", "must be the name of a tool")
        return {"type": "function", "function": {"name": choice["name"]}}
    if kind not in _CHOICES:
        raise bad("tool_choice.type", f"must be one of {', '.join([*_CHOICES, 'tool'])}")
    return _CHOICES[kind]


def _thinking(thinking: dict[str, Any] | None) -> dict[str, Any]:
    """Options of the template. Without a word the template decides."""
    if thinking is None:
        return {}
    if thinking.get("type") not in _THINKING:
        raise bad("thinking.type", f"must be one of {', '.join(_THINKING)}")
    return {"enable_thinking": _THINKING[thinking["type"]]}


def _answer_fields(body: MessagesRequest, *, thinks: bool) -> dict[str, Any]:
    thinking = body.thinking or {}
    fields: dict[str, Any] = {}
    budget_tokens = _budget_tokens(thinking)
    if thinks:
        fields["thinking_token_budget"] = budget_tokens
    if thinking.get("type") == "disabled" or thinking.get("display") == "omitted":
        fields["include_reasoning"] = False
    wanted = (body.output_config or {}).get("format")
    if wanted is not None:
        fields["response_format"] = _response_format(wanted)
    return fields


def _budget_tokens(thinking: dict[str, Any]) -> int | None:
    given = thinking.get("budget_tokens")
    if given is not None and (type(given) is not int or not 0 <= given <= MAX_INT32):
        raise bad("thinking.budget_tokens", "must be a number of tokens")
    return given


def _response_format(wanted: object) -> dict[str, Any]:
    match wanted:
        case {"type": "json_schema", "schema": dict(schema)}:
            return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    raise bad("output_config.format", 'must be {"type": "json_schema", "schema": {…}}')


def _user(metadata: dict[str, Any] | None) -> str | None:
    user = (metadata or {}).get("user_id")
    if user is not None and not isinstance(user, str):
        raise bad("metadata.user_id", "must be a string")
    return user
