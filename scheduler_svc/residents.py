"""Who is on the worker: the one way in and the one way out of slots, blocks and decode order."""

from __future__ import annotations

from collections.abc import Sequence

from pagemesh.scheduler_svc.blocks import BlockManager
from pagemesh.scheduler_svc.errors import InvariantError
from pagemesh.scheduler_svc.request import Request, Status


class Residents:
    """Owner of the slots, of the block manager, and of the running requests (by slot, in the order
    of admission).

    The worker keeps the decoding rows in the order of `decoding`; `off_order` are the other running
    requests: prefills, those whose last token is on its way, and those the budget has left out.
    """

    def __init__(self, *, num_blocks: int, max_num_seqs: int, block_tokens: int) -> None:
        self.blocks = BlockManager(num_blocks)
        self.running: dict[int, Request] = {}
        self.gone: list[int] = []
        """Slots given up since the last step: the worker has yet to hear of them."""
        self.decoding: list[Request] = []
        """Rows of one token in the last step; some may have left since. Replaced, never changed."""
        self.due: list[Request] = []
        """Those of `decoding` that left, need a block, or have their last token on its way."""
        self.off_order: dict[int, Request] = {}
        """By slot, in the order of admission or of leaving the decode order."""
        self._block_tokens = block_tokens
        self._max_num_seqs = max_num_seqs
        self._free_slots = list(reversed(range(max_num_seqs)))

    def admit(self, request: Request, blocks: list[int], computed: int, step: int) -> None:
        """Give `request` a slot and the committed `blocks`, which hold `computed` tokens."""
        if request.status is Status.RUNNING or not self._free_slots:
            raise InvariantError(f"no slot for request {request.request_id}: {request.status}")
        request.status = Status.RUNNING
        request.void = False
        request.admitted_step = step
        request.slot = self._free_slots.pop()
        request.blocks = blocks
        request.room_tokens = len(blocks) * self._block_tokens
        request.computed = request.confirmed = computed
        request.entry_length = request.length
        request.due_at = min(request.room_tokens, request.plan_limit - 1)
        self.running[request.slot] = self.off_order[request.slot] = request

    def grow(self, request: Request, block: int) -> None:
        request.blocks.append(block)
        request.room_tokens += self._block_tokens
        request.due_at = min(request.room_tokens, request.plan_limit - 1)

    def reorder(
        self, decoding: list[Request], joined: Sequence[Request], paused: Sequence[Request]
    ) -> None:
        """`decoding` is the order from now on: `joined` enter it, `paused` stay."""
        self.decoding = decoding
        for request in joined:
            del self.off_order[request.slot]
        for request in paused:
            self.off_order[request.slot] = request

    def forget_order(self) -> None:
        """The worker's batch is empty; whoever decodes enters its order anew."""
        self.decoding, self.due = [], []
        self.off_order = dict(self.running)

    def evict(self, request: Request) -> None:
        """Take back slot and blocks. Does nothing to a request that has none."""
        if request.status is not Status.RUNNING:
            return
        slot, blocks = request.slot, request.blocks
        request.slot, request.blocks = -1, []
        del self.running[slot]
        if self.off_order.pop(slot, None) is None:
            self.due.append(request)
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
