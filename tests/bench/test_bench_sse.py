"""Reading a stream that arrives in pieces of any size."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_server import text, usage

from pagemesh.bench.sse import EventReader, StreamFailed, StreamLog

PAYLOADS = [json.dumps(p).encode() for p in (text("é"), text("b"), text("", "stop"), usage(5, 9))]


def as_stream(payloads: list[bytes], line_end: bytes) -> bytes:
    event = b"data: %b" + 2 * line_end
    return b": comment" + 2 * line_end + b"".join(event % payload for payload in payloads)


@given(
    cuts=st.lists(st.integers(0, 400), max_size=12),
    line_end=st.sampled_from([b"\n", b"\r\n"]),
    ended=st.booleans(),
)
def test_events_do_not_depend_on_where_the_bytes_are_cut(
    cuts: list[int], line_end: bytes, ended: bool
) -> None:
    stream = as_stream(PAYLOADS, line_end)
    if not ended:
        stream = stream.rstrip(b"\r\n")
    reader = EventReader()
    edges = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    seen: list[bytes] = []
    for start, end in pairwise(edges):
        seen += reader.feed(stream[start:end])
    assert seen + reader.close() == PAYLOADS


def test_a_log_stamps_what_completes_an_event() -> None:
    stream = as_stream([*PAYLOADS, b"[DONE]"], b"\n")
    first, rest = stream[:60], stream[60:]
    log = StreamLog()
    log.feed(first, 1.0)
    log.feed(rest, 2.0)
    log.close(3.0)
    assert list(log.event_s) == [2.0, 2.0]  # the finish brought no text
    assert log.last_s == 2.0
    assert (log.prompt_tokens, log.output_tokens, log.counted_from) == (5, 9, "usage")


def test_half_a_character_is_an_event_with_output() -> None:
    log = StreamLog()
    log.feed(as_stream([json.dumps(text("")).encode()], b"\n"), 1.0)
    assert list(log.event_s) == [1.0]


@pytest.mark.parametrize("shape", [b'{"choices": 5}', b"[]", b"\xff", b'"text"', b"{"])
def test_what_is_no_chunk_ends_the_answer(shape: bytes) -> None:
    with pytest.raises(StreamFailed) as failed:
        StreamLog().feed(b"data: " + shape + b"\n\n", 1.0)
    assert failed.value.failure.kind == "bad event"


@pytest.mark.parametrize("error", [{"message": "lost"}, "lost"])
def test_an_error_event_ends_the_answer(error: object) -> None:
    payload = json.dumps({"error": error}).encode()
    with pytest.raises(StreamFailed, match="lost") as failed:
        StreamLog().feed(b"data: " + payload + b"\n\n", 1.0)
    assert failed.value.failure.kind == "error event"
