"""The request bodies. Every optional field takes null for absent; values are checked elsewhere.

msgspec is strict: true is no number, "5" is not 5, 0.01 is no integer. Fields that are known but
not served, and those accepted without effect, stand in `fields.py`.
"""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Struct

# Wider integers would not fit the mesh's messages.
Int32 = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]


class StreamOptions(Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationRequest(Struct, kw_only=True):
    """What chat and completions share."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Int32 | None = None
    best_of: Int32 | None = None
    max_tokens: Int32 | None = None
    max_completion_tokens: Int32 | None = None
    min_tokens: Int32 | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int32 | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: Int64 | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: Int32 | None = None
    add_special_tokens: bool | None = None
    priority: Int32 | None = None
    timeout: float | None = None
    """Seconds for the whole answer."""
    cache_salt: str | None = None
    user: str | None = None
    prompt_cache_key: str | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None


class ChatRequest(GenerationRequest, kw_only=True):
    messages: list[dict[str, Any]]
    logprobs: bool | None = None
    top_logprobs: Int32 | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None


class CompletionRequest(GenerationRequest, kw_only=True):
    """`prompt`: a string, a list of strings, token ids, or a list of lists of token ids."""

    prompt: str | list[str | int | list[int]]
    echo: bool | None = None
    logprobs: Int32 | None = None


class TokenizeRequest(Struct, kw_only=True):
    """Exactly one of `prompt` and `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Struct, kw_only=True):
    model: str | None = None
    tokens: list[int]
