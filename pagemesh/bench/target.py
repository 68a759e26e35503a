"""What the server is: its model, and whether it takes token ids as a prompt."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import aiohttp

from pagemesh.bench.datasets import Endpoint
from pagemesh.shared.errors import StartupError

# Smaller than any vocabulary in use; a server that tells its own overrides it.
DEFAULT_VOCAB_TOKENS: Final = 10_000
_PROBE_TOKENS: Final = 4
_PATHS: Final[Mapping[Endpoint, str]] = {
    "completions": "/v1/completions",
    "chat": "/v1/chat/completions",
}


class Server(NamedTuple):
    """`refused_ids` says why random prompts are text; None when they travel as token ids."""

    url: str
    model: str
    vocab_tokens: int
    refused_ids: str | None


async def explore(
    session: aiohttp.ClientSession,
    base_url: str,
    endpoint: Endpoint,
    *,
    model: str | None,
    vocab_tokens: int | None,
) -> Server:
    """Ask the server at `base_url`. Raises StartupError when it does not answer."""
    root = base_url.rstrip("/").removesuffix("/v1")
    listed = await _models(session, root) if model is None or vocab_tokens is None else {}
    model = model or listed.get("id")
    if model is None:
        raise StartupError(f"{root}/v1/models names no model; give one with --model")
    vocab_tokens = vocab_tokens or _vocab_tokens(listed)
    refused: str | None = "chat takes messages"
    if endpoint == "completions":
        refused = await _refusal_of_ids(session, root, model, vocab_tokens)
    return Server(root + _PATHS[endpoint], model, vocab_tokens, refused)


async def first_model(session: aiohttp.ClientSession, root: str) -> str:
    """The name that the server at `root` lists first. Raises StartupError."""
    name = (await _models(session, root)).get("id")
    if name is None:
        raise StartupError(f"{root}/v1/models names no model; give one with --model")
    return str(name)


async def _models(session: aiohttp.ClientSession, root: str) -> dict[str, Any]:
    """The first entry of the server's list; empty where there is none."""
    try:
        async with session.get(f"{root}/v1/models") as answer:
            if answer.status in (401, 403):
                raise StartupError(f"{root} asks for a key: give one with --api-key")
            body = await answer.json(content_type=None) if answer.status == 200 else {}
    except (aiohttp.ClientError, OSError, ValueError) as error:
        raise StartupError(f"no OpenAI-style server answers at {root}: {error}") from error
    match body:
        case {"data": [{"id": str()} as first, *_]}:
            return dict(first)
    return {}


def _vocab_tokens(listed: Mapping[str, Any]) -> int:
    match listed:
        case {"meta": {"n_vocab": int(n_vocab)}} if n_vocab > 0:
            return n_vocab
    return DEFAULT_VOCAB_TOKENS


async def _refusal_of_ids(
    session: aiohttp.ClientSession, root: str, model: str, vocab_tokens: int
) -> str | None:
    """None when the server takes the largest of the ids that may be drawn."""
    body = {"model": model, "prompt": [vocab_tokens - 1] * _PROBE_TOKENS, "max_tokens": 1}
    try:
        async with session.post(root + _PATHS["completions"], json=body) as answer:
            if answer.status == 200:
                return None
            return f"HTTP {answer.status}: {(await answer.text(errors='replace'))[:200]}"
    except (aiohttp.ClientError, OSError) as error:
        raise StartupError(f"{root} does not answer: {error}") from error
