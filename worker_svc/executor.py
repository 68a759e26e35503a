"""What the runner asks of a device: the state of the slots that lives there, and computing rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from torch import Tensor

from pagemesh.shared.engine_messages import NewRow
from pagemesh.worker_svc.batch import Ints, Rows, WireInts
from pagemesh.worker_svc.pooling import PooledRow
from pagemesh.worker_svc.prompt_logprobs import PromptScores
from pagemesh.worker_svc.sampler import SampledRows


class Computed(NamedTuple):
    """What the model gave for some rows; `sampled` has an entry for each of them that samples.

    `sampled`, `prompts` and `pooled` are in the host's memory and valid once `wait` has returned.
    `tokens` are the sampled ones, int64 on the device, for `Executor.commit`.
    """

    sampled: SampledRows
    prompts: list[PromptScores]
    pooled: list[PooledRow]
    tokens: Tensor
    wait: Callable[[], None]


def at_once() -> None:
    """`Computed.wait` of a device that computes while it is called."""


class Executor(Protocol):
    """Owner of the model, the KV pool and the device's state by slot. Used by one thread.

    The runner keeps the books (`Batch`) and changes them first; an executor reads them and changes
    none. Calls within a step come in the order leave, enter, grow, copy_blocks, compute, commit.
    """

    def leave(self, slots: Ints) -> None: ...

    def enter(self, row: NewRow, ids: WireInts) -> None:
        """A request enters its slot with `ids`, all its known tokens."""

    def grow(self, slots: Ints, columns: Ints, blocks: Ints) -> None:
        """Entries that were appended to the block tables."""

    def copy_blocks(self, src: Ints, dst: Ints) -> None: ...

    def clear(self) -> None:
        """Every slot is empty."""

    def compute(self, rows: Rows) -> Computed:
        """Changes the KV pool only, with the same values if it is run again."""

    def commit(self, rows: Rows, tokens: Tensor | None) -> None:
        """Append each sampling row's token; None for rows that failed, which get zeros: steps
        already planned count on a token."""

    def relieve(self) -> None:
        """An allocation failed: give back what is only kept for reuse."""
