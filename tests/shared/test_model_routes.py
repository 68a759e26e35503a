"""Routes: what may be written, what stands behind them, and how a split decides."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagemesh.shared.routes import (
    MAX_ROUTES,
    MAX_TARGETS,
    BadRoute,
    Route,
    model_shares,
    preferred,
    read_route,
    read_routes,
)

N_KEYS = 500
WEIGHTS = st.dictionaries(st.text("abcdef", min_size=1, max_size=3), st.floats(0.1, 10), min_size=1)


def shares_of(weights: Route) -> Route:
    return model_shares({"(route)": weights})["(route)"]


@pytest.mark.parametrize(
    ("given", "route"),
    [
        ("model-a", {"model-a": 1}),
        ("a:0.9,b:0.1", {"a": 0.9, "b": 0.1}),
        (" a : 3 , b ", {"a": 3, "b": 1}),
        ("llama3:latest:2", {"llama3:latest": 2}),
        ("org/llama3:latest", {"org/llama3:latest": 1}),
        ({"llama:8": 1}, {"llama:8": 1}),
    ],
)
def test_a_route_is_text_or_weights(given: Any, route: Route) -> None:
    assert read_route("name", given) == route


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ("", "targets are needed, not 0"),
        ({}, "targets are needed, not 0"),
        ("a:0", "must be a positive number, not 0"),
        ("a:-1", "must be a positive number"),
        ("a:nan", "must be a positive number"),
        ({"a": math.inf}, "must be a positive number"),
        ({"": 1}, "a target's name"),
        ("a:1,b,a:2", "lists a twice"),
        ({str(i): 1 for i in range(MAX_TARGETS + 1)}, "targets are needed, not 17"),
    ],
)
def test_what_cannot_be_a_route_is_refused(given: Any, reason: str) -> None:
    with pytest.raises(BadRoute, match=reason) as refused:
        read_route("chat", given)
    assert refused.value.name == "chat"


def test_routes_may_lead_to_routes() -> None:
    routes = read_routes({"all": "fast:1,slow:3", "fast": "a", "slow": "a:1,b:1"})
    assert model_shares(routes)["all"] == {"a": 0.25 + 0.375, "b": 0.375}


def test_a_models_own_name_may_be_split() -> None:
    shares = model_shares({"a": {"a": 9, "b": 1}, "chat": {"a": 1}})
    assert shares["a"] == shares["chat"] == {"a": 0.9, "b": 0.1}


def test_a_share_may_be_as_small_as_can_be() -> None:
    shares = model_shares({"chat": {"a": 1e-320, "b": 1e9}, "all": {"chat": 1e-320, "c": 1}})
    first, *others = preferred(shares["all"], "key")
    assert (first, sorted(others)) == ("c", ["a", "b"])


@pytest.mark.parametrize("given", [{"a": "b", "b": "a"}, {"a": "b", "b": "c,x", "c": "a"}])
def test_a_cycle_is_refused(given: dict[str, str]) -> None:
    with pytest.raises(BadRoute, match="leads back to itself"):
        read_routes(given)


def test_routes_are_bounded() -> None:
    routes: dict[str, Route] = {str(i): {"a": 1} for i in range(MAX_ROUTES)}
    model_shares(routes)
    with pytest.raises(BadRoute, match="256 routes already"):
        model_shares(routes | {"more": {"a": 1}})


@settings(max_examples=30)
@given(WEIGHTS)
def test_keys_fall_to_models_by_their_shares(weights: Route) -> None:
    shares = shares_of(weights)
    assert math.isclose(sum(shares.values()), 1)
    counts = Counter(preferred(shares, f"request-{i}")[0] for i in range(N_KEYS))
    for model, share in shares.items():
        deviation = math.sqrt(share * (1 - share) / N_KEYS)
        assert abs(counts[model] / N_KEYS - share) <= 7 * deviation + 1e-9


@given(WEIGHTS, st.text())
def test_a_key_decides_alone(weights: Route, key: str) -> None:
    """The same whatever the order in which a table was written."""
    shares = shares_of(weights)
    backwards = dict(reversed(shares.items()))
    assert preferred(shares, key) == preferred(backwards, key)
    assert sorted(preferred(shares, key)) == sorted(shares)


@given(WEIGHTS.filter(lambda weights: len(weights) > 1), st.data())
def test_without_a_model_only_its_own_keys_move(weights: Route, data: st.DataObject) -> None:
    gone = data.draw(st.sampled_from(sorted(weights)))
    left = {model: weight for model, weight in weights.items() if model != gone}
    for i in range(10):
        before = preferred(shares_of(weights), f"k{i}")
        assert preferred(shares_of(left), f"k{i}") == [m for m in before if m != gone]


@given(WEIGHTS, st.data())
def test_a_heavier_model_takes_keys_and_loses_none(weights: Route, data: st.DataObject) -> None:
    grown = data.draw(st.sampled_from(sorted(weights)))
    heavier = shares_of(weights | {grown: 2 * weights[grown]})
    for i in range(10):
        before, after = preferred(shares_of(weights), f"k{i}")[0], preferred(heavier, f"k{i}")[0]
        assert after in (before, grown)
