"""Threads that share a step: every item once, whoever is late or missing."""

from __future__ import annotations

import gc
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit

from pagemesh.kernels.cpu.sync import claim, finish, open_phases, phase_words, wait
from pagemesh.kernels.cpu.team import Team

ITEMS = np.array([1, 40, 3, 0, 700, 2])
PHASES = len(ITEMS)


@njit(nogil=True)
def begin(words, tag):
    open_phases(words, PHASES, tag)


@njit(nogil=True)
def share(words, tag, items, most, done, broken):
    """A thread's share of a step: `most` items at most, then it leaves without waiting.

    `done[phase, item]` counts; `broken[0]` says that a phase began before the last was over.
    """
    taken = 0
    for phase in range(PHASES):
        while taken < most:
            item = claim(words, phase, tag, items[phase])
            if item < 0:
                break
            for earlier in range(phase and items[phase - 1]):
                if done[phase - 1, earlier] != tag:
                    broken[0] = 1
            done[phase, item] += 1
            finish(words, phase, tag)
            taken += 1
        if taken == most or not wait(words, phase, tag, items[phase]):
            break
    return taken


class Steps:
    def __init__(self) -> None:
        self.words = phase_words(PHASES)
        self.done = np.zeros((PHASES, ITEMS.max()), np.int64)
        self.broken = np.zeros(1, np.int64)
        self.tag = 0

    def open(self) -> int:
        self.tag += 1
        begin(self.words, self.tag)
        return self.tag

    def share(self, tag: int, most: int = 2**40) -> int:
        return share(self.words, tag, ITEMS, most, self.done, self.broken)

    def assert_all_done_once_a_step(self) -> None:
        assert not self.broken[0]
        for phase, items in enumerate(ITEMS):
            assert (self.done[phase, :items] == self.tag).all()
            assert not self.done[phase, items:].any()


@pytest.mark.parametrize("n_threads", [1, 2, 3, 5])
def test_every_item_once_over_many_steps(n_threads):
    steps, team = Steps(), Team(n_threads)
    for _ in range(300):
        tag = steps.open()
        team.run(lambda rank, tag=tag: steps.share(tag))
        steps.assert_all_done_once_a_step()


@settings(max_examples=50)
@given(st.lists(st.integers(0, 60), max_size=4), st.lists(st.integers(0, 800), max_size=4))
def test_helpers_that_leave_midway_hold_nothing_up(early, late):
    """`early`: items that helpers take before the leader; `late`: those asked for afterwards."""
    steps = Steps()
    for _ in range(3):
        tag = steps.open()
        for most in early:
            assert steps.share(tag, most) <= most
        steps.share(tag)
        for most in late:
            assert steps.share(tag, most) == 0
        steps.assert_all_done_once_a_step()


@given(st.integers(1, 5))
def test_a_laggard_of_an_earlier_step_takes_nothing(lag):
    steps = Steps()
    for _ in range(lag):
        old = steps.open()
        steps.share(old)
    steps.open()
    assert steps.share(old) == 0
    assert steps.share(steps.tag) == ITEMS.sum()
    assert steps.share(old) == 0
    steps.assert_all_done_once_a_step()


def test_a_helper_blocked_for_the_whole_step_holds_nothing_up():
    """It enters its share during a later step, with the earlier step's tag."""
    steps, team, taken = Steps(), Team(2), []
    entered, go, back = threading.Event(), threading.Event(), threading.Event()

    def job(rank: int) -> None:
        tag = steps.tag
        if rank == 0:
            assert entered.wait(60)
            steps.share(tag)
            return
        entered.set()
        assert go.wait(60)
        taken.append(steps.share(tag))
        back.set()

    for _ in range(20):
        steps.open()
        team.run(job)
        steps.assert_all_done_once_a_step()
    steps.open()
    go.set()
    assert back.wait(60)
    assert taken[0] == 0
    steps.share(steps.tag)
    steps.assert_all_done_once_a_step()


def test_all_ranks_run_together_when_the_job_lets_them():
    team, barrier, ranks = Team(3), threading.Barrier(3, timeout=60), []

    def job(rank: int) -> None:
        barrier.wait()
        ranks.append(rank)
        barrier.wait()

    team.run(job)
    assert sorted(ranks) == [0, 1, 2]


def test_the_callers_exception_is_raised_and_the_team_works_on():
    steps, team = Steps(), Team(2)

    def fail(rank: int) -> None:
        if rank == 0:
            raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        team.run(fail)
    tag = steps.open()
    team.run(lambda rank: steps.share(tag))
    steps.assert_all_done_once_a_step()


def test_threads_end_with_the_team():
    before = set(threading.enumerate())
    team = Team(3)
    team.run(lambda rank: None)
    ours = set(threading.enumerate()) - before
    assert len(ours) == 2
    del team
    gc.collect()
    for thread in ours:
        thread.join(60)
        assert not thread.is_alive()
