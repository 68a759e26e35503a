"""What is said when the memory of a GPU is too little: one sentence each, with a change that works.
Every value that is named has been tried in the plan."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

from pagemesh.shared.errors import StartupError
from pagemesh.worker_svc.gpu.memory import Card, Division, Needs, Wanted, plan_of, room_bytes
from pagemesh.worker_svc.memory import longest_tokens, show_bytes

_SHARES: Final = 1000
_STEP_TOKENS: Final = 64


def divide(model: str, card: Card, needs: Needs, wanted: Wanted) -> Division:
    """Raises StartupError with the changes that would work, each by itself."""
    longest_tokens(wanted.max_model_len, wanted.model_max_tokens)
    plan = plan_of(card, needs, wanted)
    if plan is None:
        raise StartupError(_too_little(model, card, needs, wanted))
    return Division(card, needs, plan)


class _Way(NamedTuple):
    """A setting, and its values from the mildest change on: if one works, so do those after it."""

    flag: str
    field: str
    values: Sequence[Any]


def remedies(card: Card, needs: Needs, wanted: Wanted) -> Iterator[str]:
    """Flags with the mildest value that makes the plan succeed, each by itself."""
    for way in _ways(card, needs, wanted):

        def works(value: Any, field: str = way.field) -> bool:
            changed = replace(wanted, **{field: value})
            return plan_of(card, needs.at(wanted, changed), changed) is not None

        found = bisect_left(way.values, True, key=works)
        if found < len(way.values):
            yield f"{way.flag} {_shown(way.values[found])}"


def _ways(card: Card, needs: Needs, wanted: Wanted) -> Iterator[_Way]:
    if wanted.kv_bytes is None:
        steps = range(int(wanted.share * _SHARES) + 1, _SHARES + 1)
        yield _Way("--gpu-memory-utilization", "share", [step / _SHARES for step in steps])
    else:
        pool_bytes = min(
            max(wanted.kv_bytes, wanted.least_pool_bytes), room_bytes(card, needs, wanted)
        )
        yield _Way("--kv-cache-memory", "kv_bytes", [pool_bytes])
    if wanted.max_model_len != "auto":
        yield _Way("--max-model-len", "max_model_len", range(int(wanted.max_model_len) - 1, 0, -1))
    fewer = range(
        (wanted.step_tokens - 1) // _STEP_TOKENS * _STEP_TOKENS,
        wanted.fewest_step_tokens - 1,
        -_STEP_TOKENS,
    )
    yield _Way("--max-num-batched-tokens", "step_tokens", fewer)
    yield _Way("--max-num-seqs", "max_num_seqs", range(wanted.max_num_seqs - 1, 0, -1))


def _shown(value: float) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _too_little(model: str, card: Card, needs: Needs, wanted: Wanted) -> str:
    left_bytes = max(0, room_bytes(card, needs, wanted))
    least_bytes = max(wanted.least_pool_bytes, wanted.kv_bytes or 0)
    limit = "" if wanted.kv_bytes else f" at --gpu-memory-utilization {wanted.share:g}"
    return (
        f"the KV cache of {model} does not fit {card.name}: of {show_bytes(card.total_bytes)}, "
        f"{_taken(card)}, this worker's weights, steps and graphs take "
        f"{show_bytes(needs.total_bytes)}, and {show_bytes(left_bytes)} are left{limit} where "
        f"{show_bytes(least_bytes)} are needed: {_advice(card, needs, wanted)}"
    )


def _advice(card: Card, needs: Needs, wanted: Wanted) -> str:
    ways = list(remedies(card, needs, wanted))
    return f"set {' or '.join(ways)}" if ways else _elsewhere(card)


def check_weights(model: str, card: Card, weights_bytes: int, half_bytes: int) -> None:
    """Before anything is loaded. `half_bytes` is what they take in 16 bits. Raises StartupError
    when they do not fit."""
    if weights_bytes <= card.left_bytes:
        return
    way = "set --dtype bfloat16" if half_bytes <= card.left_bytes else _elsewhere(card)
    raise StartupError(
        f"the weights of {model}, {show_bytes(weights_bytes)}, do not fit {card.name}: of "
        f"{show_bytes(card.total_bytes)}, {_taken(card)}: {way}"
    )


def step_too_large(model: str, card: Card, wanted: Wanted, passed: Wanted | None) -> StartupError:
    """`passed`: what was found to fit in place of `wanted`."""
    return StartupError(
        f"steps of {wanted.step_tokens} tokens and {wanted.max_num_seqs} requests do not fit "
        f"{card.name} beside the weights of {model}: of {show_bytes(card.total_bytes)}, "
        f"{_taken(card)}: {_elsewhere(card) if passed is None else _lowered(wanted, passed)}"
    )


def _lowered(wanted: Wanted, passed: Wanted) -> str:
    flags = []
    if passed.step_tokens < wanted.step_tokens:
        flags.append(f"--max-num-batched-tokens {passed.step_tokens}")
    if passed.max_num_seqs < wanted.max_num_seqs:
        flags.append(f"--max-num-seqs {passed.max_num_seqs}")
    return f"set {' '.join(flags)}"


def _taken(card: Card) -> str:
    holders = f" ({card.holders})" if card.tenants else ""
    return f"{show_bytes(card.others_bytes)} were in use before{holders}"


def _elsewhere(card: Card) -> str:
    first = "stop what else runs there, " if card.tenants else ""
    return f"{first}choose another GPU with CUDA_VISIBLE_DEVICES, or serve a smaller model"


def ran_out(model: str, card: Card) -> str:
    """The sentence for an allocation that fails although it was planned."""
    return (
        f"{card.name} ran out of memory while {model} was started: others may have taken some "
        f"meanwhile ({_taken(card)}): start again, or lower --gpu-memory-utilization"
    )
