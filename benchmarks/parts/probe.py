"""When messages pass: times noted in a process, kept in memory, written when it ends.

CLOCK_MONOTONIC is one clock for all processes of a machine, so times of different files compare.
"""

from __future__ import annotations

import json
import os
import time
from array import array
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from aiohttp import web

from pagemesh.gateway.openai.live import LiveStream
from pagemesh.shared import link
from pagemesh.shared.engine_messages import StepResult, Tokens
from pagemesh.shared.messages import Deltas
from pagemesh.shared.wire import Message, decode_packet, encode, unpack_ids

FOLDER: Final = "MESH_BENCH_TRACE"
WRITES: Final = "writes"
TOKENS_OF_WRITES: Final = "tokens of writes"
_ID_BYTES: Final = 4


class Probe:
    """By place: when tokens passed there, in nanoseconds of CLOCK_MONOTONIC, one entry each."""

    def __init__(self) -> None:
        self.times_ns: defaultdict[str, array[int]] = defaultdict(lambda: array("q"))

    def note(self, place: str, n_tokens: int = 1) -> None:
        self.times_ns[place].extend([time.monotonic_ns()] * n_tokens)

    def write(self, path: Path) -> None:
        path.write_text(json.dumps({place: list(times) for place, times in self.times_ns.items()}))


@contextmanager
def installed_probe(service: str) -> Iterator[Probe]:
    """A probe for this process; with a trace folder in the environment it sees every message.

    Encoding begins a message's way over a link and decoding ends it.
    """
    probe, folder = Probe(), os.environ.get(FOLDER)
    if folder is None:
        yield probe
        return
    _watch_links(probe)
    _watch_writes(probe)
    try:
        yield probe
    finally:
        probe.write(Path(folder) / f"{service}.json")


def _watch_links(probe: Probe) -> None:
    def noted_encode(message: Message) -> bytes:
        probe.note(f"sends {type(message).__name__}", tokens_in(message))
        return encode(message)

    def noted_decode(packet: bytes) -> Iterator[Message]:
        for message in decode_packet(packet):
            probe.note(f"has {type(message).__name__}", tokens_in(message))
            yield message

    vars(link).update(encode=noted_encode, decode_packet=noted_decode)


def tokens_in(message: Message) -> int:
    """How many generated tokens the message carries."""
    match message:
        case StepResult(sampled=sampled):
            return sum(token >= 0 for token in unpack_ids(sampled))
        case Tokens(ids=ids):
            return len(ids) // _ID_BYTES
        case Deltas(rows=rows):
            return sum(len(row.token_ids) for row in rows) // _ID_BYTES
    return 0


def _watch_writes(probe: Probe) -> None:
    """What the gateway hands to its client: a write holds all tokens that it has by then."""
    has, written = probe.times_ns["has Deltas"], probe.times_ns[WRITES]
    write_live: Callable[..., None] = LiveStream.write
    write: Callable[..., Awaitable[Any]] = web.StreamResponse.write

    def note_write() -> None:
        n_tokens = len(has) - len(written)
        probe.note(WRITES, n_tokens)
        probe.times_ns[TOKENS_OF_WRITES].append(n_tokens)

    def noted_write_live(stream: LiveStream, *what: Any) -> None:
        note_write()
        write_live(stream, *what)

    async def noted_write(response: web.StreamResponse, data: bytes) -> None:
        note_write()
        await write(response, data)

    type.__setattr__(LiveStream, "write", noted_write_live)
    type.__setattr__(web.StreamResponse, "write", noted_write)
