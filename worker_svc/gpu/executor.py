"""The executor on a GPU. Nothing here waits for the device.

Steps are launched on one stream, in order, so whatever a step writes is there for the next: tokens
go from the sampler into the batch's state and from there into the next step without the host having
seen them. The host sees them later, through `CopyOut`.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pagemesh.kernels.batch import ROW_WORDS, BatchState, StepBuffers
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
from pagemesh.worker_svc.gpu.decoder import GPUDecoder
from pagemesh.worker_svc.gpu.graphs import DecodeGraphs
from pagemesh.worker_svc.gpu.sampler import GPUSampled, GPUSampler, HostRows
from pagemesh.worker_svc.gpu.sampling_state import GPUSamplingState, upload
from pagemesh.worker_svc.gpu.staging import PARAMS, TABLES, TOKEN_IDS, StagedWrites, pinned
from pagemesh.worker_svc.kv_cache import KVCache
from pagemesh.worker_svc.prompt_logprobs import PromptScores, prompt_parts, score_prompt
from pagemesh.worker_svc.sampler import SampledRows

_PADDING: Final = -1
_ZERO: Final = np.zeros(1, np.int32)


class _Forward(NamedTuple):
    """The logits [N, V] of the rows that sample, and which: slots int32[N], positions int32[N] that
    the tokens will have. `drawn` int32[2, N or more] if they were sampled already, each as if its
    row had nothing but a temperature. `hidden` [T, H] of all tokens, if some may be scored."""

    logits: Tensor
    slots: Tensor
    positions: Tensor
    drawn: Tensor | None = None
    hidden: Tensor | None = None


class _Decoded(NamedTuple):
    """What `_rows` holds once a decode step is launched: the next positions of `slots`, in the
    first rows of `size`."""

    size: int
    slots: Ints
    starts: Ints


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
    ) -> None:
        """`eager`: decode steps are launched kernel by kernel, without graphs."""
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
        )
        self._sampler = GPUSampler(self._sampling)
        self._copy_out = CopyOut(device)
        most_tokens = max(max_step_tokens, n_slots)
        self._buffers = StepBuffers.empty(n_slots, most_tokens, n_blocks, device)
        self._padding = torch.from_numpy(_padding_rows(n_slots)).to(device)
        self._rows = self._padding.clone()
        self._decoded: _Decoded | None = None
        self._sampled = ints(2, n_slots)
        self._logits = torch.empty(n_slots, vocab_tokens, dtype=dtype, device=device)
        self.graphs = DecodeGraphs(self._launch_decode, n_slots)
        self._eager = eager

    # -- state ------------------------------------------------------------------------------------

    def leave(self, slots: Ints) -> None:
        self._staged.drop(slots)
        self._sampling.leave(slots)

    def enter(self, row: NewRow, ids: WireInts) -> None:
        self._staged.add(TOKEN_IDS, row.slot, 0, ids)
        self._staged.add(TABLES, row.slot, 0, np.frombuffer(row.blocks, np.int32))
        words = self._sampling.enter(row.slot, row.params, row.seed, ids, row.n_prompt)
        self._staged.add(PARAMS, row.slot, 0, words)

    def grow(self, slots: Ints, columns: Ints, blocks: Ints) -> None:
        values = blocks.astype(np.int32)
        for i, (slot, column) in enumerate(zip(slots.tolist(), columns.tolist(), strict=True)):
            self._staged.add(TABLES, slot, column, values[i : i + 1])

    def copy_blocks(self, src: Ints, dst: Ints) -> None:
        device = self._rows.device
        self._kv.copy_blocks(upload(src, device), upload(dst, device))

    def clear(self) -> None:
        self._staged.clear()
        self._sampling.clear()

    def relieve(self) -> None:
        torch.cuda.empty_cache()

    # -- steps ------------------------------------------------------------------------------------

    def compute(self, rows: Rows) -> Computed:
        self._staged.flush()
        decodes = bool(rows.samples.all()) and int(rows.n_tokens.max()) == 1
        forward = self._decode(rows) if decodes else self._mixed(rows)
        prompts = [] if forward.hidden is None else self._score_prompts(rows, forward.hidden)
        sampled = self._sample(rows, forward)
        computed = self._fetch(len(forward.logits), sampled, prompts)
        self._sampler.count(sampled)
        return computed

    def capture(self) -> None:
        """Make the graphs of decode steps that will be wanted. Others are made when they are."""
        if not self._eager:
            self._capture(self.graphs.hot_sizes)

    def launch_decodes(self) -> None:
        """The steps that `capture` makes graphs of, on rows of no sequence."""
        self._place_padding()
        for size in self.graphs.hot_sizes:
            self._launch_decode(size)

    def _capture(self, sizes: list[int]) -> None:
        # A graph is launched once before it is captured.
        self._place_padding()
        self.graphs.capture(sizes)

    def _place_padding(self) -> None:
        """Rows of no sequence."""
        self._rows.copy_(self._padding)
        self._decoded = None

    def commit(self, rows: Rows, tokens: Tensor | None) -> None:
        """Tokens that were sampled stand where they belong, and are counted, already."""
        if tokens is None:
            for slot in rows.slots[rows.samples].tolist():
                self._staged.add(TOKEN_IDS, slot, int(self._batch.known[slot]), _ZERO)

    def _decode(self, rows: Rows) -> _Forward:
        """One token of each row, through a graph."""
        n = len(rows)
        size = self.graphs.size_for(n)
        if not (self._eager or self.graphs.holds(size)):
            self._capture([size])
        self._place(rows, size)
        self._copy_out.fence()
        if self._eager:
            self._launch_decode(size)
        else:
            self.graphs.replay(size)
        self._decoded = _Decoded(size, rows.slots, rows.starts + 1)
        slots, positions = self._buffers.slots[:n], self._buffers.next_positions[:n]
        return _Forward(self._logits[:n], slots, positions, self._sampled)

    def _place(self, rows: Rows, size: int) -> None:
        """Bring `rows` to the device, unless a step has just left them there."""
        there = self._decoded
        self._decoded = None  # until the step is launched: it may fail before it moves the rows on
        if there is None or not _follows(rows, size, there):
            source, words = pinned(size * ROW_WORDS)
            packed = words.reshape(size, ROW_WORDS)
            packed[:] = _padding_rows(size)
            packed[: len(rows), 0], packed[: len(rows), 1] = rows.slots, rows.starts
            self._rows[:size].view(-1).copy_(source, non_blocking=True)

    def _launch_decode(self, size: int) -> None:
        """The step of `size` rows that a graph captures: from `_rows` to `_sampled`."""
        longest = self._batch.row_tokens
        hidden = self._run(self._rows[:size], size, most_query=1, longest=longest, n_decode=size)
        logits = self._model.logits(hidden, out=self._logits[:size])
        slots, positions = self._buffers.slots[:size], self._buffers.next_positions[:size]
        self._sampler.draw(
            logits,
            SamplingRows(self._state.params, slots, positions),
            SampledTokens(self._sampled[:, :size], self._state.token_ids),
        )

    def _mixed(self, rows: Rows) -> _Forward:
        """Rows of any number of tokens, launched kernel by kernel."""
        n, sampling = len(rows), np.flatnonzero(rows.samples)
        ends = np.cumsum(rows.n_tokens)
        if ends[-1] > len(self._buffers.token_ids):  # kernels check no bounds
            raise ValueError(f"{ends[-1]} tokens are more than a step of this worker may have")
        source, words = pinned(n * ROW_WORDS + 2 * len(sampling))
        packed = words[: n * ROW_WORDS].reshape(n, ROW_WORDS)
        for column, values in enumerate((rows.slots, rows.starts, rows.n_tokens, ends)):
            packed[:, column] = values
        packed[:, 3] -= rows.n_tokens.astype(np.int32)
        words[n * ROW_WORDS :].reshape(2, -1)[:] = sampling, ends[sampling] - 1
        device_words = source.to(self._rows.device, non_blocking=True)
        which, last = device_words[n * ROW_WORDS :].view(2, -1)
        longer = np.flatnonzero(rows.n_tokens != 1)
        hidden = self._run(
            device_words[: n * ROW_WORDS].view(n, ROW_WORDS),
            int(ends[-1]),
            most_query=int(rows.n_tokens.max()),
            longest=int((rows.starts + rows.n_tokens).max()),
            n_decode=int(longer[0]) if len(longer) else n,
        )
        logits = self._logits[: len(sampling)]
        self._model.logits(hidden[last], out=logits)
        buffers = self._buffers
        return _Forward(logits, buffers.slots[which], buffers.next_positions[which], hidden=hidden)

    def _run(
        self, rows: Tensor, n_tokens: int, *, most_query: int, longest: int, n_decode: int
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
        )
        return self._model.forward(buffers.token_ids, buffers.positions, attention, self._kv)

    # -- results ----------------------------------------------------------------------------------

    def _sample(self, rows: Rows, forward: _Forward) -> GPUSampled:
        slots = rows.slots[rows.samples]
        if forward.drawn is not None and not self._sampler.asks_more(slots):
            return GPUSampled(forward.drawn)
        n_output = self._batch.known[slots] - self._batch.n_prompt[slots]
        result = forward.logits.new_empty((2, len(slots)), dtype=torch.int32)
        return self._sampler(
            forward.logits,
            HostRows(slots, n_output),
            SamplingRows(self._state.params, forward.slots, forward.positions),
            SampledTokens(result, self._state.token_ids),
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

    def _fetch(self, n: int, sampled: GPUSampled, prompts: list[PromptScores]) -> Computed:
        """Start the copies of everything that the host is to see of `n` sampled rows."""
        wanted = [sampled.result, *(sampled.logprobs or ())]
        for score in prompts:
            wanted += [*score.logprobs, score.finite]
        copies, wait = self._copy_out.start(wanted)
        result, rest = copies[0], iter(copies[1:])
        logprobs = Logprobs(*(next(rest) for _ in range(3))) if sampled.logprobs else None
        host = SampledRows(
            result[0, :n],
            result[1, :n].numpy(),
            sampled.logprob_rows,
            sampled.logprob_tops,
            logprobs,
        )
        scores = [
            score._replace(logprobs=Logprobs(*(next(rest) for _ in range(3))), finite=next(rest))
            for score in prompts
        ]
        return Computed(host, scores, sampled.result, wait)


def _follows(rows: Rows, size: int, there: _Decoded) -> bool:
    """Whether `rows` are one token each of the slots that a step of `size` rows left behind."""
    return (
        there.size == size
        and np.array_equal(there.slots, rows.slots)
        and np.array_equal(there.starts, rows.starts)
    )


def _padding_rows(n: int) -> WireInts:
    """int32[n, 4]: rows of no sequence, one token each (see `kernels.batch.gather_rows`)."""
    rows = np.zeros((n, ROW_WORDS), np.int32)
    rows[:, 0], rows[:, 2], rows[:, 3] = _PADDING, 1, np.arange(n)
    return rows
