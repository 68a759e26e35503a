"""From a step's logits to one token per row on a GPU. Nothing here waits for the device."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pagemesh.kernels.gpu.grammar_mask import apply_masks
from pagemesh.kernels.gpu.logprobs import token_logprobs
from pagemesh.kernels.gpu.penalties import add_edits, apply_penalties, count_tokens, widen
from pagemesh.kernels.gpu.row_params import SamplingRows
from pagemesh.kernels.gpu.sampling import SampledTokens, sample_rows
from pagemesh.kernels.logprobs import Logprobs, with_tokens
from pagemesh.worker_svc.batch import Ints
from pagemesh.worker_svc.gpu.sampling_state import GPUSamplingState, upload
from pagemesh.worker_svc.grammar_masks import mask_words
from pagemesh.worker_svc.sampler import NO_LOGPROBS, LogprobRows
from pagemesh.worker_svc.sampling_state import (
    ADJUSTED,
    FILTERED,
    LOGPROBS,
    PENALISED,
    Needs,
)

_MORE: Final = ADJUSTED | FILTERED | LOGPROBS


class HostRows(NamedTuple):
    """int64[r]: the slots of a step's rows that sample, and how many tokens each has generated so
    far. Padding rows, which follow them on the device, are not here."""

    slots: Ints
    n_output: Ints


class RowMasks(NamedTuple):
    """What the rules of int64[G] of a step's rows allow: int32[G, ceil(V / 32)] bits, on the
    device."""

    rows: Ints
    masks: Tensor


class GPUSampled(NamedTuple):
    """`result` int32[2, R or more], tokens and whether a row's logits were finite, and the logprobs
    of the rows that `asked`. `uncounted` are the rows, if tokens of some are still to be counted.
    Tensors are on the device."""

    result: Tensor
    asked: LogprobRows = NO_LOGPROBS
    logprobs: Logprobs | None = None
    uncounted: SamplingRows | None = None


class GPUSampler:
    """Chooses the kernels that a step's rows need, by the host's mirror of their parameters.

    Without edits, penalties and logprobs a step's launches depend on whether some row filters and
    on the shape alone, and can be captured in a graph.
    """

    def __init__(self, state: GPUSamplingState) -> None:
        self._state = state

    def asks_more(self, slots: Ints) -> bool:
        """Whether a row needs more than `draw` does."""
        return bool((self._state.needs[slots] & _MORE).any())

    def draw(self, logits: Tensor, rows: SamplingRows, out: SampledTokens) -> None:
        """Sample each row by its temperature alone."""
        sample_rows(logits, rows, out, filtered=False)

    def __call__(
        self,
        logits: Tensor,
        host: HostRows,
        rows: SamplingRows,
        out: SampledTokens,
        allowed: RowMasks | None = None,
    ) -> GPUSampled:
        """Sample from raw [R, V] logits, which stay as they are. Changes no state but the known
        tokens, so that it may be done again. `allowed` is what rows with a rule need."""
        needs = self._state.needs[host.slots]
        any_needs = int(np.bitwise_or.reduce(needs, initial=0))
        edited = any_needs & ADJUSTED > 0
        sampled_from = self._edit(logits, host, rows, allowed) if edited else logits
        filtered = any_needs & FILTERED > 0
        sample_rows(sampled_from, rows, out, filtered=filtered, edited=edited)
        sampled = self._with_logprobs(logits, host, out.result, needs)
        return sampled._replace(uncounted=rows) if any_needs & PENALISED else sampled

    def count(self, sampled: GPUSampled) -> None:
        """Count the tokens of penalised rows: once, so when nothing of the step can fail any more
        and have it tried again."""
        rows, counts = sampled.uncounted, self._state.counts
        if rows is not None:
            tokens = sampled.result[0, : len(rows.slots)]
            count_tokens(tokens, rows, counts.seen, counts.output_counts)

    def _with_logprobs(
        self, logits: Tensor, host: HostRows, result: Tensor, needs: Needs
    ) -> GPUSampled:
        wanted = np.flatnonzero(needs & LOGPROBS)
        if len(wanted) == 0:
            return GPUSampled(result)
        tops = self._state.logprobs[host.slots[wanted]]
        index = upload(wanted, logits.device)
        chosen = result[0].index_select(0, index)
        logprobs, _ = token_logprobs(logits, index, chosen, int(tops.max()))
        more, ids = self._state.logprob_ids(host.slots[wanted])
        if ids.size > 0:
            logprobs = with_tokens(logprobs, logits, index, upload(ids, logits.device))
        return GPUSampled(result, LogprobRows(wanted, tops, more), logprobs)

    def score(self, logits: Tensor, targets: Tensor, top: int) -> tuple[Logprobs, Tensor]:
        """Logprobs of int[N] `targets` and of the `top` best under raw [N, V] logits, and whether
        all were finite, bool[]; all on the device. Rows that were not count as zeros."""
        rows = torch.arange(len(logits), device=logits.device)
        logprobs, finite = token_logprobs(logits, rows, targets, top)
        return logprobs, finite.all()

    def launch_mask(self, logits: Tensor) -> None:
        """What rows with rules add to a step, on [1, V] logits that nobody reads."""
        words = logits.new_full((1, mask_words(logits.shape[1])), -1, dtype=torch.int32)
        self._mask(widen(logits), RowMasks(np.zeros(1, np.int64), words))

    def _mask(self, wide: Tensor, allowed: RowMasks) -> None:
        rows = upload(allowed.rows.astype(np.int32), wide.device)
        apply_masks(wide, rows, allowed.masks)

    def _edit(
        self, logits: Tensor, host: HostRows, rows: SamplingRows, allowed: RowMasks | None
    ) -> Tensor:
        wide = widen(logits)
        starts, token_ids, values = self._state.edits(*host)
        if len(token_ids) > 0:
            of_row = np.repeat(np.arange(len(host.slots)), np.diff(starts))
            edits = np.stack((of_row, token_ids, values.view(np.int32))).astype(np.int32)
            add_edits(wide, upload(edits, logits.device))
        counts = self._state.counts
        if (self._state.needs[host.slots] & PENALISED).any():
            apply_penalties(wide, rows, counts.seen, counts.output_counts)
        if allowed is not None:
            self._mask(wide, allowed)
        return wide
