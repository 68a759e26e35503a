"""Who is on the worker: the one way in and the one way out of slots and blocks."""

from __future__ import annotations

from collections.abc import Sequence

from pagemesh.scheduler_svc.blocks import BlockManager
from pagemesh.scheduler_svc.errors import InvariantError
from pagemesh.scheduler_svc.request import Request, Status


class Residents:
    """Owner of the slots, of the block manager, and of the running requests (by slot, in the order
    of admission)."""

    def __init__(self, *, num_blocks: int, max_num_seqs: int, block_tokens: int) -> None:
        self.blocks = BlockManager(num_blocks)
        self.running: dict[int, Request] = {}
        self.gone: list[int] = []
        """Slots given up since the last step: the worker has yet to hear of them."""
        self._block_tokens = block_tokens
        self._max_num_seqs = max_num_seqs
        self._free_slots = list(reversed(range(max_num_seqs)))

    def admit(self, request: Request, blocks: list[int], computed: int, step: int) -> None:
        """Give `request` a slot and the committed `blocks`, which hold `computed` tokens."""
        if request.status is Status.RUNNING or not self._free_slots:
            raise InvariantError(f"no slot for request {request.request_id}: {request.status}")
        request.status = Status.RUNNING
        request.admitted_step = step
        request.slot = self._free_slots.pop()
        request.blocks = blocks
        request.room_tokens = len(blocks) * self._block_tokens
        request.computed = request.confirmed = computed
        self.running[request.slot] = request

    def grow(self, request: Request, block: int) -> None:
        request.blocks.append(block)
        request.room_tokens += self._block_tokens

    def evict(self, request: Request) -> None:
        """Take back slot and blocks. Does nothing to a request that has none."""
        if request.status is not Status.RUNNING:
            return
        slot, blocks = request.slot, request.blocks
        request.slot, request.blocks = -1, []
        del self.running[slot]
        self._free_slots.append(slot)
        self.gone.append(slot)
        self.blocks.release(blocks)

    def audit(self) -> list[str]:
        """Findings about blocks and slots, after repair. Empty when the books are sound."""
        findings = self.blocks.audit(self._tables())
        free = set(self._free_slots)
        whole = free | self.running.keys() == set(range(self._max_num_seqs))
        if not whole or len(free) + len(self.running) != self._max_num_seqs:
            findings.append("the free slots and the running requests do not add up")
            taken = self.running.keys()
            self._free_slots = [s for s in reversed(range(self._max_num_seqs)) if s not in taken]
        return findings

    def _tables(self) -> Sequence[list[int]]:
        return [request.blocks for request in self.running.values()]
