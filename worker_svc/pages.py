"""What the pages of the KV pool hold, for the scheduler that comes after this one.

A scheduler says which content a block holds (`Step.sealed`) once the step that filled it has proved
good. The worker remembers it until a step is about to write into the block, and tells whoever takes
over: a restarted scheduler finds the prefix cache warm.
"""

from __future__ import annotations

from collections.abc import Iterable
from threading import Lock
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from pagemesh.shared.engine_messages import CachedBlocks, Step
from pagemesh.shared.hashing import HASH_BYTES
from pagemesh.shared.messages import ModelCard
from pagemesh.shared.settings import MAX_RUN_AHEAD_STEPS

MAX_BLOCKS_A_FRAME: Final = 65_536
"""20 bytes each: far below the frame limit, and soon packed."""
_WIRE_INT: Final = np.dtype("<i4")
_HALVES: Final = np.dtype("<u8")

Blocks = NDArray[np.integer[Any]]


class PageContents:
    """The content hash of each block of one pool, and the order in which blocks were last in use.

    Bounded by the pool: 24 bytes a block. One thread calls `follow` and `release`; another may
    `distrust` and `told` meanwhile.
    """

    def __init__(self, num_blocks: int) -> None:
        # A hash as two integers. No content hashes to zeros.
        self._hashes = np.zeros((num_blocks, HASH_BYTES // _HALVES.itemsize), _HALVES)
        self._used = np.zeros(num_blocks, np.int64)
        self._clock = 0
        self._sealed_from = 0
        self._lock = Lock()

    def follow(self, step: Step, left: Iterable[Blocks], block_tokens: int) -> None:
        """Before `step` writes anything. `left` are the block tables of the rows that leave.

        Raises ValueError or IndexError when the step does not fit the pool.
        """
        for table in left:
            self.release(table)
        for row in step.new:
            self._overwrite(_ints(row.blocks)[row.computed // block_tokens :])
        if step.grown:
            self._overwrite(_ints(step.grown)[1::2])
        if step.copies:
            self._overwrite(_ints(step.copies)[1::2])
        if step.sealed:
            self._seal(step)

    def release(self, table: Blocks) -> None:
        """A row gives its blocks back, the tail first: its head is the last to be reused."""
        n_blocks = len(table)
        self._used[table] = np.arange(self._clock + n_blocks, self._clock, -1)
        self._clock += n_blocks

    def distrust(self, step: int) -> None:
        """Rows of `step` went wrong, so the scheduler forgets what their requests filled before.
        Which blocks that were is its knowledge: all are forgotten here, and so is what it seals
        until it must have heard of `step`."""
        with self._lock:
            self._hashes[:] = 0
            self._sealed_from = step + MAX_RUN_AHEAD_STEPS + 1

    def told(self, epoch: int, card: ModelCard) -> list[CachedBlocks]:
        """What the pages hold, least recently used first; steps are counted anew from here on."""
        with self._lock:
            self._sealed_from = 0
            blocks = np.flatnonzero(self._hashes.any(axis=1))
            blocks = blocks[np.argsort(self._used[blocks], kind="stable")]
            hashes = self._hashes[blocks]
        return [
            CachedBlocks(
                epoch,
                card.fingerprint,
                card.block_tokens,
                blocks[start : start + MAX_BLOCKS_A_FRAME].astype(_WIRE_INT).tobytes(),
                hashes[start : start + MAX_BLOCKS_A_FRAME].tobytes(),
            )
            for start in range(0, len(blocks), MAX_BLOCKS_A_FRAME)
        ]

    def _overwrite(self, blocks: Blocks) -> None:
        self._hashes[blocks] = 0

    def _seal(self, step: Step) -> None:
        hashes = np.frombuffer(step.sealed_hashes, _HALVES).reshape(-1, self._hashes.shape[1])
        with self._lock:
            if step.step >= self._sealed_from:
                self._hashes[_ints(step.sealed)] = hashes


def _ints(packed: bytes) -> NDArray[np.int32]:
    return np.frombuffer(packed, _WIRE_INT)
