"""Conversations at a time: each waits for its answer, thinks, and says the next thing."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import aiohttp

GOOD_TTFT_S: Final = 1.0
GOOD_ITL_S: Final = 0.1
_WORDS: Final = (
    "page table block cache token prompt engine worker queue step batch prefix index hash slot "
    "stream answer request model memory chain head tail tree list lease mesh link frame wire"
)


class Plan(NamedTuple):
    """`systems` prompts of `system_words`, shared by the conversations at random; a turn says
    `turn_words` and is answered with `answer_tokens`, after a pause of `think_s` on average."""

    conversations: int
    turns: int
    systems: int
    system_words: int
    turn_words: int
    answer_tokens: int
    think_s: float


class Turn(NamedTuple):
    """One answered request. `itl_s` is the mean time between two tokens."""

    prompt_tokens: int
    cached_tokens: int
    ttft_s: float
    itl_s: float

    @property
    def good(self) -> bool:
        return self.ttft_s <= GOOD_TTFT_S and self.itl_s <= GOOD_ITL_S


class Outcome(NamedTuple):
    turns: Sequence[Turn]
    seconds: float

    @property
    def hit_rate(self) -> float:
        """Share of the prompts' tokens that were cached."""
        prompt_tokens = sum(turn.prompt_tokens for turn in self.turns)
        return sum(turn.cached_tokens for turn in self.turns) / prompt_tokens

    @property
    def goodput(self) -> float:
        """Good requests a second."""
        return sum(turn.good for turn in self.turns) / self.seconds

    def ttft_s(self, share: float) -> float:
        ordered = sorted(turn.ttft_s for turn in self.turns)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


async def converse(url: str, plan: Plan, seed: int = 1) -> Outcome:
    began_s = time.perf_counter()
    timeout = aiohttp.ClientTimeout(total=None)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(url, timeout=timeout, connector=connector) as session:
        held = [_one(session, plan, seed, number) for number in range(plan.conversations)]
        turns = [turn for each in await asyncio.gather(*held) for turn in each]
    return Outcome(turns, time.perf_counter() - began_s)


async def _one(session: aiohttp.ClientSession, plan: Plan, seed: int, number: int) -> list[Turn]:
    draw = random.Random(f"{seed}/{number}")
    system = random.Random(f"{seed}/system/{draw.randrange(plan.systems)}")
    messages = [{"role": "system", "content": _text(system, plan.system_words)}]
    turns = []
    for _ in range(plan.turns):
        await asyncio.sleep(draw.expovariate(1 / plan.think_s))
        messages.append({"role": "user", "content": _text(draw, plan.turn_words)})
        text, turn = await _ask(session, messages, plan.answer_tokens)
        messages.append({"role": "assistant", "content": text})
        turns.append(turn)
    return turns


async def _ask(
    session: aiohttp.ClientSession, messages: list[dict[str, str]], answer_tokens: int
) -> tuple[str, Turn]:
    body = {
        "messages": messages,
        "max_tokens": answer_tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    text, usage, times_s = "", dict[str, Any](), list[float]()
    asked_s = time.perf_counter()
    async with session.post("/v1/chat/completions", json=body) as answer:
        answer.raise_for_status()
        async for line in answer.content:
            piece, usage = _read(line, usage)
            if piece:
                text += piece
                times_s.append(time.perf_counter())
    itl_s = (times_s[-1] - times_s[0]) / (answer_tokens - 1)
    cached_tokens = usage["prompt_tokens_details"]["cached_tokens"]
    return text, Turn(usage["prompt_tokens"], cached_tokens, times_s[0] - asked_s, itl_s)


def _read(line: bytes, usage: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    if not line.startswith(b"data: {"):
        return "", usage
    chunk = json.loads(line.removeprefix(b"data: "))
    pieces = [choice["delta"].get("content") or "" for choice in chunk["choices"]]
    return "".join(pieces), chunk.get("usage") or usage


def _text(draw: random.Random, n_words: int) -> str:
    return " ".join(draw.choices(_WORDS.split(), k=n_words))
