"""Leaving out what is oldest of a conversation that does not fit (`truncation: auto`)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from pagemesh.gateway.openai.responses.conversation import Message, begun_at, turn_starts

Fits = Callable[[list[Message]], Awaitable[bool]]


async def truncated(messages: list[Message], fits: Fits) -> list[Message]:
    """`messages`, or as many of the last turns as fit beside what the system says; the last turn
    alone if none do. `fits` is asked a logarithmic number of times."""
    starts = turn_starts(messages)
    if not starts or await fits(messages):
        return messages
    low, high = 0, len(starts) - 1
    while low < high:
        middle = (low + high) // 2
        if await fits(begun_at(messages, starts[middle])):
            high = middle
        else:
            low = middle + 1
    return begun_at(messages, starts[low])
