"""Sampling parameters by row slot, and the token counts of the slots that are penalised."""

from __future__ import annotations

from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagemesh.kernels.penalties import Penalties
from pagemesh.kernels.sampling import Filters
from pagemesh.shared.sampling import SamplingParams
from pagemesh.worker_svc.batch import Ints

# What a row needs beyond the argmax of its logits. One bitwise-or over a batch's slots tells which
# work the step can leave out.
RANDOM: Final = 1
FILTERED: Final = 2
PENALISED: Final = 4
BIASED: Final = 8
MIN_TOKENS: Final = 16
LOGPROBS: Final = 32
PROMPT_LOGPROBS: Final = 64

Needs = NDArray[np.uint8]
_FIRST_COUNT_ROWS: Final = 4


class SamplingState:
    """Written when a request enters its slot, read by every step that samples for it."""

    def __init__(
        self,
        *,
        max_num_seqs: int,
        vocab_tokens: int,
        eos_token_ids: list[int],
        device: torch.device,
    ) -> None:
        self._device = device
        self._vocab_tokens = vocab_tokens
        self._eos_token_ids = eos_token_ids
        self.needs = np.zeros(max_num_seqs, np.uint8)
        self.min_tokens = np.zeros(max_num_seqs, np.int64)
        self.logprobs = np.zeros(max_num_seqs, np.int64)
        self.prompt_logprobs = np.zeros(max_num_seqs, np.int64)
        self._seeds = np.zeros(max_num_seqs, np.int64)
        self._top_k = np.zeros(max_num_seqs, np.int64)
        self._floats = {
            name: np.zeros(max_num_seqs, np.float32)
            for name in (
                "temperature",
                "top_p",
                "min_p",
                "repetition_penalty",
                "frequency_penalty",
                "presence_penalty",
            )
        }
        self._biases: dict[int, tuple[Tensor, Tensor]] = {}
        self._banned: dict[int, Tensor] = {}
        self.counts = TokenCounts(max_num_seqs, vocab_tokens, device)

    def enter(
        self, slot: int, params: SamplingParams, seed: int, token_ids: Tensor, n_prompt: int
    ) -> None:
        """`token_ids`: int32, all known tokens of the request, on the device."""
        self.needs[slot] = _needs(params)
        self.min_tokens[slot] = params.min_tokens
        self.logprobs[slot] = params.logprobs or 0
        self.prompt_logprobs[slot] = params.prompt_logprobs or 0
        self._seeds[slot] = seed
        self._top_k[slot] = max(params.top_k, 0)
        for name, column in self._floats.items():
            column[slot] = getattr(params, name)
        self._enter_rare(slot, params)
        if self.needs[slot] & PENALISED:
            self.counts.enter(slot, token_ids, n_prompt)

    def _enter_rare(self, slot: int, params: SamplingParams) -> None:
        if params.logit_bias:
            ids = torch.tensor(list(params.logit_bias), device=self._device)
            values = torch.tensor(list(params.logit_bias.values()), dtype=torch.float32)
            self._biases[slot] = ids, values.to(self._device)
        if params.min_tokens > 0:
            banned = sorted({*self._eos_token_ids, *params.stop_token_ids})
            self._banned[slot] = torch.tensor(banned, dtype=torch.int64, device=self._device)

    def leave(self, slots: Ints) -> None:
        for slot in slots[self.needs[slots] & (PENALISED | BIASED | MIN_TOKENS) > 0].tolist():
            self.counts.leave(slot)
            self._biases.pop(slot, None)
            self._banned.pop(slot, None)

    def clear(self) -> None:
        self._biases.clear()
        self._banned.clear()
        self.counts.clear()

    # -- gathered for a step's rows ---------------------------------------------------------------

    def seeds(self, slots: Ints) -> Tensor:
        return self._gather(self._seeds, slots)

    def temperatures(self, slots: Ints) -> Tensor:
        return self._gather(self._floats["temperature"], slots)

    def filters(self, slots: Ints) -> Filters:
        top_p, min_p = (self._gather(self._floats[name], slots) for name in ("top_p", "min_p"))
        return Filters(self._gather(self._top_k, slots), top_p, min_p)

    def penalties(self, slots: Ints) -> Penalties:
        names = ("repetition_penalty", "frequency_penalty", "presence_penalty")
        return Penalties(*(self._gather(self._floats[name], slots) for name in names))

    def biases(self, rows: Ints, slots: Ints) -> tuple[Tensor, Tensor, Tensor]:
        """For `add_bias`: row, token id and bias of every entry; `rows[i]` is the row of slot i."""
        entries = [self._biases[slot] for slot in slots.tolist()]
        ids, values = (torch.cat(part) for part in zip(*entries, strict=True))
        return self._repeat(rows, [len(ids) for ids, _ in entries]), ids, values

    def banned(self, rows: Ints, slots: Ints) -> tuple[Tensor, Tensor]:
        """For `ban`: row and token id of every token that must not end its request yet."""
        entries = [self._banned[slot] for slot in slots.tolist()]
        return self._repeat(rows, [len(ids) for ids in entries]), torch.cat(entries)

    def _repeat(self, rows: Ints, lengths: list[int]) -> Tensor:
        return torch.from_numpy(np.repeat(rows, lengths)).to(self._device)

    def _gather(self, column: np.ndarray, slots: Ints) -> Tensor:
        return torch.from_numpy(column[slots]).to(self._device)


class TokenCounts:
    """Which tokens a penalised slot has seen, prompt or output, and how often it generated each.

    A row of a full vocabulary is large, so rows come from a pool that doubles when it is used up.
    """

    def __init__(self, max_num_seqs: int, vocab_tokens: int, device: torch.device) -> None:
        self._row_of = np.zeros(max_num_seqs, np.int64)
        self._free: list[int] = []
        self._used: dict[int, int] = {}
        self.seen = torch.zeros((0, vocab_tokens), dtype=torch.bool, device=device)
        self.output_counts = torch.zeros((0, vocab_tokens), dtype=torch.int32, device=device)

    def rows(self, slots: Ints) -> Tensor:
        """int64: the rows of `seen` and `output_counts` that belong to `slots`."""
        return torch.from_numpy(self._row_of[slots]).to(self.output_counts.device)

    def enter(self, slot: int, token_ids: Tensor, n_prompt: int) -> None:
        if not self._free:
            self._grow()
        row = self._used[slot] = self._free.pop()
        self._row_of[slot] = row
        ids = token_ids.to(torch.int64)
        vocab_tokens = self.output_counts.shape[1]
        self.seen[row] = torch.bincount(ids, minlength=vocab_tokens) > 0
        self.output_counts[row] = torch.bincount(ids[n_prompt:], minlength=vocab_tokens)

    def add(self, slots: Ints, tokens: Tensor) -> None:
        """Count one generated token, int64[N] on the device, for each slot."""
        rows = self.rows(slots)
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
        self._free.extend(range(size, size + added))
        self.seen = _longer(self.seen, added)
        self.output_counts = _longer(self.output_counts, added)


def _longer(table: Tensor, added: int) -> Tensor:
    return torch.cat((table, table.new_zeros((added, table.shape[1]))))


def _needs(params: SamplingParams) -> int:
    penalised = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
    filtered = params.top_k > 0 or params.top_p < 1 or params.min_p > 0
    random = not params.is_greedy
    wanted = {
        RANDOM: random,
        FILTERED: random and filtered,
        PENALISED: penalised != (1.0, 0.0, 0.0),
        BIASED: bool(params.logit_bias),
        MIN_TOKENS: params.min_tokens > 0,
        LOGPROBS: params.logprobs is not None,
        PROMPT_LOGPROBS: params.prompt_logprobs is not None,
    }
    return sum(flag for flag, is_wanted in wanted.items() if is_wanted)
