"""Rows that follow a rule, on a GPU: a step's masks need the tokens of the step before."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pagemesh.worker_svc.batch import Ints
from pagemesh.worker_svc.executor import Computed
from pagemesh.worker_svc.gpu.sampler import RowMasks
from pagemesh.worker_svc.gpu.staging import pinned
from pagemesh.worker_svc.grammars import AnswerRules
from pagemesh.worker_svc.sampling_state import RULED, HostSamplingState


class _Awaited(NamedTuple):
    """Tokens on their way: entry i of `rows`, among those that a step sampled, is for rules i.
    Its slot may pass to another request meanwhile."""

    rows: Ints
    rules: list[AnswerRules]
    computed: Computed


class RuledRows:
    """Follows what was sampled for rows with rules. Steps without such rows cost nothing here."""

    def __init__(self, state: HostSamplingState, device: torch.device) -> None:
        self._state = state
        self._device = device
        self._awaited: list[_Awaited] = []

    def masks(self, slots: Ints) -> RowMasks | None:
        """What the rows of a step that sample may get, None without rules.

        Waits for the device to have sampled what was launched before: to be called when the forward
        pass that needs the masks is under way. Raises RuleBroken.
        """
        rows = self._ruled(slots)
        if len(rows) == 0:
            return None
        self._catch_up()
        return RowMasks(rows, self._masks(slots[rows]))

    def sampled(self, slots: Ints, computed: Computed) -> None:
        """A step that samples for `slots` was launched."""
        rows = self._ruled(slots)
        if len(rows) > 0:
            rules = self._state.grammars.rules(slots[rows])
            self._awaited.append(_Awaited(rows, rules, computed))

    def _masks(self, slots: Ints) -> Tensor:
        """Filled where the device copies them from: a row is as wide as the vocabulary."""
        grammars = self._state.grammars
        n_rows, n_words = grammars.mask_shape(slots)
        tensor, words = pinned(n_rows * n_words)
        grammars.fill_masks(slots, words.reshape(n_rows, n_words))
        return tensor.view(n_rows, n_words).to(self._device, non_blocking=True)

    def _ruled(self, slots: Ints) -> Ints:
        return np.flatnonzero(self._state.needs[slots] & RULED)

    def _catch_up(self) -> None:
        awaited, self._awaited = self._awaited, []
        for rows, rules, computed in awaited:
            computed.wait()
            self._state.grammars.advance(rules, computed.sampled.tokens[rows].tolist())
