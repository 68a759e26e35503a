"""Sampling parameters: one schema for the gateway, the wire and the offline class."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import msgspec

from pagemesh.shared.structured_outputs import StructuredOutputsParams

MAX_N = 128
MAX_LOGPROBS = 64
MAX_LOGPROB_TOKEN_IDS = 128
MAX_BAD_WORDS = 1024
# Samplers calculate in float32: within these no scaled logit overflows or becomes a denormal.
MAX_TEMPERATURE = 1e3
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 1e-3, 1e3
_MASK64 = (1 << 64) - 1
# What few requests ask for, so that others pay one comparison for all of it.
_of_tokens = attrgetter(
    "allowed_token_ids", "bad_words", "logprob_token_ids", "thinking_token_budget"
)
_NOT_ASKED: tuple[Any, ...] = (None,) * 4
_restrictions = attrgetter("structured_outputs", "allowed_token_ids", "bad_word_ids", "thinking")
_UNRESTRICTED: tuple[Any, ...] = (None,) * 4


class ThinkingBudget(msgspec.Struct, frozen=True, array_like=True):
    """At most `most_tokens` of reasoning, which `opening` begins (empty: the prompt has begun it);
    then the tokens `closing` are forced."""

    most_tokens: int
    opening: list[int]
    closing: list[int]


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """How one request is sampled. Names, defaults and meaning are vLLM's.

    Raises ValueError from the constructor; the text starts with the name of the field at fault.
    `max_tokens=None` means as much as fits. `top_k` 0 or -1 is off. `seed` is any int64. Without
    `detokenize` there are token ids and no text.

    `allowed_token_ids` are all that may be generated; `bad_words` are texts that must not be, and
    `logprob_token_ids` are shown beside the best ones where `logprobs` are asked for. The tokenizer
    service makes `bad_word_ids` of `bad_words`, and `thinking` of `thinking_token_budget`, for the
    worker.
    """

    n: int = 1
    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    seed: int | None = None
    stop: list[str] = []
    stop_token_ids: list[int] = []
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    detokenize: bool = True
    structured_outputs: StructuredOutputsParams | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    logprob_token_ids: list[int] | None = None
    thinking_token_budget: int | None = None
    bad_word_ids: list[list[int]] | None = None
    thinking: ThinkingBudget | None = None

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            # A frozen struct may still normalise its own fields while it is being built.
            msgspec.structs.force_setattr(self, "stop", [self.stop])
        self._check_counts()
        self._check_ranges()

    def _check_counts(self) -> None:
        if not 1 <= self.n <= MAX_N:
            raise _wrong("n", f"must be between 1 and {MAX_N}", self.n)
        if self.max_tokens is not None and self.max_tokens < 0:
            raise _wrong("max_tokens", "must be at least 0", self.max_tokens)
        if self.min_tokens < 0:
            raise _wrong("min_tokens", "must be at least 0", self.min_tokens)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            limit = f"must be at most max_tokens ({self.max_tokens})"
            raise _wrong("min_tokens", limit, self.min_tokens)
        _check_logprobs("logprobs", self.logprobs)
        _check_logprobs("prompt_logprobs", self.prompt_logprobs)
        if _of_tokens(self) != _NOT_ASKED:
            self._check_tokens()
        if not all(self.stop):
            raise _wrong("stop", "must not contain an empty string", self.stop)
        if self.stop and not self.detokenize:
            raise _wrong("stop", "is looked for in the text: it needs detokenize", self.stop)
        if self.seed is not None and not -(2**63) <= self.seed < 2**63:
            raise _wrong("seed", "must fit in 64 bits", self.seed)

    def _check_tokens(self) -> None:
        if self.allowed_token_ids == []:
            raise _wrong("allowed_token_ids", "must not be empty", self.allowed_token_ids)
        if self.allowed_token_ids and self.structured_outputs is not None:
            raise ValueError("allowed_token_ids cannot be combined with structured outputs")
        words, ids = self.bad_words or [], self.logprob_token_ids or []
        if len(words) > MAX_BAD_WORDS or not all(words):
            rule = f"takes at most {MAX_BAD_WORDS} words, none of them empty"
            raise _wrong("bad_words", rule, len(words))
        if len(ids) > MAX_LOGPROB_TOKEN_IDS:
            rule = f"takes at most {MAX_LOGPROB_TOKEN_IDS} ids"
            raise _wrong("logprob_token_ids", rule, len(ids))
        if self.logprob_token_ids and self.logprobs is None:
            raise ValueError("logprob_token_ids needs logprobs to be asked for")
        if (self.thinking_token_budget or 0) < 0:
            raise _wrong("thinking_token_budget", "must be at least 0", self.thinking_token_budget)

    def _check_ranges(self) -> None:
        if not 0 <= self.temperature <= MAX_TEMPERATURE:
            rule = f"must be between 0 and {MAX_TEMPERATURE:g}"
            raise _wrong("temperature", rule, self.temperature)
        if not 0 < self.top_p <= 1:
            raise _wrong("top_p", "must be in (0, 1]", self.top_p)
        if not self.top_k >= -1:
            raise _wrong("top_k", "must be -1, 0 or a positive count", self.top_k)
        if not 0 <= self.min_p <= 1:
            raise _wrong("min_p", "must be in [0, 1]", self.min_p)
        _check_penalty("presence_penalty", self.presence_penalty)
        _check_penalty("frequency_penalty", self.frequency_penalty)
        if not MIN_REPETITION_PENALTY <= self.repetition_penalty <= MAX_REPETITION_PENALTY:
            rule = f"must be between {MIN_REPETITION_PENALTY:g} and {MAX_REPETITION_PENALTY:g}"
            raise _wrong("repetition_penalty", rule, self.repetition_penalty)
        for bias in self.logit_bias.values():
            if not -100 <= bias <= 100:
                raise _wrong("logit_bias", "values must be between -100 and 100", bias)

    def with_seed(self, seed: int) -> SamplingParams:
        """The same with another `seed`, an int64. Nothing is checked again."""
        # What copy() would call, for less.
        seeded: SamplingParams = SamplingParams.__copy__(self)  # type: ignore[attr-defined]
        msgspec.structs.force_setattr(seeded, "seed", seed)
        return seeded

    @property
    def restricts_tokens(self) -> bool:
        """Whether a worker must look at what came, or may come, token by token."""
        return _restrictions(self) != _UNRESTRICTED

    @property
    def is_greedy(self) -> bool:
        """Temperatures this small would overflow the scaled logits; they mean the maximum."""
        return self.temperature < 1e-5


def _check_logprobs(name: str, count: int | None) -> None:
    if count is not None and not 0 <= count <= MAX_LOGPROBS:
        raise _wrong(name, f"must be between 0 and {MAX_LOGPROBS}", count)


def _check_penalty(name: str, value: float) -> None:
    if not -2 <= value <= 2:
        raise _wrong(name, "must be between -2 and 2", value)


def _wrong(name: str, rule: str, value: object) -> ValueError:
    return ValueError(f"{name} {rule}, got {value!r}")


def child_seed(seed: int, index: int) -> int:
    """Seed of choice `index` of a request: `seed` itself for choice 0, else mixed with the index.

    Splitmix64 finaliser (Steele, Lea, Flood 2014), so neighbouring seeds do not share children.
    """
    if index == 0:
        return seed
    z = (seed + index * 0x9E3779B97F4A7C15) & _MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    z ^= z >> 31
    return z - (1 << 64) if z >= 1 << 63 else z
