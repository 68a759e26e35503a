"""The request bodies. Every optional field takes null for absent; values are checked elsewhere.

msgspec is strict: true is no number, "5" is not 5, 0.01 is no integer. Fields that are known but
not served, and those accepted without effect, stand in `fields.py`.
"""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct

from pagemesh.gateway.openai.limits import (
    BadWords,
    Bias,
    CacheKey,
    CacheSalt,
    Choices,
    Count,
    Documents,
    Effort,
    FewTokenIds,
    Int32,
    Int64,
    Logprobs,
    Messages,
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
    Truncation,
    Verbosity,
)
from pagemesh.shared.pooling import Pooling


class StreamOptions(Struct, frozen=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationRequest(Struct, kw_only=True):
    """What chat and completions share."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Choices | None = None
    best_of: Choices | None = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    min_tokens: Count | None = None
    temperature: Temperature | None = None
    top_p: ShareAboveZero | None = None
    top_k: TopK | None = None
    min_p: Share | None = None
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
    prompt_logprobs: Logprobs | None = None
    add_special_tokens: bool | None = None
    priority: Int32 | None = None
    timeout: Seconds | None = None
    """Seconds for the whole answer."""
    cache_salt: CacheSalt | None = None
    user: str | None = None
    prompt_cache_key: CacheKey | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    truncate_prompt_tokens: Truncation | None = None
    """How many of the prompt's last tokens count; -1: as many as fit."""
    allowed_token_ids: SomeTokenIds | None = None
    bad_words: BadWords | None = None
    logprob_token_ids: FewTokenIds | None = None
    """Shown beside the best ones."""
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    """In logprobs, `token_id:N` in place of the text."""
    service_tier: Tier | None = None


class ChatRequest(GenerationRequest, kw_only=True):
    messages: Messages
    max_tokens: Positive | None = None
    max_completion_tokens: Positive | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    reasoning_effort: Effort | None = None
    thinking_token_budget: Count | None = None
    verbosity: Verbosity | None = None
    chat_template: str | None = None
    documents: Documents | None = None


class CompletionRequest(GenerationRequest, kw_only=True):
    """`prompt`: a string, a list of strings, token ids, or a list of lists of token ids."""

    prompt: str | list[str | TokenId | list[TokenId]]
    echo: bool | None = None
    logprobs: Logprobs | None = None
    suffix: str | None = None


class GenerateRequest(Struct, kw_only=True):
    """vLLM's tokens in, tokens out. `sampling_params`: fields of completions."""

    token_ids: list[TokenId]
    sampling_params: dict[str, Any] | None = None
    request_id: str | None = None
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: CacheSalt | None = None
    priority: Int32 | None = None
    timeout: Seconds | None = None


class EmbeddingRequest(Struct, kw_only=True):
    """`input` has the forms of completions' `prompt`. `truncate_prompt_tokens` keeps the last ones
    of each, -1 as many as the model takes."""

    model: str | None = None
    input: str | list[str | int | list[int]]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Positive | None = None
    pooling: Pooling | None = None
    normalize: bool | None = None
    truncate_prompt_tokens: Truncation | None = None
    add_special_tokens: bool | None = None
    priority: Int32 | None = None
    timeout: Seconds | None = None
    """Seconds for the whole answer."""
    cache_salt: CacheSalt | None = None
    user: str | None = None
    prompt_cache_key: CacheKey | None = None


class TokenizeRequest(Struct, kw_only=True):
    """Exactly one of `prompt` and `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Struct, kw_only=True):
    model: str | None = None
    tokens: list[TokenId]


class FileForm(Struct, kw_only=True):
    """The parts of an upload; `file` is the content. `expires_after[anchor]` and
    `expires_after[seconds]` may stand beside."""

    purpose: str
    file: bytes


class ExpiresAfter(Struct):
    anchor: str
    seconds: int


class BatchRequest(Struct, kw_only=True):
    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[str, str] | None = None
    output_expires_after: ExpiresAfter | None = None
