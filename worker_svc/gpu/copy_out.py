"""From the device to the host beside the computation: results travel on a stream of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Wait = Callable[[], None]


class CopyOut:
    """Owner of the side stream. Waiting may be done in another thread."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._last: torch.cuda.Event | None = None

    def start(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], Wait]:
        """Copies of `tensors` as they will be after the work launched so far, in the host's memory,
        and a function that returns when they are there.

        The function holds on to `tensors`, whose memory must not be reused before.
        """
        computing = torch.cuda.current_stream()
        self._stream.wait_stream(computing)
        # Cheaper than the context manager, in the middle of every step.
        torch.cuda.set_stream(self._stream)
        try:
            copies = [
                torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(
                    tensor, non_blocking=True
                )
                for tensor in tensors
            ]
            # Sleeps while it waits: a spinning thread would take turns from the one that launches.
            arrived = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            arrived.record(self._stream)
        finally:
            torch.cuda.set_stream(computing)
        self._last = arrived

        def wait(held: Sequence[Tensor] = tensors) -> None:
            arrived.synchronize()

        return copies, wait

    def fence(self) -> None:
        """Let what is launched from here on wait for the last copies: it may overwrite their
        sources."""
        if self._last is not None:
            torch.cuda.current_stream().wait_event(self._last)
