"""The prompt forms of completions: a string, strings, token ids, lists of token ids."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import msgspec

from pagemesh.gateway.openai.body import IdLimit, is_short
from pagemesh.gateway.openai.errors import bad
from pagemesh.gateway.openai.schema import CompletionRequest, EmbeddingRequest, GenerationRequest
from pagemesh.shared.errors import RequestError
from pagemesh.shared.messages import ModelCard, Prompt, PromptExtras
from pagemesh.shared.wire import pack_ids

MAX_CHOICES: Final = 1024
# Of a prompt of ids of which the last ones count.
MIN_TRUNCATED_LIMIT_TOKENS: Final = 2**18


class PromptField(NamedTuple):
    """The field that prompts come in, and how many it takes."""

    name: str
    most: int

    def check_lists(self, limit_tokens: int, n_prompts: int, longest_tokens: int) -> None:
        """Raises RequestError (400) for more prompts of ids, or longer ones, than are taken."""
        self.check_count(n_prompts)
        self.check_context(limit_tokens, longest_tokens)

    def check_count(self, n_prompts: int) -> None:
        if n_prompts > self.most:
            raise bad(self.name, f"must hold at most {self.most} prompts, got {n_prompts}")

    def check_context(self, limit_tokens: int, n_tokens: int) -> None:
        """Raises RequestError (400) for a prompt of ids that no context holds."""
        if n_tokens > limit_tokens:
            raise RequestError(
                f"The maximum context length is {limit_tokens} tokens, "
                f"but the {self.name} alone has {n_tokens} tokens.",
                code="context_length_exceeded",
                param=self.name,
            )


# Half of what one tokenizer service lets wait, so that no request alone can fill it.
PROMPT: Final = PromptField("prompt", 512)


def id_limit(field: PromptField, raw: bytes, longest_tokens: int | None) -> IdLimit | None:
    """Of a body that is not decoded yet; None where nothing in it can be over a limit. A context
    holds at most `longest_tokens`: that of the model is checked once its name is known."""
    if longest_tokens is None or is_short(raw, longest_tokens):
        return None
    return IdLimit(field.name, _longest_ids_tokens(raw, longest_tokens), field.check_lists)


def _longest_ids_tokens(raw: bytes, longest_tokens: int) -> int:
    """How many ids a prompt of the body `raw` may have before it is decoded; a context holds
    `longest_tokens`."""
    # So many ids need twice as many bytes.
    if len(raw) > 2 * longest_tokens and b'"truncate_prompt_tokens"' in raw:
        return max(longest_tokens, MIN_TRUNCATED_LIMIT_TOKENS)
    return longest_tokens


def completion_prompts(body: CompletionRequest, card: ModelCard) -> list[Prompt]:
    """One Prompt each. Raises RequestError (400) for empty, mixed or out-of-vocabulary prompts."""
    prompts = split_prompts(PROMPT, body.prompt, body, card)
    return [_with_suffix(prompt, body) for prompt in prompts] if body.suffix else prompts


def split_prompts(
    field: PromptField,
    value: str | list[Any],
    body: CompletionRequest | EmbeddingRequest,
    card: ModelCard,
) -> list[Prompt]:
    """One Prompt for each in `value`, which is that of `field`. Raises RequestError (400)."""
    special, keep = body.add_special_tokens is not False, truncation(body)
    extras = PromptExtras(truncate_tokens=keep) if keep else None
    if isinstance(value, str):
        return [_text_prompt(field, value, special, extras)]
    given = _split(field, value)
    field.check_count(len(given))
    return [
        _text_prompt(field, each, special, extras)
        if isinstance(each, str)
        else _ids_prompt(field, each, extras, card)
        for each in given
    ]


def truncation(body: GenerationRequest | EmbeddingRequest) -> int:
    """How many of the last tokens count, as in PromptExtras. Raises RequestError (400)."""
    keep = body.truncate_prompt_tokens
    if keep is not None and (keep < -1 or keep == 0):
        raise bad("truncate_prompt_tokens", f"must be -1, or at least 1, got {keep}")
    return keep or 0


def _with_suffix(prompt: Prompt, body: CompletionRequest) -> Prompt:
    if prompt.text is None or body.echo:
        raise bad("suffix", "needs a prompt of text, and no echo")
    extras = prompt.extras or PromptExtras()
    with_suffix = extras._replace(suffix=body.suffix or "")
    return msgspec.structs.replace(prompt, extras=with_suffix)


def _split(field: PromptField, value: list[Any]) -> list[str] | list[list[int]]:
    if not value:
        raise bad(field.name, "must not be empty")
    kinds = {type(item) for item in value}
    if kinds == {int}:
        return [value]
    if len(kinds) > 1:
        raise bad(field.name, "must not mix strings, token ids and lists of token ids")
    return value


def _text_prompt(
    field: PromptField, text: str, special: bool, extras: PromptExtras | None
) -> Prompt:
    return Prompt(text=text, add_special_tokens=special, field=field.name, extras=extras)


def _ids_prompt(
    field: PromptField, ids: list[int], extras: PromptExtras | None, card: ModelCard
) -> Prompt:
    if not ids:
        raise bad(field.name, "must not be empty")
    if extras is None:
        field.check_context(card.max_model_len, len(ids))
    check_vocabulary(ids, card, field.name)
    packed = pack_ids(ids)
    return Prompt(token_ids=packed, add_special_tokens=False, field=field.name, extras=extras)


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
