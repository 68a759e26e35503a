"""What callers of the offline class give: prompts and parameters in all their forms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypedDict, TypeVar, cast

from pagemesh.shared.errors import RequestError
from pagemesh.shared.messages import Prompt
from pagemesh.shared.wire import pack_ids

T = TypeVar("T")


class TextPrompt(TypedDict):
    prompt: str


class TokensPrompt(TypedDict):
    prompt_token_ids: Sequence[int]


PromptInput = str | TextPrompt | TokensPrompt
Conversation = list[dict[str, Any]]


def as_prompts(given: PromptInput | Sequence[PromptInput]) -> list[Prompt]:
    """One each. Raises RequestError for what is neither text nor token ids."""
    many = [given] if isinstance(given, str | dict) else list(given)
    return [_as_prompt(prompt) for prompt in many]


def conversations(messages: Conversation | Sequence[Conversation]) -> list[Conversation]:
    """A list of messages is one conversation; a list of lists of messages is several."""
    if len(messages) > 0 and isinstance(messages[0], dict):
        return [cast(Conversation, messages)]
    return [list(conversation) for conversation in cast(Sequence[Conversation], messages)]


def _as_prompt(given: PromptInput) -> Prompt:
    """Raises RequestError for what is neither text nor token ids."""
    if isinstance(given, str):
        return Prompt(text=given)
    match given:
        case {"prompt_token_ids": [*ids]}:
            return Prompt(token_ids=_packed(ids))
        case {"prompt": str(text)}:
            return Prompt(text=text)
    raise RequestError(
        "a prompt is a string, {'prompt': text} or {'prompt_token_ids': [ids]}, "
        f"not {type(given).__name__}",
        param="prompts",
    )


def _packed(ids: list[Any]) -> bytes:
    try:
        return pack_ids(ids)
    except (TypeError, OverflowError) as error:
        raise RequestError(
            f"prompt_token_ids must be whole numbers in the vocabulary ({error})",
            param="prompt_token_ids",
        ) from error


def one_each(given: T | Sequence[T] | None, default: T, n_prompts: int, param: str) -> list[T]:
    """`given`, or the default, for each prompt. Raises RequestError naming `param` for a list of
    another length."""
    if not isinstance(given, Sequence):
        return [default if given is None else given] * n_prompts
    if len(given) != n_prompts:
        raise RequestError(
            f"{n_prompts} prompts came with {len(given)} {param}: give one, or one each",
            param=param,
        )
    return list(given)
