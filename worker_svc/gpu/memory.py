"""How the memory of a GPU is divided: weights, working memory, graphs, and the KV pool from what
they leave. Pure arithmetic on what was measured; a remedy that is named has been tried in it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Any, Final, NamedTuple

from pagemesh.shared.errors import StartupError
from pagemesh.shared.settings import MaxModelLen
from pagemesh.worker_svc.gpu.tenants import Tenant
from pagemesh.worker_svc.memory import (
    NULL_BLOCKS,
    MemoryPlan,
    blocks_for,
    longest_tokens,
    plan_memory,
    pool_line,
    show_bytes,
)

RESERVE_BYTES: Final = 2**28
"""Left alone where others leave less than our share: theirs and ours may grow a little."""
_SHARES: Final = 1000
_STEP_TOKENS: Final = 64
_MIB: Final = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """A GPU before this worker has loaded anything. `others_bytes` are in use, by other processes
    and by CUDA itself; `tenants` are those processes, as far as they are known."""

    name: str
    total_bytes: int
    others_bytes: int
    tenants: tuple[Tenant, ...] = ()

    @property
    def left_bytes(self) -> int:
        """What this worker may take at most."""
        return max(0, self.total_bytes - self.others_bytes - RESERVE_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What a worker takes beside its KV pool, as measured. `slots_bytes` is the state of all
    requests, `step_bytes` the working memory of the largest step, of which `step_bytes_per_token`
    for each of its tokens."""

    weights_bytes: int
    slots_bytes: int
    step_bytes: int
    step_bytes_per_token: float
    graphs_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        return self.weights_bytes + self.slots_bytes + self.step_bytes + self.graphs_bytes

    def at(self, measured: Wanted, changed: Wanted) -> Needs:
        """What they would have been with other numbers of requests and of a step's tokens."""
        fewer_tokens = measured.step_tokens - changed.step_tokens
        saved_bytes = int(self.step_bytes_per_token * fewer_tokens)
        slots_bytes = ceil(self.slots_bytes * changed.max_num_seqs / measured.max_num_seqs)
        step_bytes = max(0, self.step_bytes - saved_bytes)
        return replace(self, slots_bytes=slots_bytes, step_bytes=step_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What the settings and the model ask for. `kv_bytes` is the size of the pool, if one is given;
    `fewest_step_tokens` the least that a step must hold."""

    share: float
    kv_bytes: int | None
    kv_bytes_per_token: int
    block_tokens: int
    model_max_tokens: int
    max_model_len: MaxModelLen
    max_num_seqs: int
    step_tokens: int
    fewest_step_tokens: int = _STEP_TOKENS

    @property
    def least_pool_bytes(self) -> int:
        """A pool that can serve: for one request of the length asked for, or for one block."""
        auto = self.max_model_len == "auto"
        blocks = 1 if auto else blocks_for(int(self.max_model_len), self.block_tokens)
        return (blocks + NULL_BLOCKS) * self.block_tokens * self.kv_bytes_per_token


@dataclass(frozen=True, slots=True)
class Division:
    """Who gets what of a card."""

    card: Card
    needs: Needs
    plan: MemoryPlan

    @property
    def free_bytes(self) -> int:
        taken_bytes = self.card.others_bytes + self.needs.total_bytes + self.plan.kv_pool_bytes
        return self.card.total_bytes - taken_bytes


def divide(model: str, card: Card, needs: Needs, wanted: Wanted) -> Division:
    """Raises StartupError with the changes that would work, each by itself."""
    longest_tokens(wanted.max_model_len, wanted.model_max_tokens)
    plan = _plan(card, needs, wanted)
    if plan is None:
        raise StartupError(_too_little(model, card, needs, wanted))
    return Division(card, needs, plan)


def _plan(card: Card, needs: Needs, wanted: Wanted) -> MemoryPlan | None:
    """None when it does not fit."""
    room_bytes = _room_bytes(card, needs, wanted)
    pool_bytes = room_bytes if wanted.kv_bytes is None else wanted.kv_bytes
    if not wanted.least_pool_bytes <= pool_bytes <= room_bytes:
        return None
    return plan_memory(
        kv_bytes_per_token=wanted.kv_bytes_per_token,
        block_tokens=wanted.block_tokens,
        pool_bytes=pool_bytes,
        model_max_tokens=wanted.model_max_tokens,
        max_model_len=wanted.max_model_len,
        max_num_seqs=wanted.max_num_seqs,
    )


def _room_bytes(card: Card, needs: Needs, wanted: Wanted) -> int:
    """What is left for the KV pool; negative when not even the rest fits."""
    limit_bytes = card.left_bytes
    if wanted.kv_bytes is None:  # a size that is given is absolute
        limit_bytes = min(limit_bytes, int(wanted.share * card.total_bytes))
    return limit_bytes - needs.total_bytes


# -- when it does not fit -------------------------------------------------------------------------


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
            return _plan(card, needs.at(wanted, changed), changed) is not None

        found = bisect_left(way.values, True, key=works)
        if found < len(way.values):
            yield f"{way.flag} {_shown(way.values[found])}"


def _ways(card: Card, needs: Needs, wanted: Wanted) -> Iterator[_Way]:
    if wanted.kv_bytes is None:
        steps = range(int(wanted.share * _SHARES) + 1, _SHARES + 1)
        yield _Way("--gpu-memory-utilization", "share", [step / _SHARES for step in steps])
    else:
        pool_bytes = min(
            max(wanted.kv_bytes, wanted.least_pool_bytes), _room_bytes(card, needs, wanted)
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
    room_bytes = max(0, _room_bytes(card, needs, wanted))
    least_bytes = max(wanted.least_pool_bytes, wanted.kv_bytes or 0)
    limit = "" if wanted.kv_bytes else f" at --gpu-memory-utilization {wanted.share:g}"
    return (
        f"the KV cache of {model} does not fit {card.name}: of {show_bytes(card.total_bytes)}, "
        f"{_taken(card)}, this worker's weights, steps and graphs take "
        f"{show_bytes(needs.total_bytes)}, and {show_bytes(room_bytes)} are left{limit} where "
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
    holders = f" ({_holders(card)})" if card.tenants else ""
    return f"{show_bytes(card.others_bytes)} were in use before{holders}"


def _holders(card: Card) -> str:
    return ", ".join(
        f"{tenant.name}, process {tenant.pid}: {show_bytes(tenant.used_bytes)}"
        for tenant in card.tenants
    )


def _elsewhere(card: Card) -> str:
    first = "stop what else runs there, " if card.tenants else ""
    return f"{first}choose another GPU with CUDA_VISIBLE_DEVICES, or serve a smaller model"


# -- the numbers of a start -----------------------------------------------------------------------


def division_table(division: Division, wanted: Wanted) -> list[tuple[str, str]]:
    """Name and value of each line that a start shows."""
    card, needs, plan = division.card, division.needs, division.plan
    steps_bytes = needs.slots_bytes + needs.step_bytes
    return [
        ("device", f"{card.name}, {show_bytes(card.total_bytes)}"),
        ("in use before", _in_use(card)),
        ("weights", show_bytes(needs.weights_bytes)),
        (
            "largest step",
            f"{show_bytes(steps_bytes)} ({wanted.step_tokens:,} tokens, "
            f"{wanted.max_num_seqs:,} requests)",
        ),
        ("graphs", show_bytes(needs.graphs_bytes)),
        ("KV pool", pool_line(plan)),
        ("left free", show_bytes(division.free_bytes)),
    ]


def _in_use(card: Card) -> str:
    if not card.tenants:
        return f"{show_bytes(card.others_bytes)} (other processes and CUDA itself)"
    itself = max(0, card.others_bytes - sum(tenant.used_bytes for tenant in card.tenants))
    return f"{show_bytes(card.others_bytes)} ({_holders(card)}; CUDA itself {show_bytes(itself)})"
