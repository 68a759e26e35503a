"""The executor on a GPU. Nothing here waits for the device, but steps with rows that follow a rule.

Steps are launched on one stream, in order, so whatever a step writes is there for the next: tokens
go from the sampler into the batch's state and from there into the next step without the host having
seen them. The host sees them later, through `CopyOut`.
"""

from __future__ import annotations

from functools import partial
from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pagemesh.kernels.batch import BatchState, StepBuffers
from pagemesh.kernels.gpu.batch import gather_rows
from pagemesh.kernels.gpu.row_params import ROW_WORDS as PARAM_WORDS
from pagemesh.kernels.gpu.row_params import SamplingRows
from pagemesh.kernels.gpu.sampling import SampledTokens
from pagemesh.kernels.inputs import AttentionInputs
from pagemesh.kernels.logprobs import Logprobs
from pagemesh.shared.engine_messages import NewRow
from pagemesh.worker_svc.batch import Batch, Ints, Rows, WireInts
from pagemesh.worker_svc.executor import Computed
from pagemesh.worker_svc.gpu.copy_out import CopyOut
from pagemesh.worker_svc.gpu.decode_rows import DecodeRows
from pagemesh.worker_svc.gpu.decoder import GPUDecoder
from pagemesh.worker_svc.gpu.graphs import StepGraphs, decode_sizes, prompt_sizes
from pagemesh.worker_svc.gpu.ruled_rows import RuledRows
from pagemesh.worker_svc.gpu.sampler import GPUSampled, GPUSampler, HostRows
from pagemesh.worker_svc.gpu.sampling_state import GPUSamplingState, upload
from pagemesh.worker_svc.gpu.staging import PARAMS, TABLES, TOKEN_IDS, StagedWrites
from pagemesh.worker_svc.gpu.step_words import StepWords, count_decodes
from pagemesh.worker_svc.grammars import Grammars
from pagemesh.worker_svc.kv_cache import KVCache
from pagemesh.worker_svc.pooling import PooledRow, Pooler
from pagemesh.worker_svc.prompt_logprobs import PromptScores, prompt_parts, score_prompt
from pagemesh.worker_svc.sampler import SampledRows

_ZERO: Final = np.zeros(1, np.int32)
# Rows of up to as many tokens are no work to share out, so that attention has a simpler kernel (for
# 16 bits and heads of up to 128; elsewhere it is the same). Their decode steps have own graphs.
_SHORT_TOKENS: Final = 768


class _Forward(NamedTuple):
    """The logits [N, V] of the rows that sample, and which: slots int32[N], positions int32[N] that
    the tokens will have. `drawn` int32[2, N or more] if they were sampled already, each as if its
    row had nothing but a temperature. `hidden` [T, H] of all tokens, if some may be scored or
    pooled."""

    logits: Tensor
    slots: Tensor
    positions: Tensor
    drawn: Tensor | None = None
    hidden: Tensor | None = None


class _Decodes(NamedTuple):
    """Decode steps of rows of up to `longest` tokens."""

    longest: int
    graphs: StepGraphs


class GPUExecutor:
    """An `Executor`. Launches on the stream that is current in its thread."""

    def __init__(
        self,
        model: GPUDecoder,
        kv: KVCache,
        batch: Batch,
        *,
        vocab_tokens: int,
        eos_token_ids: list[int],
        max_step_tokens: int,
        eager: bool = False,
        grammars: Grammars | None = None,
    ) -> None:
        """`eager`: all steps are launched kernel by kernel, without graphs."""
        n_slots, n_blocks = batch.tables.shape
        device, dtype = kv.pool.device, kv.pool.dtype

        def ints(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        self._model = model
        self._kv = kv
        self._batch = batch
        self._state = BatchState(
            ints(n_slots, batch.row_tokens), ints(n_slots, n_blocks), ints(n_slots, PARAM_WORDS)
        )
        self._staged = StagedWrites(self._state)
        self._sampling = GPUSamplingState(
            max_num_seqs=n_slots,
            vocab_tokens=vocab_tokens,
            eos_token_ids=eos_token_ids,
            device=device,
            grammars=grammars,
        )
        self._sampler = GPUSampler(self._sampling)
        self._ruled = RuledRows(self._sampling, device)
        self._pooler = Pooler()
        self._copy_out = CopyOut(device)
        most_tokens = max(max_step_tokens, n_slots)
        # One row more, for padding tokens.
        self._buffers = StepBuffers.empty(n_slots + 1, most_tokens, n_blocks, device)
        self._rows = DecodeRows(n_slots, device)
        self._sampled = ints(2, n_slots)
        self._logits = torch.empty(n_slots, vocab_tokens, dtype=dtype, device=device)
        memory = torch.cuda.graph_pool_handle()
        self.decodes = [
            _Decodes(
                longest,
                StepGraphs(
                    partial(self._launch_decode, longest=longest),
                    self._rows.place_padding,
                    decode_sizes(n_slots),
                    memory,
                ),
            )
            for longest in sorted({min(_SHORT_TOKENS, batch.row_tokens), batch.row_tokens})
        ]
        self._words = StepWords(n_slots, device)
        self._hidden: dict[int, Tensor] = {}
        self.prompt_graphs = StepGraphs(
            self._launch_prompts, self._words.place_padding, prompt_sizes(most_tokens), memory
        )
        self._eager = eager

    # -- state ------------------------------------------------------------------------------------

    def leave(self, slots: Ints) -> None:
        self._staged.drop(slots)
        self._sampling.leave(slots)
        self._pooler.leave(slots)

    def enter(self, row: NewRow, ids: WireInts) -> None:
        self._pooler.enter(row)
        self._staged.add(TOKEN_IDS, row.slot, 0, ids)
        self._staged.add(TABLES, row.slot, 0, np.frombuffer(row.blocks, np.int32))
        words = self._sampling.enter(row.slot, row.params, row.seed, ids, row.n_prompt)
        self._staged.add(PARAMS, row.slot, 0, words)

    def grow(self, slots: Ints, columns: Ints, blocks: Ints) -> None:
        values = blocks.astype(np.int32)
        for i, (slot, column) in enumerate(zip(slots.tolist(), columns.tolist(), strict=True)):
            self._staged.add(TABLES, slot, column, values[i : i + 1])

    def copy_blocks(self, src: Ints, dst: Ints) -> None:
        device = self._kv.pool.device
        self._kv.copy_blocks(upload(src, device), upload(dst, device))

    def clear(self) -> None:
        self._staged.clear()
        self._sampling.clear()
        self._pooler.clear()

    def relieve(self) -> None:
        torch.cuda.empty_cache()

    # -- steps ------------------------------------------------------------------------------------

    def compute(self, rows: Rows) -> Computed:
        self._staged.flush()
        pools = self._pooler.wants(rows)
        decodes = bool(rows.samples.all()) and int(rows.n_tokens.max()) == 1 and not pools
        forward = self._decode(rows) if decodes else self._mixed(rows)
        prompts, pooled = list[PromptScores](), list[PooledRow]()
        if forward.hidden is not None:
            prompts = self._score_prompts(rows, forward.hidden)
            pooled = self._pooler.pool(rows, forward.hidden) if pools else []
        sampled = self._sample(rows, forward)
        computed = self._fetch(len(forward.logits), sampled, prompts, pooled)
        self._sampler.count(sampled)
        self._ruled.sampled(rows.slots[rows.samples], computed)
        return computed

    def capture(self) -> None:
        """Make the graphs of steps that will be wanted. Others are made when they are."""
        if not self._eager:
            for graphs in self._graphs:
                graphs.capture_hot()

    def launch_hot(self) -> None:
        """The steps that `capture` makes graphs of, on rows of no sequence."""
        for graphs in self._graphs:
            graphs.launch_hot()

    def launch_largest(self) -> None:
        """The largest step there may be, kernel by kernel, on no sequence: with as many rows that
        decode, and as long ones, as there is room for."""
        size = len(self._buffers.token_ids)
        self._words.place_padding(size)
        self._launch_prompts(size)
        del self._hidden[size]
        self._sampler.launch_mask(self._logits[:1])

    @property
    def _graphs(self) -> list[StepGraphs]:
        """Those that need most memory first: the others find it there."""
        decodes = [decodes.graphs for decodes in reversed(self.decodes)]
        return [self.prompt_graphs, *decodes]

    def commit(self, rows: Rows, tokens: Tensor | None) -> None:
        """Tokens that were sampled stand where they belong, and are counted, already."""
        if tokens is not None:
            self._pooler.commit(rows.slots)
        else:
            for slot in rows.slots[rows.samples].tolist():
                self._staged.add(TOKEN_IDS, slot, int(self._batch.known[slot]), _ZERO)

    def _decode(self, rows: Rows) -> _Forward:
        """One token of each row, through a graph."""
        n = len(rows)
        self._copy_out.fence()  # a step to capture writes to `_sampled` too
        longest = int(rows.starts.max()) + 1
        decodes = next(decodes for decodes in self.decodes if longest <= decodes.longest)
        graphs = decodes.graphs
        size = graphs.size_for(n) if self._eager else graphs.hold(n)
        self._rows.place(rows, size)
        if self._eager:
            self._launch_decode(size, decodes.longest)
        else:
            graphs.replay(size)
        self._rows.launched(rows, size)
        slots, positions = self._buffers.slots[:n], self._buffers.next_positions[:n]
        return _Forward(self._logits[:n], slots, positions, self._sampled)

    def _launch_decode(self, size: int, longest: int) -> None:
        """The step of `size` rows of up to `longest` tokens that a graph captures: from `_rows` to
        `_sampled`."""
        hidden = self._run(
            self._rows.first(size), size, most_query=1, longest=longest, n_decode=size
        )
        logits = self._model.logits(hidden, out=self._logits[:size])
        slots, positions = self._buffers.slots[:size], self._buffers.next_positions[:size]
        self._sampler.draw(
            logits,
            SamplingRows(self._state.params, slots, positions),
            SampledTokens(self._sampled[:, :size], self._state.token_ids),
        )

    def _mixed(self, rows: Rows) -> _Forward:
        """Rows of any number of tokens, through a graph if one is large enough."""
        n_tokens = int(rows.n_tokens.sum())
        if n_tokens > len(self._buffers.token_ids):  # kernels check no bounds
            raise ValueError(f"{n_tokens} tokens are more than a step of this worker may have")
        n_decode = count_decodes(rows.n_tokens)
        if self._eager or n_tokens > self.prompt_graphs.largest:
            which, last = self._words.place(rows, n_decode, n_tokens)
            hidden = self._run_prompts(rows, n_tokens, n_decode)
        else:
            size = self.prompt_graphs.hold(n_tokens)
            which, last = self._words.place(rows, n_decode, size)
            self.prompt_graphs.replay(size)
            hidden = self._hidden[size]
        logits = self._logits[: len(last)]
        self._model.logits(hidden[last], out=logits)
        buffers = self._buffers
        return _Forward(logits, buffers.slots[which], buffers.next_positions[which], hidden=hidden)

    def _launch_prompts(self, size: int) -> None:
        """The step of `size` tokens that a graph captures: from `_words` to `_hidden`."""
        longest, most_decodes = self._batch.row_tokens, min(size, len(self._words.rows) - 1)
        self._hidden[size] = self._run(
            self._words.rows,
            size,
            most_query=size,
            longest=longest,
            n_decode=most_decodes,
            counts=self._words.counts,
        )

    def _run_prompts(self, rows: Rows, n_tokens: int, n_decode: int) -> Tensor:
        return self._run(
            self._words.rows[: len(rows)],
            n_tokens,
            most_query=int(rows.n_tokens.max()),
            longest=int((rows.starts + rows.n_tokens).max()),
            n_decode=n_decode,
        )

    def _run(
        self,
        rows: Tensor,
        n_tokens: int,
        *,
        most_query: int,
        longest: int,
        n_decode: int,
        counts: Tensor | None = None,
    ) -> Tensor:
        buffers = self._buffers.part(len(rows), n_tokens)
        gather_rows(rows, self._state, self._batch.block_tokens, buffers)
        attention = AttentionInputs(
            query_start=buffers.query_start,
            seq_lens=buffers.seq_lens,
            block_tables=buffers.block_tables,
            slot_mapping=buffers.slot_mapping,
            max_query_tokens=most_query,
            max_seq_tokens=longest,
            n_decode=n_decode,
            counts=counts,
        )
        return self._model.forward(buffers.token_ids, buffers.positions, attention, self._kv)

    # -- results ----------------------------------------------------------------------------------

    def _sample(self, rows: Rows, forward: _Forward) -> GPUSampled:
        slots = rows.slots[rows.samples]
        if forward.drawn is not None and not self._sampler.asks_more(slots):
            return GPUSampled(forward.drawn)
        # First, since it waits for the tokens before: the forward pass runs meanwhile.
        allowed = self._ruled.masks(slots)
        n_output = self._batch.known[slots] - self._batch.n_prompt[slots]
        result = forward.logits.new_empty((2, len(slots)), dtype=torch.int32)
        return self._sampler(
            forward.logits,
            HostRows(slots, n_output),
            SamplingRows(self._state.params, forward.slots, forward.positions),
            SampledTokens(result, self._state.token_ids),
            allowed,
        )

    def _score_prompts(self, rows: Rows, hidden: Tensor) -> list[PromptScores]:
        scores = []
        for part in prompt_parts(rows, self._batch, self._sampling.needs):
            targets = self._state.token_ids[part.slot, part.start + 1 : part.stop + 1]
            top = int(self._sampling.prompt_logprobs[part.slot])
            states = hidden[part.first : part.first + part.stop - part.start]
            score = score_prompt(self._model, self._sampler, states, targets, top)
            scores.append(PromptScores(part.row, part.start + 1, *score))
        return scores

    def _fetch(
        self,
        n: int,
        sampled: GPUSampled,
        prompts: list[PromptScores],
        pooled: list[PooledRow],
    ) -> Computed:
        """Start the copies of everything that the host is to see of `n` sampled rows."""
        wanted = [sampled.result, *(sampled.logprobs or ())]
        for score in prompts:
            wanted += [*score.logprobs, score.finite]
        wanted += [row.total for row in pooled]
        copies, wait = self._copy_out.start(wanted)
        result, rest = copies[0], iter(copies[1:])
        logprobs = Logprobs(*(next(rest) for _ in range(3))) if sampled.logprobs else None
        host = SampledRows(
            result[0, :n],
            result[1, :n].numpy(),
            sampled.asked,
            logprobs,
        )
        scores = [
            score._replace(logprobs=Logprobs(*(next(rest) for _ in range(3))), finite=next(rest))
            for score in prompts
        ]
        totals = [row._replace(total=next(rest)) for row in pooled]
        return Computed(host, scores, totals, sampled.result, wait)
