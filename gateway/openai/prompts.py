"""The prompt forms of completions: a string, strings, token ids, lists of token ids."""

from __future__ import annotations

from typing import Any, Final

from pagemesh.shared.errors import RequestError
from pagemesh.shared.wire import ModelCard, Prompt, pack_ids

MAX_PROMPTS: Final = 2048


def completion_prompts(
    value: str | list[Any], card: ModelCard, *, add_special_tokens: bool
) -> list[Prompt]:
    """One Prompt each. Raises RequestError (400) for empty, mixed or out-of-vocabulary prompts."""
    prompts = _split(value)
    if len(prompts) > MAX_PROMPTS:
        raise _bad(f"must hold at most {MAX_PROMPTS} prompts, got {len(prompts)}")
    return [_prompt(prompt, card, add_special_tokens) for prompt in prompts]


def _split(value: str | list[Any]) -> list[str] | list[list[int]]:
    if isinstance(value, str):
        return [value]
    if not value:
        raise _bad("must not be empty")
    kinds = {type(item) for item in value}
    if kinds == {int}:
        return [value]
    if len(kinds) > 1:
        raise _bad("must not mix strings, token ids and lists of token ids")
    return value


def _prompt(prompt: str | list[int], card: ModelCard, add_special_tokens: bool) -> Prompt:
    if isinstance(prompt, str):
        return Prompt(text=prompt, add_special_tokens=add_special_tokens)
    if not prompt:
        raise _bad("must not be empty")
    if len(prompt) > card.max_model_len:
        raise RequestError(
            f"This model's maximum context length is {card.max_model_len} tokens, "
            f"but the prompt alone has {len(prompt)} tokens.",
            code="context_length_exceeded",
            param="prompt",
        )
    check_vocabulary(prompt, card, "prompt")
    return Prompt(token_ids=pack_ids(prompt), add_special_tokens=False)


def check_vocabulary(ids: list[int], card: ModelCard, param: str) -> None:
    """Raises RequestError (400) for an id the model does not have."""
    if ids and not (min(ids) >= 0 and max(ids) < card.vocab_tokens):
        worst = min(ids) if min(ids) < 0 else max(ids)
        raise RequestError(
            f"{param} holds token id {worst}; this model has ids 0 to {card.vocab_tokens - 1}",
            code="invalid_value",
            param=param,
        )


def _bad(rule: str) -> RequestError:
    return RequestError(f"prompt {rule}", code="invalid_value", param="prompt")
