"""The prompt forms of completions: a string, strings, token ids, lists of token ids."""

from __future__ import annotations

from typing import Any, Final

from pagemesh.gateway.openai.errors import bad
from pagemesh.gateway.openai.schema import CompletionRequest, GenerationRequest
from pagemesh.shared.errors import RequestError
from pagemesh.shared.messages import ModelCard, Prompt
from pagemesh.shared.wire import pack_ids

# Half of what one tokenizer service lets wait, so that no request alone can fill it.
MAX_PROMPTS: Final = 512
MAX_CHOICES: Final = 1024
# Of a prompt of ids of which the last ones count.
MIN_TRUNCATED_LIMIT_TOKENS: Final = 2**18


def completion_prompts(body: CompletionRequest, card: ModelCard) -> list[Prompt]:
    """One Prompt each. Raises RequestError (400) for empty, mixed or out-of-vocabulary prompts."""
    given = _split(body.prompt)
    _check_count(len(given))
    special, keep = body.add_special_tokens is not False, truncation(body)
    prompts = [_prompt(prompt, card, special, truncated=keep != 0) for prompt in given]
    if keep:
        prompts = [prompt._replace(truncate_tokens=keep) for prompt in prompts]
    return [_with_suffix(prompt, body) for prompt in prompts] if body.suffix else prompts


def truncation(body: GenerationRequest) -> int:
    """How many of the last tokens count, as in Prompt. Raises RequestError (400)."""
    keep = body.truncate_prompt_tokens
    if keep is not None and (keep < -1 or keep == 0):
        raise bad("truncate_prompt_tokens", f"must be -1, or at least 1, got {keep}")
    return keep or 0


def _with_suffix(prompt: Prompt, body: CompletionRequest) -> Prompt:
    if prompt.text is None or body.echo:
        raise bad("suffix", "needs a prompt of text, and no echo")
    return prompt._replace(suffix=body.suffix or "")


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


def _prompt(
    prompt: str | list[int], card: ModelCard, add_special_tokens: bool, *, truncated: bool
) -> Prompt:
    if isinstance(prompt, str):
        return Prompt(text=prompt, add_special_tokens=add_special_tokens)
    if not prompt:
        raise _bad("must not be empty")
    if not truncated:
        check_context(card.max_model_len, len(prompt))
    check_vocabulary(prompt, card, "prompt")
    return Prompt(token_ids=pack_ids(prompt), add_special_tokens=False)


def check_id_lists(limit_tokens: int, n_prompts: int, longest_tokens: int) -> None:
    """Raises RequestError (400) for more prompts of ids, or longer ones, than are taken."""
    _check_count(n_prompts)
    check_context(limit_tokens, longest_tokens)


def _check_count(n_prompts: int) -> None:
    if n_prompts > MAX_PROMPTS:
        raise _bad(f"must hold at most {MAX_PROMPTS} prompts, got {n_prompts}")


def check_context(limit_tokens: int, n_tokens: int) -> None:
    """Raises RequestError (400) for a prompt of ids that no context holds."""
    if n_tokens > limit_tokens:
        raise RequestError(
            f"The maximum context length is {limit_tokens} tokens, "
            f"but the prompt alone has {n_tokens} tokens.",
            code="context_length_exceeded",
            param="prompt",
        )


def check_choices(n_prompts: int, n: int) -> None:
    """Raises RequestError (400): each prompt makes n choices, and all of them live at once."""
    if n_prompts * n > MAX_CHOICES:
        raise RequestError(
            f"n times the number of prompts must be at most {MAX_CHOICES} choices, "
            f"got n {n} for {n_prompts} prompts in prompt",
            code="invalid_value",
            param="n",
        )


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
