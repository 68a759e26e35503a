"""What is made of a prompt's hidden states: one schema for the gateway, the wire and the offline
class."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable
from typing import Final, Literal

import msgspec

from pagemesh.shared.sampling import SamplingParams

Pooling = Literal["mean", "last"]
POOLINGS: Final[tuple[Pooling, ...]] = ("mean", "last")
NO_TOKENS: Final = SamplingParams(max_tokens=0, temperature=0.0, seed=0, detokenize=False)
"""How a request is sampled whose answer is a vector."""


def pack_floats(numbers: Iterable[float]) -> bytes:
    """Numbers as a vector travels: little-endian float32."""
    packed = array("f", numbers)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_floats(vector: bytes) -> list[float]:
    """The numbers of a packed vector."""
    numbers = array("f", vector)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tolist()


class PoolingParams(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """How a prompt becomes one vector: the mean of the hidden states of all its tokens, behind the
    model's last norm, or that of its last token; None: as the settings say. Of that the first
    `dimensions` numbers, then scaled to length 1 if it is to `normalize`. Names are vLLM's.

    Raises ValueError from the constructor; the text starts with the name of the field at fault.
    """

    pooling: Pooling | None = None
    dimensions: int | None = None
    normalize: bool = True

    def __post_init__(self) -> None:
        if self.pooling not in (None, *POOLINGS):
            raise ValueError(f"pooling must be one of {', '.join(POOLINGS)}, got {self.pooling!r}")
        if self.dimensions is not None and self.dimensions < 1:
            raise ValueError(f"dimensions must be at least 1, got {self.dimensions}")

    @property
    def reads_all(self) -> bool:
        """Whether the hidden states of all tokens are needed, so that none may be taken from the
        prefix cache, which keeps keys and values alone."""
        return self.pooling != "last"
