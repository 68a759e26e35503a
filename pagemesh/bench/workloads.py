"""The offline workloads, the same ids for every engine and in every repeat.

Ids come from Python's `random.Random` alone, so another engine's harness can draw the same ones.
They go up to HIGHEST_ID; a model with fewer tokens takes them modulo its vocabulary.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

HIGHEST_ID: Final = 100_000
STEP_BATCHES: Final = (1, 8, 32, 64, 128, 256)
PREFILL_LENS: Final = (128, 1024, 4096, 8192)
LATENCY_PRESETS: Final = ("W4", "W5", "STEP", "PREFILL")
_W1_HIGHEST_ID: Final = 10_000


class Workload(NamedTuple):
    """Prompts of token ids and, for each, how many tokens to generate. `cached` ids begin prompts
    and are to be in the prefix cache before."""

    prompts: list[list[int]]
    max_tokens: list[int]
    temperature: float = 0.0
    cached: tuple[int, ...] = ()

    @property
    def input_tokens(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def output_tokens(self) -> int:
        return sum(self.max_tokens)

    @property
    def longest_tokens(self) -> int:
        """Of the longest request, prompt and answer."""
        return max(len(prompt) + n for prompt, n in zip(self.prompts, self.max_tokens, strict=True))

    def within(self, vocab_tokens: int) -> Workload:
        """The same workload with its ids modulo `vocab_tokens`."""
        return self._replace(
            prompts=[[i % vocab_tokens for i in ids] for ids in self.prompts],
            cached=tuple(i % vocab_tokens for i in self.cached),
        )

    def shifted(self, by: int) -> Workload:
        """The same workload with other ids."""
        return self._replace(
            prompts=[[i + by for i in ids] for ids in self.prompts],
            cached=tuple(i + by for i in self.cached),
        )


def varied(repeat: int = 0, temperature: float = 0.6) -> Workload:
    """256 requests, in and out 100 to 1024, as nano-vllm's benchmark draws them."""
    draw = random.Random(repeat)
    prompts = [
        [draw.randint(0, _W1_HIGHEST_ID) for _ in range(draw.randint(100, 1024))]
        for _ in range(256)
    ]
    return Workload(prompts, [draw.randint(100, 1024) for _ in range(256)], temperature)


def fixed(
    n_requests: int,
    input_len: int,
    output_len: int,
    repeat: int = 0,
    *,
    salt: str | int = 0,
    temperature: float = 0.0,
) -> Workload:
    """Requests of one length. Another `salt` or `repeat` draws other ids."""
    draw = random.Random(f"{salt}-{n_requests}-{input_len}-{repeat}")
    prompts = [_ids(draw, input_len) for _ in range(n_requests)]
    return Workload(prompts, [output_len] * n_requests, temperature)


def shared_prefix(
    n_requests: int = 200,
    prefix_len: int = 2048,
    unique_len: int = 128,
    output_len: int = 64,
    repeat: int = 0,
    *,
    salt: str = "prefix",
    cached: bool = False,
) -> Workload:
    """Requests that begin with the same tokens, `cached` before or computed by the first."""
    draw = random.Random(f"{salt}-{repeat}")
    prefix = _ids(draw, prefix_len)
    prompts = [prefix + _ids(draw, unique_len) for _ in range(n_requests)]
    return Workload(prompts, [output_len] * n_requests, cached=tuple(prefix) if cached else ())


PRESETS: Final[Mapping[str, Callable[[int], Workload]]] = {
    "W1": varied,
    "W1greedy": lambda repeat: varied(repeat, temperature=0.0),
    "W2": lambda repeat: fixed(512, 512, 256, repeat),
    "W3": lambda repeat: fixed(64, 8192, 16, repeat),
    "W4": lambda repeat: fixed(1, 128, 256, repeat),
    "W5": lambda repeat: fixed(32, 128, 256, repeat),
    "PREFIX": lambda repeat: shared_prefix(repeat=repeat),
    # Ids that "PREFIX" has left in no cache.
    "PREFIX-warm": lambda repeat: shared_prefix(repeat=repeat, salt="warm-prefix", cached=True),
    "PREFIX-none": lambda repeat: fixed(200, 2176, 64, repeat, salt="noshare"),
}


def _ids(draw: random.Random, n_tokens: int) -> list[int]:
    return [draw.randint(0, HIGHEST_ID) for _ in range(n_tokens)]
