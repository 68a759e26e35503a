"""From the device to the host beside the computation: results travel on a stream of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


class CopyOut:
    """Owner of the side stream."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def start(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], Callable[[], None]]:
        """Copies of `tensors` as they will be after the work launched so far, in the host's memory,
        and a function that returns when they are there.

        The function holds on to `tensors`, whose memory must not be reused before.
        """
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            copies = [
                torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(
                    tensor, non_blocking=True
                )
                for tensor in tensors
            ]
            # Sleeps while it waits: a spinning thread would take turns from the one that launches.
            arrived = torch.cuda.Event(blocking=True)
            arrived.record()

        def wait(held: Sequence[Tensor] = tensors) -> None:
            arrived.synchronize()

        return copies, wait
