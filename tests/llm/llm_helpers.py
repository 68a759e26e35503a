"""Names that the tests of `LLM` share."""

from __future__ import annotations

from collections.abc import Callable

from pagemesh import LLM, RequestOutput, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
WARM = SamplingParams(temperature=1, max_tokens=12, seed=7, ignore_eos=True)

MakeLLM = Callable[..., LLM]


def ids_of(outputs: list[RequestOutput]) -> list[list[int]]:
    return [choice.token_ids for output in outputs for choice in output.outputs]


def state_of(llm: LLM) -> tuple[int, int, float]:
    """Running, waiting, share of the KV blocks in use."""
    stats = llm._loop.stats
    return stats.running, stats.waiting, stats.kv_usage
