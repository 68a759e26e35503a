"""The tools of a request, and how its answer may call them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Final

from pagemesh.gateway.openai.body import MAX_VALUES, check_plain
from pagemesh.gateway.openai.errors import bad
from pagemesh.gateway.openai.schema import ChatRequest
from pagemesh.shared.messages import ModelCard
from pagemesh.shared.text_parsers import NONE

MAX_TOOLS: Final = 1024
AUTO: Final = "auto"
REQUIRED: Final = "required"
_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_SCHEMA_TYPES: Final = frozenset(
    {"array", "boolean", "integer", "null", "number", "object", "string"}
)
_SCHEMA_MAPS: Final = ("$defs", "definitions", "patternProperties", "properties")
_SCHEMA_LISTS: Final = ("allOf", "anyOf", "oneOf", "prefixItems")
_SCHEMAS: Final = ("additionalProperties", "items", "not")


@dataclass(frozen=True, slots=True)
class ToolUse:
    """`tools` as the template gets them. `choice` is AUTO, REQUIRED or the name of one of them:
    the last two only constrain what is generated."""

    tools: list[dict[str, Any]]
    choice: str
    parallel: bool

    @property
    def names(self) -> frozenset[str]:
        return frozenset(tool["function"]["name"] for tool in self.tools)

    @property
    def is_forced(self) -> bool:
        return self.choice != AUTO


def tool_use(body: ChatRequest, card: ModelCard) -> ToolUse | None:
    """None for an answer without calls. Raises RequestError (400) naming the field at fault."""
    tools = checked_tools(body.tools)
    choice = _choice(body.tool_choice)
    if choice == NONE or (not tools and choice == AUTO):
        return None
    use = ToolUse(tools, choice, body.parallel_tool_calls is not False)
    if choice not in (AUTO, REQUIRED, *use.names):
        raise bad("tool_choice", f"names {choice!r}, which is none of the tools")
    if not tools:
        raise bad("tool_choice", "needs tools to choose from")
    if card.parsers.tools == NONE and not use.is_forced:
        raise bad(
            "tools",
            "cannot be called: the server does not know how this model writes calls. Start it with "
            "--tool-call-parser, or set tool_choice to none, required or a function",
            code="unsupported_parameter",
        )
    return use


def _choice(given: str | dict[str, Any] | None) -> str:
    """NONE, AUTO, REQUIRED or the name of a function."""
    if given is None or given in (NONE, AUTO, REQUIRED):
        return AUTO if given is None else str(given)
    match given:
        case {"type": "function", "function": {"name": str(name)}}:
            return name
    raise bad(
        "tool_choice",
        'must be none, auto, required or {"type": "function", "function": {"name": …}}',
    )


def checked_tools(tools: list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """Without null fields. Raises RequestError (400) naming the tool, and the part of it, at
    fault."""
    if not tools:
        return []
    if len(tools) > MAX_TOOLS:
        raise bad("tools", f"must hold at most {MAX_TOOLS} tools, got {len(tools)}")
    left = MAX_VALUES
    for i, tool in enumerate(tools):
        left = check_plain(tool, f"tools[{i}]", left)
    checked = [_checked(tool, f"tools[{i}]") for i, tool in enumerate(tools)]
    names = [tool["function"]["name"] for tool in checked]
    for i, name in enumerate(names):
        if name in names[:i]:
            raise bad(f"tools[{i}].function.name", f"{name!r} is the name of another tool")
    return checked


def _checked(tool: dict[str, Any], where: str) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise bad(f"{where}.type", "must be function")
    function = tool.get("function")
    if not isinstance(function, dict):
        raise bad(f"{where}.function", "must be an object")
    function = {key: value for key, value in function.items() if value is not None}
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise bad(
            f"{where}.function.name", "must have 1 to 64 letters, digits, underscores, dots, dashes"
        )
    if not isinstance(function.get("description", ""), str):
        raise bad(f"{where}.function.description", "must be a string")
    if not isinstance(function.get("strict", False), bool):
        raise bad(f"{where}.function.strict", "must be true or false")
    if "parameters" in function:
        _check_parameters(function["parameters"], f"{where}.function.parameters")
    return {**tool, "function": function}


def _check_parameters(schema: object, where: str) -> None:
    if not isinstance(schema, dict) or schema.get("type", "object") != "object":
        raise bad(where, "must be a JSON schema of an object")
    _check_schema(schema, where)


def _check_schema(schema: object, where: str) -> None:
    """The shape of a JSON schema. Keywords that nobody knows are passed over."""
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        raise bad(where, "must be a JSON schema, that is an object or a boolean")
    _check_keywords(schema, where)
    for key in _SCHEMA_MAPS:
        for name, child in schema.get(key, {}).items():
            _check_schema(child, f"{where}.{key}.{name[:64]}")
    for key in _SCHEMA_LISTS:
        for i, child in enumerate(schema.get(key, [])):
            _check_schema(child, f"{where}.{key}[{i}]")
    for key in _SCHEMAS:
        if key in schema and not (key == "items" and isinstance(schema[key], list)):
            _check_schema(schema[key], f"{where}.{key}")


def _check_keywords(schema: dict[str, Any], where: str) -> None:
    for key in _SCHEMA_MAPS:
        if not isinstance(schema.get(key, {}), dict):
            raise bad(f"{where}.{key}", "must be an object")
    for key in (*_SCHEMA_LISTS, "enum", "required"):
        if not isinstance(schema.get(key, []), list):
            raise bad(f"{where}.{key}", "must be a list")
    if not all(isinstance(name, str) for name in schema.get("required", [])):
        raise bad(f"{where}.required", "must hold names of properties")
    types = schema.get("type", [])
    for kind_name in types if isinstance(types, list) else [types]:
        if not isinstance(kind_name, str) or kind_name not in _SCHEMA_TYPES:
            raise bad(f"{where}.type", f"must be one of {', '.join(sorted(_SCHEMA_TYPES))}")
