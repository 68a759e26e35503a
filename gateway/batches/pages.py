"""Lists in pages, as OpenAI's clients follow them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from pagemesh.gateway.openai.errors import bad


class Page(NamedTuple):
    """At most `limit` entries beyond that called `after`."""

    after: str | None
    limit: int
    newest_first: bool

    def beyond(self, names: Iterable[str]) -> list[str]:
        """Those from which the page is taken, in order. Names grow with time."""
        newest, after = self.newest_first, self.after
        if after is not None:
            names = [name for name in names if (name < after if newest else name > after)]
        return sorted(names, reverse=newest)

    def shown(self, entries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """`entries`: those of the page, and perhaps one more."""
        data = list(entries[: self.limit])
        return {
            "object": "list",
            "data": data,
            "first_id": data[0]["id"] if data else None,
            "last_id": data[-1]["id"] if data else None,
            "has_more": len(entries) > self.limit,
        }


def page_of(query: Mapping[str, str], most: int, default: int) -> Page:
    """Raises RequestError (400) naming the parameter."""
    order, limit = query.get("order") or "desc", query.get("limit")
    if order not in ("asc", "desc"):
        raise bad("order", "must be asc or desc")
    n_entries = _limit(limit, most) if limit else default
    return Page(query.get("after") or None, n_entries, order == "desc")


def _limit(given: str, most: int) -> int:
    if not (given.isascii() and given.isdigit() and len(given) <= 6 and 1 <= int(given) <= most):
        raise bad("limit", f"must be a whole number between 1 and {most}")
    return int(given)
