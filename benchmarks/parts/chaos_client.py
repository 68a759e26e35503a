"""Clients of a mesh that is hurt: what they are told, whether it is right, how long they wait."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import aiohttp
import msgspec

EVENT: Final = b"data: "
DONE: Final = b"[DONE]"
# So long a client leaves a gateway alone that turned it away, or died.
ELSEWHERE_S: Final = 4.0
NOTED_S: Final = 0.2
TURNED_AWAY: Final = 503


class Ask(NamedTuple):
    """One request: its body, and the text that answers it."""

    body: dict[str, Any]
    text: str
    n_tokens: int


class Silence(NamedTuple):
    """A stream brought nothing for `lasted_s` until `ended_s`, of time.monotonic."""

    ended_s: float
    lasted_s: float


@dataclass
class Tally:
    """What came of all requests so far. `wrong` and `errors` say what was seen, `broken` are those
    whose gateway was killed, `turned_away` were not begun and asked elsewhere."""

    asked: int = 0
    right: int = 0
    tokens: int = 0
    broken: int = 0
    turned_away: int = 0
    wrong: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    silences: list[Silence] = field(default_factory=list)
    open: dict[str, int] = field(default_factory=dict)
    """Requests under way, by gateway."""

    def longest_silence_s(self, since_s: float, until_s: float) -> float:
        """Of those that ended in that time."""
        ended = [each.lasted_s for each in self.silences if since_s <= each.ended_s <= until_s]
        return max(ended, default=0.0)


class Killed(Exception):
    """The connection ended without an answer's end."""


class TurnedAway(Exception):
    """Refused before it began, by a gateway that is going or gone."""


class Clients:
    """`n` clients, each asking one thing after the other until they are told to stop.

    A client goes to another gateway when its own is killed, turns it away or refuses connections,
    as a load balancer would send it. `mortal` are the gateways that may be killed at the moment:
    their streams may break. Those that are `leaving` may close a connection without a word, if they
    have not begun to answer.
    """

    def __init__(
        self, urls: Sequence[str], ask: Callable[[random.Random], Ask], seed: int = 0
    ) -> None:
        self.tally = Tally(open=dict.fromkeys(urls, 0))
        self.mortal: set[str] = set()
        self.leaving: set[str] = set()
        self._urls = list(urls)
        self._ask = ask
        self._seed = seed
        self._stopping = False
        self._avoided: dict[str, float] = {}

    async def run(self, n: int) -> None:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with (
            aiohttp.ClientSession(timeout=timeout, connector=connector) as session,
            asyncio.TaskGroup() as group,
        ):
            for number in range(n):
                group.create_task(self._go_on(session, number))

    def stop(self) -> None:
        """Each client ends after the answer it has."""
        self._stopping = True

    async def _go_on(self, session: aiohttp.ClientSession, number: int) -> None:
        chance = random.Random(f"{self._seed}/{number}")
        while not self._stopping:
            await self._have_answered(session, self._ask(chance), number)

    async def _have_answered(self, session: aiohttp.ClientSession, ask: Ask, number: int) -> None:
        self.tally.asked += 1
        began_s = time.monotonic()
        while True:
            url = self._gateway(number)
            try:
                self.tally.open[url] += 1
                told = await self._listen(session, url, ask, began_s)
            except TurnedAway:
                self.tally.turned_away += 1
                self._avoided[url] = time.monotonic() + ELSEWHERE_S
                await asyncio.sleep(0.02)
                continue
            except Killed as error:
                if url in self.mortal:
                    self.tally.broken += 1
                    self._avoided[url] = time.monotonic() + ELSEWHERE_S
                else:
                    self.tally.errors.append(f"{url}: {error}")
                return None
            finally:
                self.tally.open[url] -= 1
            return self._judge(ask, told)

    def _gateway(self, number: int) -> str:
        now_s = time.monotonic()
        urls = [url for url in self._urls if self._avoided.get(url, 0.0) < now_s] or self._urls
        return urls[number % len(urls)]

    def _judge(self, ask: Ask, told: str) -> None:
        if told == ask.text:
            self.tally.right += 1
            self.tally.tokens += ask.n_tokens
        else:
            self.tally.wrong.append(_difference(ask.text, told))

    async def _listen(
        self, session: aiohttp.ClientSession, url: str, ask: Ask, began_s: float
    ) -> str:
        """The text that is streamed. Raises TurnedAway or Killed."""
        begun = False
        try:
            async with session.post(f"{url}/v1/completions", json=ask.body) as answer:
                begun = True
                if answer.status == TURNED_AWAY:
                    raise TurnedAway(await answer.text())
                if answer.status != 200:
                    raise Killed(f"answered {answer.status}: {await answer.text()}")
                return await self._read(answer, began_s)
        except aiohttp.ClientConnectorError as error:
            raise TurnedAway(str(error)) from error
        except (aiohttp.ClientError, OSError) as error:
            if url in self.leaving and not begun:
                raise TurnedAway(str(error)) from error
            raise Killed(f"{type(error).__name__}: {error}") from error

    async def _read(self, answer: aiohttp.ClientResponse, last_s: float) -> str:
        pieces: list[str] = []
        async for line in answer.content:
            if not line.startswith(EVENT):
                continue  # a comment that keeps the connection alive, or the end of an event
            data = line[len(EVENT) :].strip()
            if data == DONE:
                return "".join(pieces)
            event = msgspec.json.decode(data)
            if "error" in event:
                raise Killed(f"an error event: {event['error']['message']}")
            now_s = time.monotonic()
            if now_s - last_s > NOTED_S:
                self.tally.silences.append(Silence(now_s, now_s - last_s))
            last_s = now_s
            pieces.append(event["choices"][0]["text"])
        raise Killed("the stream ended before its end")


def _difference(expected: str, told: str) -> str:
    with suppress(ValueError):
        same = [a == b for a, b in zip(expected, told, strict=False)].index(False)
        return (
            f"from character {same}: {told[same : same + 40]!r}, not {expected[same : same + 40]!r}"
        )
    return f"{len(told)} characters of {len(expected)}"
