"""Frames and packets: how messages travel.

A frame is one msgpack array `[tag, *fields]`; the tag is the message's place in `Message`. A packet
is one msgpack array of frames.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Sequence
from typing import Any, Final

import msgspec

from pagemesh.shared.engine_messages import (
    CachedBlocks,
    End,
    ForgetCached,
    Lost,
    NeedSnapshot,
    Step,
    StepResult,
    Submit,
    Tokens,
)
from pagemesh.shared.messages import (
    Accepted,
    CacheReset,
    Cancel,
    Deltas,
    Detokenize,
    Detokenized,
    Echo,
    Engines,
    Failed,
    Generate,
    Hello,
    Refused,
    Render,
    Rendered,
    ResetCache,
    Tokenize,
    Tokenized,
)

PROTOCOL: Final = 3
MAX_FRAME_BYTES: Final = 64 * 2**20
# Of the array around the frames.
PACKET_HEAD_BYTES: Final = 3
MAX_PACKET_FRAMES: Final = 2**16 - 1
ID_BYTES: Final = 4
"""Of a packed integer."""

Message = (
    Hello
    | Refused
    | Engines
    | Generate
    | Cancel
    | Tokenize
    | Detokenize
    | Accepted
    | Deltas
    | Failed
    | Tokenized
    | Detokenized
    | Submit
    | End
    | Tokens
    | Lost
    | Step
    | StepResult
    | NeedSnapshot
    | Echo
    | CachedBlocks
    | Render
    | Rendered
    | ResetCache
    | CacheReset
    | ForgetCached
)

_TYPES: Final[tuple[type[Any], ...]] = Message.__args__
_TAGS: Final[dict[type[Any], int]] = {kind: tag for tag, kind in enumerate(_TYPES)}
# A fifth of the time that packb takes, for the same bytes.
_pack: Final = msgspec.msgpack.Encoder().encode
# Straight from the bytes into the message: a third of the time of unpacking and checking apart.
_DECODERS: Final = tuple(msgspec.msgpack.Decoder(kind) for kind in _TYPES)
# The frames of a packet are not looked into.
_RAW_FRAMES: Final = msgspec.msgpack.Decoder(list[msgspec.Raw])
_SHORT_ARRAY: Final = 0x90
_ARRAY16: Final = 0xDC


class BadFrame(ValueError):
    """Bytes that are no message of this protocol, or a message that no frame can hold."""


def encode(message: Message) -> bytes:
    """The frame of `message`. Raises BadFrame when no peer could take it: it is over
    MAX_FRAME_BYTES, or holds an integer over 64 bits or something that is no data."""
    try:
        packed = _pack((_TAGS[type(message)], *message))
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise BadFrame(f"{type(message).__name__} cannot be packed: {error}") from error
    if len(packed) > MAX_FRAME_BYTES:
        raise BadFrame(f"{type(message).__name__} of {len(packed)} bytes is over the frame limit")
    return packed


def decode(frame: bytes) -> Message:
    """The message in `frame`, with every field checked against its type.

    Raises BadFrame, and nothing else, on anything that is not a message.
    """
    try:
        tag, fields = _untagged(frame)
        message: Message = _DECODERS[tag].decode(fields)
    except (ValueError, TypeError, IndexError, OverflowError, RecursionError) as error:
        raise BadFrame(f"not a frame of protocol {PROTOCOL}: {error}") from error
    return message


def join_frames(frames: Sequence[bytes]) -> bytes:
    """The packet of at most MAX_PACKET_FRAMES."""
    return b"".join((b"\xdc%b" % len(frames).to_bytes(2, "big"), *frames))


def split_frames(packet: bytes) -> list[bytes]:
    """The frames of `packet`. Raises BadFrame when it is no packet."""
    try:
        return [bytes(raw) for raw in _RAW_FRAMES.decode(packet)]
    except (ValueError, RecursionError) as error:
        raise BadFrame(f"not a packet of protocol {PROTOCOL}: {error}") from error


def _untagged(frame: bytes) -> tuple[int, bytes]:
    """The tag, and the array of the fields alone. Raises IndexError, ValueError, OverflowError."""
    head = frame[0]
    if head & 0xF0 == _SHORT_ARRAY:
        return frame[1], bytes((max(head - 1, _SHORT_ARRAY),)) + frame[2:]
    if head != _ARRAY16:
        raise ValueError("it is no array")
    n_fields = int.from_bytes(frame[1:3], "big") - 1
    return frame[3], frame[:1] + n_fields.to_bytes(2, "big") + frame[4:]


def pack_ids(ids: Iterable[int]) -> bytes:
    """Integers as little-endian int32 bytes. Raises OverflowError outside int32."""
    packed = array("i", ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_ids(data: bytes) -> list[int]:
    packed = array("i", data)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tolist()
