"""`pagemesh chat` and `pagemesh complete`: talk to a server in the terminal."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any, Final

import aiohttp

from pagemesh.bench.target import first_model
from pagemesh.flags import Parser
from pagemesh.talk.stream import AnswerFailed, pieces

EXIT_FAILED: Final = 1
DEFAULT_URL: Final = "http://127.0.0.1:8000"
_HELP: Final = {
    "chat": "a conversation with a server, in the terminal",
    "complete": "what a server makes of a text",
}
Message = dict[str, str]


def run_talk(argv: Sequence[str]) -> int:
    """`argv` begins with the command. 1 when the server refused. Raises StartupError."""
    command, *rest = argv
    given = vars(_parser(command).parse_args(rest))
    try:
        return asyncio.run(_ACTIONS[command](given))
    except (AnswerFailed, aiohttp.ClientError) as error:
        print(f"pagemesh: error: {error}", file=sys.stderr)
        return EXIT_FAILED


def _parser(command: str) -> Parser:
    parser = Parser(prog=f"pagemesh {command}", description=_HELP[command])
    add = parser.add_argument
    add("text", nargs="?", help="what to say first (chat), or to go on from; default: ask for it")
    add("--url", default=DEFAULT_URL, help=f"of the server (default: {DEFAULT_URL})")
    add("--api-key", default=None, metavar="KEY")
    add("--model", default=None, help="default: the first that the server lists")
    add("--max-tokens", type=int, metavar="N", help="of an answer")
    add("--temperature", type=float, metavar="T")
    if command == "chat":
        add("--system", default=None, metavar="TEXT", help="the system's message")
    return parser


async def _chat(given: dict[str, Any]) -> int:
    """Ends at the end of the input; one that comes with its text is one question."""
    asked = given.get("text")
    system = given["system"]
    messages: list[Message] = [] if system is None else [{"role": "system", "content": system}]
    async with _session(given) as session:
        url, fields = await _target(session, given, "/v1/chat/completions")
        while True:
            question = asked or await _ask("> ")
            if question is None:
                return 0
            messages.append({"role": "user", "content": question})
            answer = await _show(pieces(session, url, {**fields, "messages": messages}))
            messages.append({"role": "assistant", "content": answer})
            if asked:
                return 0


async def _complete(given: dict[str, Any]) -> int:
    async with _session(given) as session:
        url, fields = await _target(session, given, "/v1/completions")
        prompt = given.get("text") or await _ask("")
        if prompt is not None:
            await _show(pieces(session, url, {**fields, "prompt": prompt}))
    return 0


def _session(given: dict[str, Any]) -> aiohttp.ClientSession:
    key = given["api_key"]
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    return aiohttp.ClientSession(headers=headers, timeout=aiohttp.ClientTimeout(total=None))


async def _target(
    session: aiohttp.ClientSession, given: dict[str, Any], path: str
) -> tuple[str, dict[str, Any]]:
    """Where to ask, and what every question carries. Raises StartupError without a server."""
    root = given["url"].rstrip("/").removesuffix("/v1")
    model = given["model"] or await first_model(session, root)
    names = ("max_tokens", "temperature")
    options: dict[str, Any] = {name: given[name] for name in names if name in given}
    return root + path, {"model": model, **options}


async def _ask(prompt: str) -> str | None:
    """A line that is not empty; None at the end of the input. Signals are heard meanwhile."""
    while True:
        print(prompt, end="", flush=True)
        line: str = await asyncio.to_thread(sys.stdin.readline)
        if not line:
            return None
        if line.strip():
            return line.strip()


async def _show(answer: AsyncIterator[str]) -> str:
    text = ""
    async for piece in answer:
        print(piece, end="", flush=True)
        text += piece
    print()
    return text


_ACTIONS: Final[dict[str, Callable[[dict[str, Any]], Coroutine[Any, Any, int]]]] = {
    "chat": _chat,
    "complete": _complete,
}
