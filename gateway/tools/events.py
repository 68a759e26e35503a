"""What a model's text turns out to be, piece by piece."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Content(NamedTuple):
    text: str


class Reasoning(NamedTuple):
    text: str


class CallStart(NamedTuple):
    """A call of the function `name`. `number` counts the calls of one answer from 0."""

    number: int
    id: str
    name: str


class Arguments(NamedTuple):
    """The next piece of the JSON object that call `number` has as its arguments."""

    number: int
    text: str


Event = Content | Reasoning | CallStart | Arguments


def merged(events: Iterable[Event]) -> list[Event]:
    """Neighbours of one kind as one event."""
    joined: list[tuple[Event, list[str]]] = []
    for event in events:
        if isinstance(event, CallStart):
            joined.append((event, []))
        elif joined and type(joined[-1][0]) is type(event):
            joined[-1][1].append(event.text)
        else:
            joined.append((event, [event.text]))
    return [
        event if isinstance(event, CallStart) else event._replace(text="".join(texts))
        for event, texts in joined
    ]
