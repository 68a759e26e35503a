"""One request of a batch to a server, again while the refusal is of the moment."""

from __future__ import annotations

import asyncio
import random
from typing import Final

import aiohttp
import msgspec

from pagemesh.gateway.batches.lines import Answered, Line
from pagemesh.shared.errors import PagemeshError

MAX_TRIES: Final = 8
FIRST_WAIT_S: Final = 0.5
LONGEST_WAIT_S: Final = 30.0
_LATER: Final = (429, 503)


class NotAnswered(PagemeshError):
    """The server could not be reached, or its answer is none."""


async def ask(session: aiohttp.ClientSession, line: Line) -> Answered:
    """Raises NotAnswered after MAX_TRIES."""
    wait_s = FIRST_WAIT_S
    for n_left in reversed(range(MAX_TRIES)):
        try:
            answered = await _ask_once(session, line)
            if answered.status not in _LATER or not n_left:
                return answered
        except (aiohttp.ClientError, OSError, msgspec.DecodeError) as error:
            if not n_left:
                raise NotAnswered(f"no answer: {error}") from error
        await asyncio.sleep(wait_s * random.uniform(0.5, 1.0))
        wait_s = min(2 * wait_s, LONGEST_WAIT_S)
    raise AssertionError("the last try returns or raises")


async def _ask_once(session: aiohttp.ClientSession, line: Line) -> Answered:
    async with session.post(line.url, data=line.body) as answer:
        # Some servers break lines within their answers.
        body = msgspec.json.format(await answer.read(), indent=-1)
        return Answered(answer.status, answer.headers.get("x-request-id", ""), body)
