"""What the clients of a mesh that is hurt ask for, and what they must be told."""

from __future__ import annotations

import asyncio
import random
import time
from itertools import count
from typing import Any, Final, Protocol

import aiohttp
import msgspec
import numpy as np

from pagemesh.shared.prepared import prepared_folder
from pagemesh.shared.settings import Settings
from parts.chaos_client import Ask
from parts.prompt_script import PromptScript

REAL_TOKENS: Final = 96
_FIRST_ID: Final = 1000  # beyond the special ones
_LAST_ID: Final = 40_000


class Asks(Protocol):
    """`about` says what there is to know about them, once prepared."""

    about: str

    async def prepare(self, url: str) -> None:
        """Ask what must be known first, of a mesh that is whole."""

    def next(self, chance: random.Random) -> Ask: ...


class ScriptedAsks:
    """Prompts of any ids; the answers are those of `PromptScript`."""

    about = "every token is a function of the prompt and its place"

    def __init__(self, settings: Settings) -> None:
        folder = prepared_folder(settings.model)
        self._script = PromptScript(folder / "tokenizer.json")

    async def prepare(self, url: str) -> None: ...

    def next(self, chance: random.Random) -> Ask:
        n_prompt, n_tokens = chance.randrange(8, 64), chance.randrange(40, 160)
        ids = np.array(chance.choices(range(_FIRST_ID, _LAST_ID), k=n_prompt), np.int32)
        body = _body(n_tokens, prompt=ids.tolist(), ignore_eos=True)
        return Ask(body, self._script.text(ids, n_tokens), n_tokens)


class RealAsks:
    """`n` greedy requests to the real model. What it answers undisturbed, it must always answer."""

    def __init__(self, n: int) -> None:
        self.about = ""
        self._bodies = [
            _body(REAL_TOKENS, prompt=f"Story {number}. Once upon a time there was", temperature=0)
            for number in range(n)
        ]
        self._asks: list[Ask] = []
        self._next = count()

    async def prepare(self, url: str) -> None:
        async with aiohttp.ClientSession() as session:
            told = await asyncio.gather(*(_answer(session, url, body) for body in self._bodies))
            self._asks = [
                Ask(body, text, REAL_TOKENS) for body, text in zip(self._bodies, told, strict=True)
            ]
            floor_s = await self._floor_s(session, url)
        self.about = (
            "greedy, to be answered as undisturbed; half of them, with their answers, are "
            f"prefilled anew in {floor_s:.2f} s"
        )

    async def _floor_s(self, session: aiohttp.ClientSession, url: str) -> float:
        """How long the mesh takes to compute, anew, what a lost worker of two had at the most, on
        the other: until the last of these prompts has its next token."""
        began_s = time.monotonic()
        half = self._asks[: len(self._asks) // 2]
        bodies = [
            {
                **ask.body,
                "prompt": ask.body["prompt"] + ask.text,
                "max_tokens": 1,
                "cache_salt": "floor",
            }
            for ask in half
        ]
        await asyncio.gather(*(_answer(session, url, body) for body in bodies))
        return time.monotonic() - began_s

    def next(self, chance: random.Random) -> Ask:
        return self._asks[next(self._next) % len(self._asks)]


def _body(n_tokens: int, **fields: Any) -> dict[str, Any]:
    return {"max_tokens": n_tokens, "stream": True, **fields}


async def _answer(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> str:
    async with session.post(f"{url}/v1/completions", json={**body, "stream": False}) as answer:
        answer.raise_for_status()
        whole = msgspec.json.decode(await answer.read())
        text: str = whole["choices"][0]["text"]
        return text
