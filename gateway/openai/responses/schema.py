"""The body of POST /v1/responses. As in `openai/schema.py`, null stands for absent."""

from __future__ import annotations

from typing import Any, Final

from msgspec import Struct

from pagemesh.gateway.openai.limits import (
    BadWords,
    Bias,
    CacheKey,
    CacheSalt,
    Count,
    Effort,
    Int32,
    Int64,
    Penalty,
    Positive,
    RepetitionPenalty,
    Seconds,
    Share,
    ShareAboveZero,
    SomeText,
    SomeTokenIds,
    Temperature,
    Tier,
    TokenId,
    TopK,
    TopLogprobs,
    Verbosity,
)


class TextOptions(Struct):
    format: dict[str, Any] | None = None
    verbosity: Verbosity | None = None


class ReasoningOptions(Struct):
    effort: Effort | None = None
    summary: str | None = None
    generate_summary: str | None = None


class ResponseStreamOptions(Struct):
    include_obfuscation: bool | None = None


class ResponseRequest(Struct, kw_only=True):
    """`input`: a string, or a list of items. The last block are fields of chat completions that
    OpenAI's clients send in `extra_body`."""

    input: str | list[dict[str, Any]]
    model: str | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    background: bool | None = None
    store: bool | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    include: list[str] | None = None
    max_output_tokens: Positive | None = None
    max_tool_calls: Int32 | None = None
    temperature: Temperature | None = None
    top_p: ShareAboveZero | None = None
    top_logprobs: TopLogprobs | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    truncation: str | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: CacheKey | None = None
    service_tier: Tier | None = None

    top_k: TopK | None = None
    min_p: Share | None = None
    min_tokens: Count | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: RepetitionPenalty | None = None
    logit_bias: dict[str, Bias] | None = None
    seed: Int64 | None = None
    stop: SomeText | list[SomeText] | None = None
    stop_token_ids: list[TokenId] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    structured_outputs: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    thinking_token_budget: Count | None = None
    allowed_token_ids: SomeTokenIds | None = None
    bad_words: BadWords | None = None
    priority: Int32 | None = None
    timeout: Seconds | None = None
    cache_salt: CacheSalt | None = None


REFUSED: Final[dict[str, tuple[Any, ...]]] = {
    "access_programs": (),
    "background_options": (),
    "context_management": ([],),
    "conversation": (),
    "image": (),
    "moderation": (),
    "prompt": (),
}
"""Known and not served, but for the values that ask for nothing."""
