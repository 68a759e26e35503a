"""What a request costs on an engine: the seconds until its answer, as far as engines differ.

It has to wait for the prompt tokens that are queued there, computes those of its own prompt that
are not cached, and decodes beside the others' rows. So an engine that holds the prefix wins until
waiting for it costs more than computing the prefix elsewhere. No I/O, no clock, no state.
"""

from __future__ import annotations

from math import ceil
from typing import Final, NamedTuple

from pagemesh.shared.messages import Capacity
from pagemesh.shared.step_stats import StepPace

ANSWER_TOKENS: Final = 128
"""Of an answer that may be longer: most are cut by their end, which nobody knows."""
UNMEASURED: Final = StepPace(overhead_s=0.0, token_s=1.0)
"""While no engine has reported its pace, costs are in tokens."""


class Work(NamedTuple):
    """Of one request. `choices` rows decode `answer_tokens` each."""

    uncached_tokens: float
    answer_tokens: int
    choices: int = 1


class Load(NamedTuple):
    """What an engine has taken on: choices that run or wait, and prompt tokens to be computed."""

    requests: int = 0
    prefill_tokens: float = 0.0


def cost_s(work: Work, load: Load, capacity: Capacity, pace: StepPace) -> float:
    """Seconds; tokens where `pace` is UNMEASURED."""
    answer_tokens = min(work.answer_tokens, ANSWER_TOKENS)
    rows = max(1, capacity.max_num_seqs)
    beside = min(load.requests, rows)
    prefill_s = _prefill_s(load.prefill_tokens + work.uncached_tokens, beside, capacity, pace)
    decode_s = answer_tokens * _step_s(beside, pace)
    return _wait_for_rows_s(work, load, rows, pace) + prefill_s + decode_s


def _prefill_s(tokens: float, beside: int, capacity: Capacity, pace: StepPace) -> float:
    """Prompts share their steps with `beside` rows that decode."""
    room_tokens = max(1, capacity.max_num_batched_tokens - beside)
    return tokens * pace.token_s + ceil(tokens / room_tokens) * _step_s(beside, pace)


def _wait_for_rows_s(work: Work, load: Load, rows: int, pace: StepPace) -> float:
    """A full batch passes at the pace of its answers."""
    over = max(0, load.requests + work.choices - rows)
    return over / rows * ANSWER_TOKENS * _step_s(rows, pace)


def _step_s(rows: int, pace: StepPace) -> float:
    return pace.overhead_s + rows * pace.token_s
