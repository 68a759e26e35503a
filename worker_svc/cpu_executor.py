"""The executor on a CPU: tokens in host memory, everything done when the call returns."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from pagemesh.kernels.cpu.staging import Inputs, lay_out
from pagemesh.kernels.cpu.team import Team
from pagemesh.kernels.inputs import AttentionInputs
from pagemesh.shared.engine_messages import NewRow
from pagemesh.worker_svc.batch import Batch, Ints, Rows, WireInts
from pagemesh.worker_svc.executor import Computed, at_once
from pagemesh.worker_svc.grammars import Grammars
from pagemesh.worker_svc.kv_cache import KVCache
from pagemesh.worker_svc.pooling import PooledRow, Pooler
from pagemesh.worker_svc.prompt_logprobs import PromptScores, prompt_parts, score_prompt
from pagemesh.worker_svc.sampler import SampledRows, Sampler, no_rows
from pagemesh.worker_svc.sampling_state import PENALISED, RULED, SamplingState
from pagemesh.worker_svc.step_model import StepModel

CPU = torch.device("cpu")


class CPUExecutor:
    """An `Executor`. `team`: the threads that sample, those of the model."""

    def __init__(
        self,
        model: StepModel,
        kv: KVCache,
        batch: Batch,
        *,
        vocab_tokens: int,
        eos_token_ids: list[int],
        team: Team | None = None,
        grammars: Grammars | None = None,
    ) -> None:
        self._model = model
        self._kv = kv
        self._batch = batch
        # Not zeroed, so untouched pages cost no memory.
        self._token_ids = np.empty(batch.max_num_seqs * batch.row_tokens, np.int32)
        self._sampling = SamplingState(
            max_num_seqs=batch.max_num_seqs,
            vocab_tokens=vocab_tokens,
            eos_token_ids=eos_token_ids,
            device=CPU,
            grammars=grammars,
        )
        self._sampler = Sampler(self._sampling, team)
        self._pooler = Pooler()

    # -- state ------------------------------------------------------------------------------------

    def leave(self, slots: Ints) -> None:
        self._sampling.leave(slots)
        self._pooler.leave(slots)

    def enter(self, row: NewRow, ids: WireInts) -> None:
        self._pooler.enter(row)
        first = row.slot * self._batch.row_tokens
        self._token_ids[first : first + len(ids)] = ids
        known = self._tokens_of(row.slot)
        self._sampling.enter(row.slot, row.params, row.seed, known, row.n_prompt)

    def grow(self, slots: Ints, columns: Ints, blocks: Ints) -> None:
        """The tables that are read are the batch's own."""

    def copy_blocks(self, src: Ints, dst: Ints) -> None:
        self._kv.copy_blocks(torch.from_numpy(src), torch.from_numpy(dst))

    def clear(self) -> None:
        self._sampling.clear()
        self._pooler.clear()

    def relieve(self) -> None:
        """The CPU's allocator keeps nothing."""

    def _tokens_of(self, slot: int) -> Tensor:
        """int32 ids of every known token of a slot."""
        first = slot * self._batch.row_tokens
        return torch.from_numpy(self._token_ids[first : first + int(self._batch.known[slot])])

    # -- steps ------------------------------------------------------------------------------------

    def compute(self, rows: Rows) -> Computed:
        token_ids, positions, attention = self._gather(rows)
        hidden = self._model.forward(token_ids, positions, attention, self._kv)
        ends = np.cumsum(rows.n_tokens)
        prompts, pooled = self._score_prompts(rows, hidden), self._pool(rows, hidden)
        sampled = self._sample(rows, hidden, ends) if rows.samples.any() else no_rows(CPU)
        return Computed(sampled, prompts, pooled, sampled.tokens, at_once)

    def commit(self, rows: Rows, tokens: Tensor | None) -> None:
        slots = rows.slots[rows.samples]
        if tokens is None:
            tokens = torch.zeros(len(slots), dtype=torch.int64)
        else:
            self._follow_rules(slots, tokens)
            self._pooler.commit(rows.slots)
        penalised = np.flatnonzero(self._sampling.needs[slots] & PENALISED)
        if len(penalised):
            chosen = tokens[torch.from_numpy(penalised)]
            self._sampling.counts.add(slots[penalised], chosen)
        places = slots * self._batch.row_tokens + self._batch.known[slots]
        self._token_ids[places] = tokens.numpy()

    def _follow_rules(self, slots: Ints, tokens: Tensor) -> None:
        ruled = np.flatnonzero(self._sampling.needs[slots] & RULED)
        if len(ruled):
            grammars = self._sampling.grammars
            grammars.advance(grammars.rules(slots[ruled]), tokens.numpy()[ruled].tolist())

    def _gather(self, rows: Rows) -> tuple[Tensor, Tensor, AttentionInputs]:
        """Pack the inputs of `rows` from their slots: int64[T] token ids and positions, and what
        attention must know."""
        seq_lens = rows.starts + rows.n_tokens
        max_seq_tokens = int(seq_lens.max())
        batch, longer = self._batch, np.flatnonzero(rows.n_tokens != 1)
        inputs = _room_for(rows, -(-max_seq_tokens // batch.block_tokens))
        lay_out(
            rows.slots,
            rows.n_tokens,
            rows.starts,
            batch.tables,
            batch.row_tokens,
            batch.block_tokens,
            inputs,
        )
        attention = AttentionInputs(
            query_start=torch.from_numpy(inputs.query_start),
            seq_lens=torch.from_numpy(inputs.seq_lens),
            block_tables=torch.from_numpy(inputs.tables),
            slot_mapping=torch.from_numpy(inputs.slot_mapping),
            max_query_tokens=int(rows.n_tokens.max()),
            max_seq_tokens=max_seq_tokens,
            n_decode=int(longer[0]) if len(longer) else len(rows),
        )
        # numpy's indexing is a good deal lighter than torch's
        token_ids = torch.from_numpy(self._token_ids[inputs.places].astype(np.int64))
        return token_ids, torch.from_numpy(inputs.positions), attention

    def _sample(self, rows: Rows, hidden: Tensor, ends: Ints) -> SampledRows:
        last = torch.from_numpy(ends[rows.samples] - 1)
        slots = rows.slots[rows.samples]
        positions = self._batch.known[slots]
        n_output = positions - self._batch.n_prompt[slots]
        return self._sampler(self._model.logits(hidden[last]), slots, positions, n_output)

    def _pool(self, rows: Rows, hidden: Tensor) -> list[PooledRow]:
        return self._pooler.pool(rows, hidden) if self._pooler.wants(rows) else []

    def _score_prompts(self, rows: Rows, hidden: Tensor) -> list[PromptScores]:
        scores = []
        for part in prompt_parts(rows, self._batch, self._sampling.needs):
            targets = self._tokens_of(part.slot)[part.start + 1 : part.stop + 1]
            top = int(self._sampling.prompt_logprobs[part.slot])
            states = hidden[part.first : part.first + part.stop - part.start]
            score = score_prompt(self._model, self._sampler, states, targets, top)
            scores.append(PromptScores(part.row, part.start + 1, *score))
        return scores


def _room_for(rows: Rows, blocks: int) -> Inputs:
    tokens, n = int(rows.n_tokens.sum()), len(rows)
    places, positions, slot_mapping = np.empty((3, tokens), np.int64)
    lens, tables = np.empty(2 * n + 1, np.int32), np.empty((n, blocks), np.int32)
    return Inputs(places, positions, slot_mapping, lens[: n + 1], lens[n + 1 :], tables)
