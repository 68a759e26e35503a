"""Sampling parameters by row slot, and the token counts of the slots that are penalised.

What the host knows of them is the same on every device; what kernels read is not.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagemesh.kernels.sample_rows import PARAMS, Edits, SamplingInputs
from pagemesh.shared.sampling import SamplingParams
from pagemesh.worker_svc.batch import Ints
from pagemesh.worker_svc.grammar_masks import banned_tokens
from pagemesh.worker_svc.grammars import Grammars, no_vocabulary

# What a row needs beyond its parameters. One bitwise-or over a batch's slots tells which work the
# step can leave out.
PENALISED: Final = 1
BIASED: Final = 2
MIN_TOKENS: Final = 4
LOGPROBS: Final = 8
PROMPT_LOGPROBS: Final = 16
FILTERED: Final = 32
RULED: Final = 64
ADJUSTED: Final = PENALISED | BIASED | MIN_TOKENS | RULED
"""Logits that are changed before sampling."""

Needs = NDArray[np.uint8]
Known = Tensor | NDArray[np.int32]
"""Token ids of a request, in the host's memory."""
_FIRST_COUNT_ROWS: Final = 4
_MAX_TOP_K: Final = 2**31 - 1
_NO_IDS: Final = np.empty(0, np.int64)
_NO_VALUES: Final = np.empty(0, np.float32)


class HostSamplingState:
    """What is kept of the slots' sampling parameters on any device: what each needs, its edits, its
    token counts (`n_count_rows` at first), and how far it has followed its rules."""

    def __init__(
        self,
        *,
        max_num_seqs: int,
        vocab_tokens: int,
        eos_token_ids: list[int],
        device: torch.device,
        n_count_rows: int = 0,
        grammars: Grammars | None = None,
    ) -> None:
        """Without `grammars` a request with a rule fails."""
        self._vocab_tokens = vocab_tokens
        self.grammars = grammars or Grammars(no_vocabulary, vocab_tokens)
        self._eos_token_ids = eos_token_ids
        self.needs = np.zeros(max_num_seqs, np.uint8)
        self.min_tokens = np.zeros(max_num_seqs, np.int64)
        self.logprobs = np.zeros(max_num_seqs, np.int64)
        self.prompt_logprobs = np.zeros(max_num_seqs, np.int64)
        self._biases: dict[int, tuple[Ints, NDArray[np.float32]]] = {}
        self._banned: dict[int, Ints] = {}
        self._logprob_ids: dict[int, Ints] = {}
        self.counts = TokenCounts(max_num_seqs, vocab_tokens, device, n_rows=n_count_rows)

    def note(
        self,
        slot: int,
        params: SamplingParams,
        token_ids: Tensor | NDArray[np.int32],
        n_prompt: int,
    ) -> None:
        """A request with `params` and all its known tokens enters the slot."""
        self.needs[slot] = _needs(params)
        self.min_tokens[slot] = params.min_tokens
        self.logprobs[slot] = params.logprobs or 0
        self.prompt_logprobs[slot] = params.prompt_logprobs or 0
        if params.logit_bias:
            ids = np.fromiter(params.logit_bias, np.int64)
            known = (ids >= 0) & (ids < self._vocab_tokens)
            by = np.fromiter(params.logit_bias.values(), np.float32)
            self._biases[slot] = ids[known], by[known]
        if params.min_tokens > 0:
            banned = sorted(filter(self._is_token, {*self._eos_token_ids, *params.stop_token_ids}))
            self._banned[slot] = np.array(banned, np.int64)
        if params.logprob_token_ids:
            wanted = filter(self._is_token, params.logprob_token_ids)
            self._logprob_ids[slot] = np.array([*wanted], np.int64)
        if params.restricts_tokens:
            self.grammars.enter(slot, params, token_ids[n_prompt:].tolist())

    def _is_token(self, token: int) -> bool:
        """A model may name ids to stop at that it has no logits for; kernels check no bounds."""
        return 0 <= token < self._vocab_tokens

    def leave(self, slots: Ints) -> None:
        for slot in slots[self.needs[slots] & ADJUSTED > 0].tolist():
            self.counts.leave(slot)
            self._biases.pop(slot, None)
            self._banned.pop(slot, None)
            self.grammars.leave(slot)
        if self._logprob_ids:
            for slot in slots.tolist():
                self._logprob_ids.pop(slot, None)

    def clear(self) -> None:
        self.grammars.clear()
        self._biases.clear()
        self._banned.clear()
        self._logprob_ids.clear()
        self.counts.clear()

    def logprob_ids(self, slots: Ints) -> tuple[Ints, Ints]:
        """Which further tokens those rows want the logprobs of: how many, int64[N], and which,
        int64[N, most of them], filled up with zeros."""
        if not self._logprob_ids:
            return np.zeros(len(slots), np.int64), np.empty((len(slots), 0), np.int64)
        wanted = [self._logprob_ids.get(slot, _NO_IDS) for slot in slots.tolist()]
        counts = np.array([*map(len, wanted)], np.int64)
        ids = np.zeros((len(wanted), counts.max(initial=0)), np.int64)
        for row, own in enumerate(wanted):
            ids[row, : len(own)] = own
        return counts, ids

    def edits(self, slots: Ints, n_output: Ints) -> Edits:
        """Biases, and bans of the tokens that must not end a request yet, for a step's rows."""
        if not self._may_edit():
            return Edits(np.zeros(len(slots) + 1, np.int64), _NO_IDS, _NO_VALUES)
        needs = self.needs[slots]
        starts = np.zeros(len(slots) + 1, np.int64)
        ids, values = [_NO_IDS], [_NO_VALUES]
        for row in np.flatnonzero(needs & (BIASED | MIN_TOKENS | RULED)).tolist():
            for row_ids, row_values in self._edits_of(int(slots[row]), int(n_output[row])):
                ids.append(row_ids)
                values.append(row_values)
                starts[row + 1] += len(row_ids)
        return Edits(starts.cumsum(), np.concatenate(ids), np.concatenate(values))

    def _may_edit(self) -> bool:
        return bool(self._biases or self._banned)

    def _edits_of(self, slot: int, n_output: int) -> Iterator[tuple[Ints, NDArray[np.float32]]]:
        if slot in self._biases:
            yield self._biases[slot]
        banned = self._banned.get(slot, _NO_IDS)
        # Rules that allow nothing but these have the last word.
        if n_output < self.min_tokens[slot] and not self.grammars.allows_only(slot, banned):
            yield banned, np.full(len(banned), -np.inf, np.float32)


class SamplingState(HostSamplingState):
    """Written when a request enters its slot, read by every step that samples for it."""

    def __init__(
        self,
        *,
        max_num_seqs: int,
        vocab_tokens: int,
        eos_token_ids: list[int],
        device: torch.device,
        grammars: Grammars | None = None,
    ) -> None:
        super().__init__(
            max_num_seqs=max_num_seqs,
            vocab_tokens=vocab_tokens,
            eos_token_ids=eos_token_ids,
            device=device,
            grammars=grammars,
        )
        self._params = np.zeros(max_num_seqs, PARAMS)

    def enter(
        self, slot: int, params: SamplingParams, seed: int, token_ids: Tensor, n_prompt: int
    ) -> None:
        """`token_ids`: int32, all known tokens of the request, on the device."""
        self.note(slot, params, token_ids, n_prompt)
        self._params[slot] = row_params(params, seed)
        if self.needs[slot] & PENALISED:
            self._params[slot]["count_row"] = self.counts.enter(slot, token_ids, n_prompt)

    def inputs(self, slots: Ints, positions: Ints, n_output: Ints) -> SamplingInputs:
        """See Sampler."""
        if not self.grammars.is_empty:
            self.grammars.masks(slots[self.needs[slots] & RULED > 0])
        params, edits, counts = self._params[slots], self.edits(slots, n_output), self.counts
        return SamplingInputs(params, positions, edits, counts.seen, counts.output_counts)

    def _may_edit(self) -> bool:
        return super()._may_edit() or not self.grammars.is_empty

    def _edits_of(self, slot: int, n_output: int) -> Iterator[tuple[Ints, NDArray[np.float32]]]:
        """What a rule does not allow is one more ban."""
        yield from super()._edits_of(slot, n_output)
        if self.needs[slot] & RULED:
            banned = banned_tokens(self.grammars.mask(slot), self._vocab_tokens)
            yield banned, np.full(len(banned), -np.inf, np.float32)


class TokenCounts:
    """Which tokens a penalised slot has seen, prompt or output, and how often it generated each.

    A row of a full vocabulary is large, so rows come from a pool that doubles when it is used up.
    It begins with `n_rows`.
    """

    def __init__(
        self, max_num_seqs: int, vocab_tokens: int, device: torch.device, *, n_rows: int = 0
    ) -> None:
        self._row_of = np.zeros(max_num_seqs, np.int64)
        self._free = list(range(n_rows))
        self._used: dict[int, int] = {}
        self.seen = torch.zeros((n_rows, vocab_tokens), dtype=torch.bool, device=device)
        self.output_counts = torch.zeros((n_rows, vocab_tokens), dtype=torch.int32, device=device)

    def enter(self, slot: int, token_ids: Tensor, n_prompt: int) -> int:
        """The slot's row of `seen` and `output_counts`."""
        # Whatever needs memory, and may fail, comes before the books change.
        if not self._free:
            self._grow()
        ids = token_ids.to(torch.int64)
        output = ids[n_prompt:]
        ones = torch.ones_like(output, dtype=torch.int32)
        row = self._used[slot] = self._free.pop()
        self._row_of[slot] = row
        self.seen[row].zero_().index_fill_(0, ids, True)
        self.output_counts[row].zero_().scatter_add_(0, output, ones)
        return row

    def add(self, slots: Ints, tokens: Tensor) -> None:
        """Count one generated token, int64[N] on the device, for each slot."""
        rows = torch.from_numpy(self._row_of[slots]).to(self.output_counts.device)
        self.output_counts[rows, tokens] += 1
        self.seen[rows, tokens] = True

    def leave(self, slot: int) -> None:
        row = self._used.pop(slot, None)
        if row is not None:
            self._free.append(row)

    def clear(self) -> None:
        self._free.extend(self._used.values())
        self._used.clear()

    def _grow(self) -> None:
        size = len(self.output_counts)
        added = max(size, _FIRST_COUNT_ROWS)
        self.seen, self.output_counts = (
            _longer(self.seen, added),
            _longer(self.output_counts, added),
        )
        self._free.extend(range(size, size + added))


def _longer(table: Tensor, added: int) -> Tensor:
    return torch.cat((table, table.new_zeros((added, table.shape[1]))))


def row_params(params: SamplingParams, seed: int) -> NDArray[np.void]:
    """PARAMS of a row without penalty counts."""
    return np.array(
        (
            seed,
            min(max(params.top_k, 0), _MAX_TOP_K),
            -1,
            0.0 if params.is_greedy else 1 / params.temperature,
            params.top_p,
            math.log(params.min_p) if params.min_p > 0 else -math.inf,
            params.repetition_penalty,
            params.frequency_penalty,
            params.presence_penalty,
        ),
        PARAMS,
    )


def _needs(params: SamplingParams) -> int:
    penalised = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
    wanted = {
        PENALISED: penalised != (1.0, 0.0, 0.0),
        BIASED: bool(params.logit_bias),
        MIN_TOKENS: params.min_tokens > 0,
        LOGPROBS: params.logprobs is not None,
        PROMPT_LOGPROBS: params.prompt_logprobs is not None,
        RULED: params.restricts_tokens,
        FILTERED: not params.is_greedy
        and (params.top_k > 0 or params.top_p < 1 or params.min_p > 0),
    }
    return sum(flag for flag, is_wanted in wanted.items() if is_wanted)
