"""How the memory of a GPU is divided: weights, working memory, graphs, and the KV pool from what
they leave. Pure arithmetic on what was measured."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil
from typing import Final, Literal

from pagemesh.shared.errors import PagemeshError
from pagemesh.shared.settings import MaxModelLen
from pagemesh.worker_svc.gpu.tenants import Tenant
from pagemesh.worker_svc.memory import (
    NULL_BLOCKS,
    MemoryPlan,
    blocks_for,
    plan_figures,
    plan_memory,
    pool_line,
    show_bytes,
)

RESERVE_BYTES: Final = 2**28
"""Left alone where others leave less than our share: theirs and ours may grow a little."""

Limit = Literal["step_tokens", "max_num_seqs"]
"""A setting that makes steps smaller."""


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

    @property
    def holders(self) -> str:
        """The tenants in words; empty where none are known."""
        return ", ".join(
            f"{tenant.name}, process {tenant.pid}: {show_bytes(tenant.used_bytes)}"
            for tenant in self.tenants
        )


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
    fewest_step_tokens: int = 1

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


def plan_of(card: Card, needs: Needs, wanted: Wanted) -> MemoryPlan | None:
    """None when it does not fit."""
    room = room_bytes(card, needs, wanted)
    pool_bytes = room if wanted.kv_bytes is None else wanted.kv_bytes
    if not wanted.least_pool_bytes <= pool_bytes <= room:
        return None
    return plan_memory(
        kv_bytes_per_token=wanted.kv_bytes_per_token,
        block_tokens=wanted.block_tokens,
        pool_bytes=pool_bytes,
        model_max_tokens=wanted.model_max_tokens,
        max_model_len=wanted.max_model_len,
        max_num_seqs=wanted.max_num_seqs,
    )


def room_bytes(card: Card, needs: Needs, wanted: Wanted) -> int:
    """What is left for the KV pool; negative when not even the rest fits."""
    limit_bytes = card.left_bytes
    if wanted.kv_bytes is None:  # a size that is given is absolute
        limit_bytes = min(limit_bytes, int(wanted.share * card.total_bytes))
    return limit_bytes - needs.total_bytes


class StepTooLarge(PagemeshError):
    """A step did not fit the device. `limit` would make it smaller."""

    def __init__(self, limit: Limit) -> None:
        super().__init__(f"a step does not fit the device: lower {limit}")
        self.limit: Limit = limit


def lowered(wanted: Wanted, limit: Limit) -> Wanted | None:
    """With half of the limit; None below what is of use."""
    least = {"step_tokens": wanted.fewest_step_tokens, "max_num_seqs": 1}[limit]
    half = getattr(wanted, limit) // 2
    return replace(wanted, **{limit: half}) if half >= least else None


def lowered_to_fit(card: Card, needs: Needs, measured: Wanted) -> Wanted | None:
    """`measured`, with as few tokens in a step as leave room for a KV pool."""
    trial: Wanted | None = measured
    while trial is not None and plan_of(card, needs.at(measured, trial), trial) is None:
        trial = lowered(trial, "step_tokens")
    return trial


def division_figures(division: Division, wanted: Wanted) -> dict[str, int | str]:
    card, needs = division.card, division.needs
    return {
        "device": card.name,
        "total_bytes": card.total_bytes,
        "others_bytes": card.others_bytes,
        "weights_bytes": needs.weights_bytes,
        "step_bytes": needs.slots_bytes + needs.step_bytes,
        "graphs_bytes": needs.graphs_bytes,
        "free_bytes": division.free_bytes,
        "budget_tokens": wanted.step_tokens,
        **plan_figures(division.plan),
    }


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
        ("KV pool", pool_line(plan, wanted.model_max_tokens)),
        ("left free", show_bytes(division.free_bytes)),
    ]


def _in_use(card: Card) -> str:
    if not card.tenants:
        return f"{show_bytes(card.others_bytes)} (other processes and CUDA itself)"
    itself = max(0, card.others_bytes - sum(tenant.used_bytes for tenant in card.tenants))
    return f"{show_bytes(card.others_bytes)} ({card.holders}; CUDA itself {show_bytes(itself)})"
