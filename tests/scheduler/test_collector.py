"""The scheduler's settings of the garbage collector end with it."""

from __future__ import annotations

import gc

import pytest

from pagemesh.scheduler_svc.collector import YOUNG_OBJECTS, rare_collections


def fail_within() -> None:
    with rare_collections():
        assert gc.get_threshold()[0] == YOUNG_OBJECTS
        raise KeyError


def test_collections_are_rare_within_and_as_before_behind() -> None:
    outer = gc.get_threshold()
    with pytest.raises(KeyError):
        fail_within()
    assert gc.get_threshold() == outer
