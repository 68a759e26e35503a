"""Checks of a request that need its text or token ids. Each raises RequestError (400 or 413)."""

from __future__ import annotations

from typing import Final

import msgspec

from pagemesh.shared.errors import RequestError
from pagemesh.shared.messages import ModelCard, Prompt
from pagemesh.shared.pooling import PoolingParams
from pagemesh.shared.sampling import SamplingParams
from pagemesh.tokenizer_svc.text_model import TextModel

MAX_STOPS: Final = 128
MAX_STOP_CHARS: Final = 1024
# A question may be about more than a model takes, within reason: a token is some four characters.
MIN_QUESTION_LIMIT: Final = 2**20
QUESTION_UNITS_PER_TOKEN: Final = 8
# They all travel in one delta, which is packed and unpacked in one go.
MAX_PROMPT_LOGPROBS: Final = 2**18
# Of the parameters of all choices, which are sent at once.
MAX_CHOICES_BYTES: Final = 16 * 2**20


def check_prompt(prompt: Prompt, n_prompt: int, max_model_len: int, *, room: int) -> None:
    """`room` is how many tokens must fit behind the prompt at least."""
    if n_prompt == 0:
        raise RequestError("the prompt is empty: it has no tokens", param=param_of(prompt))
    if n_prompt + room > max_model_len:
        raise _too_long(prompt, f"{n_prompt} tokens", max_model_len)


def check_text(prompt: Prompt, min_tokens: int, max_model_len: int) -> None:
    """Spares the encoding of a text that has `min_tokens` at the very least."""
    if min_tokens > max_model_len:
        raise _too_long(prompt, f"at least {min_tokens} tokens", max_model_len)


def _too_long(prompt: Prompt, length: str, max_model_len: int) -> RequestError:
    param = param_of(prompt)
    return RequestError(
        f"This model's maximum context length is {max_model_len} tokens. However, your {param} "
        f"resulted in {length}, which leaves no room for an answer. Please reduce the length of "
        f"the {param}.",
        code="context_length_exceeded",
        param=param,
    )


def param_of(prompt: Prompt) -> str:
    """The field of the request that the prompt came in."""
    return "messages" if prompt.messages is not None else prompt.field


def check_pooling(pooling: PoolingParams | None, card: ModelCard) -> None:
    if pooling is not None and (pooling.dimensions or 0) > card.hidden_size:
        raise RequestError(
            f"dimensions is {pooling.dimensions}; embeddings of this model have "
            f"{card.hidden_size} at most",
            param="dimensions",
        )


def check_question(n_units: int, max_model_len: int, *, param: str) -> None:
    """`n_units` are characters of a text or token ids. Raises RequestError (413)."""
    limit = max(MIN_QUESTION_LIMIT, QUESTION_UNITS_PER_TOKEN * max_model_len)
    if n_units > limit:
        raise RequestError(
            f"{param} is too long: {n_units} characters or tokens, where at most {limit} can be "
            "converted in one request",
            status=413,
            param=param,
        )


def check_prompt_logprobs(params: SamplingParams, n_prompt: int) -> None:
    n_entries = n_prompt * (1 + (params.prompt_logprobs or 0))
    if params.prompt_logprobs is not None and n_entries > MAX_PROMPT_LOGPROBS:
        raise RequestError(
            f"prompt_logprobs={params.prompt_logprobs} over a prompt of {n_prompt} tokens makes "
            f"{n_entries} entries; at most {MAX_PROMPT_LOGPROBS} can be returned",
            param="prompt_logprobs",
        )


def resolve_max_tokens(params: SamplingParams, n_prompt: int, card: ModelCard) -> SamplingParams:
    """`params` with max_tokens known: what fits behind the prompt when it was left open, or the
    model's default if that is less."""
    max_model_len = card.max_model_len
    room = max_model_len - n_prompt
    if params.max_tokens is None:
        most = min(room, int(card.defaults.get("max_tokens", room)))
        try:
            return msgspec.structs.replace(params, max_tokens=most)
        except ValueError as error:
            raise RequestError(str(error), param="min_tokens") from error
    if params.max_tokens > room:
        raise RequestError(
            f"'max_tokens' or 'max_completion_tokens' is too large: {params.max_tokens}. This "
            f"model's maximum context length is {max_model_len} tokens and your request has "
            f"{n_prompt} input tokens ({params.max_tokens} > {max_model_len} - {n_prompt}).",
            code="context_length_exceeded",
            param="max_tokens",
        )
    return params


def check_choices(n: int, params: SamplingParams) -> None:
    """`n` choices each bring their own copy of `params` to the worker."""
    size_bytes = len(msgspec.msgpack.encode(params))
    if size_bytes * n > MAX_CHOICES_BYTES:
        raise RequestError(
            f"n must be at most {MAX_CHOICES_BYTES // size_bytes} with the rules and the token "
            "ids that this request brings",
            code="invalid_value",
            param="n",
        )


def _check_allowed(token_ids: list[int], text_model: TextModel) -> None:
    text_model.check_vocabulary(token_ids, param="allowed_token_ids")
    if len(token_ids) > text_model.prepared.vocab_tokens:
        raise RequestError(
            "allowed_token_ids holds more ids than the model has",
            code="invalid_value",
            param="allowed_token_ids",
        )


def check_params(params: SamplingParams, text_model: TextModel) -> None:
    text_model.check_vocabulary(list(params.logit_bias), param="logit_bias")
    text_model.check_vocabulary(params.stop_token_ids, param="stop_token_ids")
    _check_allowed(params.allowed_token_ids or [], text_model)
    text_model.check_vocabulary(params.logprob_token_ids or [], param="logprob_token_ids")
    if len(params.stop) > MAX_STOPS or max(map(len, params.stop), default=0) > MAX_STOP_CHARS:
        raise RequestError(
            f"stop takes at most {MAX_STOPS} strings of at most {MAX_STOP_CHARS} characters",
            param="stop",
        )
    if params.structured_outputs is not None:
        text_model.rules.check(params.structured_outputs)
