"""From request fields to SamplingParams."""

from __future__ import annotations

import random
from operator import attrgetter
from typing import Any, Final

from aiohttp import web

from pagemesh.gateway.headers import REQUEST_ID
from pagemesh.gateway.openai.errors import bad
from pagemesh.gateway.openai.limits import (
    MAX_CACHE_NAME_CHARS,
    MAX_TEMPERATURE,
    MAX_TOP_LOGPROBS,
    TIERS,
)
from pagemesh.gateway.openai.prompts import check_vocabulary
from pagemesh.gateway.openai.schema import (
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    GenerationRequest,
)
from pagemesh.gateway.openai.structured import structured_outputs
from pagemesh.shared.errors import RequestError
from pagemesh.shared.messages import ModelCard
from pagemesh.shared.sampling import MAX_N, SamplingParams

COMPLETION_MAX_TOKENS: Final = 16
# Of stop strings, and of stop token ids.
MAX_STOPS: Final = 1024
SEED_BITS: Final = 63

_SAME_NAME: Final = (
    "n",
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "skip_special_tokens",
    "prompt_logprobs",
)
_same_values: Final = attrgetter(*_SAME_NAME)
# What few requests ask for, so that others pay one comparison for all of it.
_TOKEN_RULES: Final = ("allowed_token_ids", "bad_words", "logprob_token_ids")
_RARE: Final = (*_TOKEN_RULES, "service_tier")
_rare: Final = attrgetter(*_RARE)
_NOT_ASKED: Final = (None,) * len(_RARE)


class Seeds:
    """Seeds for the requests that bring none; `seed` makes the draw itself repeatable."""

    def __init__(self, seed: int | None) -> None:
        self._random = random.Random(seed)

    def seeded(self, params: SamplingParams) -> SamplingParams:
        if params.seed is not None:
            return params
        return params.with_seed(self._random.getrandbits(SEED_BITS))


def split_key(request: web.Request, body: GenerationRequest | EmbeddingRequest) -> str:
    """What a weighted split decides by: who asks, if the request says so, or else its id."""
    return body.user or body.prompt_cache_key or request[REQUEST_ID]


def chat_params(request: ChatRequest, card: ModelCard) -> SamplingParams:
    """Raises RequestError (400) naming the field. Without a limit, max_tokens is what fits, or the
    model's default."""
    limit_name, max_tokens = _limit(request)
    if max_tokens == 0:
        raise bad(limit_name, "must be at least 1")
    if request.best_of is not None and request.best_of != (request.n or 1):
        raise bad("best_of", "is supported only when it equals n", code="unsupported_parameter")
    fields: dict[str, Any] = {"max_tokens": max_tokens, "logprobs": _chat_logprobs(request)}
    if request.thinking_token_budget is not None:
        fields["thinking_token_budget"] = request.thinking_token_budget
    return _build(request, card, limit_name, **fields)


def _chat_logprobs(request: ChatRequest) -> int | None:
    top = request.top_logprobs or 0
    if not 0 <= top <= MAX_TOP_LOGPROBS:
        raise bad("top_logprobs", f"must be between 0 and {MAX_TOP_LOGPROBS}, got {top}")
    if top and not request.logprobs:
        raise bad("top_logprobs", "needs logprobs to be true")
    return top if request.logprobs else None


def completion_params(request: CompletionRequest, card: ModelCard) -> SamplingParams:
    """Raises RequestError (400) naming the field. An echo with logprobs scores the prompt."""
    limit_name, max_tokens = _limit(request)
    if max_tokens is None:
        max_tokens = COMPLETION_MAX_TOKENS
    if max_tokens == 0 and not request.echo:
        raise bad(limit_name, "must be at least 1, or 0 together with echo")
    fields: dict[str, Any] = {"max_tokens": max_tokens, "logprobs": request.logprobs}
    if request.echo and request.logprobs is not None:
        fields["prompt_logprobs"] = max(request.logprobs, request.prompt_logprobs or 0)
    if request.best_of is not None:
        fields |= _best_of(request, request.best_of)
    return _build(request, card, limit_name, **fields)


def _best_of(request: CompletionRequest, best_of: int) -> dict[str, Any]:
    """They are all generated, with the logprobs that they are ranked by."""
    n = request.n or 1
    if not n <= best_of <= MAX_N:
        raise bad("best_of", f"must be between n ({n}) and {MAX_N}, got {best_of}")
    if best_of == n:
        return {}
    if request.stream:
        raise bad("best_of", "greater than n is not available in a stream")
    return {"n": best_of, "logprobs": request.logprobs or 0}


def _limit(request: GenerationRequest) -> tuple[str, int | None]:
    """Which field limits the answer, and to what. max_completion_tokens wins."""
    if request.max_completion_tokens is not None:
        return "max_completion_tokens", request.max_completion_tokens
    return "max_tokens", request.max_tokens


def _build(
    request: GenerationRequest, card: ModelCard, limit_name: str, **fields: Any
) -> SamplingParams:
    _check_request(request, card)
    named = zip(_SAME_NAME, _same_values(request), strict=True)
    given = {name: value for name, value in named if value is not None}
    if _rare(request) != _NOT_ASKED:
        given |= _rare_values(request, card)
    logit_bias = _logit_bias(request.logit_bias, card) if request.logit_bias else {}
    rule = structured_outputs(request)
    try:
        values = card.defaults | given | fields if card.defaults else given | fields
        return SamplingParams(**values, logit_bias=logit_bias, structured_outputs=rule)
    except ValueError as error:
        name = str(error).split(" ", 1)[0]
        param = limit_name if name == "max_tokens" else name
        raise RequestError(str(error), code="invalid_value", param=param) from error


def _check_request(request: GenerationRequest, card: ModelCard) -> None:
    if request.temperature is not None and request.temperature > MAX_TEMPERATURE:
        raise bad("temperature", f"must be at most {MAX_TEMPERATURE}, got {request.temperature}")
    if request.stream_options is not None and not request.stream:
        raise bad("stream_options", "needs stream to be true")
    if request.prompt_logprobs is not None and request.stream:
        raise bad("prompt_logprobs", "is not available in a stream", code="unsupported_parameter")
    _check_stops(request.stop, "stop")
    _check_stops(request.stop_token_ids, "stop_token_ids")
    if request.stop_token_ids:
        check_vocabulary(request.stop_token_ids, card, "stop_token_ids")


def _rare_values(request: GenerationRequest, card: ModelCard) -> dict[str, Any]:
    if request.service_tier is not None and request.service_tier not in TIERS:
        raise bad("service_tier", f"must be one of {', '.join(TIERS)}")
    for name in ("allowed_token_ids", "logprob_token_ids"):
        check_vocabulary(getattr(request, name) or [], card, name)
    rules = {name: getattr(request, name) for name in _TOKEN_RULES}
    return {name: value for name, value in rules.items() if value is not None}


def _check_stops(stops: object, param: str) -> None:
    if isinstance(stops, list) and len(stops) > MAX_STOPS:
        raise bad(param, f"must hold at most {MAX_STOPS} entries, got {len(stops)}")


def check_cache_names(request: GenerationRequest | EmbeddingRequest) -> None:
    """Raises RequestError (400) naming the field. An empty salt looks as if it kept a cache apart,
    and would not."""
    if request.cache_salt == "":
        raise bad("cache_salt", "must not be empty; leave it out to share cached prompts")
    _check_cache_name("cache_salt", request.cache_salt)
    _check_cache_name("prompt_cache_key", request.prompt_cache_key)


def _check_cache_name(name: str, given: str | None) -> None:
    if given is not None and len(given) > MAX_CACHE_NAME_CHARS:
        rule = f"must have at most {MAX_CACHE_NAME_CHARS} characters, got {len(given)}"
        raise bad(name, rule)


def _logit_bias(bias: dict[str, float], card: ModelCard) -> dict[int, float]:
    """Keys are token ids as decimal strings."""
    for key in bias:
        if not (key.isascii() and key.isdigit()):
            raise bad("logit_bias", f"keys must be token ids, got {key[:40]!r}")
    by_id = {int(key): value for key, value in bias.items() if len(key) <= len(str(2**31))}
    if len(by_id) < len(bias):
        raise bad("logit_bias", "names a token id twice or one outside the vocabulary")
    check_vocabulary(list(by_id), card, "logit_bias")
    return by_id
