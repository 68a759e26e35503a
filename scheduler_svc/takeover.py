"""What a worker's pages hold when a scheduler takes it over: what of it can be trusted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from pagemesh.scheduler_svc.blocks import NULL_BLOCK
from pagemesh.scheduler_svc.results import BlockContent
from pagemesh.shared.engine_messages import CachedBlocks
from pagemesh.shared.hashing import split_hashes
from pagemesh.shared.messages import EngineStatus
from pagemesh.shared.wire import unpack_ids

MAX_FRAMES: Final = 64
"""From one worker; what comes after them is not kept."""


def trusted_contents(
    told: Sequence[CachedBlocks], epoch: int, offered: EngineStatus
) -> list[BlockContent]:
    """(block, hash) pairs, least recently used first: all that was `told`, or nothing if any of it
    does not fit the worker of this `epoch` and the engine it has `offered`."""
    card, num_blocks = offered.card, offered.capacity.num_blocks
    contents: dict[int, bytes] = {}
    n_told = 0
    for held in told:
        if (held.epoch, held.fingerprint, held.block_tokens) != (
            epoch,
            card.fingerprint,
            card.block_tokens,
        ):
            return []
        blocks, hashes = unpack_ids(held.blocks), split_hashes(held.hashes)
        if len(blocks) != len(hashes):
            return []
        contents.update(zip(blocks, hashes, strict=True))
        n_told += len(blocks)
    fits = all(NULL_BLOCK < block < num_blocks for block in contents)
    return list(contents.items()) if fits and len(contents) == n_told else []
