"""The runner: one step of the batch in, its result out. Synchronous, no I/O."""

from __future__ import annotations

import time
from typing import NamedTuple

import numpy as np
import structlog
import torch
from torch import Tensor

from pagemesh.kernels.cpu.team import Team
from pagemesh.shared.engine_messages import Step, StepResult
from pagemesh.shared.errors import PagemeshError
from pagemesh.shared.messages import Capacity, ModelCard
from pagemesh.worker_svc.batch import Batch, Ints, Rows, unpack
from pagemesh.worker_svc.kv_cache import KVCache
from pagemesh.worker_svc.prompt_logprobs import PromptScores, score_prompt
from pagemesh.worker_svc.results import ResultBuilder, describe
from pagemesh.worker_svc.sampler import SampledRows, Sampler, no_rows
from pagemesh.worker_svc.sampling_state import PENALISED, PROMPT_LOGPROBS, SamplingState
from pagemesh.worker_svc.step_model import StepModel

log = structlog.get_logger(__name__)


class StepGap(PagemeshError):
    """The step is no diff against the state here: the sender must send a snapshot.

    `epoch` is the sender's, `last_step` the last step that was executed for it (0: none).
    """

    def __init__(self, epoch: int, last_step: int) -> None:
        super().__init__(f"the worker stands at step {last_step} and needs a snapshot")
        self.epoch = epoch
        self.last_step = last_step


class Computed(NamedTuple):
    """What the model gave for some rows; `sampled` has an entry for each of them that samples."""

    sampled: SampledRows
    prompts: list[PromptScores]


class Runner:
    """Owner of the batch, the sampling state and the KV pool. Not thread-safe.

    The order within a step: gone, new, grown, copies, then gather, forward, sample and commit.
    """

    def __init__(
        self,
        model: StepModel,
        kv: KVCache,
        card: ModelCard,
        capacity: Capacity,
        device: torch.device,
        team: Team | None = None,
    ) -> None:
        """`team`: the threads that sample, those of the model on a CPU."""
        self.card = card
        self.capacity = capacity
        self._model = model
        self._kv = kv
        self._device = device
        self._batch = Batch(
            max_num_seqs=capacity.max_num_seqs,
            max_model_len=card.max_model_len,
            vocab_tokens=card.vocab_tokens,
            block_tokens=card.block_tokens,
            num_blocks=capacity.num_blocks,
            device=device,
        )
        self._sampling = SamplingState(
            max_num_seqs=capacity.max_num_seqs,
            vocab_tokens=card.vocab_tokens,
            eos_token_ids=card.eos_token_ids,
            device=device,
        )
        self._sampler = Sampler(self._sampling, team)
        self._epoch = 0
        self._last_step = 0
        self._in_step = False
        """Whether the batch stands at `_last_step`; if not, only a snapshot can be executed."""

    @property
    def live_rows(self) -> int:
        """Requests that hold a slot."""
        return self._batch.live_rows

    def reset(self) -> None:
        """Forget every request and who sent them; the next step must be a snapshot."""
        self._forget()
        self._last_step = 0

    @torch.inference_mode()
    def execute(self, step: Step) -> StepResult:
        """Compute one step.

        Raises StepGap when it does not follow the last one. Any other failure is reported in
        `StepResult.failed`: of the rows that could not be computed, or of all rows when the step
        contradicts the batch, after which a snapshot is needed.
        """
        started_s = time.perf_counter()
        self._follow(step)
        result = ResultBuilder(step)
        try:
            rows = self._apply(step)
        except Exception as error:
            log.exception("step_refused", step=step.step)
            self._forget()
            result.fail_all(describe(error))
        else:
            if len(rows) > 0:
                self._compute(rows, result)
                self._log_nonfinite(rows, result)
        self._last_step = step.step
        return result.build(time.perf_counter() - started_s)

    def _follow(self, step: Step) -> None:
        if step.base == 0:
            self._forget()
            self._epoch, self._in_step = step.epoch, True
        elif not self._in_step or (step.epoch, step.base) != (self._epoch, self._last_step):
            self._forget()
            raise StepGap(step.epoch, self._last_step)

    def _forget(self) -> None:
        self._batch.clear()
        self._sampling.clear()
        self._in_step = False

    def _apply(self, step: Step) -> Rows:
        gone = unpack(step.gone)
        self._batch.leave(gone)
        self._sampling.leave(gone)
        for new in step.new:
            self._batch.enter(new)
            known = self._batch.tokens_of(new.slot)
            self._sampling.enter(new.slot, new.params, new.seed, known, new.n_prompt)
        if step.grown:
            self._batch.grow(unpack(step.grown).reshape(-1, 2))
        if step.copies:
            src, dst = torch.from_numpy(unpack(step.copies).reshape(-1, 2).T).to(self._device)
            self._kv.copy_blocks(src, dst)
        return self._batch.rows(step)

    def _compute(self, rows: Rows, result: ResultBuilder) -> None:
        """Rows that cannot be computed together are tried in halves: one bad request fails alone,
        and a step too large for the memory passes in parts."""
        computed = self._try(rows, result.step)
        if isinstance(computed, Computed):
            self._commit(rows, computed.sampled.tokens)
            result.add(rows, computed.sampled, computed.prompts)
        elif len(rows) > 1:
            for half in rows.halves():
                self._compute(half, result)
        else:
            # Steps already planned count on the token that this row should have sampled.
            owed = int(rows.samples.sum())
            self._commit(rows, torch.zeros(owed, dtype=torch.int64, device=self._device))
            result.fail(rows, computed)

    def _try(self, rows: Rows, step: int) -> Computed | str:
        """What the model gives, or why it cannot. The exception ends here: it holds on to the
        tensors of the failed attempt."""
        try:
            return self._run_model(rows)
        except Exception as error:
            reason = describe(error)
            if len(rows) > 1:
                log.warning("step_split", step=step, rows=len(rows), reason=reason)
            else:
                [request_id] = self._batch.request_ids(rows.slots)
                log.exception("row_failed", step=step, request_id=request_id)
            return reason

    def _log_nonfinite(self, rows: Rows, result: ResultBuilder) -> None:
        if result.nonfinite:
            slots = rows.slots[sorted(result.nonfinite)]
            requests = self._batch.request_ids(slots)
            log.error("nonfinite_logits", step=result.step, requests=requests)

    def _run_model(self, rows: Rows) -> Computed:
        """Changes the KV pool only, with the same values if it is run again."""
        inputs = self._batch.gather(rows)
        hidden = self._model.forward(inputs.token_ids, inputs.positions, inputs.attention, self._kv)
        ends = np.cumsum(rows.n_tokens)
        prompts = self._score_prompts(rows, hidden, ends)
        if not rows.samples.any():
            return Computed(no_rows(self._device), prompts)
        last = torch.from_numpy(ends[rows.samples] - 1).to(self._device)
        slots = rows.slots[rows.samples]
        positions = self._batch.known[slots]
        n_output = positions - self._batch.n_prompt[slots]
        logits = self._model.logits(hidden[last])
        return Computed(self._sampler(logits, slots, positions, n_output), prompts)

    def _score_prompts(self, rows: Rows, hidden: Tensor, ends: Ints) -> list[PromptScores]:
        wanted = np.flatnonzero(self._sampling.needs[rows.slots] & PROMPT_LOGPROBS).tolist()
        scores = []
        for row in wanted:
            slot, start = int(rows.slots[row]), int(rows.starts[row])
            last = min(start + int(rows.n_tokens[row]), int(self._batch.n_prompt[slot]) - 1)
            if last <= start:
                continue
            first = int(ends[row] - rows.n_tokens[row])
            part = hidden[first : first + last - start]
            targets = self._batch.tokens_of(slot)[start + 1 : last + 1]
            top = int(self._sampling.prompt_logprobs[slot])
            score = score_prompt(self._model, self._sampler, part, targets, top)
            scores.append(PromptScores(row, start + 1, *score))
        return scores

    def _commit(self, rows: Rows, tokens: Tensor) -> None:
        slots = rows.slots[rows.samples]
        penalised = np.flatnonzero(self._sampling.needs[slots] & PENALISED)
        if len(penalised):
            which = torch.from_numpy(penalised).to(self._device)
            self._sampling.counts.add(slots[penalised], tokens[which])
        self._batch.commit(rows, tokens)
