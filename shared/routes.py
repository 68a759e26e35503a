"""Routes: further names for models, and weighted splits over several. Pure.

A route gives each of its targets a weight. A target is a model, or another route; a route's own
name among its targets is the model of that name, so that a model's name can be split as well.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from hashlib import blake2b
from typing import Final

from pagemesh.shared.errors import PagemeshError

MAX_ROUTES: Final = 256
MAX_TARGETS: Final = 16
MAX_NAME_CHARS: Final = 200
_MAX_WEIGHT: Final = 1e9

Route = dict[str, float]
"""Weights by target."""


class BadRoute(PagemeshError):
    """The route `name` cannot be used. The message says why."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"route {name[:MAX_NAME_CHARS]!r}: {reason}")
        self.name = name


def read_route(name: str, given: str | Mapping[str, float]) -> Route:
    """The route of a setting or a request: weights by target, or the text `MODEL` or
    `A:0.9,B:0.1`. Raises BadRoute."""
    route = _of_text(name, given) if isinstance(given, str) else dict(given)
    if not 0 < len(name) <= MAX_NAME_CHARS:
        raise BadRoute(name, f"a name has 1 to {MAX_NAME_CHARS} characters")
    if not 0 < len(route) <= MAX_TARGETS:
        raise BadRoute(name, f"1 to {MAX_TARGETS} targets are needed, not {len(route)}")
    for target, weight in route.items():
        if not 0 < len(target) <= MAX_NAME_CHARS:
            raise BadRoute(name, f"a target's name has 1 to {MAX_NAME_CHARS} characters")
        if not (math.isfinite(weight) and 0 < weight <= _MAX_WEIGHT):
            raise BadRoute(name, f"the weight of {target} must be a positive number, not {weight}")
    return route


def _of_text(name: str, text: str) -> Route:
    route = Route()
    for part in filter(None, map(str.strip, text.split(","))):
        target, weight = _target_of_text(part)
        if target in route:
            raise BadRoute(name, f"it lists {target} twice")
        route[target] = weight
    return route


def _target_of_text(text: str) -> tuple[str, float]:
    """A name may hold colons: what stands behind the last one counts if it is a number."""
    target, _, weight = text.rpartition(":")
    try:
        return (target.strip(), float(weight)) if target else (text, 1.0)
    except ValueError:
        return text, 1.0


def read_routes(given: Mapping[str, str | Mapping[str, float]]) -> dict[str, Route]:
    """All routes of a setting. Raises BadRoute for one that cannot be used, or a cycle."""
    routes = {name: read_route(name, each) for name, each in given.items()}
    model_shares(routes)
    return routes


def model_shares(routes: Mapping[str, Route]) -> dict[str, Route]:
    """By route, the share of each model behind it; shares are positive and sum to 1.

    Raises BadRoute for a cycle, and for more than MAX_ROUTES.
    """
    if len(routes) > MAX_ROUTES:
        raise BadRoute(list(routes)[-1], f"there are {MAX_ROUTES} routes already")
    shares: dict[str, Route] = {}
    for name in routes:
        _add_shares(shares, routes, name, ())
    return shares


def _add_shares(
    shares: dict[str, Route], routes: Mapping[str, Route], name: str, above: tuple[str, ...]
) -> Route:
    """Those of `name`, which stands behind the routes `above`."""
    if name in above:
        raise BadRoute(name, f"it leads back to itself ({' → '.join((*above, name))})")
    if name not in shares:
        total, found = sum(routes[name].values()), Route()
        for target, weight in routes[name].items():
            is_model = target == name or target not in routes
            behind = (
                {target: 1.0} if is_model else _add_shares(shares, routes, target, (*above, name))
            )
            for model, share in behind.items():
                part = max(share * weight / total, sys.float_info.min)
                found[model] = found.get(model, 0.0) + part
        shares[name] = found
    return shares[name]


def preferred(shares: Route, key: str) -> list[str]:
    """The models in the order in which `key` wants them.

    Weighted rendezvous hashing: over all keys a model comes first by its share; when one is passed
    over, or a weight changes, no other key moves than must. The same everywhere, at any time.
    """
    if len(shares) == 1:
        return list(shares)
    return sorted(shares, key=lambda model: (_draw(key, model) / shares[model], model))


def _draw(key: str, model: str) -> float:
    """Exponentially distributed, so that the least of several, each divided by its share, falls to
    each with just that probability."""
    digest = blake2b(f"{len(key)}:{key}{model}".encode(errors="surrogatepass"), digest_size=8)
    return -math.log((int.from_bytes(digest.digest(), "big") + 1) / 2**64)
