"""The requests of a benchmark, drawn from a seed or read from a file.

Random prompts are drawn as token ids and then worded for the server at hand: as they are, as text
of common English words (about a token each), or as a chat message of that text.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from pagemesh.shared.errors import StartupError

Messages = list[dict[str, Any]]
Prompt = list[int] | str | Messages
Wording = Callable[[list[int]], Prompt]
Endpoint = Literal["completions", "chat"]

_TEXT: Final = (
    "the of and to in is that it was for on are as with his they at be this have from or one "
    "had by word but not what all were we when your can said there use an each which she do how "
    "their if will up other about out many then them these so some her would make like him into "
    "time has look two more write go see number no way could people my than first water been "
    "call who oil its now find long down day did get come made may part over new sound take "
    "only little work know place year live me back give most very after thing our just name "
    "good sentence man think say great where help through much before line right too mean old "
    "any same tell boy follow came want show also around form three small set put end does "
    "another well large must big even"
)
_WORDS: Final = _TEXT.split()


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """One request. `prompt_tokens` is None until the server has counted them."""

    prompt: Prompt
    max_tokens: int
    prompt_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class RandomShape:
    """Lengths in tokens, drawn uniformly from `length * (1 ± range_ratio)`."""

    input_len: int
    output_len: int
    range_ratio: float = 0.0


@dataclass(frozen=True, slots=True)
class PrefixShape:
    """Lengths in tokens of a prompt's shared beginning, its own end, and the answer."""

    prefix_len: int
    suffix_len: int
    num_prefixes: int
    output_len: int


def as_token_ids(ids: list[int]) -> Prompt:
    return ids


def as_text(ids: list[int]) -> str:
    return " ".join(_WORDS[token_id % len(_WORDS)] for token_id in ids)


def as_messages(ids: list[int]) -> Messages:
    return [{"role": "user", "content": as_text(ids)}]


def random_requests(
    n_requests: int, shape: RandomShape, *, vocab_tokens: int, seed: int, wording: Wording
) -> list[BenchRequest]:
    """Prompts with nothing in common, of ids below `vocab_tokens`."""
    draw = random.Random(f"random-{seed}")
    requests = []
    for _ in range(n_requests):
        n_input = _length(draw, shape.input_len, shape.range_ratio)
        n_output = _length(draw, shape.output_len, shape.range_ratio)
        requests.append(_worded(_ids(draw, n_input, vocab_tokens), n_output, wording))
    return requests


def shared_prefix_requests(
    n_requests: int, shape: PrefixShape, *, vocab_tokens: int, seed: int, wording: Wording
) -> list[BenchRequest]:
    """Prompts that begin with one of a few prefixes, in turn."""
    draw = random.Random(f"prefix-{seed}")
    prefixes = [_ids(draw, shape.prefix_len, vocab_tokens) for _ in range(shape.num_prefixes)]
    return [
        _worded(
            prefixes[index % shape.num_prefixes] + _ids(draw, shape.suffix_len, vocab_tokens),
            shape.output_len,
            wording,
        )
        for index in range(n_requests)
    ]


def file_requests(
    path: Path, n_requests: int, *, max_tokens: int, endpoint: Endpoint
) -> list[BenchRequest]:
    """At most `n_requests` lines of a JSONL file: `prompt` (text or token ids) or `messages`, and
    perhaps `max_tokens` (default: the argument). Raises StartupError naming the line at fault."""
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise StartupError(f"cannot read {path}: {error.strerror}") from error
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise StartupError(f"{path} holds no requests")
    return [
        _from_line(line, f"{path}, line {number}", max_tokens, endpoint)
        for number, line in numbered[:n_requests]
    ]


def _from_line(line: str, where: str, max_tokens: int, endpoint: Endpoint) -> BenchRequest:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise StartupError(f"{where} is not JSON: {error}") from error
    match row:
        case {"messages": list(messages)} if endpoint == "chat":
            prompt: Prompt = messages
        case {"prompt": str(text)}:
            prompt = text if endpoint == "completions" else [{"role": "user", "content": text}]
        case {"prompt": [int(), *_] as ids} if endpoint == "completions":
            prompt = ids
        case _:
            needs = "prompt or messages" if endpoint == "chat" else "prompt (text or token ids)"
            raise StartupError(f"{where} has no {needs} for --endpoint {endpoint}")
    return BenchRequest(prompt, _max_tokens(row.get("max_tokens", max_tokens), where))


def _max_tokens(value: object, where: str) -> int:
    if not isinstance(value, int) or value < 1:
        raise StartupError(f"{where}: max_tokens must be a positive number, not {value!r}")
    return value


def _length(draw: random.Random, length: int, range_ratio: float) -> int:
    low, high = math.floor(length * (1 - range_ratio)), math.ceil(length * (1 + range_ratio))
    return draw.randint(max(low, 1), max(high, 1))


def _ids(draw: random.Random, n_tokens: int, vocab_tokens: int) -> list[int]:
    return draw.choices(range(vocab_tokens), k=n_tokens)


def _worded(ids: list[int], max_tokens: int, wording: Wording) -> BenchRequest:
    """Only ids are certain to be as many tokens at the server."""
    known = len(ids) if wording is as_token_ids else None
    return BenchRequest(wording(ids), max_tokens, known)
