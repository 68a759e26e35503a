"""The runner: one step of the batch in, its result out. Synchronous, no I/O."""

from __future__ import annotations

import time

import structlog

from pagemesh.shared.engine_messages import Step, StepResult
from pagemesh.shared.errors import PagemeshError
from pagemesh.shared.messages import Capacity, ModelCard
from pagemesh.worker_svc.batch import Batch, Rows, unpack
from pagemesh.worker_svc.device_lost import loses_device
from pagemesh.worker_svc.executor import Computed, Executor
from pagemesh.worker_svc.landing import Landing, Pace, Part
from pagemesh.worker_svc.memory import is_out_of_memory
from pagemesh.worker_svc.pages import PageContents
from pagemesh.worker_svc.results import ResultBuilder, describe

log = structlog.get_logger(__name__)


class StepGap(PagemeshError):
    """The step is no diff against the state here: the sender must send a snapshot.

    `epoch` is the sender's, `last_step` the last step that was executed for it (0: none).
    """

    def __init__(self, epoch: int, last_step: int) -> None:
        super().__init__(f"the worker stands at step {last_step} and needs a snapshot")
        self.epoch = epoch
        self.last_step = last_step


class Runner:
    """Owner of the batch and of the executor. One thread launches; landings may be read in another,
    in the order of their steps.

    The order within a step: gone, new, grown, copies, then compute and commit.
    """

    def __init__(
        self, executor: Executor, batch: Batch, card: ModelCard, capacity: Capacity
    ) -> None:
        self.card = card
        self.capacity = capacity
        self.pages = PageContents(capacity.num_blocks)
        self._executor = executor
        self._batch = batch
        self._pace = Pace()
        self._epoch = 0
        self._last_step = 0
        self.ledger = batch.ledger()
        """As it was between two steps: another thread may read it."""
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
        self.ledger = self._batch.ledger()

    def execute(self, step: Step) -> StepResult:
        """Launch a step and wait for it: see `launch`."""
        return self.launch(step).result()

    def launch(self, step: Step) -> Landing:
        """Start to compute a step, which may follow one that has not landed.

        Raises StepGap when it does not follow the last one, and what says that the device is lost:
        no request is to blame, and each goes on elsewhere. Any other failure is reported in
        `StepResult.failed`: of the rows that could not be computed, or of all rows when the step
        contradicts the batch, after which a snapshot is needed.
        """
        launched_s = time.perf_counter()
        self._follow(step)
        result, parts = ResultBuilder(step), list[Part]()
        try:
            rows = self._apply(step)
        except Exception as error:
            _pass_on(error)
            log.exception("step_refused", step=step.step)
            self._forget()
            result.fail_all(describe(error))
        else:
            if len(rows) > 0:
                self._compute(rows, result, parts)
        self._last_step = step.step
        self.ledger = self._batch.ledger()
        return Landing(result, parts, self._pace, launched_s)

    def _follow(self, step: Step) -> None:
        if step.base == 0:
            self._forget()
            self._epoch, self._in_step = step.epoch, True
        elif not self._in_step or (step.epoch, step.base) != (self._epoch, self._last_step):
            self._forget()
            raise StepGap(step.epoch, self._last_step)

    def _forget(self) -> None:
        for slot in self._batch.live_slots:
            self.pages.release(self._batch.blocks_of(slot))
        self._batch.clear()
        self._executor.clear()
        self._in_step = False

    def _apply(self, step: Step) -> Rows:
        left = []
        if step.gone:
            gone = unpack(step.gone)
            self._batch.leave(gone)
            self._executor.leave(gone)
            left = [self._batch.blocks_of(slot) for slot in gone]
        self.pages.follow(step, left, self._batch.block_tokens)
        for new in step.new:
            self._executor.enter(new, self._batch.enter(new))
        if step.grown:
            grown = unpack(step.grown).reshape(-1, 2)
            columns = self._batch.grow(grown)
            self._executor.grow(grown[:, 0], columns, grown[:, 1])
        if step.copies:
            src, dst = unpack(step.copies).reshape(-1, 2).T
            self._executor.copy_blocks(src, dst)
        return self._batch.rows(step)

    def _compute(self, rows: Rows, result: ResultBuilder, parts: list[Part]) -> None:
        """Rows that cannot be computed together are tried in halves: one bad request fails alone,
        and a step too large for the memory passes in parts."""
        computed, can_split = self._try(rows, result.step)
        if isinstance(computed, Computed):
            self._commit(rows, computed)
            parts.append(Part(rows, computed, self._batch.request_ids(rows.slots)))
        elif can_split:
            for half in rows.halves():
                self._compute(half, result, parts)
        else:
            self._commit(rows, None)
            result.fail(rows, computed)

    def _commit(self, rows: Rows, computed: Computed | None) -> None:
        self._executor.commit(rows, None if computed is None else computed.tokens)
        self._batch.commit(rows)

    def _try(self, rows: Rows, step: int) -> tuple[Computed | str, bool]:
        """What the model gives, or why it cannot and whether parts of the rows still may. The
        exception ends here: it holds on to the tensors of the failed attempt."""
        try:
            return self._executor.compute(rows), False
        except Exception as error:
            _pass_on(error)
            reason, large = describe(error), is_out_of_memory(error)
            can_split = len(rows) > 1 or (large and rows.n_tokens[0] > 1)
            if can_split:
                log.warning("step_split", step=step, rows=len(rows), reason=reason)
            else:
                [request_id] = self._batch.request_ids(rows.slots)
                log.exception("row_failed", step=step, request_id=request_id)
        if large:
            self._executor.relieve()
        return reason, can_split


def _pass_on(error: Exception) -> None:
    """Raise it again if no later step can be computed here either."""
    if loses_device(error):
        raise error
