"""What an answer must look like that has to call tools: a list of calls, as JSON."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from pagemesh.gateway.openai.errors import bad
from pagemesh.gateway.openai.tools import REQUIRED, ToolUse
from pagemesh.shared.sampling import SamplingParams
from pagemesh.shared.structured_outputs import StructuredOutputsParams

PARSER: Final = "json"
"""Of the answer, whatever format the model was trained on."""
_ANY_ARGUMENTS: Final = {"type": "object"}


def with_forced_calls(params: SamplingParams, use: ToolUse) -> SamplingParams:
    """Raises RequestError (400) where the answer must look otherwise as well. A response format
    is of the message's text: as at OpenAI, an answer that has none may have any."""
    rule = params.structured_outputs
    if rule is not None and rule.given_as != "response_format":
        raise bad(rule.given_as, "cannot be combined with a tool_choice that forces calls")
    if params.allowed_token_ids is not None:
        raise bad("allowed_token_ids", "cannot be combined with a tool_choice that forces calls")
    rule = StructuredOutputsParams(json=calls_schema(use), given_as="tool_choice")
    return msgspec.structs.replace(params, structured_outputs=rule)


def calls_schema(use: ToolUse) -> dict[str, Any]:
    """Of one call or more, name first. The tools' parameters stand in $defs, by place, and what
    refers to a part of them refers to that part there."""
    functions = [tool["function"] for tool in use.tools]
    wanted = [i for i, each in enumerate(functions) if use.choice in (REQUIRED, each["name"])]
    several = use.choice == REQUIRED and use.parallel
    schema: dict[str, Any] = {
        "type": "array",
        "items": {"anyOf": [_call(functions[i]["name"], _place(i)) for i in wanted]},
        "minItems": 1,
        "$defs": {
            str(i): _moved(functions[i].get("parameters", _ANY_ARGUMENTS), _place(i))
            for i in wanted
        },
    }
    return schema if several else {**schema, "maxItems": 1}


def _place(i: int) -> str:
    return f"#/$defs/{i}"


def _call(name: str, arguments: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"const": name}, "arguments": {"$ref": arguments}},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _moved(value: Any, place: str) -> Any:
    """`value` with its references into the document's root turned to `place`. LiteLLM leaves
    their # out where it speaks to /v1/messages."""
    if isinstance(value, list):
        return [_moved(child, place) for child in value]
    if not isinstance(value, dict):
        return value
    return {
        key: place + child.removeprefix("#")
        if key == "$ref" and isinstance(child, str) and child.startswith(("#", "/"))
        else _moved(child, place)
        for key, child in value.items()
    }
