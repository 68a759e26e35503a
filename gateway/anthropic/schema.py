"""The request bodies of /v1/messages. Every optional field takes null for absent; what stands
within messages, tools and blocks is checked where it is translated."""

from __future__ import annotations

from typing import Annotated, Any, Final

from msgspec import Meta, Struct

from pagemesh.gateway.anthropic.messages import ROLES
from pagemesh.gateway.openai.limits import (
    CacheSalt,
    Int32,
    Int64,
    Positive,
    Seconds,
    ShareAboveZero,
    Temperature,
    TopK,
)
from pagemesh.gateway.openai.messages import MAX_MESSAGES

REFUSED: Final[dict[str, tuple[Any, ...]]] = {
    "container": (),
    "mcp_servers": ([],),
}
_BLOCK: Final = {
    "type": "object",
    "properties": {"type": {"type": "string"}},
    "required": ["type"],
}
_CONTENT: Final = {"anyOf": [{"type": "string"}, {"type": "array", "items": _BLOCK}]}
_MESSAGE: Final = {
    "properties": {"role": {"enum": list(ROLES)}, "content": _CONTENT},
    "required": ["role", "content"],
}
Message = Annotated[dict[str, Any], Meta(extra_json_schema=_MESSAGE)]
_SIZE: Final = {"minItems": 1, "maxItems": MAX_MESSAGES}
Messages = Annotated[list[Message], Meta(extra_json_schema=_SIZE)]


class CountTokensRequest(Struct, kw_only=True):
    """What the prompt is made of."""

    model: str | None = None
    messages: Messages
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    cache_control: dict[str, Any] | None = None
    """Accepted: prompts are cached without being told to."""
    chat_template_kwargs: dict[str, Any] | None = None


class MessagesRequest(CountTokensRequest, kw_only=True):
    """Those behind `top_p` are not Anthropic's, but of any generation here."""

    max_tokens: Positive
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: Temperature | None = None
    top_k: TopK | None = None
    top_p: ShareAboveZero | None = None
    cache_salt: CacheSalt | None = None
    priority: Int32 | None = None
    seed: Int64 | None = None
    timeout: Seconds | None = None
