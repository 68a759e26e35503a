"""What a worker's pages hold when a scheduler takes it over: what of it can be trusted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from pagemesh.scheduler_svc.blocks import NULL_BLOCK
from pagemesh.scheduler_svc.results import BlockContent
from pagemesh.shared.engine_messages import CachedBlocks
from pagemesh.shared.hashing import HASH_BYTES, split_hashes
from pagemesh.shared.messages import EngineStatus, ModelCard
from pagemesh.shared.wire import ID_BYTES, unpack_ids

MAX_FRAMES: Final = 64
"""From one worker; what comes after them is not kept."""


def trusted_contents(
    told: Sequence[CachedBlocks], epoch: int, offered: EngineStatus
) -> list[BlockContent]:
    """(block, hash) pairs, least recently used first: all that was `told`, or nothing if any of it
    does not fit the worker of this `epoch` and the engine it has `offered`."""
    if not all(_is_of(held, epoch, offered.card) and _is_whole(held) for held in told):
        return []
    blocks = [block for held in told for block in unpack_ids(held.blocks)]
    hashes = [content for held in told for content in split_hashes(held.hashes)]
    in_pool = all(NULL_BLOCK < block < offered.capacity.num_blocks for block in blocks)
    if not in_pool or len({*blocks}) < len(blocks):
        return []
    return list(zip(blocks, hashes, strict=True))


def _is_of(held: CachedBlocks, epoch: int, card: ModelCard) -> bool:
    of = (held.epoch, held.fingerprint, held.block_tokens)
    return of == (epoch, card.fingerprint, card.block_tokens)


def _is_whole(held: CachedBlocks) -> bool:
    n_blocks = len(held.blocks) // ID_BYTES
    return len(held.blocks) == n_blocks * ID_BYTES and len(held.hashes) == n_blocks * HASH_BYTES
