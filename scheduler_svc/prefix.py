"""The prefix cache of one engine: what a request can read from it, and what it adds."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from pagemesh.scheduler_svc.blocks import BlockManager
from pagemesh.scheduler_svc.request import Request, Status
from pagemesh.shared.hashing import CHAIN_START, block_hash, chain_hashes
from pagemesh.shared.wire import pack_ids


class Prefix(NamedTuple):
    """Blocks a request need not compute. A fork shares `blocks` with its leader and copies block
    `copy_from` (None: nothing to copy), because it will write into that one. The last `blocks` may
    be those of `lenders`, which compute them in steps that are out."""

    blocks: list[int]
    computed: int
    forked_from: Request | None = None
    copy_from: int | None = None
    lenders: tuple[Request, ...] = ()


class PrefixCache:
    """Reads and publishes through the block manager; `enabled` is the setting."""

    def __init__(self, blocks: BlockManager, block_tokens: int, *, enabled: bool) -> None:
        self._blocks = blocks
        self._block_tokens = block_tokens
        self._enabled = enabled

    # -- pure ------------------------------------------------------------------------------------

    def find(self, request: Request) -> Prefix:
        """The longest prefix there is: cached blocks, or those of the request's leader."""
        cached = self._cached(request)
        forked = self._forked(request)
        return forked if forked is not None and forked.computed > cached.computed else cached

    def reads(self, request: Request) -> bool:
        """Prompt logprobs that are still owed, and the mean of a prompt, need every position."""
        scored = request.prompt_logprobs_from >= request.n_prompt
        return self._enabled and scored and not request.computes_all

    def _cached(self, request: Request) -> Prefix:
        """At least one token is left to compute: its logits are needed."""
        if not self.reads(request):
            return Prefix([], 0)
        limit = (len(request.ids) - 1) // self._block_tokens
        hit = self._blocks.match(request.hashes, limit)
        return Prefix(hit, len(hit) * self._block_tokens)

    def _forked(self, request: Request) -> Prefix | None:
        """All of the leader's prompt. Where there is nothing more, the logits of its last token are
        computed again."""
        leader = request.leader
        if leader is None or leader.status is not Status.RUNNING:
            return None
        if leader.computed < leader.n_prompt:
            return None
        n_shared = min(leader.n_prompt, len(request.ids) - 1)
        shared, rest = divmod(n_shared, self._block_tokens)
        copied = leader.blocks[shared] if rest else None
        return Prefix(leader.blocks[:shared], n_shared, leader, copied)

    # -- commit ----------------------------------------------------------------------------------

    def extend_hashes(self, request: Request) -> None:
        """Continue the hash chain over the full blocks of all confirmed tokens."""
        start = len(request.hashes) * self._block_tokens
        full = len(request.ids) // self._block_tokens * self._block_tokens
        if not self._enabled or full <= start:
            return
        request.hashes += chain_hashes(
            pack_ids(request.ids[start:full]),
            self._block_tokens,
            parent=request.hashes[-1] if request.hashes else CHAIN_START,
            salt=request.cache_salt,
        )

    def begin(self, request: Request, cached_blocks: int) -> None:
        """`cached_blocks` of the admitted request are published already."""
        request.published = cached_blocks
        if self._enabled:
            request.next_publication((cached_blocks + 1) * self._block_tokens)

    def publish_decoded(self, woken: Iterable[Request]) -> list[tuple[int, bytes]]:
        """The same for those of the decoding requests `woken` that have filled a block: one each,
        a sixteenth of all rows in every step, so this is written for speed."""
        sealed: list[tuple[int, bytes]] = []
        publish, block_tokens = self._blocks.publish, self._block_tokens
        for request in woken:
            ids, confirmed = request.ids, request.publish_at
            if len(ids) <= confirmed:
                continue
            index, hashes = request.published, request.hashes
            if index == 0 or len(hashes) != index:
                self.extend_hashes(request)
            else:
                filled = pack_ids(ids[confirmed - block_tokens : confirmed])
                hashes.append(block_hash(hashes[-1], filled))
            request.confirmed, request.published = confirmed, index + 1
            request.next_publication(confirmed + block_tokens)
            pair = (request.blocks[index], hashes[index])
            if publish(*pair):
                sealed.append(pair)
        return sealed

    def publish(self, request: Request) -> list[tuple[int, bytes]]:
        """Publish the blocks that confirmed tokens filled; return the new (block, hash) pairs.

        A block counts once its step has run: a step that fails must leave nothing to be found.
        """
        self.extend_hashes(request)
        start, full = request.published, request.confirmed // self._block_tokens
        request.published = full
        request.next_publication((full + 1) * self._block_tokens)
        pairs = zip(request.blocks[start:full], request.hashes[start:full], strict=True)
        return [pair for pair in pairs if self._blocks.publish(*pair)]
