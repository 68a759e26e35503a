"""Who commands which worker, as every scheduler decides for itself."""

from __future__ import annotations

from collections import Counter
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagemesh.scheduler_svc.leasing import PASSED_OVER_S, RETURN_S, TURN_S, Change, Leasing, View
from pagemesh.shared.leases import Lease

LOOK_S = 0.25


class Mesh:
    """Schedulers that look at one table of leases, one after the other, and do what they decide.

    A dead one stays announced for a while, and its leases are given up by the workers.
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        self.deciding: dict[str, Leasing] = {}
        self.announced: set[str] = set()
        self.workers: set[str] = set()
        self.busy: set[str] = set()
        self.leases: dict[str, Lease] = {}
        self.moves = 0
        self._terms = count(1)

    def add_scheduler(self, name: str) -> None:
        self.deciding[name] = Leasing(name)
        self.announced.add(name)

    def kill(self, name: str, *, announced: bool) -> None:
        del self.deciding[name]
        if not announced:
            self.announced.discard(name)
        for worker, lease in self.leases.items():
            if lease.holder == name:
                self.leases[worker] = lease._replace(holder="")

    def look(self) -> None:
        for name in sorted(self.deciding):
            held = {worker for worker, lease in self.leases.items() if lease.holder == name}
            view = View(self.announced, self.workers, dict(self.leases))
            self._do(name, self.deciding[name].decide(view, held - self.busy, self.now_s))
        self.now_s += LOOK_S

    def settle(self) -> None:
        """Long enough for every lease to find its place, and for no longer than that."""
        for _ in range(8 + 2 * len(self.workers) + int(TURN_S / LOOK_S)):
            self.look()

    def held(self) -> dict[str, int]:
        counts = Counter(self.leases[worker].holder for worker in self.workers)
        return {name: counts[name] for name in self.deciding}

    def _do(self, name: str, change: Change) -> None:
        if change.give_up is not None:
            lease = self.leases[change.give_up]
            assert lease.holder == name
            assert change.give_up not in self.busy
            self.leases[change.give_up] = lease._replace(holder="")
        for worker in change.claim:
            assert self.leases.get(worker, Lease(0, "")).holder == ""
            self.leases[worker] = Lease(next(self._terms), name)
            self.moves += 1


def mesh_of(n_schedulers: int, n_workers: int) -> Mesh:
    mesh = Mesh()
    for number in range(n_schedulers):
        mesh.add_scheduler(f"scheduler-{number}")
    mesh.workers = {f"worker-{number}" for number in range(n_workers)}
    mesh.settle()
    return mesh


def assert_even(mesh: Mesh) -> None:
    """Every worker is leased to a live scheduler, and all have as many, give or take one."""
    held = mesh.held()
    assert sum(held.values()) == len(mesh.workers)
    assert max(held.values()) - min(held.values()) <= 1


N_SCHEDULERS, N_WORKERS = st.integers(1, 5), st.integers(0, 12)


@given(N_SCHEDULERS, N_WORKERS)
def test_workers_spread_evenly_and_then_nothing_moves(n_schedulers: int, n_workers: int) -> None:
    mesh = mesh_of(n_schedulers, n_workers)
    assert_even(mesh)
    assert mesh.moves == n_workers
    mesh.settle()
    assert mesh.moves == n_workers


@given(N_SCHEDULERS, N_WORKERS)
def test_a_newcomer_gets_its_share_and_no_other_lease_moves(
    n_schedulers: int, n_workers: int
) -> None:
    mesh = mesh_of(n_schedulers, n_workers)
    mesh.add_scheduler("newcomer")
    mesh.settle()
    assert_even(mesh)
    assert mesh.moves - n_workers == mesh.held()["newcomer"]


@given(st.integers(2, 5), N_WORKERS, st.booleans(), st.data())
def test_of_a_dead_scheduler_only_its_own_leases_move(
    n_schedulers: int, n_workers: int, announced: bool, data: st.DataObject
) -> None:
    mesh = mesh_of(n_schedulers, n_workers)
    victim = data.draw(st.sampled_from(sorted(mesh.deciding)))
    lost = mesh.held()[victim]
    mesh.busy = set(mesh.workers)
    mesh.kill(victim, announced=announced)
    mesh.settle()
    assert_even(mesh)
    assert mesh.moves - n_workers == lost


def test_the_lease_of_a_dead_scheduler_that_is_still_announced_is_taken_in_its_turn_and_one() -> (
    None
):
    mesh = mesh_of(2, 2)
    mesh.kill("scheduler-0", announced=True)
    died_s = mesh.now_s
    while mesh.held() != {"scheduler-1": 2}:
        mesh.look()
    assert mesh.now_s - died_s <= TURN_S + 2 * LOOK_S


def test_busy_workers_stay_until_they_are_idle() -> None:
    mesh = mesh_of(1, 4)
    mesh.busy = {"worker-0", "worker-1", "worker-2", "worker-3"}
    mesh.add_scheduler("newcomer")
    mesh.settle()
    assert mesh.held() == {"scheduler-0": 4, "newcomer": 0}
    mesh.busy = {"worker-1", "worker-2"}
    mesh.settle()
    assert_even(mesh)
    assert mesh.leases["worker-1"].holder == mesh.leases["worker-2"].holder == "scheduler-0"


def test_leases_move_one_at_a_time() -> None:
    mesh = mesh_of(1, 6)
    mesh.add_scheduler("newcomer")
    free = 0
    while mesh.held()["newcomer"] < 3:
        mesh.look()
        free = sum(lease.holder == "" for lease in mesh.leases.values())
        assert free <= 1


@given(N_SCHEDULERS, st.integers(1, 12))
def test_nothing_moves_when_redis_forgets_its_leases_for_a_moment(
    n_schedulers: int, n_workers: int
) -> None:
    mesh = mesh_of(n_schedulers, n_workers)
    forgotten, mesh.leases, workers = mesh.leases, {}, mesh.workers
    announced, mesh.announced = mesh.announced, set()
    for mesh.workers in (set(), workers, workers):
        mesh.look()
    mesh.leases, mesh.announced = forgotten, announced
    mesh.settle()
    assert mesh.moves == n_workers
    assert {lease.holder for lease in mesh.leases.values()} <= announced


def test_a_lease_that_nobody_renews_is_free_in_the_end() -> None:
    mesh = mesh_of(2, 1)
    mesh.leases.clear()
    gone_s = mesh.now_s
    while not mesh.leases:
        mesh.look()
    assert mesh.now_s - gone_s == pytest.approx(RETURN_S, abs=2 * LOOK_S)


def test_who_leaves_gives_all_up_and_takes_none() -> None:
    leasing, others = Leasing("me"), Leasing("other")
    leases = {"worker-0": Lease(1, "me"), "worker-1": Lease(2, "me")}
    view = View(["other"], ["worker-0", "worker-1", "worker-2"], leases)
    assert leasing.decide(view, ["worker-0"], 0.0, leaving=True) == Change([], None)
    taken = view._replace(leases={**leases, "worker-2": Lease(3, "other")})
    assert leasing.decide(taken, ["worker-0"], 0.1, leaving=True) == Change([], "worker-0")
    assert leasing.decide(taken, [], 0.2, leaving=True) == Change([], None)
    assert others.decide(view, [], 0.0).claim == ["worker-2"]


def test_the_last_scheduler_keeps_its_workers_while_it_leaves() -> None:
    view = View([], ["worker-0"], {"worker-0": Lease(1, "me")})
    assert Leasing("me").decide(view, ["worker-0"], 0.0, leaving=True) == Change([], None)


def test_a_scheduler_that_was_passed_over_gets_its_turn_again() -> None:
    mesh = mesh_of(2, 0)
    silent = mesh.deciding.pop("scheduler-0")
    mesh.workers = {"worker-0"}
    mesh.settle()
    assert mesh.held() == {"scheduler-1": 1}
    mesh.deciding["scheduler-0"] = silent
    mesh.now_s += PASSED_OVER_S
    mesh.workers = {"worker-0", "worker-1", "worker-2", "worker-3"}
    mesh.settle()
    assert_even(mesh)


def test_nothing_is_given_up_to_a_scheduler_that_is_passed_over() -> None:
    """It is dead, and its key has not lapsed."""
    mesh = mesh_of(2, 2)
    mesh.settle()
    mesh.kill("scheduler-0", announced=True)
    before = mesh.moves
    for _ in range(int(PASSED_OVER_S / LOOK_S)):
        mesh.look()
    assert mesh.held() == {"scheduler-1": 2}
    assert mesh.moves == before + 1
