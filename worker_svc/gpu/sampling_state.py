"""Sampling parameters by slot on a GPU: the host's mirrors, and what a request's entry writes."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagemesh.kernels.gpu.row_params import PARAM_WORDS, ROW_WORDS
from pagemesh.shared.sampling import SamplingParams
from pagemesh.worker_svc.grammars import Grammars
from pagemesh.worker_svc.sampling_state import (
    PENALISED,
    HostSamplingState,
    row_params,
)

Words = NDArray[np.int32]


class GPUSamplingState(HostSamplingState):
    """Written when a request enters its slot, read by every step that samples for it.

    Kernels read the parameters from a table int32[max_num_seqs, ROW_WORDS] on the device, whose
    owner writes into it, in stream order with the steps, the words that `enter` returns.
    """

    def __init__(
        self,
        *,
        max_num_seqs: int,
        vocab_tokens: int,
        eos_token_ids: list[int],
        device: torch.device,
        grammars: Grammars | None = None,
    ) -> None:
        # All counts at once: a pool that cannot grow in the middle of a step fails everyone in it.
        super().__init__(
            max_num_seqs=max_num_seqs,
            vocab_tokens=vocab_tokens,
            eos_token_ids=eos_token_ids,
            device=device,
            n_count_rows=max_num_seqs,
            grammars=grammars,
        )
        self._device = device

    def enter(
        self, slot: int, params: SamplingParams, seed: int, token_ids: Words, n_prompt: int
    ) -> Words:
        """The slot's row of the table; `token_ids`: all known tokens of the request."""
        self.note(slot, params, token_ids, n_prompt)
        count_row = -1
        if self.needs[slot] & PENALISED:
            count_row = self.counts.enter(slot, upload(token_ids, self._device), n_prompt)
        return row_words(params, seed, count_row)


def row_words(params: SamplingParams, seed: int, count_row: int = -1) -> Words:
    """int32[ROW_WORDS], see kernels.gpu.row_params; `count_row` -1: no penalties."""
    record = row_params(params, seed)
    record["count_row"] = count_row
    words = np.zeros(ROW_WORDS, np.int32)
    words[:PARAM_WORDS] = record.reshape(1).view(np.int32)
    return words


def upload(array: NDArray[np.generic], device: torch.device) -> Tensor:
    """A copy of `array` on the device, made in stream order and not waited for."""
    source = torch.from_numpy(array.copy())
    if device.type == "cpu":
        return source
    return source.pin_memory().to(device, non_blocking=True)
