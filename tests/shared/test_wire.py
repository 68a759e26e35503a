"""Frames: every message survives the wire, and nothing else gets through."""

from __future__ import annotations

import builtins
import time
import types
from typing import Any, get_args, get_origin, get_type_hints

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagemesh.shared.engine_messages import End, Step, StepResult
from pagemesh.shared.messages import Cancel, Deltas, Hello
from pagemesh.shared.pooling import POOLINGS, PoolingParams
from pagemesh.shared.sampling import SamplingParams
from pagemesh.shared.wire import (
    MAX_PACKET_FRAMES,
    BadFrame,
    Message,
    decode,
    decode_packet,
    encode,
    join_frames,
    pack_ids,
    unpack_ids,
)

INT64 = st.integers(-(2**63), 2**63 - 1)
PARAMS = st.builds(
    SamplingParams,
    n=st.integers(1, 4),
    max_tokens=st.none() | st.integers(1, 100),
    temperature=st.floats(0, 2),
    logit_bias=st.dictionaries(st.integers(0, 1000), st.floats(-100, 100), max_size=3),
    seed=st.none() | INT64,
    stop=st.lists(st.text(min_size=1), max_size=2),
)
SCALARS = {
    int: INT64,
    float: st.floats(allow_nan=False),
    str: st.text(),
    bytes: st.binary(max_size=20),
    bool: st.booleans(),
    type(None): st.none(),
    # Any stands for the JSON of chat messages and template arguments.
    Any: st.none() | st.booleans() | INT64 | st.text(),
    SamplingParams: PARAMS,
    PoolingParams: st.builds(
        PoolingParams,
        pooling=st.sampled_from((None, *POOLINGS)),
        dimensions=st.none() | st.integers(1, 2**31),
        normalize=st.booleans(),
    ),
}


def values(hint: Any) -> st.SearchStrategy[Any]:
    """Values of a wire type. (Registering ranges for int itself would leak into other tests.)"""
    if hint in SCALARS:
        return SCALARS[hint]
    args = get_args(hint)
    match get_origin(hint):
        case builtins.list:
            return st.lists(values(args[0]), max_size=2)
        case builtins.tuple:
            return st.tuples(*map(values, args))
        case builtins.dict:
            return st.dictionaries(values(args[0]), values(args[1]), max_size=2)
        case types.UnionType:
            return st.one_of(*map(values, args))
    fields = get_type_hints(hint)
    return st.builds(hint, **{name: values(field) for name, field in fields.items()})


MESSAGES = values(Message)


@given(MESSAGES)
def test_every_message_survives_the_wire(message: Message) -> None:
    again = decode(encode(message))
    assert again == message
    assert type(again) is type(message)


@given(st.binary(max_size=200))
def test_random_bytes_are_a_bad_frame_or_a_message(frame: bytes) -> None:
    try:
        decode(frame)
    except BadFrame:
        return


@given(MESSAGES, st.data())
def test_a_damaged_frame_raises_only_bad_frame(message: Message, data: st.DataObject) -> None:
    frame = bytearray(encode(message))
    at = data.draw(st.integers(0, len(frame) - 1))
    frame[at] = data.draw(st.integers(0, 255))
    try:
        decode(bytes(frame[: data.draw(st.integers(0, len(frame)))]))
    except BadFrame:
        return


@pytest.mark.parametrize(
    "parts",
    [
        [],
        [4],
        [999, ["id"]],
        [-1, ["id"]],
        ["4", ["id"]],
        [4, []],
        [4, [17]],
        [4, ["id", "one too many"]],
        [4, ["id"], 0],
        [4, {"request_id": "id"}],
        [4, "text"],
        [4, None],
    ],
)
def test_what_is_no_message_is_a_bad_frame(parts: list[Any]) -> None:
    frame = b"".join(map(msgspec.msgpack.encode, parts))
    with pytest.raises(BadFrame):
        decode(frame)
    with pytest.raises(BadFrame):
        list(decode_packet(join_frames([encode(Cancel("r")), frame])))


@pytest.mark.parametrize("nested", [b"\x91" * 100_000, b"\x04" + b"\x91" * 100_000])
def test_deep_nesting_is_a_bad_frame(nested: bytes) -> None:
    with pytest.raises(BadFrame):
        decode(nested)
    with pytest.raises(BadFrame):
        list(decode_packet(nested))


@given(st.lists(MESSAGES, max_size=20))
def test_a_packet_holds_its_messages_in_order(messages: list[Message]) -> None:
    assert list(decode_packet(join_frames([encode(each) for each in messages]))) == messages


def test_a_packet_of_as_many_frames_as_may_be() -> None:
    frame = encode(Cancel("r"))
    assert len(list(decode_packet(join_frames([frame] * MAX_PACKET_FRAMES)))) == MAX_PACKET_FRAMES


@given(st.lists(MESSAGES, min_size=1, max_size=4), st.data())
def test_a_damaged_packet_raises_only_bad_frame(
    messages: list[Message], data: st.DataObject
) -> None:
    packet = bytearray(join_frames([encode(each) for each in messages]))
    at = data.draw(st.integers(0, len(packet) - 1))
    packet[at] = data.draw(st.integers(0, 255))
    try:
        list(decode_packet(bytes(packet[: data.draw(st.integers(0, len(packet)))])))
    except BadFrame:
        return


def test_tags_are_an_interface() -> None:
    """A new message goes to the end of the union; a changed order needs a new PROTOCOL."""
    names = [kind.__name__ for kind in get_args(Message)]
    assert names[:4] == ["Hello", "Refused", "Engines", "Generate"]
    assert encode(Cancel("r"))[0] == names.index("Cancel")
    assert [names.index(kind.__name__) for kind in (Hello, Deltas, End, Step, StepResult)] == [
        0,
        8,
        13,
        16,
        17,
    ]


def test_a_steady_decode_step_is_a_few_bytes_a_row() -> None:
    """No row is named; one in sixteen fills a block, gets a new one and publishes the old."""
    filled = pack_ids(range(1, 17))
    step = Step(
        epoch=time.time_ns(),
        step=100_000,
        base=99_999,
        n_rows=256,
        n_tokens=256,
        grown=filled * 2,
        sealed=filled,
        sealed_hashes=bytes(16 * 16),
    )
    assert len(encode(step)) < 2.5 * 256


@given(st.lists(st.integers(-(2**31), 2**31 - 1)))
def test_ids_survive_packing(ids: list[int]) -> None:
    assert unpack_ids(pack_ids(ids)) == ids


def test_ids_beyond_int32_do_not_pack() -> None:
    with pytest.raises(OverflowError):
        pack_ids([2**31])


def test_packed_ids_are_little_endian() -> None:
    assert pack_ids([1, -2]) == b"\x01\x00\x00\x00\xfe\xff\xff\xff"
