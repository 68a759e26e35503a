"""Which workers a scheduler should command: decided by each alike, from what all see in the
registry. Pure state: no I/O, no clock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Final, NamedTuple

from pagemesh.shared.leases import Lease

# A scheduler that leaves a lease which is its turn for so long is passed over for a while: it may
# have died and not have lapsed yet.
TURN_S: Final = 0.5
PASSED_OVER_S: Final = 5.0
# A lease that is gone without having been given up: Redis may have forgotten it, and its holder
# will renew it.
RETURN_S: Final = 1.5


class View(NamedTuple):
    """What the registry says: the instance ids of both services, and the leases by worker."""

    schedulers: Collection[str]
    workers: Collection[str]
    leases: Mapping[str, Lease]


class Change(NamedTuple):
    """Leases to take now, and the one to give up."""

    claim: list[str]
    give_up: str | None


class _Turn(NamedTuple):
    scheduler: str
    since_s: float


class Leasing:
    """The decisions of the scheduler `me`.

    A free worker goes to the scheduler with fewest; the one with most, if it has two more than
    another, gives one up that is idle, while none is free. So leases move one at a time, and no
    more of them than it takes. Times are of one clock, in seconds.
    """

    def __init__(self, me: str) -> None:
        self._me = me
        self._turns: dict[str, _Turn] = {}
        self._passed_over: dict[str, float] = {}
        self._last_held: dict[str, _Turn] = {}

    def decide(
        self, view: View, idle: Collection[str], now_s: float, *, leaving: bool = False
    ) -> Change:
        """`idle` workers of ours may be given up. Who is `leaving` takes none and gives up all."""
        live = {*view.schedulers} - {self._me} if leaving else {*view.schedulers, self._me}
        holders = self._holders(view, now_s)
        free = sorted(worker for worker in view.workers if worker not in holders)
        takers = self._in_turn(live, now_s)
        turns = _assign(free, holders.values(), takers)
        self._note_turns(turns, now_s)
        claim = [worker for worker, scheduler in turns.items() if scheduler == self._me]
        ours = [name for name in view.workers if holders.get(name) == self._me and name in idle]
        surplus = not free and self._has_surplus(holders.values(), takers)
        return Change(claim, max(ours, default=None) if surplus else None)

    def _holders(self, view: View, now_s: float) -> dict[str, str]:
        """By worker, of those that have one or may yet turn out to."""
        for worker, lease in view.leases.items():
            self._last_held[worker] = _Turn(lease.holder, now_s)
        self._last_held = {
            worker: held
            for worker, held in self._last_held.items()
            if held.scheduler and now_s - held.since_s < RETURN_S
        }
        return {worker: held.scheduler for worker, held in self._last_held.items()}

    def _in_turn(self, live: set[str], now_s: float) -> set[str]:
        self._passed_over = {
            name: until_s for name, until_s in self._passed_over.items() if now_s < until_s
        }
        return live - self._passed_over.keys()

    def _note_turns(self, turns: Mapping[str, str], now_s: float) -> None:
        before, self._turns = self._turns, {}
        for worker, scheduler in turns.items():
            turn = before.get(worker)
            if turn is None or turn.scheduler != scheduler:
                turn = _Turn(scheduler, now_s)
            self._turns[worker] = turn
            if scheduler != self._me and now_s - turn.since_s >= TURN_S:
                self._passed_over[scheduler] = now_s + PASSED_OVER_S

    def _has_surplus(self, holders: Iterable[str], takers: set[str]) -> bool:
        held = Counter(holders)
        ours, others = held[self._me], [held[other] for other in takers - {self._me}]
        if self._me not in takers:
            return bool(others)
        return bool(others) and ours >= max(others) and ours > min(others) + 1


def _assign(free: Iterable[str], holders: Iterable[str], takers: set[str]) -> dict[str, str]:
    """Each free worker's next scheduler: that with fewest, of equals the first by name."""
    held = Counter(holders)
    turns: dict[str, str] = {}
    for worker in free if takers else ():
        turns[worker] = min(takers, key=lambda name: (held[name], name))
        held[turns[worker]] += 1
    return turns
